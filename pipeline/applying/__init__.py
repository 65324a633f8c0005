"""Scores files with a version: plans the work, scores it in parts, and joins the parts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
