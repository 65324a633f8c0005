"""Reads files: lists their columns, and yields some rows of them at a time, flat or jagged."""

from __future__ import annotations

import os
import struct
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from engines.errors import first_line
from pipeline.applying.columns import Array, eigen_shape, entries_joined, field_of, from_awkward
from pipeline.errors import DataError
from soa.errors import SoaPipelineError, needs_extra
from soa.files import check_members, open_plain
from soa.options import nearest

ABOUT = "soa_pipeline"
"""The key of the text that says what made a file: in the metadata of Parquet and Arrow, as an
attribute in HDF5, as an array in npz, as a TObjString in ROOT."""
_TREES = ("TTree", "TNtuple", "TNtupleD", "ROOT::RNTuple")


class Source:
    """An opened file, for one thread at a time. It is a context manager, which closes the file.

    Columns are arrays of NumPy or Arrow, depending on the library that reads the file.
    """

    columns: Sequence[str] = ()
    seeks = True
    """True if rows between two edges can be read alone; else the rows before them, from the edge
    on, are read too."""
    tree: str | None = None
    """The name of the tree in a ROOT file; `ntuple` says whether it is an RNTuple."""
    ntuple = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing here; readers that keep a file open close it."""

    def __contains__(self, name: str) -> bool:
        """Whether the file has this column, listed or not."""
        return name in self.columns

    @property
    def listed(self) -> str:
        """The names of the first 20 columns, as text for people."""
        shown = [*self.columns[:20], "…"] if len(self.columns) > 20 else self.columns
        return ", ".join(shown) or "nothing"

    def about(self) -> str | None:
        """The text that says what made the file; None if `pipeline apply` did not write it."""
        raise NotImplementedError

    @property
    def advice(self) -> str:
        """What may be wrong with a file in which a column is not found."""
        return ""

    def require(self, names: Sequence[str]) -> None:
        """Raise DataError unless the file has all these columns."""
        for name in names:
            if name not in self:
                hint = nearest(name, self.columns) or self.advice
                raise DataError(f"{self.path} has no {name!r}; it has {self.listed}{hint}")

    def counter(self, name: str) -> str | None:
        """The column with the number of items per row, such as nJet for Jet_pt; None if the file
        has no column of such a name."""
        ends = [i for i, letter in enumerate(name) if letter in "_."]
        counters = (f"n{name[:end]}" for end in reversed(ends))
        return next((each for each in counters if each in self.columns), None)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        """The rows at which row groups, baskets or clusters begin, and the number of rows."""
        raise NotImplementedError

    def head(self, names: Sequence[str], rows: int) -> dict[str, Any]:
        """The first `rows` rows, or fewer if the first batch of the file has fewer."""
        first = min(rows, self.edges(names)[-1])
        return next(self.batches(names, 0, first, rows))

    def cast(self, dtypes: Mapping[str, str]) -> None:
        """Say which dtypes columns are read as, if the file is text. Other files have their own."""

    def batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Yields rows `start` to `stop`, at most `rows` at a time; if none, one empty batch. Every
        error of a library is a DataError of one line."""
        try:
            yield from self._batches(names, start, stop, rows)
        except SoaPipelineError:
            raise
        except Exception as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from error

    def _batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        if start == stop:  # an empty batch still has the columns' dtypes
            yield self._slice(names, start, stop)
        for low in range(start, stop, rows):
            yield self._slice(names, low, min(low + rows, stop))

    def _slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        raise NotImplementedError


def open_source(path: Path, tree: str | None = None) -> Source:
    """Open a file without reading its values. `tree`: a ROOT file's tree. Raises DataError."""
    if path.suffix not in READERS:
        raise DataError(f"{path}: its suffix must be one of {', '.join(READERS)}")
    kind, libraries = READERS[path.suffix]
    with needs_extra("data", DataError):
        for name in libraries:  # not imported here: a file of flat columns needs no Awkward
            if find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    try:
        os.close(open_plain(path, links=True))
        source: Source = kind(path, tree) if kind is _Root else kind(path)
        return source
    except SoaPipelineError:
        raise
    except Exception as error:  # a library can raise anything for a file of another format
        if isinstance(error, OSError) and error.filename:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        raise DataError(f"{path} is no {path.suffix} file: {first_line(error)}") from error


class _Root(Source):
    def __init__(self, path: Path, tree: str | None = None) -> None:
        super().__init__(path)
        import uproot

        # Faster than the default. With a memory map, a file truncated meanwhile would crash us.
        handler = uproot.MultithreadedFileSource
        self._file = uproot.open(path, array_cache=None, handler=handler, num_workers=1)
        try:
            kinds = self._file.classnames(cycle=False)
            trees = [name for name, kind in kinds.items() if kind in _TREES]
            self.tree = tree or (trees[0] if len(trees) == 1 else "Events")
            if self.tree not in trees:
                have = ", ".join(trees) or "none"
                raise DataError(f"{path} has the trees {have}: name one, --tree NAME")
            self.ntuple = kinds[self.tree] == "ROOT::RNTuple"
            self._branches = self._file[self.tree]
            self.columns = self._branches.keys()
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def about(self) -> str | None:
        return str(self._file[ABOUT]) if ABOUT in self._file.keys(cycle=False) else None

    def counter(self, name: str) -> str | None:
        branch = None if self.ntuple else self._branches[name].count_branch
        return super().counter(name) if branch is None else str(branch.name)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        count = int(self._branches.num_entries)
        if self.ntuple:
            cuts = {int(each.num_first_entry) for each in self._branches.cluster_summaries}
        else:
            cuts = set.intersection(*({*self._branches[n].entry_offsets} for n in names))
        return sorted({0, *(int(cut) for cut in cuts if 0 < cut < count), count})

    def _slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        import uproot

        arrays = {}
        for name in names:
            branch = self._branches[name]
            if isinstance(getattr(branch, "interpretation", None), uproot.AsDtype):
                arrays[name] = branch.array(entry_start=start, entry_stop=stop, library="np")
            else:
                arrays[name] = from_awkward(branch.array(entry_start=start, entry_stop=stop))
        return arrays


class _Arrow(Source):
    """A file of record batches. Column `a.b` is field b of a struct, or list of structs, a.

    A struct of the entries of an Eigen column, as `to_arrow` makes it, is listed as one column `a`
    of vectors or matrices; its entries can be read by name.
    """

    def __init__(self, path: Path, schema: Any, notes: Any, counts: Sequence[int]) -> None:
        import pyarrow as pa

        super().__init__(path)
        self._schema, self._notes = schema, notes
        self._edges = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self._places: dict[str, tuple[str, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for field in schema:
            if (shape := eigen_shape(field.type)) is not None:
                self._shapes[field.name] = shape
                self._places[field.name] = field.name, ""
            nested = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
            kind = field.type.value_type if nested else field.type
            for inner in [each.name for each in kind] if pa.types.is_struct(kind) else [""]:
                self._places[f"{field.name}.{inner}".strip(".")] = field.name, inner
        entries = {name for name, (field, i) in self._places.items() if field in self._shapes and i}
        self.columns = [name for name in self._places if name not in entries]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def about(self) -> str | None:
        text = (self._notes or {}).get(ABOUT.encode())
        return text.decode() if text else None

    def counter(self, name: str) -> str | None:
        import pyarrow as pa

        field, inner = self._places[name]
        struct = pa.types.is_struct(self._schema.field(field).type)
        return f"n{field}" if inner and not struct else super().counter(name)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        return self._edges

    def _batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Batches of at most `rows` rows from the record batches that overlap with the range."""
        fields = list(dict.fromkeys(self._places[name][0] for name in names))
        if start == stop:
            yield self._columns(names, self._schema.empty_table())
            return
        first, last = bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop)
        at = self._edges[first]
        for batch in self._read(fields, range(first, last), rows):
            low, high = max(start - at, 0), min(stop - at, batch.num_rows)
            at += batch.num_rows
            for cut in range(low, high, rows):
                yield self._columns(names, batch.slice(cut, min(rows, high - cut)))

    def _read(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        """Yields these fields of row groups or batches of the file as record batches, in order."""
        raise NotImplementedError

    def _columns(self, names: Sequence[str], batch: Any) -> dict[str, Any]:
        """The columns of a batch by name: also fields of structs, and entries of fixed shape."""
        import pyarrow as pa

        columns = {}
        for name in names:
            field, inner = self._places[name]
            column = batch.column(field)
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            if inner:
                column = field_of(column, inner)
            elif name in self._shapes:
                column = entries_joined(column, self._shapes[name])
            columns[name] = column
        return columns


class _Parquet(_Arrow):
    seeks = False

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path, page_checksum_verification=True)
        meta = self._file.metadata
        counts = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        super().__init__(path, self._file.schema_arrow, meta.metadata, counts)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        yield from self._file.iter_batches(
            rows, row_groups=[*groups], columns=fields, use_threads=False
        )


class _Ipc(_Arrow):
    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._map = pa.memory_map(str(path))
        one = self._open([0])  # one field is enough to count rows: no other is decompressed
        counts = [one.get_batch(i).num_rows for i in range(one.num_record_batches)]
        schema = self._open([]).schema
        super().__init__(path, schema, schema.metadata, counts)

    def _open(self, fields: list[int]) -> Any:
        """Open the file with these fields of the schema; [] means all."""
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=fields)
        return pa.ipc.open_file(self._map, options=options)

    def __exit__(self, *_: object) -> None:
        """Do nothing: arrays may still use the mapped file, which is closed with the last one."""

    def _read(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        file = self._open([self._schema.get_field_index(name) for name in fields])
        yield from (file.get_batch(i) for i in groups)


class _Stream(_Arrow):
    """An Arrow file without an index at its end, as a stream is written."""

    seeks = False

    def __init__(self, path: Path) -> None:
        self._place = path
        with self._open() as stream:
            counts = [batch.num_rows for batch in stream]
            super().__init__(path, stream.schema, stream.schema.metadata, counts)

    def _open(self) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(pa.memory_map(str(self._place)))

    def _read(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        for i, batch in enumerate(self._open()):
            if i >= groups.stop:
                return
            if i in groups:
                yield batch.select(fields)


def _arrow_file(path: Path) -> _Arrow:
    with path.open("rb") as file:
        return _Ipc(path) if file.read(6) == b"ARROW1" else _Stream(path)


class _Csv(_Arrow):
    """Text with the names of its columns in the first line. It is read from its beginning.

    Arrow infers types from the first megabyte. If integers turn out to be other numbers later, they
    are read as float64.
    """

    seeks = False

    @property
    def advice(self) -> str:
        divided = len(self.columns) == 1 and set(self.columns[0]) & {";", "\t", "|"}
        return " (the values of a CSV file have commas between them)" if divided else ""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._place, self._types = path, dict[str, Any]()
        inferred = self._open().schema
        try:
            rows = self._count()
        except pa.ArrowInvalid:
            integers = [each.name for each in inferred if pa.types.is_integer(each.type)]
            self._types = dict.fromkeys(integers, pa.float64())
            rows = self._count()
        super().__init__(path, self._open().schema, None, [rows])

    def _open(self, columns: list[str] | None = None) -> Any:
        from pyarrow import csv

        how = csv.ConvertOptions(column_types=self._types, include_columns=columns)
        return csv.open_csv(self._place, convert_options=how)

    def _count(self) -> int:
        return sum(batch.num_rows for batch in self._open())

    def cast(self, dtypes: Mapping[str, str]) -> None:
        import pyarrow as pa

        half = ("float16", "bfloat16")  # Arrow does not read them from text
        wanted = {n: pa.type_for_alias(d) for n, d in dtypes.items() if d not in half}
        self._types |= wanted
        for name, kind in wanted.items():
            if (at := self._schema.get_field_index(name)) >= 0:
                self._schema = self._schema.set(at, pa.field(name, kind))

    def _read(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        yield from self._open(fields)


class _Arrays(Source):
    """A file of arrays that can be sliced. Column `a.b` is field b of the structured array a."""

    def __init__(self, path: Path, arrays: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._arrays = {name: each for name, each in arrays.items() if each.shape}
        self._places = {
            f"{name}.{field}".strip("."): (name, field)
            for name, each in self._arrays.items()
            for field in each.dtype.names or [""]
        }
        self.columns = [*self._places]

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        counts = {name: len(self._arrays[self._places[name][0]]) for name in names}
        for one, other in pairwise(counts):
            if counts[one] != counts[other]:
                raise DataError(
                    f"{self.path}: {one} has {counts[one]} rows, {other} has {counts[other]} rows: "
                    "columns of one job have as many rows as each other"
                )
        return [0, max(counts.values(), default=0)]

    def _slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        arrays = {}
        for name in names:
            array, field = self._places[name]
            values = self._arrays[array][start:stop]
            arrays[name] = values[field] if field else values
        return arrays


class _Hdf5(_Arrays):
    def __init__(self, path: Path) -> None:
        import h5py

        self._file = h5py.File(path)
        datasets: dict[str, Any] = {}
        self._file.visititems(
            lambda name, item: datasets.update({name: item}) if hasattr(item, "dtype") else None
        )
        super().__init__(path, datasets)

    def about(self) -> str | None:
        text: str | None = self._file.attrs.get(ABOUT)
        return text

    def _slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        import h5py

        arrays = super()._slice(names, start, stop)
        for name in names:
            array = self._arrays[self._places[name][0]]
            text = h5py.check_string_dtype(array.dtype)
            if text is not None and text.length is None:  # h5py gave Python objects: make them text
                arrays[name] = array.asstr()[start:stop].astype(np.str_)
        return arrays

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Npz(_Arrays):
    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        names = [each.removesuffix(".npy") for each in self._zip.namelist()]
        super().__init__(path, {name: _Member(self._zip, path, name) for name in names})
        self.seeks = all(each.seeks for each in self._arrays.values())

    def about(self) -> str | None:
        with np.load(self.path, allow_pickle=False) as arrays:
            return str(arrays[ABOUT]) if ABOUT in arrays.files else None

    def __exit__(self, *_: object) -> None:
        self._zip.close()


class _Member:
    """An array in an .npz: memory-mapped if it is stored uncompressed, else decompressed from its
    beginning to its end."""

    def __init__(self, file: zipfile.ZipFile, path: Path, name: str) -> None:
        self._file, self._name, info = file, f"{name}.npy", file.getinfo(f"{name}.npy")
        with file.open(info) as stream:
            wide = np.lib.format.read_magic(stream) != (1, 0)
            form = np.lib.format
            read = form.read_array_header_2_0 if wide else form.read_array_header_1_0
            self.shape, fortran, self.dtype = read(stream)
            self._head = stream.tell()
        self._row = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        self._values: Array | None = None
        self._stream: Any = None
        if self.dtype.hasobject:
            self._values = np.empty(self.shape, object)  # columns.py refuses this dtype
        elif fortran or not (self._row and self.shape and self.shape[0]):
            self._values = np.load(path)[name]
        elif info.compress_type == zipfile.ZIP_STORED:
            with path.open("rb") as raw:  # the name and an extra field precede the data
                raw.seek(info.header_offset + 26)
                name_length, extra = struct.unpack("<HH", raw.read(4))
            at = info.header_offset + 30 + name_length + extra + self._head
            self._values = np.memmap(path, self.dtype, "r", at, self.shape)
        self._path = path
        self.seeks = self._values is not None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> Array:
        """Some rows. If compressed: from row 0 on, else the rows must follow those read before."""
        if self._values is not None:
            now = self._path.stat()
            checked = _checked(self._path, now.st_size, now.st_mtime_ns)
            if self._name not in checked:
                check_members(self._file, [self._name])
                checked.add(self._name)
            return self._values[rows]
        start, stop, _ = rows.indices(len(self))
        if start == 0:
            self._stream = self._file.open(self._name)
            self._stream.read(self._head)
        content = self._stream.read((stop - start) * self._row)
        while stop == len(self) and self._stream.read(1 << 20):
            pass  # the sum is compared at the member's end, also if its shape is damaged
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])


@lru_cache(64)
def _checked(path: Path, size: int, changed: int) -> set[str]:
    """The members of a file that this process has compared with their sums: once each, although a
    member that is memory-mapped is read in many pieces."""
    return set()


READERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    ".root": (_Root, ("awkward", "uproot")),
    ".parquet": (_Parquet, ("awkward", "pyarrow")),
    **dict.fromkeys(
        (".arrow", ".arrows", ".feather", ".ipc"), (_arrow_file, ("awkward", "pyarrow"))
    ),
    ".csv": (_Csv, ("awkward", "pyarrow")),
    **dict.fromkeys((".h5", ".hdf5"), (_Hdf5, ("h5py",))),
    ".npz": (_Npz, ()),
}
"""By file suffix: the reader, and the libraries that it needs."""
