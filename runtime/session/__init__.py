"""A session runs a model on collections. A binding ties the model to memory and checks it once."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
