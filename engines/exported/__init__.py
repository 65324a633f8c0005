"""The `exported` engine: the portable program as torch runs it, read without trust."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
