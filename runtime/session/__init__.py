"""A session runs a model on collections; a binding ties it to them, and checks them once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
