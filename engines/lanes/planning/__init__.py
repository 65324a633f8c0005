"""From an exported program to the text of a network: the row's program, its plan, its code."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
