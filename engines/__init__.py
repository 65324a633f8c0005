"""Engines: how a captured program is compiled for a target, and how an artifact is opened."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
