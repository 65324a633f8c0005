"""Writes a sequence of Arrow tables, with a text that says what made them, to a file of any format.

A file is written completely or not at all. It keeps every value: FormatError is raised if its
format cannot store a column.
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
from pipeline.applying.columns import as_awkward, as_numpy, count_nulls, is_number, is_text, unnest
from pipeline.applying.sources import ABOUT
from pipeline.errors import ApplyError, DataError, FormatError
from soa.errors import SoaPipelineError

# Errors of file systems without hard links: FAT, some network file systems.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP}


@dataclass(frozen=True)
class Rows:
    """The rows to be written to a file. `tables()` yields them as Arrow tables of the schema
    `schema`; each call starts at the first table. `count`: the number of rows."""

    schema: Any
    count: int
    tables: Callable[[], Iterable[Any]]
    about: Callable[[], str]
    """Returns the text that says what made the rows. It is called after all tables were read; or
    before, if the format has the text at its beginning."""
    tree: str = "Events"
    ntuple: bool = False
    """For ROOT: write an RNTuple named `tree`, not a TTree."""
    counters: Mapping[str, str] = field(default_factory=dict)
    """For a TTree: by jagged column, the branch with the number of items per row. A column that is
    not named here has a branch of its own, `n` and its name."""


def write(path: Path, rows: Rows, folder: Path, *, over: bool = True) -> None:
    """Write a file in `folder`, then move it to `path`; its suffix says the format. `over`: replace
    an existing file.

    Raises FormatError if the format cannot store the rows, ApplyError if the file exists and `over`
    is false, or an OSError or DataError that names the file. Then no file is left behind.
    """
    partial = folder / f"{os.urandom(8).hex()}.partial"
    try:
        with _name_in_errors(path):
            WRITERS[path.suffix](partial, rows)
            if over:
                partial.replace(path)
            else:
                _move_to_new(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def require_storable(path: Path, rows: Rows) -> None:
    """Raise FormatError unless a file with the suffix of `path` can store such rows. To find out, a
    temporary file is written elsewhere."""
    with _name_in_errors(path), TemporaryDirectory(prefix="soa-apply-") as folder:
        WRITERS[path.suffix](Path(folder) / "rows", rows)


@contextlib.contextmanager
def _name_in_errors(path: Path) -> Iterator[None]:
    """Turn an error of a library or a disk, raised in the `with` block, into one that names `path`.
    A library's refusal of the values becomes a FormatError."""
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


def _move_to_new(partial: Path, path: Path) -> None:
    """Put a file at `path`. ApplyError if a file appeared there meanwhile; that file is kept.

    Moving a file could replace another one; making a hard link to it cannot. On a file system
    without hard links, an empty file is created first, which fails if `path` exists.
    """
    try:
        try:
            os.link(partial, path)  # the caller removes `partial`
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            partial.replace(path)
    except FileExistsError as error:
        raise ApplyError(
            f"{path} appeared while the job ran, and is kept: run the job again with --force to "
            "replace it, or move it away; the rows are scored already"
        ) from error


def _write_parquet(path: Path, rows: Rows) -> None:
    """Write a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A dictionary is made only for columns whose values repeat. Floating-point numbers mostly
    # differ: a dictionary of them costs time and disk space.
    repeating = [
        field.name for field in rows.schema if not pa.types.is_floating(unnest(field.type)[0])
    ]
    options = {"use_dictionary": repeating or False, "write_page_checksum": True}
    with pq.ParquetWriter(path, rows.schema, **options) as file:
        for table in rows.tables():
            for name in table.column_names:
                # Arrow writes null lists of fixed size to Parquet, but cannot read them again.
                _require_no_nulls(table, name, "Parquet", "Arrow", pa.types.is_fixed_size_list)
            file.write_table(table)
        file.add_key_value_metadata({ABOUT: rows.about()})


def _write_arrow(path: Path, rows: Rows) -> None:
    """Write an Arrow file."""
    import pyarrow as pa

    with pa.ipc.new_file(str(path), rows.schema.with_metadata({ABOUT: rows.about()})) as file:
        for table in rows.tables():
            file.write_table(table)


def _require_no_nulls(
    table: Any,
    name: str,
    form: str,
    others: str = "Parquet or Arrow",
    among: Callable[[Any], bool] = lambda kind: True,
) -> Any:
    """Return a column as one array. FormatError if it has nulls, at any depth, of types for which
    `among` is true. The message says that the format `form` cannot store them, and `others` can."""
    column = table[name].combine_chunks()
    if count := count_nulls(column, among):
        raise FormatError(
            f"column {name!r} has {count} nulls, which {form} cannot store: write {others}, or "
            "leave it out"
        )
    return column


def _refuse_unless(fits: bool, column: Any, form: str) -> None:
    """Raise FormatError unless `fits` is true. `column` is the field of the schema that the format
    `form` cannot store."""
    if not fits:
        raise FormatError(
            f"column {column.name!r} is {column.type}, which {form} cannot store: write Parquet or "
            "Arrow, or leave it out"
        )


def _is_numpy_time(kind: Any) -> bool:
    """True if a type of Arrow is a time, duration or date that NumPy has too. NumPy has no time
    zones."""
    import pyarrow as pa

    zoned = pa.types.is_timestamp(kind) and kind.tz
    tests = (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_date32)
    return not zoned and any(test(kind) for test in tests)


def _dtype_and_shape(
    column: Any, form: str, more: Callable[[Any], bool]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the NumPy dtype of a column of the schema and the shape of a row, for a format without
    jagged columns. `more`: says which types are allowed besides numbers. FormatError if the format
    `form` cannot store the column."""
    import pyarrow as pa

    kind, levels = unnest(column.type)
    shape = tuple(size for size in levels if size is not None)
    if len(shape) < len(levels):
        raise FormatError(f"column {column.name!r} is jagged: write Parquet, Arrow or ROOT")
    _refuse_unless(is_number(kind) or more(kind), column, form)
    return as_numpy(pa.array([], kind)).dtype, shape


def _write_hdf5(path: Path, rows: Rows) -> None:
    """Write an HDF5 file with a dataset for each column."""
    import h5py

    with h5py.File(path, "w", libver="v110") as file:  # older formats limit attributes to 64 KiB
        datasets = {}
        for column in rows.schema:
            dtype, shape = _dtype_and_shape(column, "HDF5", is_text)
            written = h5py.string_dtype() if dtype.hasobject else dtype
            datasets[column.name] = file.create_dataset(column.name, (rows.count, *shape), written)
        start = 0
        for table in rows.tables():
            for name, dataset in datasets.items():
                values = as_numpy(_require_no_nulls(table, name, "HDF5"))
                try:
                    dataset[start : start + len(table)] = values
                except ValueError as error:  # text with a NUL in it
                    raise FormatError(f"column {name!r}: {first_line(error)}") from error
            start += len(table)
        file.attrs[ABOUT] = rows.about()


def _write_npz(path: Path, rows: Rows) -> None:
    """Write an .npz file with an array for each column. So that only one table is in memory at a
    time, `rows.tables()` is read anew for each column."""
    with zipfile.ZipFile(path, "w") as file:
        for column in rows.schema:
            if column.name == ABOUT:
                raise FormatError(f"column {ABOUT!r}: .npz uses this name for its own record")
            dtype, shape = _dtype_and_shape(column, ".npz", _is_numpy_time)
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (rows.count, *shape),
            }
            with file.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for table in rows.tables():
                    member.write(as_numpy(_require_no_nulls(table, column.name, ".npz")).tobytes())
        with file.open(f"{ABOUT}.npy", "w") as member:
            np.lib.format.write_array(member, np.array(rows.about()))


def _write_root(path: Path, rows: Rows) -> None:
    """Write a ROOT file with a TTree, or with an RNTuple if `rows.ntuple` is true."""
    import awkward as ak
    import uproot

    form = "an RNTuple" if rows.ntuple else "a TTree"

    def arrays(table: Any) -> dict[str, Any]:
        plain = {name: _require_no_nulls(table, name, form) for name in table.column_names}
        columns = {name: as_awkward(column) for name, column in plain.items()}
        # Flat columns must be NumPy arrays: uproot compares those with the counters that it makes.
        return {name: c.data if c.is_numpy else ak.Array(c) for name, c in columns.items()}

    for column in rows.schema:
        _refuse_unless(_is_in_root(column.type, rows.ntuple), column, form)
    empty = arrays(rows.schema.empty_table())
    types = {name: ak.Array(array).type.content for name, array in empty.items()}
    # The file is opened here, not by uproot, which would leave it open if the disk is full at the
    # first bytes. ZLIB, uproot's default, takes seven times as long as ZSTD, and more disk space.
    with path.open("w+b") as opened, uproot.recreate(opened, compression=uproot.ZSTD(1)) as file:
        if rows.ntuple:
            tree = file.mkrntuple(rows.tree, types)
        else:  # columns of one counter must have the same number of items in a row
            tree = file.mktree(
                rows.tree, types, counter_name=lambda name: rows.counters.get(name, f"n{name}")
            )
        for table in rows.tables():
            if len(table):
                tree.extend(arrays(table))
        file[ABOUT] = rows.about()


def _is_in_root(kind: Any, ntuple: bool) -> bool:
    """True if ROOT can store this type of Arrow, and uproot writes it so that it can be read again.
    `ntuple`: in an RNTuple, which stores more types than a TTree."""
    import pyarrow as pa

    item, levels = unnest(kind)
    if is_text(item):
        return ntuple or not levels
    if not is_number(item) or pa.types.is_float16(item):
        return False
    return ntuple or None not in levels or levels == (None,)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".root": _write_root,
    ".parquet": _write_parquet,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), _write_arrow),
    **dict.fromkeys((".h5", ".hdf5"), _write_hdf5),
    ".npz": _write_npz,
}
