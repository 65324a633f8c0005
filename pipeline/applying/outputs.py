"""Arrow tables, one after the other, as a file of any format, with a text that says what made it.

A file is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import first_line
from pipeline.applying.columns import as_numpy, shape_of
from pipeline.applying.sources import ABOUT
from pipeline.errors import DataError
from soa.errors import SoaPipelineError


@dataclass(frozen=True)
class Rows:
    """What is to be written. `tables()` begins anew each time, and every table has `schema`."""

    schema: Any
    count: int
    tables: Callable[[], Iterable[Any]]
    about: Callable[[], str]
    """The text; asked for once all tables were taken, or where it has to come before them."""
    tree: str = "Events"
    ntuple: bool = False
    """ROOT: an RNTuple of that name, not a TTree."""


def write(path: Path, rows: Rows, folder: Path) -> None:
    """Write a file, in place of one that is there, in `folder` until it is whole.

    DataError, or an OSError that names the file; there is nothing new then.
    """
    partial = folder / f"{path.name}.{os.urandom(4).hex()}.partial"
    try:
        WRITERS[path.suffix](partial, rows)
        partial.replace(path)
    except SoaPipelineError:
        raise
    except OSError as error:
        if error.errno is None:
            raise DataError(f"{path} cannot be written: {first_line(error)}") from error
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except Exception as error:
        raise DataError(f"{path} cannot be written: {first_line(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A dictionary of numbers that are all different costs time, and room.
    words = [f.name for f in rows.schema if not pa.types.is_floating(shape_of(f.type)[0])]
    with pq.ParquetWriter(path, rows.schema, use_dictionary=words or False) as file:
        for table in rows.tables():
            file.write_table(table)
        file.add_key_value_metadata({ABOUT: rows.about()})


def _ipc(path: Path, rows: Rows) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(str(path), rows.schema.with_metadata({ABOUT: rows.about()})) as file:
        for table in rows.tables():
            file.write_table(table)


def _values(column: Any) -> Any:
    if column.null_count:
        raise DataError("an array has no nulls: write Parquet or Arrow, or keep fewer columns")
    return as_numpy(column.combine_chunks())


def _dtype(field: Any) -> tuple[Any, tuple[int, ...]]:
    """Of an array of rows, for formats that have no jagged ones."""
    import pyarrow as pa

    kind, shape = shape_of(field.type)
    if pa.types.is_nested(kind):
        raise DataError(f"column {field.name!r} is jagged: write Parquet, Arrow or ROOT")
    return np.dtype(kind.to_pandas_dtype()), shape


def _hdf5(path: Path, rows: Rows) -> None:
    import h5py

    with h5py.File(path, "w", libver="v110") as file:  # older ones have no attributes above 64 KiB
        made = {}
        for field in rows.schema:
            dtype, shape = _dtype(field)
            dtype = h5py.string_dtype() if dtype.hasobject else dtype
            made[field.name] = file.create_dataset(field.name, (rows.count, *shape), dtype)
        at = 0
        for table in rows.tables():
            for field in rows.schema:
                made[field.name][at : at + len(table)] = _values(table[field.name])
            at += len(table)
        file.attrs[ABOUT] = rows.about()


def _npz(path: Path, rows: Rows) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for field in rows.schema:
            dtype, shape = _dtype(field)
            if dtype.hasobject:
                raise DataError(f"column {field.name!r} is text, which .npz has not: leave it out")
            head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
            with file.open(f"{field.name}.npy", "w", force_zip64=True) as member:
                shaped = {**head, "shape": (rows.count, *shape)}
                np.lib.format.write_array_header_1_0(member, shaped)
                for table in rows.tables():
                    member.write(_values(table[field.name]).tobytes())
        with file.open(f"{ABOUT}.npy", "w") as member:
            np.lib.format.write_array(member, np.array(rows.about()))


def _root(path: Path, rows: Rows) -> None:
    import awkward as ak
    import uproot

    def arrays(table: Any) -> dict[str, Any]:
        found = {}
        for name in table.column_names:
            if table[name].null_count:
                raise DataError(f"column {name!r} has nulls: write Parquet, or leave it out")
            column = ak.from_arrow(table[name].combine_chunks())
            found[name] = ak.to_packed(ak.drop_none(column))
        return found

    types = {name: each.type.content for name, each in arrays(rows.schema.empty_table()).items()}
    # Opened here: uproot leaves its own file open where the disk is full at the first bytes.
    # ZLIB, its default, takes seven times as long to write, and more room.
    with path.open("w+b") as opened, uproot.recreate(opened, compression=uproot.ZSTD(1)) as file:
        make = file.mkrntuple if rows.ntuple else file.mktree
        tree = make(rows.tree, types)
        for table in rows.tables():
            if len(table):
                tree.extend(arrays(table))
        file[ABOUT] = rows.about()


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".root": _root,
    ".parquet": _parquet,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), _ipc),
    **dict.fromkeys((".h5", ".hdf5"), _hdf5),
    ".npz": _npz,
}
