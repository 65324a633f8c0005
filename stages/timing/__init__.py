"""Times candidates side by side, and chooses the engine for each number of rows, and the tile."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
