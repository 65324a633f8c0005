"""Columns that NumPy, Arrow or Awkward read, converted to NumPy values and offsets, or to Arrow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from soa.dtypes import DTYPES
from soa.errors import LayoutError
from soa.layout import eigen
from soa.memory import library_of, plain_arrow

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FileColumn:
    """Some rows of a column. Flat: `values` `(n, *shape)`, `offsets` None. Jagged: `values` holds
    all items, and row i has the items `offsets[i]` to `offsets[i + 1]`.

    A row of more than two axes, as an image with channels, is a vector of its numbers, since
    collections have vectors and matrices only; `axes` is then the shape that it had.
    """

    name: str
    values: Array
    offsets: Array | None = None
    axes: tuple[int, ...] = ()

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of a row as the file has it."""
        return self.axes or self.values.shape[1:]

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def vectors(self) -> FileColumn:
        """If all rows have the same number of items, not 0: the column as vectors. Else itself."""
        if self.offsets is None or not self.rows:
            return self
        counts = np.diff(self.offsets)
        if counts[0] == 0 or (counts != counts[0]).any():
            return self
        return FileColumn(self.name, self.values.reshape(self.rows, counts[0]))

    @property
    def cut(self) -> bytes | None:
        """The offsets as bytes; None if flat. They are equal for two columns if every row has as
        many items in one as in the other."""
        return None if self.offsets is None else self.offsets.tobytes()


def is_jagged(given: Any) -> bool:
    """True if each row is a list, and the lengths may differ."""
    if library_of(given) == "pyarrow":
        import pyarrow as pa

        return bool(pa.types.is_list(given.type) or pa.types.is_large_list(given.type))
    return library_of(given) == "awkward" and "var" in str(given.type.content)


def counts_of(given: Any) -> Array:
    """How many items each row of a jagged column has."""
    if library_of(given) == "pyarrow":
        found: Array = given.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return found
    import awkward as ak

    return np.asarray(ak.num(given, axis=1))


def column_of(
    name: str, given: Any, missing: bool = False, fill: float | None = None
) -> FileColumn:
    """Convert an array of NumPy, Arrow or Awkward. ValueError if it is no column of numbers.

    `missing`: nulls among floating-point numbers become NaN. `fill`: all nulls among numbers become
    this value. Else every null is an error.
    """
    offsets = None
    given = _without_awkward(given)
    if not isinstance(given, np.ndarray):
        import awkward as ak

        given, kind = _of_numbers(given)
        given = _filled(given, fill) if missing or fill is not None else given
        nulls = sum(int(ak.sum(ak.is_none(given, i), axis=None)) for i in range(given.ndim))
        if nulls:
            how = "fill them in the file (ak.fill_none)"
            if missing and "float" not in str(given.type.content):
                how = "cast it to floating point, where a null is NaN"
            raise ValueError(f"has {nulls} nulls: {how}")
        if "var" in kind and given.ndim == 2:
            counts = np.ma.getdata(ak.to_numpy(ak.num(given, axis=1)))
            given, offsets = ak.flatten(given, axis=1), np.append(0, np.cumsum(counts))
        elif "var" in kind:
            given = _regular(given)
        given = np.ma.getdata(ak.to_numpy(given))
    if given.dtype.name not in DTYPES:
        kind = "text" if given.dtype.kind in "SUO" else given.dtype.name
        raise ValueError(f"is {kind}: a column is one of {', '.join(DTYPES)}; leave it out")
    if given.ndim < 1:
        raise ValueError("is one number: a column has a number, a vector or a matrix for each row")
    axes = given.shape[1:] if given.ndim > 3 else ()
    if axes:
        given = given.reshape(len(given), math.prod(axes))
    return FileColumn(name, given.astype(given.dtype.newbyteorder("="), copy=False), offsets, axes)


def _of_numbers(given: Any) -> tuple[Any, str]:
    """An array of Arrow or Awkward as Awkward's, with its type. ValueError if it has no numbers."""
    import awkward as ak

    if library_of(given) == "pyarrow":
        if "dictionary" in str(given.type):  # plain_arrow has decoded those of numbers
            raise ValueError("is a category of text or objects: give its codes, or leave it out")
        given = ak.from_arrow(given)
    kind = str(given.type.content)
    if "string" in kind or "bytes" in kind or "{" in kind or "union" in kind:
        raise ValueError(f"is {kind}: a column has numbers; leave it out")
    return given, kind


def _without_awkward(given: Any) -> Any:
    """An Arrow array as NumPy where it needs no Awkward, else in its plainest form."""
    if library_of(given) != "pyarrow":
        return given
    plain = plain_arrow(given)
    return as_numpy(plain) if _is_plain(plain) else plain


def _is_plain(array: Any) -> bool:
    """True if an Arrow array has only numbers or vectors, and no null: then it needs no Awkward."""
    import pyarrow as pa

    kind, sizes = levels_of(array.type)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(number and None not in sizes and not nulls_in(array))


def _filled(given: Any, value: float | None) -> Any:
    """The Awkward array with `value` in place of each null number; dtypes are kept. If it is None:
    with NaN in place of each null floating-point number. ValueError if the dtype has no `value`."""
    import awkward as ak

    def fill(layout: Any, **_: Any) -> Any:
        if not (layout.is_option and layout.content.is_numpy):
            return None
        dtype = layout.content.dtype
        if value is None and dtype.kind != "f":
            return None
        with np.errstate(all="ignore"):
            typed = dtype.type(np.nan if value is None else value)
        if dtype.kind in "biu" and typed != value:
            raise ValueError(f"is {dtype}, which cannot hold the fill value {value}")
        return ak.fill_none(layout, typed, highlevel=False)

    return ak.transform(fill, given)


def _regular(lists: Any) -> Any:
    """Lists of lists as matrices; ValueError where their lengths differ."""
    import awkward as ak

    try:
        return ak.to_regular(lists, axis=None)
    except ValueError as error:
        raise ValueError(
            f"is {lists.type.content}, lists of lists whose lengths differ: a row is a number, a "
            "vector, a matrix, or one list of numbers; leave it out"
        ) from error


def as_arrow(given: Any, offsets: Array | None = None) -> Any:
    """Make an Arrow array: vectors become lists of fixed size, jagged rows large lists. A
    dictionary array is decoded, since an Arrow file has one dictionary for all of its batches.

    `offsets`: the offsets of jagged rows; `given` then holds the items. Raises ValueError if Arrow
    has no such type.
    """
    import pyarrow as pa

    if isinstance(given, pa.Array):
        return given.dictionary_decode() if pa.types.is_dictionary(given.type) else given
    if not isinstance(given, np.ndarray):
        import awkward as ak

        return ak.to_arrow(ak.to_packed(given), extensionarray=False)
    flat = np.ascontiguousarray(given, given.dtype.newbyteorder("=")).reshape(-1)
    try:
        kind = pa.from_numpy_dtype(flat.dtype)
    except pa.ArrowNotImplementedError:
        raise ValueError(f"Arrow has no {given.dtype.name}: leave that column out") from None
    if flat.dtype.kind in "biuf" and flat.dtype != bool:
        array = pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    else:  # this imports pandas
        array = pa.array(flat)
    for size in reversed(given.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    if offsets is None:
        return array
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), array)


def field_of(array: Any, name: str) -> Any:
    """The values of one field of an Arrow array of structs, or of lists of structs; null where the
    struct is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(array.type):
        return pc.struct_field(array, name)
    values = pc.struct_field(array.values, name)
    kind = pa.list_ if pa.types.is_list(array.type) else pa.large_list
    lists = kind(values.type), len(array), array.buffers()[:2], array.null_count, array.offset
    return pa.Array.from_buffers(*lists, [values])


def eigen_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of a row, if an Arrow type is the struct that `to_arrow` makes of an Eigen column:
    entries of one type; else None."""
    import pyarrow as pa

    if not pa.types.is_struct(kind) or len({field.type for field in kind}) != 1:
        return None
    names = [field.name for field in kind]
    last = re.fullmatch(r"e(\d+)(?:_(\d+))?", names[-1])
    shape = tuple(int(place) + 1 for place in last.groups() if place) if last else ()
    if math.prod(shape) != len(names):
        return None
    with suppress(LayoutError):  # too many entries
        return shape if eigen("one", "float32", *shape).entries == names else None
    return None


def entries_joined(structs: Any, shape: tuple[int, ...]) -> Any:
    """The vectors or matrices of these structs of entries; entries of a null struct are null."""
    import pyarrow as pa

    parts = structs.flatten()
    by_row = np.arange(len(parts) * len(structs)).reshape(len(parts), -1).T.ravel()
    joined = pa.concat_arrays(parts).take(pa.array(by_row))
    for size in reversed(shape):
        joined = pa.FixedSizeListArray.from_arrays(joined, size)
    return joined


def nulls_in(array: Any, among: Callable[[Any], bool] = lambda kind: True) -> int:
    """The number of nulls in an Arrow array, at the outermost level that has any. Only types for
    which `among` is true count."""
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
    return sum(nulls_in(each, among) for each in inner)


def levels_of(kind: Any) -> tuple[Any, tuple[int | None, ...]]:
    """The type of the innermost items, and the list length at each level, the outermost first.
    None stands for lists of any length."""
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
    """The values, `(n, *shape)`, of a flat Arrow column without nulls; text as Python objects."""
    _, shape = levels_of(array.type)
    count = len(array)
    for _ in shape:
        array = array.flatten()
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.reshape(count, *shape)


def as_awkward(array: Any) -> Any:
    """Convert an Arrow column of lists, numbers or text without nulls to an Awkward layout, whose
    types are not optional."""
    import awkward as ak
    import pyarrow as pa

    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return ak.contents.RegularArray(as_awkward(array.flatten()), kind.list_size, len(array))
    if is_jagged(array):
        ends = np.append(0, np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False)))
        offsets = ak.index.Index64(ends.astype(np.int64))
        return ak.contents.ListOffsetArray(offsets, as_awkward(array.flatten()))
    if is_text(kind):
        return ak.to_layout(ak.drop_none(ak.from_arrow(array.cast(pa.large_string()))))
    return ak.contents.NumpyArray(as_numpy(array))


def is_text(kind: Any) -> bool:
    """True if an Arrow type is text."""
    return str(kind) in ("string", "large_string", "string_view")
