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
    given = call.tensors.values()
    if call.counted and rule not in (_compared, where):
        raise Mixed(COUNT)
    if rule not in _KEEP_NUMBERS and any(value.numbered for value in given):
        raise Mixed(NUMBER)
    padded = any(value.padded for value in given)
    if padded and rule not in (shape_rules.sliced, shape_rules.put_in):
        raise Mixed("reads behind the rows")
    result = rule(call)
    each = result if isinstance(result, tuple) else (result,) * len(call.shapes)
    kept = rule is shape_rules.filled or any(value.rows for value in each)
    if not kept and any(value.rows for value in given):
        raise Mixed(ACROSS)
    return each


def _rule_of(call: Call, rules: Mapping[str, Rule]) -> Rule:
    """The rule for an operator; raises Unknown if there is none for this call."""
    target: Any = call.node.target
    if not call.name or target._schema.is_mutable:
        raise Unknown(UNKNOWN)
    if call.name in _WITH_NUMBERS or call.name in rules:
        return _WITH_NUMBERS.get(call.name) or rules[call.name]
    if call.random:
        raise Unknown("is random")
    if torch.Tag.pointwise in target.tags:
        return pointwise
    of_rows = any(value.rows or value.padded for value in call.tensors.values())
    whole = all(isinstance(size, int) for shape in call.shapes for size in shape)
    if whole and not of_rows and "empty" not in call.name:
        return constant
    raise Unknown(UNKNOWN)


# -- element by element ----------------------------------------------------------------------------


def pointwise(call: Call) -> Value:
    return Value(call.broadcast())


def constant(call: Call) -> Value:
    """Any operator on tensors without rows, such as weights."""
    return Value()


def same(call: Call) -> Value:
    """The same elements, perhaps with another dtype."""
    found = call.value()
    if found.numbered and call.node.meta["val"].is_floating_point():
        raise Mixed(NUMBER)
    return found


def _arithmetic(call: Call) -> Value:
    """`add`, `sub` and `mul`. Their results may be numbers that pick rows."""
    first, second = _numbers(call, "self"), _numbers(call, "other")
    found: Numbers | None = None
    if first and second and call.number("alpha") in (None, 1):
        if call.name == "mul":
            found = first.times(second) or second.times(first)
        elif call.name == "add":
            found = first.plus(second)
        else:
            found = first.minus(second)
    if found is None and any(value.numbered for value in call.tensors.values()):
        raise Mixed(NUMBER)
    return Value(call.broadcast(), found)


def _numbers(call: Call, name: str) -> Numbers | None:
    given = call.number(name)
    if isinstance(given, int) and not isinstance(given, bool):
        return Numbers(given, given)
    return call.value(name).numbers


def _compared(call: Call) -> Value:
    """A comparison. `begin + c < end` is true if item c belongs to the row; `end > m` is true if
    `end` exceeds the number of items m."""
    first, second, rows = _numbers(call, "self"), _numbers(call, "other"), call.broadcast()
    based = bool(first and first.base)
    if call.counted:
        (items,) = call.counted
        if not (based and rows and items.is_Symbol and items != rows.n):
            raise Mixed(COUNT)
        call.reads.add((rows.n, items))
    inside = call.name == "lt" and based and second and second.base and second.most <= 0
    starts = first is not None and first.least >= 0
    return Value(rows, below=call.given["self"] if inside and starts else None)


def _both(call: Call) -> Value:
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
    given, value = call.given[side], call.value(side)
    if side == "self" and isinstance(given, Node) and given is call.value("condition").below:
        return _INSIDE
    if isinstance(given, Node) and value.own is not None:
        return value.own
    number: Any = call.number(side)
    if not hasattr(number, "as_coeff_Add"):
        return None
    constant, symbol = number.as_coeff_Add()
    return symbol if symbol.is_Symbol and constant.is_Integer and constant >= 0 else None


def dropped(call: Call) -> Value:
    """Dropout."""
    if call.given["train"] and call.given["p"]:
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
    rows, dims = call.broadcast(), call.dims(call.most)
    if rows is not None and rows.dim in dims:
        raise Mixed(ACROSS)
    if len(call.shape) < call.most:
        rows = rows and rows.without(dims)
    return _with_places(call, rows, dims)


def largest(call: Call) -> Answer:
    """`max` and `min`, element by element of two tensors or along a dimension."""
    return pointwise(call) if "other" in call.given else along(call)


def _with_places(call: Call, rows: Rows | None, dims: list[int]) -> Answer:
    """The answers of an operator along `dims`. If its last answer holds indices along one
    dimension, these are numbers below the size of the dimension."""
    *others, last = (Value(rows),) * len(call.shapes)
    if (call.name.startswith("arg") or call.returns[-1] == "indices") and len(dims) == 1:
        size = sizes(next(iter(call.tensors)))[dims[0]]
        last = replace(last, numbers=Numbers(0, size - 1) if isinstance(size, int) else None)
    return (*others, last)


def pooled(call: Call) -> Value:
    """Pooling over the last dimensions: as many as the operator's name says."""
    return _behind(call, next(dims for dims in (1, 2, 3) if f"{dims}d" in call.name))


def matrices(call: Call) -> Value:
    """An operator on matrices, which are the last two dimensions."""
    return _behind(call, 2)


def _behind(call: Call, dims: int) -> Value:
    """Combines elements along the last `dims` dimensions; those before are a batch."""
    rows = call.broadcast()
    if rows is not None and rows.dim >= call.most - dims:
        raise Mixed(ACROSS)
    return Value(rows)


def searched(call: Call) -> Value:
    """Finds values among sorted ones, which must be the same for all rows or of the same row."""
    name = "boundaries" if "boundaries" in call.given else "sorted_sequence"
    limits = call.rows(name)
    if limits is not None and (limits.dim == call.rank(name) - 1 or limits != call.rows()):
        raise Mixed(WITH_OTHERS)
    return Value(call.rows())


# -- products, and layers with weights -------------------------------------------------------------


def product(call: Call, turned: bool = False) -> Value:
    """A product of the last two tensors, plus another one if there are three. `turned`: the sum is
    over the last dimension of both."""
    *added, left, right = [name for name, node in call.given.items() if _is_tensor(node)]
    rank, vector = len(call.shape), call.rank(right) == 1
    places: list[Rows | None] = []
    if rows := call.rows(left):
        behind = call.rank(left) - 1 - rows.dim
        if behind == 0:
            raise Mixed(ACROSS)
        places.append(rows.at(rank - 1 - behind + vector))
    if rows := call.rows(right):
        behind = call.rank(right) - 1 - rows.dim
        if behind == (0 if turned or vector else 1):
            raise Mixed(ACROSS)
        if behind == 1:  # the other dimension of a turned matrix
            behind = 0
        places.append(rows.at(rank - 1 - behind))
    for name in added:
        if rows := call.rows(name):
            places.append(rows.moved(rank - call.rank(name)))
    return Value(together(places))


def distances(call: Call) -> Value:
    """The distances of all rows of two matrices."""
    return product(call, turned=True)


def _is_tensor(given: Any) -> bool:
    return isinstance(given, Node) and isinstance(given.meta["val"], torch.Tensor)


def _of_one(call: Call) -> Rows | None:
    """The rows of the input. Raises Mixed if another tensor, which is a weight, has rows."""
    if any(call.rows(name) for name in call.given if name != "input"):
        raise Mixed("uses rows as weights")
    return call.rows("input")


def convolved(call: Call) -> Value:
    """Combines channels and positions of each row, as a convolution does. The rows must be
    dimension 0 of the input."""
    rows = _of_one(call)
    if rows is not None and rows.dim != 0:
        raise Mixed(ACROSS)
    return Value(rows)


def batch_norm(call: Call) -> Answer:
    """Batch normalisation with the statistics of the training, one for each channel."""
    rows = _of_one(call)
    if rows is not None and rows.dim == 1:
        raise Mixed("uses rows as channels")
    return (Value(rows), *[Value()] * (len(call.shapes) - 1))


def recurrent(call: Call) -> Answer:
    """LSTM, GRU and RNN: the steps belong to a row, the states have shape (layers, rows, width)."""
    rows, batch = call.rows("input"), 0 if call.given["batch_first"] else 1
    if rows is None or rows.dim != batch or call.rank("input") != 3:
        raise Mixed(ACROSS)
    if call.given["train"] and call.given["dropout"]:
        raise Mixed("is random")
    _, *others = call.tensors.values()
    if any(value.rows not in (None, rows.at(1)) for value in others):
        raise Mixed(WITH_OTHERS)
    # Before torch 2.12 the shapes of an LSTM's states have one dimension too many, at the front.
    return (Value(rows), *[Value(rows.at(len(shape) - 2)) for shape in call.shapes[1:]])


# -- by index --------------------------------------------------------------------------------------


def indexed(call: Call) -> Value:
    """`index`, as in `x[…]`, and `index_put`, as in `x[…] = values`."""
    nodes = {dim: node for dim, node in enumerate(call.given["indices"]) if node is not None}
    if any(node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes.values()):
        return _masked(call, *nodes.values())
    rank = max(len(sizes(node)) for node in nodes.values())
    chosen = {
        dim: value for dim, node in nodes.items() if isinstance(value := call.values[node], Value)
    }
    into = together(
        value.rows and value.rows.moved(rank - len(sizes(nodes[dim])))
        for dim, value in chosen.items()
    )
    elements = picked(call.value(), call.rank(), chosen, into, rank)
    return (
        _stored(call, elements, call.rank() - len(nodes) + rank)
        if "values" in call.given
        else elements
    )


def _stored(call: Call, there: Value, rank: int) -> Value:
    """`index_put`: raises Mixed unless each row stores only into its own places. `there` are the
    facts of the chosen places, `rank` their number of dimensions."""
    rows = call.rows("values")
    if call.value("values").numbered:
        raise Mixed(NUMBER)
    together([there.rows, rows and rows.moved(rank - call.rank("values"))])
    if there.rows is not None and call.rows() is None:
        raise Mixed(ACROSS)
    return Value(call.rows())


def _masked(call: Call, mask: Node, *others: Node) -> Value:
    """`x[mask] = number`. Raises Mixed for other masks, whose number of true elements matters,
    unless no row changes the mask."""
    truth, value = call.values[mask], call.given.get("values")
    first, rank, rows = call.given["indices"].index(mask), len(sizes(mask)), call.rows()
    outside = rows is None or not first <= rows.dim < first + rank
    if value is not None and truth == Value() and outside and not others:
        there = rows and (rows if rows.dim < first else rows.at(rows.dim - rank + 1))
        return _stored(call, Value(there), call.rank() - rank + 1)
    one = isinstance(value, Node) and value.meta["val"].numel() == 1 and not others
    if call.value().numbered:
        raise Mixed(NUMBER)
    if not one or call.rows("values") or not isinstance(truth, Value):
        raise Mixed("takes the number of true elements of a mask as a value")
    if first or truth.rows != call.rows():
        raise Mixed(WITH_OTHERS)
    return Value(call.rows())


def index_select(call: Call) -> Value:
    index, dim = call.value("index"), call.dim()
    return picked(call.value(), call.rank(), {dim: index}, index.rows, call.rank("index"))


def embedding(call: Call) -> Value:
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
    every = [value.rows for node, value in call.tensors.items() if sizes(node)]
    if (into is not None and into.dim == dim) or any(rows != into for rows in every):
        raise Mixed("puts rows elsewhere by an index")
    return Value(into)


def index_added(call: Call) -> Value:
    into, dim = call.rows(), call.dim()
    source = "value" if "value" in call.given else "source"
    if call.rows("index") or (into is not None and into.dim == dim):
        raise Mixed("puts rows elsewhere by an index")
    if isinstance(call.given[source], Node) and call.rank(source) and call.rows(source) != into:
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
