"""Bundles: the sealed folder of one version, and the annexes for targets that are built later."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
