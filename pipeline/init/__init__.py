"""`pipeline init`: from a user's model and file to a config that `pipeline run` accepts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
