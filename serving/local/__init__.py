"""Servers on this host: Triton and Envoy, started, waited for and stopped."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
