"""How operators that make or move elements treat rows: new tensors, shapes, parts and joins."""

from __future__ import annotations

from dataclasses import replace

from engines.exported.calls import Call, Facts, number
from engines.exported.row_places import (
    ACROSS,
    COUNT,
    NUMBER,
    SOME,
    WITH_OTHERS,
    Mixed,
    Numbers,
    Rows,
    Unknown,
    Value,
    common_rows,
    follow_view,
    rows_of_shape,
)

_END = (None, 2**63 - 1)  # the `end` of a slice that goes to the end of a tensor


# -- new tensors -----------------------------------------------------------------------------------


def follow_fill(call: Call) -> Value:
    """Find the rows of a new tensor, such as `zeros`, that has the same content for every row."""
    if "empty" in call.name:
        raise Unknown("gives memory without content")
    like = call.rows()
    keeps_rows = like is not None and like.fits_shape(call.shape)
    return Value(like if keeps_rows else rows_of_shape(call.shape))


def follow_arange(call: Call) -> Value:
    """Find the facts of `arange`: a constant range, or the indices 0, 1, … of all rows' places."""
    start, end, step = call.number("start") or 0, call.number("end"), call.number("step") or 1
    rows = rows_of_shape(call.shape)
    if rows is None:
        if not isinstance(start, int) or not isinstance(step, int) or call.shape[0] == 0:
            return Value()
        last = start + step * (call.shape[0] - 1)
        return Value(numbers=Numbers(min(start, last), max(start, last)))
    if start != 0 or step != 1 or end != rows.extent:
        raise Mixed(NUMBER)
    return Value(rows, Numbers(0, rows.inner - 1, step=rows.inner))


# -- other shapes of the same elements -------------------------------------------------------------


def follow_reshape(call: Call) -> Value:
    """Follow rows through an operator that keeps elements in order, such as `view` and `squeeze`.

    Raises Mixed if `squeeze` would remove the row dimension where n is 1.
    """
    value, rows = call.value(), call.rows()
    if rows is None:
        return value.with_rows(None)
    squeezed = call.dims(call.rank()) if call.name == "squeeze" else []
    if rows.outer * rows.inner == 1 and rows.dim in squeezed:
        raise Mixed(COUNT)
    return value.with_rows(follow_view(rows, call.sizes(), call.shape))


def follow_permute(call: Call) -> Value:
    """Follow rows through `permute`: dimension i of its result is dimension `dims[i]`."""
    value = call.value()
    if value.rows is None:
        return value.with_rows(None)
    order = [dim % call.rank() for dim in call.arguments["dims"]]
    return value.with_rows(value.rows.at(order.index(value.rows.dim)))


def follow_transpose(call: Call) -> Value:
    """Follow rows through `transpose`, and through `t`, which exchanges the last two dimensions."""
    value, rank = call.value(), call.rank()
    rows = value.rows
    if rows is not None and rank > 1:
        dim0 = call.arguments.get("dim0", -2) % rank
        dim1 = call.arguments.get("dim1", -1) % rank
        rows = rows.at({dim0: dim1, dim1: dim0}.get(rows.dim, rows.dim))
    return value.with_rows(rows)


def follow_expand(call: Call) -> Value:
    """Follow rows through `expand`, which may repeat a tensor without rows for each row."""
    value = call.value()
    rows = value.moved_rows(len(call.shape) - call.rank())
    return value.with_rows(rows_of_shape(call.shape) if rows is None else rows)


def follow_repeat(call: Call) -> Value:
    """Follow rows through `repeat`; raise Mixed if it repeats rows n times or in a `tail`."""
    value, repeats = call.value(), [number(times) for times in call.arguments["repeats"]]
    rows = value.moved_rows(len(repeats) - call.rank())
    if rows is None:
        return value.with_rows(rows_of_shape(call.shape))
    if rows.tail or not isinstance(repeats[rows.dim], int):
        raise Mixed(COUNT)
    return value.with_rows(replace(rows, outer=rows.outer * repeats[rows.dim]))


def follow_slice(call: Call) -> Value:
    """Follow rows through `slice`, along another dimension or along that of the rows.

    Along the rows, it must take all of them, with or without the `tail`. Raises Mixed otherwise.
    """
    value, dim, rows = call.value(), call.dim(), call.rows()
    start, end, step = (call.number(name) for name in ("start", "end", "step"))
    from_first = start in (None, 0) and step == 1
    if value.padded:  # only `matrix[:, :n]`, which leaves out the padding
        if dim != 1 or not from_first or not getattr(end, "is_Symbol", False):
            raise Mixed("reads behind the rows")
        return Value(Rows(end, 1))
    if rows is None or dim != rows.dim:
        if not isinstance(start, int | None) or not isinstance(end, int | None):
            raise Mixed(COUNT)
        return value.with_rows(rows)
    if from_first and (end in _END or end == rows.extent):
        return value
    if from_first and rows.tail and end in (-rows.tail, rows.extent - rows.tail):
        return value.with_rows(replace(rows, tail=0))
    raise Mixed(SOME)


def follow_select(call: Call) -> Facts:
    """Follow rows through `select`, and `unbind`, which returns a tensor for each index."""
    value = call.value()
    rows = None if value.rows is None else value.rows.without([call.dim()])
    return (value.with_rows(rows),) * len(call.shapes)


def follow_split(call: Call) -> Facts:
    """Follow rows through `split`, `chunk` and `unbind`; raise Mixed if they cut along the rows."""
    value = call.value()
    if call.name == "unbind":
        return follow_select(call)
    if value.rows is not None and value.rows.dim == call.dim():
        raise Mixed(SOME)
    return (value.with_rows(value.rows),) * len(call.shapes)


def follow_diagonal(call: Call) -> Value:
    """Follow rows through `diagonal`, which makes two dimensions a new last one."""
    rows = call.rows()
    if rows is None:
        return Value()
    return Value(rows.without([call.dim("dim1"), call.dim("dim2")]))


def follow_unfold(call: Call) -> Value:
    """Follow rows through `unfold`: the windows along a dimension become a new last dimension."""
    rows = call.rows()
    if rows is not None and rows.dim == call.dim("dimension"):
        raise Mixed(ACROSS)
    return Value(rows)


# -- several tensors in one ------------------------------------------------------------------------


def follow_join(call: Call) -> Value:
    """Follow rows through `cat` and `stack`.

    Along the rows, only the first tensor may have rows. The others become the `tail`.
    """
    if call.name == "stack":
        return _follow_stack(call)
    facts = [call.values[node] for node in call.arguments["tensors"]]
    values = [value for value in facts if isinstance(value, Value)]
    rows = common_rows(value.rows for value in values)
    if rows is None or call.dim(rank=len(call.shape)) != rows.dim:
        return Value(rows)
    first_part, *other_parts = values
    if rows.outer > 1 or first_part.rows is None or any(value.rows for value in other_parts):
        raise Mixed(WITH_OTHERS)
    length_of_other_parts = call.shape[rows.dim] - rows.extent
    return first_part.with_rows(replace(rows, tail=rows.tail + int(length_of_other_parts)))


def _follow_stack(call: Call) -> Value:
    """Follow rows through `stack`: the tensors get a new dimension, along which they are joined."""
    rows = call.broadcast()
    if rows is not None and call.dim(rank=len(call.shape)) <= rows.dim:
        rows = rows.moved(1)
    return Value(rows)


def follow_slice_scatter(call: Call) -> Value:
    """Follow rows through `slice_scatter` and `select_scatter`.

    They replace a slice of a tensor, or the part at one index, by the tensor `src`.
    """
    into, source, dim = call.value(), call.value("src"), call.dim()
    if into.padded:
        end = call.number("end")
        if dim != 1 or call.number("start") not in (None, 0) or source.rows != Rows(end, 1):
            raise Mixed("writes elsewhere than to the rows")
        return replace(source, padded=True)
    rows = source.rows
    one_index = call.rank("src") < call.rank()  # `select_scatter`: the source lacks `dim`
    if rows is not None and one_index and dim <= rows.dim:
        rows = rows.moved(1)
    common = common_rows([into.rows, rows])
    if common is not None and (common.dim == dim or into.rows is None or rows is None):
        raise Mixed(SOME)
    return Value(common)


def follow_padding(call: Call) -> Value:
    """Follow rows through padding; raise Mixed if it is along the rows.

    `pad` has two widths for each dimension, and begins with those of the last dimension.
    """
    rows, widths = call.rows(), call.arguments["pad"]
    if rows is not None:
        before = 2 * (call.rank() - 1 - rows.dim)
        if any(widths[before : before + 2]):
            raise Mixed("pads the rows")
    return Value(rows)
