"""The runtime: load a version, bind it to memory, run it.

Names are resolved on first use, so a process that only validates does not import the registry.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
