"""Test mode: a second answer for every event, and the memory around it watched."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
