"""Converts columns of files, which are arrays of NumPy or Arrow, to NumPy, Arrow or Awkward.

A column is flat if each row has a number, a vector or a matrix of fixed shape. It is jagged if each
row is a list of any length. A jagged column is kept as the values of all items and the offsets at
which the rows begin: rows `[1, 2], [], [3]` have the values `1, 2, 3` and the offsets `0, 2, 2, 3`.
In this file, `kind` is a type of Arrow, such as `pa.float32()`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from soa.dtypes import DTYPES
from soa.errors import LayoutError
from soa.layout import eigen
from soa.memory import plain_arrow

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FileColumn:
    """Some rows of a column.

    Of a flat column, `values` has the shape `(n, *shape)`, and `offsets` is None. Of a jagged one,
    `values` holds the items of all rows, and row i has the items `offsets[i]` to `offsets[i + 1]`.

    Collections have only vectors and matrices. So a row with more axes, such as an image with
    channels, becomes a vector of its numbers, and `axes` keeps the shape that it had.
    """

    name: str
    values: Array
    offsets: Array | None = None
    axes: tuple[int, ...] = ()

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape that a row has in the file."""
        return self.axes or self.values.shape[1:]

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def vectors(self) -> FileColumn:
        """The column with its rows as vectors, if it is jagged but each row has the same number of
        items, at least 1. Otherwise the column itself."""
        if self.offsets is None or not self.rows:
            return self
        counts = np.diff(self.offsets)
        if counts[0] == 0 or (counts != counts[0]).any():
            return self
        return FileColumn(self.name, self.values.reshape(self.rows, counts[0]))

    @property
    def cut(self) -> bytes | None:
        """How the items are cut into rows: the offsets as bytes, or None for a flat column. It is
        equal for two columns if each row has as many items in one as in the other, and it can be
        the key of a dict."""
        return None if self.offsets is None else self.offsets.tobytes()


def is_jagged(array: Any) -> bool:
    """True if each row of an array is a list whose length may differ. NumPy arrays never are."""
    if isinstance(array, np.ndarray):
        return False
    import pyarrow as pa

    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def count_items(lists: Any) -> Array:
    """Count the items of each row of a jagged Arrow column. A null row has none."""
    counts: Array = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return counts


def fill_items(lists: Any, fill: float | None) -> Any:
    """Replace null items in an Arrow array of lists by `fill`. Returns the same array if there are
    none, if `fill` is None, or if some lists are null. ValueError if the items' dtype cannot hold
    the value."""
    import pyarrow as pa

    if fill is None or lists.null_count or not lists.values.null_count:
        return lists
    return type(lists).from_arrays(lists.offsets, pa.array(_fill_nulls(lists.values, fill)))


def column_of(
    name: str, values: Any, missing: bool = False, fill: float | None = None
) -> FileColumn:
    """Convert an array of NumPy or Arrow to a `FileColumn`. ValueError if it does not hold numbers.

    `missing`: floating-point nulls become NaN. `fill`: all nulls become this value, also if
    `missing`. Without either, a null is a ValueError.
    """
    offsets = None
    if not isinstance(values, np.ndarray):
        values, offsets = _to_numbers(plain_arrow(values), missing, fill)
    if values.dtype.name not in DTYPES:
        kind = "text" if values.dtype.kind in "SUO" else values.dtype.name
        raise ValueError(f"is {kind}: a column is one of {', '.join(DTYPES)}; leave it out")
    if values.ndim < 1:
        raise ValueError("is one number: a column has a number, a vector or a matrix for each row")
    axes = values.shape[1:] if values.ndim > 3 else ()
    if axes:
        values = values.reshape(len(values), math.prod(axes))
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return FileColumn(name, values, offsets, axes)


def _to_numbers(array: Any, missing: bool, fill: float | None) -> tuple[Array, Array | None]:
    """Convert an Arrow array. Returns its values, and the offsets if it is jagged, else None.
    `missing`, `fill` and errors are as for `column_of`."""
    import pyarrow as pa

    kind, levels = unnest(array.type)
    if not is_number(kind):
        raise ValueError(f"is {array.type}: a column has numbers; leave it out")
    floating = pa.types.is_floating(kind)
    if fill is None and missing and floating:
        fill = math.nan
    if nulls := count_nulls(array, lambda level: fill is None or level != kind):
        advice = "fill them in the file (ak.fill_none)"
        if missing and not floating:
            advice = "cast it to floating point, where a null is NaN"
        raise ValueError(f"has {nulls} nulls: {advice}")
    if levels == (None,):  # one level of lists of any length
        offsets = np.append(0, np.cumsum(count_items(array)))
        return _fill_nulls(array.flatten(), fill), offsets
    rows, shape = len(array), list[int]()  # `shape`: of a row
    for size in levels:
        shape.append(_common_length(array) if size is None else size)
        array = array.flatten()
    return _fill_nulls(array, fill).reshape(rows, *shape), None


def _common_length(lists: Any) -> int:
    """Return the length that all lists have, 0 if there are no lists. ValueError if their lengths
    differ."""
    counts = count_items(lists)
    if (counts != counts[:1]).any():
        raise ValueError(
            f"is {lists.type}, lists of lists whose lengths differ: a row is a number, a vector, "
            "a matrix, or one list of numbers; leave it out"
        )
    return int(counts[0]) if len(counts) else 0


def _fill_nulls(array: Any, value: float | None) -> Array:
    """Convert flat numbers of Arrow to NumPy, with `value` in place of each null. ValueError if the
    dtype cannot hold the value. `value` may be None only if there are no nulls."""
    if array.null_count:
        dtype = np.dtype(array.type.to_pandas_dtype())
        with np.errstate(all="ignore"):  # a value that overflows is refused below
            typed = dtype.type(value)
        if dtype.kind in "biu" and typed != value:
            raise ValueError(f"is {dtype}, which cannot hold the fill value {value}")
        array = array.fill_null(typed.item())
    numbers: Array = array.to_numpy(zero_copy_only=False)
    return numbers


def as_arrow(values: Any, offsets: Array | None = None) -> Any:
    """Convert an array to Arrow. Vectors become lists of fixed size, and jagged rows large lists.

    `offsets`: the offsets of jagged rows; `values` then holds the items. An array of Arrow is
    returned as it is. But one with a dictionary is decoded, since an Arrow file has one dictionary
    for all of its batches. ValueError if Arrow has no type for the values.
    """
    import pyarrow as pa

    if isinstance(values, pa.Array):
        return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    flat = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1)
    try:
        kind = pa.from_numpy_dtype(flat.dtype)
    except pa.ArrowNotImplementedError:
        raise ValueError(f"Arrow has no {values.dtype.name}: leave that column out") from None
    if flat.dtype.kind in "biuf" and flat.dtype != bool:
        array = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    else:  # this imports pandas
        array = pa.array(flat)
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    if offsets is None:
        return array
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), array)


def extract_field(array: Any, name: str) -> Any:
    """Return one field of an Arrow array of structs, or of lists of structs: an array of values, or
    of lists of values. A value is null where its struct is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(array.type):
        return pc.struct_field(array, name)
    values = pc.struct_field(array.values, name)
    list_type = pa.list_ if pa.types.is_list(array.type) else pa.large_list
    buffers = array.buffers()[:2]  # which rows are null, and the offsets
    lists = list_type(values.type), len(array), buffers, array.null_count, array.offset
    return pa.Array.from_buffers(*lists, [values])


def eigen_shape(kind: Any) -> tuple[int, ...] | None:
    """Return the shape of a vector or matrix that `to_arrow` wrote as a struct of its entries.

    The struct of a 2 x 2 matrix has the fields e0_0, e0_1, e1_0 and e1_1, all of one type. Returns
    None for any other type.
    """
    import pyarrow as pa

    if not pa.types.is_struct(kind) or len({field.type for field in kind}) != 1:
        return None
    names = [field.name for field in kind]
    last = re.fullmatch(r"e(\d+)(?:_(\d+))?", names[-1])
    if last is None:
        return None
    shape = tuple(int(index) + 1 for index in last.groups() if index)
    if math.prod(shape) != len(names):  # cheaper than all names of a large shape
        return None
    try:
        entries = eigen("any", "float32", *shape).entries
    except LayoutError:  # too many of them
        return None
    return shape if entries == names else None


def join_entries(structs: Any, shape: tuple[int, ...]) -> Any:
    """Join the fields of structs of entries to vectors or matrices of this shape, in an Arrow array
    of lists of fixed size. The entries of a null struct are null."""
    import pyarrow as pa

    entries = structs.flatten()  # an array for each entry: their values are put row by row
    by_row = np.arange(len(entries) * len(structs)).reshape(len(entries), -1).T.ravel()
    joined = pa.concat_arrays(entries).take(pa.array(by_row))
    for size in reversed(shape):
        joined = pa.FixedSizeListArray.from_arrays(joined, size)
    return joined


def count_nulls(array: Any, among: Callable[[Any], bool] = lambda kind: True) -> int:
    """Count the nulls in an Arrow array, also in lists and structs. Nulls inside a level that has
    nulls itself are not counted. `among`: says which types to look at; by default all."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count and among(array.type):
        return int(array.null_count)
    inner = []
    if pa.types.is_struct(array.type):
        inner = array.flatten()
    elif pa.types.is_map(array.type):
        inner = [array.keys, array.items]
    elif hasattr(array, "flatten"):
        inner = [array.flatten()]  # the items of the lists that are not null
    return sum(count_nulls(values, among) for values in inner)


def unnest(kind: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return the type of the innermost items of lists in lists, and the length of the lists at each
    level, the outermost first. None stands for lists of any length.

    A list of any length of vectors of three floats gives `(float, (None, 3))`; a float gives
    `(float, ())`.
    """
    import pyarrow as pa

    levels: tuple[int | None, ...] = ()
    while True:
        if pa.types.is_fixed_size_list(kind):
            levels = (*levels, kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            levels = (*levels, None)
        else:
            return kind, levels
        kind = kind.value_type


def as_numpy(array: Any) -> Array:
    """Convert a flat Arrow column without nulls to an array of shape `(n, *shape)`. Text becomes
    Python objects."""
    _, shape = unnest(array.type)
    count = len(array)
    for _ in shape:
        array = array.flatten()
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.reshape(count, *shape)


def from_awkward(array: Any) -> Any:
    """Convert an Awkward array to an Arrow array."""
    import awkward as ak

    return ak.to_arrow(ak.to_packed(array), extensionarray=False)


def as_awkward(array: Any) -> Any:
    """Convert an Arrow column of lists, numbers or text without nulls to an Awkward layout. Unlike
    those of `ak.from_arrow`, its types are not optional ones."""
    import awkward as ak
    import pyarrow as pa

    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return ak.contents.RegularArray(as_awkward(array.flatten()), kind.list_size, len(array))
    if is_jagged(array):
        offsets = ak.index.Index64(np.append(0, np.cumsum(count_items(array))).astype(np.int64))
        return ak.contents.ListOffsetArray(offsets, as_awkward(array.flatten()))
    if is_text(kind):
        return ak.to_layout(ak.drop_none(ak.from_arrow(array.cast(pa.large_string()))))
    return ak.contents.NumpyArray(as_numpy(array))


def is_number(kind: Any) -> bool:
    """True if an Arrow type is a number or a bool."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_text(kind: Any) -> bool:
    """True if an Arrow type is text."""
    return str(kind) in ("string", "large_string", "string_view")
