"""What columns a user's file has: ROOT, Parquet, HDF5 or npz; flat, of a fixed shape, or jagged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.errors import first_line
from pipeline.errors import InitError
from soa.dtypes import DTYPES
from soa.errors import needs_extra

Array = npt.NDArray[Any]
_Readers = dict[str, Callable[[int], Any]]
_TREES = ("TTree", "TNtuple", "TNtupleD", "ROOT::RNTuple")


@dataclass(frozen=True)
class FileColumn:
    """The first rows of a column: `values` are `(n, *shape)`, or all items of jagged rows, with
    `offsets` `(n + 1)`."""

    name: str
    values: Array
    offsets: Array | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1


@dataclass(frozen=True)
class DataFile:
    """A file, and what may be columns in it: each with a function that reads its first rows."""

    path: Path
    readers: _Readers

    def column(self, name: str, rows: int = 4096) -> FileColumn:
        """At most so many rows of a column. Raises InitError."""
        if name not in self.readers:
            have = ", ".join([*self.readers][:20])
            raise InitError(
                f"{self.path} has no {name!r}; it has {have}{', …' * (len(self.readers) > 20)}"
            )
        try:
            found = _column(name, self.readers[name](rows))
        except (OSError, ValueError, TypeError, NotImplementedError) as error:
            raise InitError(f"{self.path}: {name} {first_line(error)}") from error
        if found.rows == 0:
            raise InitError(f"{self.path} has no rows: give a file that has some, or none at all")
        return found


def open_data(path: Path, tree: str | None = None) -> DataFile:
    """A file without the values in it; `tree` is for ROOT. Raises InitError."""
    readers: dict[str, Callable[[Path], _Readers]] = {
        ".root": partial(_root, tree=tree),
        ".parquet": _parquet,
        ".npz": _npz,
    }
    readers |= dict.fromkeys((".h5", ".hdf5"), _hdf5)
    if path.suffix not in readers:
        raise InitError(f"{path}: files that are read are {', '.join(readers)}")
    try:
        with path.open("rb"):
            return DataFile(path, readers[path.suffix](path))
    except InitError:
        raise
    except Exception as error:  # whatever the library makes of a file that is none of its
        if isinstance(error, OSError) and error.filename:
            raise InitError(f"{path} cannot be read: {error.strerror}") from error
        raise InitError(f"{path} is no {path.suffix} file: {first_line(error)}") from error


def _root(path: Path, tree: str | None) -> _Readers:
    with needs_extra("data", InitError):
        import awkward as awkward  # which uproot imports as it reads
        import uproot
    file = uproot.open(path)
    trees = [name for name, kind in file.classnames(cycle=False).items() if kind in _TREES]
    found = tree or ("Events" if "Events" in trees else trees[0] if len(trees) == 1 else None)
    if found not in trees:
        raise InitError(f"{path} has the trees {', '.join(trees) or 'none'}: name one, --tree NAME")
    branches = file[found]

    def read(name: str, rows: int) -> Any:
        return branches[name].array(entry_stop=rows)

    return {name: partial(read, name) for name in branches.keys()}  # noqa: SIM118


def _parquet(path: Path) -> _Readers:
    with needs_extra("data", InitError):
        import awkward as ak
        import pyarrow as pa
        import pyarrow.parquet as pq
    file = pq.ParquetFile(path)
    found: _Readers = {}

    def read(name: str, inner: str, rows: int) -> Any:
        batch = next(file.iter_batches(rows, columns=[name]), None)
        array = ak.from_arrow(file.schema_arrow.empty_table() if batch is None else batch)[name]
        return array[inner] if inner else array

    for field in file.schema_arrow:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        for inner in [each.name for each in kind] if pa.types.is_struct(kind) else [""]:
            found[f"{field.name}.{inner}".strip(".")] = partial(read, field.name, inner)
    return found


def _hdf5(path: Path) -> _Readers:
    with needs_extra("data", InitError):
        import h5py
    found: dict[str, Any] = {}
    h5py.File(path).visititems(
        lambda name, item: found.update({name: item}) if hasattr(item, "dtype") else None
    )
    return _arrays(found)


def _npz(path: Path) -> _Readers:
    return _arrays(np.load(path, allow_pickle=False))


def _arrays(arrays: Mapping[str, Any]) -> _Readers:
    """Of arrays that can be sliced, and of the fields of structured ones."""

    def read(name: str, field: str, rows: int) -> Any:
        array = arrays[name][:rows]
        return array[field] if field else array

    return {
        f"{name}.{field}".strip("."): partial(read, name, field)
        for name in arrays
        for field in arrays[name].dtype.names or [""]
    }


def _column(name: str, given: Any) -> FileColumn:
    """What a library read, NumPy's or Awkward's; ValueError for what is no column of numbers."""
    offsets = None
    if not isinstance(given, np.ndarray):
        import awkward as ak

        kind = str(given.type.content)
        if "string" in kind or "bytes" in kind or "{" in kind or "union" in kind:
            raise ValueError(f"is {kind}: a column has numbers; leave it out")
        nulls = sum(int(ak.sum(ak.is_none(given, i), axis=None)) for i in range(given.ndim))
        if nulls:
            raise ValueError(f"has {nulls} nulls: fill them in the file (ak.fill_none)")
        if "var" in kind:
            counts = np.ma.getdata(ak.to_numpy(ak.num(given, axis=1)))
            given, offsets = ak.flatten(given, axis=1), np.append(0, np.cumsum(counts))
        given = np.ma.getdata(ak.to_numpy(given))
    if given.dtype.name not in DTYPES:
        kind = "text" if given.dtype.kind in "SUO" else given.dtype.name
        raise ValueError(f"is {kind}: a column is one of {', '.join(DTYPES)}; leave it out")
    if given.ndim not in ((1, 2, 3) if offsets is None else (1,)):
        raise ValueError(
            f"has the shape {list(given.shape)}: a row is a number, a vector, a matrix"
        )
    return FileColumn(name, given.astype(given.dtype.newbyteorder("="), copy=False), offsets)
