"""The columns of a table, a mapping or records of any library, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soa.errors import CollectionError
from soa.memory.collection import Collection
from soa.memory.to_libraries import to_numpy
from soa.options import nearest, repeated


def library_of(value: object) -> str:
    """The name of the library that a value comes from, as `pandas`."""
    return type(value).__module__.partition(".")[0]


def columns_of(data: Any) -> dict[str, Any]:
    """The columns of what `as_collection` takes, by name, as their library has them."""
    source = named_columns(to_numpy(data) if isinstance(data, Collection) else data)
    return {str(name): source.column(name) for name in source.names}


def require_column(name: str, names: Sequence[Any]) -> None:
    """Raises CollectionError if `name` is not among the names; it names the nearest one."""
    if name not in names:
        have = ", ".join(map(str, names))
        raise CollectionError(f"no column {name!r}, there are: {have}{nearest(name, names)}")


@dataclass(frozen=True)
class NamedColumns:
    """Columns by name. `computed`: the values are read from a file, or made, when they are asked
    for, so that nobody else holds their memory."""

    names: Sequence[Any]
    column: Callable[[Any], Any]
    computed: bool = False


def named_columns(data: Any) -> NamedColumns:
    """The columns of `data`. Raises CollectionError if they have no names, or two have the same."""
    columns = _of_table(data) or _of_mapping(data)
    if not columns.names:
        raise CollectionError(
            f"a {type(data).__name__} without columns that have names: give a dict of columns, a "
            "structured array, a table or flat records; one buffer is Collection.wrap(layout, "
            "memory, n)"
        )
    if twice := repeated(columns.names):
        raise CollectionError(f"two columns are called {twice[0]!r}: rename one")
    return columns


def _of_table(data: Any) -> NamedColumns | None:
    """The columns of a table of Arrow or polars, of a reader, or of something lazy; None if `data`
    is none of these."""
    library, lazy = library_of(data), False
    if library == "polars":
        lazy = hasattr(data, "collect")  # a LazyFrame
        frame = data.collect() if lazy else data
        if not hasattr(frame, "columns"):
            return None
        data = frame.to_arrow()
    elif library != "pyarrow" or not hasattr(data, "schema"):
        return None
    elif not hasattr(data, "column"):  # a RecordBatchReader, which can be read once, or a dataset
        lazy = True
        data = data.read_all() if hasattr(data, "read_all") else data.to_table()
    return NamedColumns(data.schema.names, data.column, lazy)


def _of_mapping(data: Any) -> NamedColumns:
    """The columns of a dict, records, a DataFrame of pandas, or a group of HDF5; no name if there
    are none."""
    library = library_of(data)
    if library == "awkward":
        return NamedColumns(data.fields, data.__getitem__)
    in_file = library == "h5py" or (library == "numpy" and isinstance(data, Mapping))  # an .npz
    if isinstance(data, Mapping) or (library == "pandas" and hasattr(data, "columns")):
        return NamedColumns(list(data), data.__getitem__, in_file)
    fields = getattr(getattr(data, "dtype", None), "names", None) or ()  # a structured array
    return NamedColumns(fields, lambda name: data[name], in_file)
