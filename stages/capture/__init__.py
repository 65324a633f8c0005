"""Capture: a model becomes one portable program, with the eager model's answers as reference."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
