"""Opening: the one route from a name to an artifact that runs.

    opened = open_version(Opening("jets@production"))  # checks promotion and signatures
    here = open_here(opened, device)  # chooses target and engine

Names are resolved on first use: a process that only validates does not import the registry.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
