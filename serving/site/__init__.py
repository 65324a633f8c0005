"""A site: the servers and devices that a job may use, and which one runs a request."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
