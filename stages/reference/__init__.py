"""The reference: inputs, the eager model's answers, and what the answers prove."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
