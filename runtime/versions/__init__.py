"""Sessions that choose a version: one that follows a name, those with a shadow or a canary."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
