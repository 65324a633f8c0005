"""Processes: risky steps run in a child process; objects are repaired after a fork."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
