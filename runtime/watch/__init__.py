"""Counts of what a version reads and answers, and how far they moved from the reference's."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
