"""Files of rows: ROOT, Parquet, Arrow, HDF5 and npz, read some rows at a time, and written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
