"""Packaging: everything of a version, or of one more target, in a sealed folder."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
