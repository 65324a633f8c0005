"""Compiles the text of a network: for CPUs as a library, for GPUs as a kernel."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
