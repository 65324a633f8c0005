"""Sessions that choose a version: one that follows what is promoted, and one with a shadow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
