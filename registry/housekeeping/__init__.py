"""Push, export, import and removal of versions, and the removal of garbage."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
