"""Our parts of a Triton server: a model repository, and the Python backend in it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
