"""Test mode: compares each event with a reference program, and looks for writes to other memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
