"""Deploy a version on many Triton servers: values for the SuperSONIC chart."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
