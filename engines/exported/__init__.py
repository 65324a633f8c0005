"""The `exported` engine: torch runs the portable program. The file is read as untrusted data."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
