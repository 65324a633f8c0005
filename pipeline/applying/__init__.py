"""Files scored by a version: planned once, in parts that are whole or not there, then joined."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
