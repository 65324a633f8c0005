"""Promotion: measures on this host what the gates need, and moves aliases."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
