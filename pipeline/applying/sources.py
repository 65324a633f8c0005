"""Reads files: lists their columns, and yields some rows at a time.

Each format has a subclass of `Source`, which `open_source` chooses by the file's suffix. The
libraries of a format are imported when its first file is opened.
"""

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
from typing import Any, NamedTuple, Self

import numpy as np

from engines.errors import first_line
from pipeline.applying.columns import Array, eigen_shape, extract_field, from_awkward, join_entries
from pipeline.errors import DataError
from soa.errors import SoaPipelineError, needs_extra
from soa.files import check_members, open_plain
from soa.options import find_repeated, nearest_hint

ABOUT = "soa_pipeline"
"""The key of the text that says what made a file: in the metadata of Parquet and Arrow, as an
attribute in HDF5, as an array in npz, as a TObjString in ROOT."""
_LISTED = 20  # so many columns at most are listed in a message
_ZIP_HEADER = 30  # bytes of a member's header in a zip file
_TREES = ("TTree", "TNtuple", "TNtupleD", "ROOT::RNTuple")


class Source:
    """An opened file, for one thread at a time. It is a context manager, which closes the file.

    Columns are arrays of NumPy or Arrow, depending on the library that reads the file.
    """

    columns: Sequence[str] = ()
    seeks = True
    """True if some rows between two edges can be read alone. Otherwise the rows before them, from
    the edge on, are read too."""
    tree: str | None = None
    """The name of the tree in a ROOT file; None for other formats."""
    ntuple = False
    """True if the tree is an RNTuple, not a TTree."""
    repeated: Sequence[str] = ()
    """Names that several columns have, such as one called `a.b` and the field b of a struct a."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing. A subclass that keeps its file open closes it here."""

    def __contains__(self, name: str) -> bool:
        """Whether the file has this column. A subclass may have columns that are not listed."""
        return name in self.columns

    @property
    def listed(self) -> str:
        """The names of the first columns, as text for messages."""
        shown = [*self.columns[:_LISTED], "…"] if len(self.columns) > _LISTED else self.columns
        return ", ".join(shown) or "nothing"

    def about(self) -> str | None:
        """Read the text under the key `ABOUT`. Returns None if `pipeline apply` did not write the
        file."""
        raise NotImplementedError

    @property
    def advice(self) -> str:
        """What may be wrong with the file if a column is not found: the end of a message, or ""."""
        return ""

    def require(self, names: Sequence[str]) -> None:
        """Raise DataError unless the file has all these columns."""
        for name in names:
            if name not in self:
                hint = nearest_hint(name, self.columns) or self.advice
                raise DataError(f"{self.path} has no {name!r}; it has {self.listed}{hint}")

    def counter(self, name: str) -> str | None:
        """Find the column with the number of items per row of a jagged column. Returns None if the
        file has none.

        It is called n and the first words of the name: nJet for Jet_pt; for a_b_c, na_b or else na.
        """
        ends = [i for i, letter in enumerate(name) if letter in "_."]
        counters = (f"n{name[:end]}" for end in reversed(ends))
        return next((counter for counter in counters if counter in self.columns), None)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        """Return the rows at which row groups, baskets or clusters of these columns begin, and at
        the end the number of rows."""
        raise NotImplementedError

    def head(self, names: Sequence[str], rows: int) -> dict[str, Any]:
        """Read the first `rows` rows of these columns, or fewer if the first batch of the file has
        fewer."""
        stop = min(rows, self.edges(names)[-1])
        return next(self.batches(names, 0, stop, rows))

    def cast(self, dtypes: Mapping[str, str]) -> None:
        """Set the dtypes, by column, as which a text file is read. Does nothing for other files,
        since they state their dtypes."""

    def batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Yields rows `start` to `stop` of these columns, at most `rows` at a time, as arrays by
        column. If there are none, yields one empty batch. An error of the library that reads the
        file is raised as a DataError of one line."""
        if several := [name for name in names if name in self.repeated]:
            raise DataError(
                f"{self.path} has several columns called {several[0]}, maybe one as a field of a "
                "struct: rename all but one"
            )
        try:
            yield from self._read_batches(names, start, stop, rows)
        except SoaPipelineError:
            raise
        except Exception as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from error

    def _read_batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the same as `batches`, but raises the errors of the library as they are."""
        if start == stop:  # an empty batch still has the columns' dtypes
            yield self._read_slice(names, start, stop)
        for low in range(start, stop, rows):
            yield self._read_slice(names, low, min(low + rows, stop))

    def _read_slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        """Read rows `start` to `stop` of these columns at once. Returns the arrays by column."""
        raise NotImplementedError


def open_source(path: Path, tree: str | None = None) -> Source:
    """Open a file without reading its values. `tree`: the name of the tree in a ROOT file, which
    may be None if it has only one. DataError if the file cannot be opened, or if its suffix is
    unknown or needs a library that is not installed."""
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
    """A tree of a ROOT file: a TTree or an RNTuple."""

    def __init__(self, path: Path, tree: str | None = None) -> None:
        super().__init__(path)
        import uproot

        # This is faster than the default, and safer than a memory map: with one, the process would
        # crash if the file were truncated meanwhile.
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
        """As `Source.counter`, but a TTree itself may say which branch counts the items."""
        branch = None if self.ntuple else self._branches[name].count_branch
        return super().counter(name) if branch is None else str(branch.name)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        """Return the rows at which clusters begin, or baskets of all these branches of a TTree."""
        count = int(self._branches.num_entries)
        if self.ntuple:
            cuts = {int(cluster.num_first_entry) for cluster in self._branches.cluster_summaries}
        else:
            cuts = set.intersection(*({*self._branches[name].entry_offsets} for name in names))
        return sorted({0, *(int(cut) for cut in cuts if 0 < cut < count), count})

    def _read_slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        """Read flat branches of a TTree as arrays of NumPy, and all other columns as Arrow's."""
        import uproot

        arrays = {}
        for name in names:
            branch = self._branches[name]
            if isinstance(getattr(branch, "interpretation", None), uproot.AsDtype):
                arrays[name] = branch.array(entry_start=start, entry_stop=stop, library="np")
            else:
                arrays[name] = from_awkward(branch.array(entry_start=start, entry_stop=stop))
        return arrays


class _Place(NamedTuple):
    """Where the values of a column are: in a field of the file; or, if `inner` is not empty, in the
    field `inner` of the structs that this field holds."""

    field: str
    inner: str = ""

    @property
    def column(self) -> str:
        """The name of the column."""
        return f"{self.field}.{self.inner}" if self.inner else self.field


def _struct_fields(kind: Any) -> list[str] | None:
    """Return the names of the fields, if an Arrow type is a struct or a list of structs; else
    None."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return [field.name for field in kind] if pa.types.is_struct(kind) else None


class _Arrow(Source):
    """A file of record batches of Arrow. Column `a.b` is the field b of a, which is a struct or a
    list of structs.

    `to_arrow` makes a struct of the entries of an Eigen column. Such a struct is listed as one
    column `a` of vectors or matrices. Its entries are not listed, but can be read by name.
    """

    def __init__(self, path: Path, schema: Any, metadata: Any, counts: Sequence[int]) -> None:
        """`metadata`: the texts that the file holds, or None. `counts`: the number of rows in each
        record batch."""
        super().__init__(path)
        self._schema, self._metadata = schema, metadata
        self._edges = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self._shapes: dict[str, tuple[int, ...]] = {}
        """By field that is a struct of Eigen entries: the shape of its vectors or matrices."""
        places: list[_Place] = []
        for field in schema:
            if (shape := eigen_shape(field.type)) is not None:
                self._shapes[field.name] = shape
            inner = _struct_fields(field.type)
            if inner is None or shape is not None:
                places.append(_Place(field.name))
            places += [_Place(field.name, name) for name in inner or ()]
        self._places = {place.column: place for place in places}
        """By column, listed or not: where its values are."""
        self.repeated = find_repeated(place.column for place in places)
        self.columns = [
            name
            for name, place in self._places.items()
            if not (place.inner and place.field in self._shapes)
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def about(self) -> str | None:
        text = (self._metadata or {}).get(ABOUT.encode())
        return text.decode() if text else None

    def counter(self, name: str) -> str | None:
        import pyarrow as pa

        place = self._places[name]
        if place.inner and not pa.types.is_struct(self._schema.field(place.field).type):
            return f"n{place.field}"  # a field of a list of structs
        return super().counter(name)

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        return self._edges

    def _read_batches(
        self, names: Sequence[str], start: int, stop: int, rows: int
    ) -> Iterator[dict[str, Any]]:
        """Yields batches of at most `rows` rows from the record batches of the file that overlap
        with the range `start` to `stop`."""
        fields = list(dict.fromkeys(self._places[name].field for name in names))
        if start == stop:
            yield self._pick_columns(names, self._schema.empty_table())
            return
        groups = range(bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop))
        begin = self._edges[groups.start]  # the row of the file at which `batch` begins
        for batch in self._read_groups(fields, groups, rows):
            low, high = max(start - begin, 0), min(stop - begin, batch.num_rows)
            begin += batch.num_rows
            for cut in range(low, high, rows):
                yield self._pick_columns(names, batch.slice(cut, min(rows, high - cut)))

    def _read_groups(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        """Yields these fields of the row groups or batches `groups` of the file, in order, as
        record batches. `rows`: the size that they should have; the caller cuts larger ones."""
        raise NotImplementedError

    def _pick_columns(self, names: Sequence[str], batch: Any) -> dict[str, Any]:
        """Return columns of a record batch by name. A column may be a field inside of structs, or
        the entries of an Eigen column, which are joined."""
        import pyarrow as pa

        columns = {}
        for name in names:
            place = self._places[name]
            column = batch.column(place.field)
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            if place.inner:
                column = extract_field(column, place.inner)
            elif name in self._shapes:
                column = join_entries(column, self._shapes[name])
            columns[name] = column
        return columns


class _Parquet(_Arrow):
    """A Parquet file. Its row groups are read as record batches."""

    seeks = False

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path, page_checksum_verification=True)
        footer = self._file.metadata
        counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        super().__init__(path, self._file.schema_arrow, footer.metadata, counts)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_groups(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        yield from self._file.iter_batches(
            rows, row_groups=[*groups], columns=fields, use_threads=False
        )


class _Ipc(_Arrow):
    """An Arrow file with an index at its end, which is mapped into memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._map = pa.memory_map(str(path))
        file = self._open([0])  # one field is enough to count rows: no other is decompressed
        counts = [file.get_batch(i).num_rows for i in range(file.num_record_batches)]
        schema = self._open([]).schema
        super().__init__(path, schema, schema.metadata, counts)

    def _open(self, fields: list[int]) -> Any:
        """Open the file for reading the fields with these indices; [] means all."""
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=fields)
        return pa.ipc.open_file(self._map, options=options)

    def __exit__(self, *_: object) -> None:
        """Does nothing, because arrays may still use the mapped file. The last one closes it."""

    def _read_groups(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        file = self._open([self._schema.get_field_index(name) for name in fields])
        yield from (file.get_batch(i) for i in groups)


class _Stream(_Arrow):
    """An Arrow file in the format of a stream, without an index at its end."""

    seeks = False

    def __init__(self, path: Path) -> None:
        self.path = path  # `_open` needs it before the base class sets it
        with self._open() as stream:
            counts = [batch.num_rows for batch in stream]
            super().__init__(path, stream.schema, stream.schema.metadata, counts)

    def _open(self) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(pa.memory_map(str(self.path)))

    def _read_groups(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        for i, batch in enumerate(self._open()):
            if i >= groups.stop:
                return
            if i in groups:
                yield batch.select(fields)


def _open_arrow(path: Path) -> _Arrow:
    """Open an Arrow file or stream. A file begins with the mark ARROW1."""
    with path.open("rb") as file:
        return _Ipc(path) if file.read(6) == b"ARROW1" else _Stream(path)


class _Csv(_Arrow):
    """A text file with the names of its columns in the first line.

    Arrow infers the types from the first megabyte. If a column of integers has other numbers later,
    all columns of integers are read as float64.
    """

    seeks = False

    @property
    def advice(self) -> str:
        if len(self.columns) == 1 and set(self.columns[0]) & {";", "\t", "|"}:
            return " (the values of a CSV file have commas between them)"
        return ""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path  # `_open` needs it before the base class sets it
        self._types: dict[str, Any] = {}
        inferred = self._open().schema
        try:
            rows = self._count_rows()
        except pa.ArrowInvalid:
            integers = [field.name for field in inferred if pa.types.is_integer(field.type)]
            self._types = dict.fromkeys(integers, pa.float64())
            rows = self._count_rows()
        super().__init__(path, self._open().schema, None, [rows])

    def _open(self, columns: list[str] | None = None) -> Any:
        """Open the file anew for reading these columns from its beginning; None: all columns."""
        from pyarrow import csv

        options = csv.ConvertOptions(column_types=self._types, include_columns=columns)
        return csv.open_csv(self.path, convert_options=options)

    def _count_rows(self) -> int:
        """Read the whole file, and count its rows. ArrowInvalid if a value does not have the type
        of its column."""
        return sum(batch.num_rows for batch in self._open())

    def cast(self, dtypes: Mapping[str, str]) -> None:
        import pyarrow as pa

        half = ("float16", "bfloat16")  # Arrow does not read them from text
        kinds = {n: pa.type_for_alias(dtype) for n, dtype in dtypes.items() if dtype not in half}
        self._types |= kinds
        for name, kind in kinds.items():
            index = self._schema.get_field_index(name)
            if index >= 0:  # -1 if the file lacks that column
                self._schema = self._schema.set(index, pa.field(name, kind))

    def _read_groups(self, fields: list[str], groups: range, rows: int) -> Iterator[Any]:
        yield from self._open(fields)


class _Arrays(Source):
    """A file of arrays that can be sliced. Column `a.b` is the field b of the structured array a.
    A subclass opens the file, and gives the arrays by name."""

    def __init__(self, path: Path, arrays: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._arrays = {name: array for name, array in arrays.items() if array.shape}
        places = [
            _Place(name, field)
            for name, array in self._arrays.items()
            for field in array.dtype.names or ("",)
        ]
        self._places = {place.column: place for place in places}
        self.repeated = find_repeated(place.column for place in places)
        self.columns = [*self._places]

    def edges(self, names: Sequence[str]) -> Sequence[int]:
        """Return 0 and the number of rows. DataError if the columns do not all have as many."""
        counts = {name: len(self._arrays[self._places[name].field]) for name in names}
        for name, other in pairwise(counts):
            if counts[name] != counts[other]:
                raise DataError(
                    f"{self.path}: {name} has {counts[name]} rows, {other} has {counts[other]} "
                    "rows: columns of one job have as many rows as each other"
                )
        return [0, max(counts.values(), default=0)]

    def _read_slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        arrays = {}
        for name in names:
            place = self._places[name]
            values = self._arrays[place.field][start:stop]
            arrays[name] = values[place.inner] if place.inner else values
        return arrays


class _Hdf5(_Arrays):
    """The datasets of an HDF5 file, those in groups too."""

    def __init__(self, path: Path) -> None:
        import h5py

        self._file = h5py.File(path)
        datasets: dict[str, Any] = {}
        self._file.visititems(  # of groups and datasets, only the latter have a dtype
            lambda name, item: datasets.update({name: item}) if hasattr(item, "dtype") else None
        )
        super().__init__(path, datasets)

    def about(self) -> str | None:
        text: str | None = self._file.attrs.get(ABOUT)
        return text

    def _read_slice(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        """As in the base class, but text, which h5py gives as Python objects, is NumPy's."""
        import h5py

        arrays = super()._read_slice(names, start, stop)
        for name in names:
            array = self._arrays[self._places[name].field]
            text = h5py.check_string_dtype(array.dtype)
            if text is not None and text.length is None:  # text of any length
                arrays[name] = array.asstr()[start:stop].astype(np.str_)
        return arrays

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Npz(_Arrays):
    """The arrays of an .npz file."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        names = [member.removesuffix(".npy") for member in self._zip.namelist()]
        super().__init__(path, {name: _Member(self._zip, path, name) for name in names})
        self.seeks = all(array.seeks for array in self._arrays.values())

    def about(self) -> str | None:
        with np.load(self.path, allow_pickle=False) as arrays:
            return str(arrays[ABOUT]) if ABOUT in arrays.files else None

    def __exit__(self, *_: object) -> None:
        self._zip.close()


class _Member:
    """An array in an .npz file. If it is stored without compression, it is memory-mapped, and any
    rows can be read (`seeks`). Else it is decompressed from its beginning to its end."""

    def __init__(self, file: zipfile.ZipFile, path: Path, name: str) -> None:
        self._zip, self._name, self._path = file, f"{name}.npy", path
        info = file.getinfo(self._name)
        with file.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read_header = np.lib.format.read_array_header_2_0
            if version == (1, 0):
                read_header = np.lib.format.read_array_header_1_0
            self.shape, fortran, self.dtype = read_header(stream)
            self._header_bytes = stream.tell()
        self._row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        self._values: Array | None = None
        self._stream: Any = None
        if self.dtype.hasobject:
            self._values = np.empty(self.shape, object)  # columns.py refuses this dtype
        # An array in Fortran's order, or without a value, has no rows that lie one after the other.
        elif fortran or not (self._row_bytes and self.shape and self.shape[0]):
            self._values = np.load(path)[name]
        elif info.compress_type == zipfile.ZIP_STORED:
            start = _content_offset(path, info) + self._header_bytes
            self._values = np.memmap(path, self.dtype, "r", start, self.shape)
        self.seeks = self._values is not None

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> Array:
        """Read some rows. If the array is compressed, they must begin at row 0, or follow the rows
        that were read last."""
        if self._values is not None:
            status = self._path.stat()
            checked = _checked_members(self._path, status.st_size, status.st_mtime_ns)
            if self._name not in checked:
                check_members(self._zip, [self._name])
                checked.add(self._name)
            return self._values[rows]
        start, stop, _ = rows.indices(len(self))
        if start == 0:
            self._stream = self._zip.open(self._name)
            self._stream.read(self._header_bytes)
        content = self._stream.read((stop - start) * self._row_bytes)
        while stop == len(self) and self._stream.read(1 << 20):
            pass  # to the member's end, where zipfile compares its checksum
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])


def _content_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Return the byte at which the content of a stored member begins in a zip file.

    Before it are a header of 30 bytes, the member's name and an extra field. The last four bytes of
    the header are the lengths of the name and of the extra field. The central directory has an
    extra field of its own, so its length cannot be used here.
    """
    with path.open("rb") as file:
        file.seek(info.header_offset + _ZIP_HEADER - 4)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
    return int(info.header_offset + _ZIP_HEADER + name_length + extra_length)


@lru_cache(64)
def _checked_members(path: Path, size: int, mtime_ns: int) -> set[str]:
    """Return the set of members of a zip file whose checksums this process has compared. The caller
    adds to it.

    It starts empty. `lru_cache` returns the same set for the same arguments, so as long as the file
    does not change. A memory-mapped member is read in many pieces; it is to be compared only once.
    """
    return set()


READERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    ".root": (_Root, ("awkward", "uproot")),
    ".parquet": (_Parquet, ("awkward", "pyarrow")),
    **dict.fromkeys(
        (".arrow", ".arrows", ".feather", ".ipc"), (_open_arrow, ("awkward", "pyarrow"))
    ),
    ".csv": (_Csv, ("awkward", "pyarrow")),
    **dict.fromkeys((".h5", ".hdf5"), (_Hdf5, ("h5py",))),
    ".npz": (_Npz, ()),
}
"""By file suffix: the reader, and the libraries that it needs."""
