"""How operators that make or move elements treat rows: new tensors, shapes, parts and joins."""

from __future__ import annotations

from dataclasses import replace

from engines.exported.calls import Answer, Call, number
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
    together,
    uniform,
    viewed,
)

_END = (None, 2**63 - 1)  # the `end` of a slice that goes to the end of a tensor


# -- new tensors -----------------------------------------------------------------------------------


def filled(call: Call) -> Value:
    """A new tensor with the same content for every row."""
    if "empty" in call.name:
        raise Unknown("gives memory without content")
    like = call.rows()
    return Value(like if like is not None and like.fit(call.shape) else uniform(call.shape))


def counting(call: Call) -> Value:
    """`arange`: a constant range, or the indices 0, 1, … of all places of all rows."""
    start, end, step = call.number("start") or 0, call.number("end"), call.number("step") or 1
    rows = uniform(call.shape)
    if rows is None:
        if not isinstance(start, int) or not isinstance(step, int) or call.shape[0] == 0:
            return Value()
        last = start + step * (call.shape[0] - 1)
        return Value(numbers=Numbers(min(start, last), max(start, last)))
    if start != 0 or step != 1 or end != rows.extent:
        raise Mixed(NUMBER)
    return Value(rows, Numbers(0, rows.inner - 1, step=rows.inner))


# -- other shapes of the same elements -------------------------------------------------------------


def reshaped(call: Call) -> Value:
    """The same elements in order. With a single row, `squeeze` would remove the row dimension:
    raises Mixed."""
    value, rows = call.value(), call.rows()
    if rows is None:
        return value.placed(None)
    squeezed = call.dims(call.rank()) if call.name == "squeeze" else []
    if rows.outer * rows.inner == 1 and rows.dim in squeezed:
        raise Mixed(COUNT)
    return value.placed(viewed(rows, call.sizes(), call.shape))


def permuted(call: Call) -> Value:
    """`permute`: dimension i of the answer is dimension `dims[i]` of the tensor."""
    value = call.value()
    if value.rows is None:
        return value.placed(None)
    order = [dim % call.rank() for dim in call.arguments["dims"]]
    return value.placed(value.rows.at(order.index(value.rows.dim)))


def transposed(call: Call) -> Value:
    """`transpose`, and `t`, which has no arguments and exchanges the last two dimensions."""
    value, rank = call.value(), call.rank()
    rows = value.rows
    if rows is not None and rank > 1:
        first = call.arguments.get("dim0", -2) % rank
        second = call.arguments.get("dim1", -1) % rank
        rows = rows.at({first: second, second: first}.get(rows.dim, rows.dim))
    return value.placed(rows)


def expanded(call: Call) -> Value:
    """`expand`: a tensor without rows may be repeated for each row."""
    value = call.value()
    rows = value.moved_rows(len(call.shape) - call.rank())
    return value.placed(uniform(call.shape) if rows is None else rows)


def repeated(call: Call) -> Value:
    """Rows repeated as a whole stay apart, if the number of repeats is fixed."""
    value, repeats = call.value(), [number(each) for each in call.arguments["repeats"]]
    rows = value.moved_rows(len(repeats) - call.rank())
    if rows is None:
        return value.placed(uniform(call.shape))
    if rows.tail or not isinstance(repeats[rows.dim], int):
        raise Mixed(COUNT)
    return value.placed(replace(rows, outer=rows.outer * repeats[rows.dim]))


def sliced(call: Call) -> Value:
    """A slice may take all rows, drop those behind them, or leave the axis of rows alone."""
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
        return value.placed(rows)
    if from_first and (end in _END or end == rows.extent):
        return value
    if from_first and rows.tail and end in (-rows.tail, rows.extent - rows.tail):
        return value.placed(replace(rows, tail=0))
    raise Mixed(SOME)


def selected(call: Call) -> Answer:
    """`select`, and `unbind`, which returns a tensor for each index."""
    value = call.value()
    rows = None if value.rows is None else value.rows.without([call.dim()])
    return (value.placed(rows),) * len(call.shapes)


def split(call: Call) -> Answer:
    """`split` and `chunk`, which must not be along the rows, and `unbind`."""
    value = call.value()
    if call.name == "unbind":
        return selected(call)
    if value.rows is not None and value.rows.dim == call.dim():
        raise Mixed(SOME)
    return (value.placed(value.rows),) * len(call.shapes)


def diagonal(call: Call) -> Value:
    """`diagonal`: two dimensions become a new last dimension."""
    rows = call.rows()
    if rows is None:
        return Value()
    return Value(rows.without([call.dim("dim1"), call.dim("dim2")]))


def unfolded(call: Call) -> Value:
    """`unfold`: windows along a dimension, which become a new last dimension."""
    rows = call.rows()
    if rows is not None and rows.dim == call.dim("dimension"):
        raise Mixed(ACROSS)
    return Value(rows)


# -- several tensors in one ------------------------------------------------------------------------


def joined(call: Call) -> Value:
    """`cat` and `stack`. Along the rows, only the first part may have rows; the others become the
    `tail`."""
    if call.name == "stack":
        return _stacked(call)
    facts = [call.values[node] for node in call.arguments["tensors"]]
    values = [value for value in facts if isinstance(value, Value)]
    rows = together(value.rows for value in values)
    if rows is None or call.dim(rank=len(call.shape)) != rows.dim:
        return Value(rows)
    first, *others = values
    if rows.outer > 1 or first.rows is None or any(value.rows for value in others):
        raise Mixed(WITH_OTHERS)
    length_of_others = call.shape[rows.dim] - rows.extent
    return first.placed(replace(rows, tail=rows.tail + int(length_of_others)))


def _stacked(call: Call) -> Value:
    """`stack`: the tensors get a new dimension, along which they are joined."""
    rows = call.broadcast()
    if rows is not None and call.dim(rank=len(call.shape)) <= rows.dim:
        rows = rows.moved(1)
    return Value(rows)


def put_in(call: Call) -> Value:
    """`slice_scatter`, `select_scatter`: replace a slice, or one index, of a tensor."""
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
    common = together([into.rows, rows])
    if common is not None and (common.dim == dim or into.rows is None or rows is None):
        raise Mixed(SOME)
    return Value(common)


def edged(call: Call) -> Value:
    """Padding. The list has two widths for each dimension, and begins with the last dimension."""
    rows, widths = call.rows(), call.arguments["pad"]
    if rows is not None:
        first = 2 * (call.rank() - 1 - rows.dim)
        if any(widths[first : first + 2]):
            raise Mixed("pads the rows")
    return Value(rows)
