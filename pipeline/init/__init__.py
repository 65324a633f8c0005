"""`pipeline init`: writes a config that `pipeline run` accepts, for a user's model and file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
