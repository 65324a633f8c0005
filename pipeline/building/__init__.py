"""Builds a version from a config, and an existing version for one more target."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
