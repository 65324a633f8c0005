"""Bundles, the MLflow registry that keeps them, and the rules of promotion.

Names are imported on first use. MLflow is imported only when a `Registry` first uses its store.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
