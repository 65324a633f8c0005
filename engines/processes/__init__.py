"""Processes: risky steps in one of their own, and what a fork leaves behind."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
