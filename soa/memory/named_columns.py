"""The columns of a table, a mapping or records of any library, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soa.errors import CollectionError
from soa.memory.collection import Collection
from soa.memory.to_libraries import to_numpy
from soa.options import find_repeated, nearest_hint


def library_of(value: object) -> str:
    """Return the name of the library that defines a value's type, such as `pandas`."""
    return type(value).__module__.partition(".")[0]


def columns_of(data: Any) -> dict[str, Any]:
    """Return the columns of data that `as_collection` takes, each as its own library has it."""
    source = named_columns(to_numpy(data) if isinstance(data, Collection) else data)
    return {str(name): source.column(name) for name in source.names}


def require_column(name: str, names: Sequence[Any]) -> None:
    """Raise CollectionError, with the nearest name, if `name` is not among the names."""
    if name not in names:
        known = ", ".join(map(str, names))
        raise CollectionError(f"no column {name!r}, there are: {known}{nearest_hint(name, names)}")


@dataclass(frozen=True)
class NamedColumns:
    """The names of columns, and a function that returns the column of a name.

    `computed`: each column is read or computed when it is asked for. So nobody else holds its
    memory.
    """

    names: Sequence[Any]
    column: Callable[[Any], Any]
    computed: bool = False


def named_columns(data: Any) -> NamedColumns:
    """Return the columns of `data`; raise CollectionError if they have no names, or one twice."""
    columns = _columns_of_polars(data) or _columns_of_arrow(data) or _columns_of_mapping(data)
    if not columns.names:
        raise CollectionError(
            f"a {type(data).__name__} without columns that have names: give a dict of columns, a "
            "structured array, a table or flat records; one buffer is Collection.wrap(layout, "
            "memory, n)"
        )
    if twice := find_repeated(columns.names):
        raise CollectionError(f"two columns are called {twice[0]!r}: rename one")
    return columns


def _columns_of_polars(data: Any) -> NamedColumns | None:
    """Return the columns of a polars DataFrame or LazyFrame; None if `data` is neither."""
    if library_of(data) != "polars":
        return None
    lazy = hasattr(data, "collect")
    frame = data.collect() if lazy else data
    if not hasattr(frame, "columns"):  # a Series
        return None
    table = frame.to_arrow()
    return NamedColumns(table.schema.names, table.column, computed=lazy)


def _columns_of_arrow(data: Any) -> NamedColumns | None:
    """Return the columns of an Arrow table, record batch, reader or dataset; None for other data.

    A reader or a dataset is read as a whole.
    """
    if library_of(data) != "pyarrow" or not hasattr(data, "schema"):
        return None
    if hasattr(data, "column"):
        return NamedColumns(data.schema.names, data.column)
    # A RecordBatchReader, which can be read once, or a dataset.
    table = data.read_all() if hasattr(data, "read_all") else data.to_table()
    return NamedColumns(table.schema.names, table.column, computed=True)


def _columns_of_mapping(data: Any) -> NamedColumns:
    """Return the columns of a dict, an .npz file, records, a pandas DataFrame or a group of HDF5.

    For other data there are no names.
    """
    library = library_of(data)
    if library == "awkward":
        return NamedColumns(data.fields, data.__getitem__)
    in_file = library == "h5py" or (library == "numpy" and isinstance(data, Mapping))  # an .npz
    if isinstance(data, Mapping) or (library == "pandas" and hasattr(data, "columns")):
        return NamedColumns(list(data), data.__getitem__, in_file)
    fields = getattr(getattr(data, "dtype", None), "names", None) or ()  # a structured array
    return NamedColumns(fields, lambda name: data[name], in_file)
