"""Inference as a service: a version in NVIDIA Triton, and sessions that use such a server."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
