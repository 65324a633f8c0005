"""Access to MLflow: its stored models and runs, and the texts for its pages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
