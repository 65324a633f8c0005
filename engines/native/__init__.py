"""The native runner: C++ code that calls artifacts without the GIL."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
