"""Opening: the one route from a name to an artifact that runs.

    opened = open_version(Opening("jets@production"))  # looked up, promoted, trusted
    here = open_here(opened, device)  # its target and engine chosen, opened as it was hashed

Names are resolved on first use: a process that only validates does not import the registry.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
