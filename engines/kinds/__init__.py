"""Kinds of targets. Each kind knows its architectures and which of them this host runs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
