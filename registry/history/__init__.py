"""What happened to a model, in order: one writer at a time, also when killed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
