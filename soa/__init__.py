"""Structure-of-Arrays memory: layouts, collections, blocks, and the signature of a model.

Names are resolved on first use, so a program that needs only the errors does not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
