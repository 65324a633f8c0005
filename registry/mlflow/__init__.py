"""What MLflow keeps for us, how it is reached, and what its pages show."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
