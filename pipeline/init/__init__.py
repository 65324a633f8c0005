"""A first config: from a model and a file of the user's own to one that `pipeline run` accepts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
