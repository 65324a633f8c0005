"""Give a collection's columns to other libraries, in place if possible.

`collection["pt"]` is a NumPy view of a column, `collection.tensor("pt")` a torch tensor over it;
both export DLPack. An Eigen column is a struct (Arrow) or a record (Awkward) of its entries, row by
row: `e0, e1, ...` of a vector, `e0_0, e0_1, ...` of a matrix. All functions here take CPU memory.
Their result keeps the memory alive, and shows later writes to it unless it is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soa.dtypes import is_opaque
from soa.errors import CollectionError, needs_extra, needs_library
from soa.layout import Column
from soa.memory.collection import COLLECTION, Collection
from soa.memory.span import Array
from soa.options import TEXTS, takes

if TYPE_CHECKING:
    import awkward as ak
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_takes_columns = takes(CollectionError, collection=COLLECTION, columns=TEXTS.or_none)


@_takes_columns
def to_arrow(collection: Collection, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """Return the n elements in use of a CPU collection as an Arrow record batch.

    Only booleans are copied. The batch keeps the memory alive, and shows later writes to it. Raises
    CollectionError for scalars, opaque columns and bfloat16, which Arrow does not have.

    Examples
    --------
    >>> jets = Collection(Layout([column("pt", "float32")]), 3)
    >>> to_arrow(jets).num_rows
    3
    """
    with needs_extra("data", CollectionError):
        import pyarrow as pa

    arrays: dict[str, pa.Array] = {}
    for member, views in _iterate_members(collection, columns):
        entries = [pa.array(view) for view in views]
        arrays[member.name] = entries[0]
        if member.kind == "eigen":
            arrays[member.name] = pa.StructArray.from_arrays(entries, names=member.entries)
    return pa.RecordBatch.from_pydict(arrays)


@_takes_columns
def to_awkward(collection: Collection, columns: Sequence[str] | None = None) -> ak.Array:
    """Return the n elements in use of a CPU collection as Awkward records, without a copy.

    Limits and lifetime are those of `to_arrow`.

    Examples
    --------
    >>> jets = Collection(Layout([column("pt", "float32")]), 3)
    >>> to_awkward(jets).pt.to_list()
    [0.0, 0.0, 0.0]
    """
    with needs_extra("data", CollectionError):
        import awkward as ak

    contents: dict[str, Any] = {}
    for member, views in _iterate_members(collection, columns):
        entries = [ak.contents.NumpyArray(view) for view in views]
        contents[member.name] = entries[0]
        if member.kind == "eigen":
            contents[member.name] = ak.contents.RecordArray(
                entries, member.entries, length=collection.n
            )
    return ak.Array(ak.contents.RecordArray([*contents.values()], [*contents], length=collection.n))


@_takes_columns
def to_numpy(collection: Collection, columns: Sequence[str] | None = None) -> dict[str, Array]:
    """Return the NumPy view `collection[name]` of each member, by name.

    An Eigen column of a `columns` layout has no such view and is copied.

    Examples
    --------
    >>> jets = Collection(Layout([column("pt", "float32")]), 3)
    >>> to_numpy(jets)
    {'pt': array([0., 0., 0.], dtype=float32)}
    """
    names = [member.name for member in collection.layout.columns] if columns is None else columns
    arrays: dict[str, Array] = {}
    for name in names:
        member = collection.layout[name]
        if member.kind == "eigen" and collection.layout.storage == "columns":
            ((_, views),) = _iterate_members(collection, [name])
            arrays[name] = np.stack(views, axis=-1).reshape(collection.n, *member.shape)
        else:
            arrays[name] = collection[name]
    return arrays


@_takes_columns
def to_pandas(collection: Collection, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return a pandas DataFrame, a copy of the batch of `to_arrow`.

    Examples
    --------
    >>> jets = Collection(Layout([column("pt", "float32")]), 3)
    >>> to_pandas(jets).shape
    (3, 1)
    """
    batch = to_arrow(collection, columns)
    with needs_library("pandas", CollectionError):
        return batch.to_pandas()


@_takes_columns
def to_polars(collection: Collection, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return a polars DataFrame over the batch of `to_arrow`, without another copy.

    Examples
    --------
    >>> jets = Collection(Layout([column("pt", "float32")]), 3)
    >>> to_polars(jets).shape
    (3, 1)
    """
    with needs_library("polars", CollectionError):
        import polars as pl

    frame = pl.from_arrow(to_arrow(collection, columns))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _iterate_members(
    collection: Collection, columns: Sequence[str] | None
) -> Iterator[tuple[Column, list[Array]]]:
    """Yield each member with a list of NumPy views `(n,)`, one for each of its entries, row by row.

    `columns` are the names of the members; None: all. Raises CollectionError for memory of a GPU,
    and for a member that Arrow cannot have.
    """
    if collection.device.type != "cpu":
        raise CollectionError(
            f"the collection lies on {collection.device}: copy it first, collection.to('cpu')"
        )
    names = [member.name for member in collection.layout.columns] if columns is None else columns
    for name in names:
        member = collection.layout[name]
        if member.kind == "scalar" or is_opaque(member.dtype):
            kind = "opaque" if is_opaque(member.dtype) else "a scalar of the collection"
            raise CollectionError(f"{name!r} is {kind}, not a column: leave it out (columns=)")
        if member.dtype == "bfloat16":
            raise CollectionError(
                f"column {name!r}: NumPy and Arrow have no bfloat16; leave it out (columns=)"
            )
        components = map(member.component_of, range(member.components))
        yield member, [collection.span(name, k).first(collection.n).numpy() for k in components]
