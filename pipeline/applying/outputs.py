"""Arrow tables, one after the other, as a file of any format, with a text that says what made it.

A file is there whole or not at all, and has every value that it was given: what a format cannot
hold is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from engines.errors import first_line
from pipeline.applying.columns import (
    as_awkward,
    as_numpy,
    is_text,
    levels_of,
    nulls_in,
)
from pipeline.applying.sources import ABOUT
from pipeline.errors import ApplyError, DataError, FormatError
from soa.errors import SoaPipelineError

# Of file systems without hard links: FAT, some of the network.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP}


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
    counters: Mapping[str, str] = field(default_factory=dict)
    """Of a TTree's jagged columns, the branch that says how many items a row has; by default one of
    its own for each, `n` before its name."""


def write(path: Path, rows: Rows, folder: Path, *, over: bool = True) -> None:
    """Write a file, in `folder` until it is whole; `over`: in place of one that is there.

    FormatError for rows that the format cannot hold, ApplyError for a file that is there, or an
    OSError that names the file; there is nothing new then.
    """
    partial = folder / f"{os.urandom(8).hex()}.partial"
    try:
        with _said(path):
            WRITERS[path.suffix](partial, rows)
            if over:
                partial.replace(path)
            else:
                _put(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def require_held(path: Path, rows: Rows) -> None:
    """FormatError unless a file of this suffix holds such rows; it is not written."""
    with _said(path), TemporaryDirectory(prefix="soa-apply-") as folder:
        WRITERS[path.suffix](Path(folder) / "rows", rows)


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Inside, what goes wrong is said of `path`."""
    try:
        yield
    except SoaPipelineError:
        raise
    except OSError as error:
        if error.errno is None:
            raise DataError(f"{path} cannot be written: {first_line(error)}") from error
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except (TypeError, ValueError, NotImplementedError) as error:  # a library's own refusals
        raise FormatError(f"{path} cannot be written: {first_line(error)}") from error
    except Exception as error:
        raise DataError(f"{path} cannot be written: {first_line(error)}") from error


def _put(partial: Path, path: Path) -> None:
    """Give a file its name, which nobody else has: what came there meanwhile stays."""
    try:
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            partial.replace(path)
    except FileExistsError as error:
        raise ApplyError(
            f"{path} appeared while the job ran, and stays: run it again with --force to replace "
            "it, or move it away; the rows are scored"
        ) from error


def _parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A dictionary of numbers that are all different costs time, and room.
    words = [f.name for f in rows.schema if not pa.types.is_floating(levels_of(f.type)[0])]
    with pq.ParquetWriter(path, rows.schema, use_dictionary=words or False) as file:
        for table in rows.tables():
            for name in table.column_names:
                # Arrow writes them, and cannot read what it wrote.
                _values(table, name, "Parquet", "Arrow", pa.types.is_fixed_size_list)
            file.write_table(table)
        file.add_key_value_metadata({ABOUT: rows.about()})


def _ipc(path: Path, rows: Rows) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(str(path), rows.schema.with_metadata({ABOUT: rows.about()})) as file:
        for table in rows.tables():
            file.write_table(table)


def _values(
    table: Any,
    name: str,
    form: str,
    others: str = "Parquet or Arrow",
    among: Callable[[Any], bool] = lambda kind: True,
) -> Any:
    """A column in one piece; FormatError for nulls, at any depth, of types `among` all."""
    column = table[name].combine_chunks()
    if count := nulls_in(column, among):
        raise FormatError(
            f"column {name!r} has {count} nulls, which {form} has not: write {others}, or leave it "
            "out"
        )
    return column


def _require(held: bool, column: Any, form: str, others: str = "Parquet or Arrow") -> None:
    """FormatError where a format does not hold a column of the schema."""
    if not held:
        raise FormatError(
            f"column {column.name!r} is {column.type}, which {form} has not: write {others}, or "
            "leave it out"
        )


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_moment(kind: Any) -> bool:
    """One that NumPy has: it knows no time zones."""
    import pyarrow as pa

    zoned = pa.types.is_timestamp(kind) and kind.tz
    kinds = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_date32)
    return not zoned and any(fits(kind) for fits in kinds)


def _dtype(
    column: Any, form: str, more: Callable[[Any], bool]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Of an array of rows, for formats that have no jagged ones; `more`: types beside numbers."""
    import pyarrow as pa

    kind, levels = levels_of(column.type)
    shape = tuple(size for size in levels if size is not None)
    if len(shape) < len(levels):
        raise FormatError(f"column {column.name!r} is jagged: write Parquet, Arrow or ROOT")
    _require(_is_number(kind) or more(kind), column, form)
    return as_numpy(pa.array([], kind)).dtype, shape


def _hdf5(path: Path, rows: Rows) -> None:
    import h5py

    with h5py.File(path, "w", libver="v110") as file:  # older ones have no attributes above 64 KiB
        made = {}
        for column in rows.schema:
            dtype, shape = _dtype(column, "HDF5", is_text)
            written = h5py.string_dtype() if dtype.hasobject else dtype
            made[column.name] = file.create_dataset(column.name, (rows.count, *shape), written)
        at = 0
        for table in rows.tables():
            for name, dataset in made.items():
                values = as_numpy(_values(table, name, "HDF5"))
                try:
                    dataset[at : at + len(table)] = values
                except ValueError as error:  # text with a NUL in it
                    raise FormatError(f"column {name!r}: {first_line(error)}") from error
            at += len(table)
        file.attrs[ABOUT] = rows.about()


def _npz(path: Path, rows: Rows) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for column in rows.schema:
            if column.name == ABOUT:
                raise FormatError(f"column {ABOUT!r}: .npz has that name for what made it")
            dtype, shape = _dtype(column, ".npz", _is_moment)
            head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
            with file.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                shaped = {**head, "shape": (rows.count, *shape)}
                np.lib.format.write_array_header_1_0(member, shaped)
                for table in rows.tables():
                    member.write(as_numpy(_values(table, column.name, ".npz")).tobytes())
        with file.open(f"{ABOUT}.npy", "w") as member:
            np.lib.format.write_array(member, np.array(rows.about()))


def _root(path: Path, rows: Rows) -> None:
    import awkward as ak
    import uproot

    form = "an RNTuple" if rows.ntuple else "a TTree"

    def arrays(table: Any) -> dict[str, Any]:
        found = {name: as_awkward(_values(table, name, form)) for name in table.column_names}
        # Flat ones as NumPy's: uproot compares those with the counters that it makes itself.
        return {name: v.data if v.is_numpy else ak.Array(v) for name, v in found.items()}

    for column in rows.schema:
        _require(_in_root(column.type, rows.ntuple), column, form)
    empty = arrays(rows.schema.empty_table())
    types = {name: ak.Array(each).type.content for name, each in empty.items()}
    # Opened here: uproot leaves its own file open where the disk is full at the first bytes.
    # ZLIB, its default, takes seven times as long to write, and more room.
    with path.open("w+b") as opened, uproot.recreate(opened, compression=uproot.ZSTD(1)) as file:
        if rows.ntuple:
            tree = file.mkrntuple(rows.tree, types)
        else:  # which refuses one counter of columns whose rows have not the same numbers of items
            tree = file.mktree(
                rows.tree, types, counter_name=lambda name: rows.counters.get(name, f"n{name}")
            )
        for table in rows.tables():
            if len(table):
                tree.extend(arrays(table))
        file[ABOUT] = rows.about()


def _in_root(kind: Any, ntuple: bool) -> bool:
    """Whether ROOT has a type, and uproot writes it so that it can be read."""
    import pyarrow as pa

    item, levels = levels_of(kind)
    if is_text(item):
        return ntuple or not levels
    number = _is_number(item) and not pa.types.is_float16(item)
    return number and (ntuple or None not in levels or levels == (None,))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".root": _root,
    ".parquet": _parquet,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), _ipc),
    **dict.fromkeys((".h5", ".hdf5"), _hdf5),
    ".npz": _npz,
}
