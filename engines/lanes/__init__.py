"""The engine `lanes`: the program for one row, compiled so that SIMD lanes are rows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
