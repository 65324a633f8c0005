"""How operators treat rows: a rule for each kind of operator. See also shape_rules.py.

A rule returns where the rows of an answer (a returned tensor) lie, or raises Mixed. An operator
names its rule where it is lowered: `@lowers(..., rows=...)` in engines/lanes/operators/. Those that
work element by element need none, because torch tags them as pointwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from engines.exported import shape_rules
from engines.exported.calls import Answer, Call, Rule
from engines.exported.graph import sizes
from engines.exported.row_places import (
    ACROSS,
    COUNT,
    NUMBER,
    UNKNOWN,
    WITH_OTHERS,
    Mixed,
    Numbers,
    Rows,
    Unknown,
    Value,
    picked,
    together,
)


def answers(call: Call, rules: Mapping[str, Rule]) -> tuple[Value, ...]:
    """The facts of each tensor that a call returns. Raises Mixed if rows depend on each other,
    Unknown if there is no rule for the operator."""
    rule = _rule_of(call, rules)
    tensors = call.tensors.values()
    if call.counted and rule not in (_compared, where):
        raise Mixed(COUNT)
    if rule not in _KEEP_NUMBERS and any(value.numbered for value in tensors):
        raise Mixed(NUMBER)
    padded = any(value.padded for value in tensors)
    if padded and rule not in (shape_rules.sliced, shape_rules.put_in):
        raise Mixed("reads behind the rows")
    answer = rule(call)
    returned = answer if isinstance(answer, tuple) else (answer,) * len(call.shapes)
    keeps_rows = rule is shape_rules.filled or any(value.rows for value in returned)
    if not keeps_rows and any(value.rows for value in tensors):
        raise Mixed(ACROSS)
    return returned


def _rule_of(call: Call, rules: Mapping[str, Rule]) -> Rule:
    """The rule for an operator; raises Unknown if there is none for this call."""
    target: Any = call.node.target
    if not call.name or target._schema.is_mutable:
        raise Unknown(UNKNOWN)
    if call.name in _WITH_NUMBERS:
        return _WITH_NUMBERS[call.name]
    if call.name in rules:
        return rules[call.name]
    if call.random:
        raise Unknown("is random")
    if torch.Tag.pointwise in target.tags:
        return pointwise
    reads_rows = any(value.rows or value.padded for value in call.tensors.values())
    fixed_shapes = all(isinstance(size, int) for shape in call.shapes for size in shape)
    if fixed_shapes and not reads_rows and "empty" not in call.name:
        return constant
    raise Unknown(UNKNOWN)


# -- element by element ----------------------------------------------------------------------------


def pointwise(call: Call) -> Value:
    """An operator element by element: each row of the answer needs that row of every argument."""
    return Value(call.broadcast())


def constant(call: Call) -> Value:
    """Any operator on tensors without rows, such as weights."""
    return Value()


def same(call: Call) -> Value:
    """The same elements, perhaps with another dtype."""
    value = call.value()
    if value.numbered and call.node.meta["val"].is_floating_point():
        raise Mixed(NUMBER)  # such numbers pick no rows, they are values
    return value


def _arithmetic(call: Call) -> Value:
    """`add`, `sub` and `mul`. Their results may be numbers that pick rows."""
    first, second = _numbers(call, "self"), _numbers(call, "other")
    result: Numbers | None = None
    if first and second and call.number("alpha") in (None, 1):
        if call.name == "mul":
            result = first.times(second) or second.times(first)
        elif call.name == "add":
            result = first.plus(second)
        else:
            result = first.minus(second)
    if result is None and any(value.numbered for value in call.tensors.values()):
        raise Mixed(NUMBER)
    return Value(call.broadcast(), result)


def _numbers(call: Call, name: str) -> Numbers | None:
    """What is known of the integers in an argument, a number or a tensor; None if nothing is."""
    number = call.number(name)
    if isinstance(number, int) and not isinstance(number, bool):
        return Numbers(number, number)
    return call.value(name).numbers


def _compared(call: Call) -> Value:
    """A comparison. `begin + c < end` is true if item c belongs to the row; `end > m` is true if
    `end` exceeds the number of items m."""
    first, second, rows = _numbers(call, "self"), _numbers(call, "other"), call.broadcast()
    has_base = first is not None and first.base is not None
    if call.counted:
        (items,) = call.counted
        if not has_base or rows is None or not items.is_Symbol or items == rows.n:
            raise Mixed(COUNT)
        call.reads.add((rows.n, items))
    if call.name != "lt" or first is None or second is None:
        return Value(rows)
    # `first` is `begin` and no less, and `second` is `end` and no more.
    from_begin = has_base and first.least >= 0
    to_end = second.base is not None and second.most <= 0
    return Value(rows, below=call.arguments["self"] if from_begin and to_end else None)


def _both(call: Call) -> Value:
    """`and` of two bools. Where it is true, both are: so what one of them implies, it implies."""
    below = call.value("self").below or call.value("other").below
    return Value(call.broadcast(), below=below)


def where(call: Call) -> Value:
    """`where`. `where(begin + c < end, begin + c, m)` gives the index of an item of the row, or of
    the element behind all m items."""
    rows = call.broadcast()
    picks = {_picks(call, side) for side in ("self", "other")} - {_INSIDE}
    own = picks.pop() if len(picks) == 1 else None
    if own is None and call.counted:
        raise Mixed(COUNT)
    if own is not None and rows is not None:
        call.reads.add((rows.n, own))
    return Value(rows, own=own)


_INSIDE = "items of the row"


def _picks(call: Call, side: str) -> Any:
    """What one side of a `where` points to: `_INSIDE` for an item of the row; the symbol of a
    number of items if it points behind that many items, or to an item of the row; else None."""
    argument, value = call.arguments[side], call.value(side)
    if isinstance(argument, Node):
        if side == "self" and argument is call.value("condition").below:
            return _INSIDE
        if value.own is not None:
            return value.own
    number: Any = call.number(side)
    if not hasattr(number, "as_coeff_Add"):  # it is no expression of sizes
        return None
    constant, symbol = number.as_coeff_Add()
    return symbol if symbol.is_Symbol and constant.is_Integer and constant >= 0 else None


def dropped(call: Call) -> Value:
    """Dropout, which does nothing outside of training."""
    if call.arguments["train"] and call.arguments["p"]:
        raise Mixed("is random")
    return same(call)


def mixed(call: Call) -> Value:
    """An operator for which every element counts, or that reads other places of the memory."""
    if any(value.rows for value in call.tensors.values()):
        raise Mixed(ACROSS)
    return Value()


# -- along dimensions ------------------------------------------------------------------------------


def along(call: Call) -> Answer:
    """An operator along dimensions, which the answers keep, or lose as in a sum."""
    rows, dims = call.broadcast(), call.dims(call.largest_rank)
    if rows is not None and rows.dim in dims:
        raise Mixed(ACROSS)
    if len(call.shape) < call.largest_rank and rows is not None:
        rows = rows.without(dims)
    return _with_places(call, rows, dims)


def largest(call: Call) -> Answer:
    """`max` and `min`, element by element of two tensors or along a dimension."""
    return pointwise(call) if "other" in call.arguments else along(call)


def _with_places(call: Call, rows: Rows | None, dims: list[int]) -> Answer:
    """The answers of an operator along `dims`. If its last answer holds indices along one
    dimension, these are numbers below the size of the dimension."""
    values = (Value(rows),) * len(call.shapes)
    are_indices = call.name.startswith("arg") or call.returns[-1] == "indices"
    if not are_indices or len(dims) != 1:
        return values
    first_tensor = next(iter(call.tensors))
    size = sizes(first_tensor)[dims[0]]
    if not isinstance(size, int):
        return values
    return (*values[:-1], replace(values[-1], numbers=Numbers(0, size - 1)))


def pooled(call: Call) -> Value:
    """Pooling over the last dimensions: as many as the operator's name says."""
    return _along_last(call, next(dims for dims in (1, 2, 3) if f"{dims}d" in call.name))


def matrices(call: Call) -> Value:
    """An operator on matrices, which are the last two dimensions."""
    return _along_last(call, 2)


def _along_last(call: Call, dims: int) -> Value:
    """Combines elements along the last `dims` dimensions; those before are a batch."""
    rows = call.broadcast()
    if rows is not None and rows.dim >= call.largest_rank - dims:
        raise Mixed(ACROSS)
    return Value(rows)


def searched(call: Call) -> Value:
    """Finds values among sorted ones, which must be the same for all rows or of the same row."""
    name = "boundaries" if "boundaries" in call.arguments else "sorted_sequence"
    limits = call.rows(name)
    if limits is not None and (limits.dim == call.rank(name) - 1 or limits != call.rows()):
        raise Mixed(WITH_OTHERS)
    return Value(call.rows())


# -- products, and layers with weights -------------------------------------------------------------


def product(call: Call, turned: bool = False) -> Value:
    """A product of the last two tensors, plus another one if there are three. `turned`: the sum is
    over the last dimension of both."""
    *added, left, right = [name for name, node in call.arguments.items() if _is_tensor(node)]
    rank, vector = len(call.shape), call.rank(right) == 1
    places = [call.value(name).moved_rows(rank - call.rank(name)) for name in added]
    # `behind`: how many dimensions follow that of the rows.
    if rows := call.rows(left):
        behind = call.rank(left) - 1 - rows.dim
        if behind == 0:  # the sum is over the rows
            raise Mixed(ACROSS)
        # A vector on the right takes away the last dimension.
        places.append(rows.at(rank - 1 - behind + vector))
    if rows := call.rows(right):
        behind = call.rank(right) - 1 - rows.dim
        if behind == (0 if turned or vector else 1):
            raise Mixed(ACROSS)
        if behind == 1:  # the other dimension of a turned matrix: the last one of the result
            behind = 0
        places.append(rows.at(rank - 1 - behind))
    return Value(together(places))


def distances(call: Call) -> Value:
    """The distances of all rows of two matrices."""
    return product(call, turned=True)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta["val"], torch.Tensor)


def _input_rows(call: Call) -> Rows | None:
    """The rows of the input. Raises Mixed if another tensor, which is a weight, has rows."""
    if any(call.rows(name) for name in call.arguments if name != "input"):
        raise Mixed("uses rows as weights")
    return call.rows("input")


def convolved(call: Call) -> Value:
    """Combines channels and positions of each row, as a convolution does. The rows must be
    dimension 0 of the input."""
    rows = _input_rows(call)
    if rows is not None and rows.dim != 0:
        raise Mixed(ACROSS)
    return Value(rows)


def batch_norm(call: Call) -> Answer:
    """Batch normalisation with the statistics of the training, one for each channel."""
    rows = _input_rows(call)
    if rows is not None and rows.dim == 1:
        raise Mixed("uses rows as channels")
    return (Value(rows), *[Value()] * (len(call.shapes) - 1))


def recurrent(call: Call) -> Answer:
    """LSTM, GRU and RNN: the steps belong to a row, the states have shape (layers, rows, width)."""
    rows, batch = call.rows("input"), 0 if call.arguments["batch_first"] else 1
    if rows is None or rows.dim != batch or call.rank("input") != 3:
        raise Mixed(ACROSS)
    if call.arguments["train"] and call.arguments["dropout"]:
        raise Mixed("is random")
    _, *others = call.tensors.values()
    if any(value.rows not in (None, rows.at(1)) for value in others):
        raise Mixed(WITH_OTHERS)
    # Before torch 2.12 the shapes of an LSTM's states have one dimension too many, at the front.
    return (Value(rows), *[Value(rows.at(len(shape) - 2)) for shape in call.shapes[1:]])


# -- by index --------------------------------------------------------------------------------------


def indexed(call: Call) -> Value:
    """`index`, as in `x[…]`, and `index_put`, as in `x[…] = values`."""
    nodes = {dim: node for dim, node in enumerate(call.arguments["indices"]) if node is not None}
    if any(node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes.values()):
        return _masked(call, *nodes.values())
    rank = max(len(sizes(node)) for node in nodes.values())
    indices = {
        dim: value for dim, node in nodes.items() if isinstance(value := call.values[node], Value)
    }
    into = together(
        value.moved_rows(rank - len(sizes(nodes[dim]))) for dim, value in indices.items()
    )
    elements = picked(call.value(), call.rank(), indices, into, rank)
    if "values" not in call.arguments:
        return elements
    return _stored(call, elements, call.rank() - len(nodes) + rank)


def _stored(call: Call, places: Value, rank: int) -> Value:
    """`index_put`: raises Mixed unless each row stores only into its own places. `places` are the
    facts of the chosen places, `rank` their number of dimensions."""
    stored = call.value("values")
    if stored.numbered:
        raise Mixed(NUMBER)
    together([places.rows, stored.moved_rows(rank - call.rank("values"))])  # raises if they differ
    if places.rows is not None and call.rows() is None:
        raise Mixed(ACROSS)
    return Value(call.rows())


def _masked(call: Call, mask: Node, *others: Node) -> Value:
    """`x[mask] = number`. Raises Mixed for other masks, whose number of true elements matters,
    unless no row changes the mask."""
    truth, value, rows = call.values[mask], call.arguments.get("values"), call.rows()
    first, rank = call.arguments["indices"].index(mask), len(sizes(mask))
    masks_rows = rows is not None and first <= rows.dim < first + rank
    if value is not None and truth == Value() and not masks_rows and not others:
        # The chosen elements have one dimension in place of the mask's.
        if rows is not None and rows.dim >= first:
            rows = rows.at(rows.dim - rank + 1)
        return _stored(call, Value(rows), call.rank() - rank + 1)
    is_number = isinstance(value, Node) and value.meta["val"].numel() == 1 and not others
    if call.value().numbered:
        raise Mixed(NUMBER)
    if not is_number or call.rows("values") or not isinstance(truth, Value):
        raise Mixed("takes the number of true elements of a mask as a value")
    if first or truth.rows != rows:
        raise Mixed(WITH_OTHERS)
    return Value(rows)


def index_select(call: Call) -> Value:
    """`index_select`: picks by one index tensor along one dimension."""
    index, dim = call.value("index"), call.dim()
    return picked(call.value(), call.rank(), {dim: index}, index.rows, call.rank("index"))


def embedding(call: Call) -> Value:
    """`embedding`: picks rows of a matrix of weights."""
    index = call.value("indices")
    return picked(call.value("weight"), 2, {0: index}, index.rows, call.rank("indices"))


def gathered(call: Call) -> Value:
    """`gather`: each element of the answer has its own index along one dimension."""
    value, index, dim = call.value(), call.value("index"), call.dim()
    if value.numbered or index.numbered:
        raise Mixed(NUMBER)
    if index.rows is not None and value.rows is None and index.rows.dim != dim:
        raise Mixed(NUMBER)  # row i gets row i of a constant
    if value.rows is not None and (value.rows.dim == dim or value.rows != index.rows):
        raise Mixed("picks rows by an index")
    return Value(index.rows)


def scattered(call: Call) -> Value:
    """`scatter` along a dimension, which must not be the dimension of the rows."""
    into, dim = call.rows(), call.dim()
    rows_of_each = [value.rows for node, value in call.tensors.items() if sizes(node)]
    if (into is not None and into.dim == dim) or any(rows != into for rows in rows_of_each):
        raise Mixed("puts rows elsewhere by an index")
    return Value(into)


def index_added(call: Call) -> Value:
    """`index_add` and `index_fill`, along a dimension that must not be that of the rows."""
    into, dim = call.rows(), call.dim()
    source = "value" if "value" in call.arguments else "source"
    if call.rows("index") or (into is not None and into.dim == dim):
        raise Mixed("puts rows elsewhere by an index")
    if isinstance(call.arguments[source], Node) and call.rank(source) and call.rows(source) != into:
        raise Mixed(WITH_OTHERS)
    return Value(into)


# Operators element by element whose numbers may pick rows: these rules know more than `pointwise`.
_WITH_NUMBERS: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul"), _arithmetic),
    **dict.fromkeys(("lt", "gt", "ge", "le", "eq", "ne"), _compared),
    **dict.fromkeys(("bitwise_and", "logical_and"), _both),
}
_KEEP_NUMBERS = frozenset(
    [
        same, _arithmetic, indexed, index_select, embedding,
        shape_rules.filled, shape_rules.reshaped, shape_rules.permuted, shape_rules.transposed,
        shape_rules.expanded, shape_rules.repeated, shape_rules.sliced, shape_rules.selected,
        shape_rules.split,
    ]
)  # fmt: skip
