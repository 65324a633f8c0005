"""Inference as a service: a version behind NVIDIA Triton, and sessions that run there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
