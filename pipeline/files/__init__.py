"""Files of rows, ROOT, Parquet, Arrow, HDF5 and npz: what is in them, some rows at a time, and how they are
written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
