"""Deploys a promoted version with Triton, on this host or in a cluster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
