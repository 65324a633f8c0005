"""A bundle: the sealed folder of one version, and what is built for it later."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
