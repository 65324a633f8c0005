"""Sessions that choose a device for each event, or a version at each moment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
