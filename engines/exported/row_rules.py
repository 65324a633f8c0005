"""How operators treat rows: a rule for each kind of operator. See also shape_rules.py.

A rule follows the rows through a call: it finds what is known of each returned tensor (`Value`),
such as where its rows lie, and raises Mixed if rows may depend on each other. An operator names its
rule where it is lowered: `@lowers(..., rows=...)` in engines/lanes/operators/. Those that work
element by element need none, because torch tags them as pointwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from engines.exported import shape_rules
from engines.exported.calls import Call, Facts, Rule
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
    common_rows,
    follow_indexing,
)


def facts_of_returned(call: Call, rules: Mapping[str, Rule]) -> tuple[Value, ...]:
    """Apply the rule of an operator: return the facts of each tensor that the call returns.

    Raises Mixed if rows may depend on each other, and Unknown if the operator has no rule.
    """
    rule = _find_rule(call, rules)
    tensors = call.tensors.values()
    if call.counted and rule not in (_follow_comparison, follow_where):
        raise Mixed(COUNT)
    if rule not in _KEEP_NUMBERS and any(value.numbered for value in tensors):
        raise Mixed(NUMBER)
    padded = any(value.padded for value in tensors)
    if padded and rule not in (shape_rules.follow_slice, shape_rules.follow_slice_scatter):
        raise Mixed("reads behind the rows")
    facts = rule(call)
    returned = facts if isinstance(facts, tuple) else (facts,) * len(call.shapes)
    keeps_rows = rule is shape_rules.follow_fill or any(value.rows for value in returned)
    if not keeps_rows and any(value.rows for value in tensors):
        raise Mixed(ACROSS)
    return returned


def _find_rule(call: Call, rules: Mapping[str, Rule]) -> Rule:
    """Return the rule for a call of an operator; raise Unknown if there is none."""
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
        return follow_pointwise
    reads_rows = any(value.rows or value.padded for value in call.tensors.values())
    fixed_shapes = all(isinstance(size, int) for shape in call.shapes for size in shape)
    if fixed_shapes and not reads_rows and "empty" not in call.name:
        return follow_constant
    raise Unknown(UNKNOWN)


# -- element by element ----------------------------------------------------------------------------


def follow_pointwise(call: Call) -> Value:
    """Follow rows through an operator that works element by element.

    Each row of its result needs the same row of every argument.
    """
    return Value(call.broadcast())


def follow_constant(call: Call) -> Value:
    """Return the facts of any result that is computed without rows, such as from weights."""
    return Value()


def follow_same_elements(call: Call) -> Value:
    """Follow rows through an operator that returns the same elements, perhaps as another dtype."""
    value = call.value()
    if value.numbered and call.node.meta["val"].is_floating_point():
        raise Mixed(NUMBER)  # such numbers pick no rows, they are values
    return value


def _follow_arithmetic(call: Call) -> Value:
    """Follow rows through `add`, `sub` and `mul`, whose results may be numbers that pick rows."""
    left, right = _numbers(call, "self"), _numbers(call, "other")
    result: Numbers | None = None
    if left and right and call.number("alpha") in (None, 1):
        if call.name == "mul":
            result = left.times(right) or right.times(left)
        elif call.name == "add":
            result = left.plus(right)
        else:
            result = left.minus(right)
    if result is None and any(value.numbered for value in call.tensors.values()):
        raise Mixed(NUMBER)
    return Value(call.broadcast(), result)


def _numbers(call: Call, name: str) -> Numbers | None:
    """What is known of the integers in an argument, a number or a tensor; None if nothing is."""
    number = call.number(name)
    if isinstance(number, int) and not isinstance(number, bool):
        return Numbers(number, number)
    return call.value(name).numbers


def _follow_comparison(call: Call) -> Value:
    """Follow rows through a comparison.

    Two comparisons have a meaning in a jagged collection, whose items lie from `begin` up to `end`:
    `begin + c < end` is true if item c of a row belongs to it, and `end > m` is true if `end` is
    larger than the number of items m.
    """
    left, right, rows = _numbers(call, "self"), _numbers(call, "other"), call.broadcast()
    has_base = left is not None and left.base is not None
    if call.counted:
        (items,) = call.counted
        if not has_base or rows is None or not items.is_Symbol or items == rows.n:
            raise Mixed(COUNT)
        call.reads.add((rows.n, items))
    if call.name != "lt" or left is None or right is None:
        return Value(rows)
    # `left` is `begin` or more, and `right` is `end` or less.
    from_begin = has_base and left.least >= 0
    to_end = right.base is not None and right.most <= 0
    return Value(rows, below=call.arguments["self"] if from_begin and to_end else None)


def _follow_and(call: Call) -> Value:
    """Follow rows through `and`. Where its result is true, both bools are: `below` holds for it."""
    below = call.value("self").below or call.value("other").below
    return Value(call.broadcast(), below=below)


def follow_where(call: Call) -> Value:
    """Follow rows through `where`, which may compute indices of a row's items.

    In a jagged collection of m items, those of a row lie from `begin` up to `end`. So
    `where(begin + c < end, begin + c, m)` is the index of item c of the row, or m if it has none.
    """
    rows = call.broadcast()
    picked = {_find_picked(call, side) for side in ("self", "other")} - {_INSIDE}
    own = picked.pop() if len(picked) == 1 else None
    if own is None and call.counted:
        raise Mixed(COUNT)
    if own is not None and rows is not None:
        call.reads.add((rows.n, own))
    return Value(rows, own=own)


_INSIDE = "items of the row"


def _find_picked(call: Call, side: str) -> Any:
    """Find what the indices in one argument of `where` (`side`) point to.

    `_INSIDE`: to items of their row. The symbol of a number of items: to items of their row, or
    after that many items. None: neither is known.
    """
    argument, value = call.arguments[side], call.value(side)
    if isinstance(argument, Node):
        if side == "self" and argument is call.value("condition").below:
            return _INSIDE
        if value.own is not None:
            return value.own
    number: Any = call.number(side)
    if not hasattr(number, "as_coeff_Add"):  # it is no expression of sizes
        return None
    added, symbol = number.as_coeff_Add()
    return symbol if symbol.is_Symbol and added.is_Integer and added >= 0 else None


def follow_dropout(call: Call) -> Value:
    """Follow rows through dropout; raise Mixed if it draws random numbers, as in training."""
    if call.arguments["train"] and call.arguments["p"]:
        raise Mixed("is random")
    return follow_same_elements(call)


def refuse_rows(call: Call) -> Value:
    """Raise Mixed if a tensor has rows. Other rules are for operators that keep rows apart."""
    if any(value.rows for value in call.tensors.values()):
        raise Mixed(ACROSS)
    return Value()


# -- along dimensions ------------------------------------------------------------------------------


def follow_along_dims(call: Call) -> Facts:
    """Follow rows through an operator along dimensions, such as a sum or a softmax.

    Its results keep these dimensions or lose them. Raises Mixed if rows lie along one of them.
    """
    rows, dims = call.broadcast(), call.dims(call.largest_rank)
    if rows is not None and rows.dim in dims:
        raise Mixed(ACROSS)
    if len(call.shape) < call.largest_rank and rows is not None:
        rows = rows.without(dims)
    return _follow_indices(call, rows, dims)


def follow_max(call: Call) -> Facts:
    """Follow rows through `max` and `min`, of two tensors or along a dimension of one."""
    return follow_pointwise(call) if "other" in call.arguments else follow_along_dims(call)


def _follow_indices(call: Call, rows: Rows | None, dims: list[int]) -> Facts:
    """Return the facts of what an operator along `dims` returns, with `rows` in each tensor.

    If the last tensor holds indices along a single dimension, as that of `max` and `sort` does, its
    numbers are less than the size of the dimension.
    """
    values = (Value(rows),) * len(call.shapes)
    are_indices = call.name.startswith("arg") or call.returns[-1] == "indices"
    if not are_indices or len(dims) != 1:
        return values
    first_tensor = next(iter(call.tensors))
    size = sizes(first_tensor)[dims[0]]
    if not isinstance(size, int):
        return values
    return (*values[:-1], replace(values[-1], numbers=Numbers(0, size - 1)))


def follow_pooling(call: Call) -> Value:
    """Follow rows through pooling over the last dimensions: two for `max_pool2d`."""
    dims = next(dims for dims in (1, 2, 3) if f"{dims}d" in call.name)
    return _follow_along_last(call, dims)


def follow_matrices(call: Call) -> Value:
    """Follow rows through an operator on matrices, which are the last two dimensions."""
    return _follow_along_last(call, dims=2)


def _follow_along_last(call: Call, dims: int) -> Value:
    """Follow rows through an operator that combines elements along the last `dims` dimensions.

    Raises Mixed if rows lie along one of these; the dimensions before are a batch.
    """
    rows = call.broadcast()
    if rows is not None and rows.dim >= call.largest_rank - dims:
        raise Mixed(ACROSS)
    return Value(rows)


def follow_search(call: Call) -> Value:
    """Follow rows through a search of values among sorted limits, as in `searchsorted`.

    Raises Mixed unless the limits are the same for all rows, or each row has its own limits.
    """
    name = "boundaries" if "boundaries" in call.arguments else "sorted_sequence"
    limits = call.rows(name)
    if limits is not None and (limits.dim == call.rank(name) - 1 or limits != call.rows()):
        raise Mixed(WITH_OTHERS)
    return Value(call.rows())


# -- products, and layers with weights -------------------------------------------------------------


def follow_product(call: Call, transposed: bool = False) -> Value:
    """Follow rows through a product of matrices or vectors, as in `mm`, `mv` and `addmm`.

    The last two tensors are multiplied; if there are three, the first is added. `transposed`: the
    sum is over the last dimension of both, as if the right matrix were transposed.
    """
    *added, left, right = [name for name, node in call.arguments.items() if _is_tensor(node)]
    rank, vector = len(call.shape), call.rank(right) == 1
    rows_in_result = [call.value(name).moved_rows(rank - call.rank(name)) for name in added]
    # `behind`: how many dimensions follow that of the rows.
    if rows := call.rows(left):
        behind = call.rank(left) - 1 - rows.dim
        if behind == 0:  # the sum is over the rows
            raise Mixed(ACROSS)
        # A vector on the right takes away the last dimension.
        rows_in_result.append(rows.at(rank - 1 - behind + vector))
    if rows := call.rows(right):
        behind = call.rank(right) - 1 - rows.dim
        if behind == (0 if transposed or vector else 1):
            raise Mixed(ACROSS)
        if behind == 1:  # the other dimension of a transposed matrix: the last one of the result
            behind = 0
        rows_in_result.append(rows.at(rank - 1 - behind))
    return Value(common_rows(rows_in_result))


def follow_distances(call: Call) -> Value:
    """Follow rows through the distances between all rows of two matrices."""
    return follow_product(call, transposed=True)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta["val"], torch.Tensor)


def _input_rows(call: Call) -> Rows | None:
    """Return the rows of a layer's input; raise Mixed if another tensor, a weight, has rows."""
    if any(call.rows(name) for name in call.arguments if name != "input"):
        raise Mixed("uses rows as weights")
    return call.rows("input")


def follow_convolution(call: Call) -> Value:
    """Follow rows through a convolution, or what else combines channels and positions of a row.

    Raises Mixed unless the rows are dimension 0 of the input.
    """
    rows = _input_rows(call)
    if rows is not None and rows.dim != 0:
        raise Mixed(ACROSS)
    return Value(rows)


def follow_batch_norm(call: Call) -> Facts:
    """Follow rows through batch normalisation, which uses the statistics of the training.

    There is one statistic for each channel, dimension 1: rows must not lie there.
    """
    rows = _input_rows(call)
    if rows is not None and rows.dim == 1:
        raise Mixed("uses rows as channels")
    return (Value(rows), *[Value()] * (len(call.shapes) - 1))


def follow_recurrent(call: Call) -> Facts:
    """Follow rows through LSTM, GRU and RNN.

    All steps belong to one row. The states have shape (layers, rows, width).
    """
    rows, batch_dim = call.rows("input"), 0 if call.arguments["batch_first"] else 1
    if rows is None or rows.dim != batch_dim or call.rank("input") != 3:
        raise Mixed(ACROSS)
    if call.arguments["train"] and call.arguments["dropout"]:
        raise Mixed("is random")
    _, *other_tensors = call.tensors.values()
    if any(value.rows not in (None, rows.at(1)) for value in other_tensors):
        raise Mixed(WITH_OTHERS)
    # Before torch 2.12 the shapes of an LSTM's states have one dimension too many, at the front.
    return (Value(rows), *[Value(rows.at(len(shape) - 2)) for shape in call.shapes[1:]])


# -- by index --------------------------------------------------------------------------------------


def follow_index(call: Call) -> Value:
    """Follow rows through `index`, as in `x[…]`, and `index_put`, as in `x[…] = values`."""
    nodes = {dim: node for dim, node in enumerate(call.arguments["indices"]) if node is not None}
    if any(node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes.values()):
        return _follow_mask(call, *nodes.values())
    index_rank = max(len(sizes(node)) for node in nodes.values())
    index_facts = {
        dim: value for dim, node in nodes.items() if isinstance(value := call.values[node], Value)
    }
    into = common_rows(
        value.moved_rows(index_rank - len(sizes(nodes[dim]))) for dim, value in index_facts.items()
    )
    elements = follow_indexing(call.value(), call.rank(), index_facts, into, index_rank)
    if "values" not in call.arguments:
        return elements
    return _follow_store(call, elements, call.rank() - len(nodes) + index_rank)


def _follow_store(call: Call, chosen: Value, rank: int) -> Value:
    """Follow rows through `index_put`; raise Mixed if a row stores into places of another row.

    `chosen` are the facts of the chosen elements, which have `rank` dimensions.
    """
    stored = call.value("values")
    if stored.numbered:
        raise Mixed(NUMBER)
    # This raises Mixed if the rows differ.
    common_rows([chosen.rows, stored.moved_rows(rank - call.rank("values"))])
    if chosen.rows is not None and call.rows() is None:
        raise Mixed(ACROSS)
    return Value(call.rows())


def _follow_mask(call: Call, mask: Node, *other_indices: Node) -> Value:
    """Follow rows through `x[mask]` and `x[mask] = values`.

    How many elements a mask chooses is no number of a single row. So this raises Mixed, unless the
    mask does not depend on rows, or a single number is stored.
    """
    truth, value, rows = call.values[mask], call.arguments.get("values"), call.rows()
    first_dim, rank = call.arguments["indices"].index(mask), len(sizes(mask))
    masks_rows = rows is not None and first_dim <= rows.dim < first_dim + rank
    if value is not None and truth == Value() and not masks_rows and not other_indices:
        # The chosen elements have one dimension in place of the mask's.
        if rows is not None and rows.dim >= first_dim:
            rows = rows.at(rows.dim - rank + 1)
        return _follow_store(call, Value(rows), call.rank() - rank + 1)
    is_number = isinstance(value, Node) and value.meta["val"].numel() == 1 and not other_indices
    if call.value().numbered:
        raise Mixed(NUMBER)
    if not is_number or call.rows("values") or not isinstance(truth, Value):
        raise Mixed("takes the number of true elements of a mask as a value")
    if first_dim or truth.rows != rows:
        raise Mixed(WITH_OTHERS)
    return Value(rows)


def follow_index_select(call: Call) -> Value:
    """Follow rows through `index_select`, which picks by one index tensor along one dimension."""
    index, dim = call.value("index"), call.dim()
    return follow_indexing(call.value(), call.rank(), {dim: index}, index.rows, call.rank("index"))


def follow_embedding(call: Call) -> Value:
    """Follow rows through `embedding`, which picks rows of a matrix of weights."""
    index, weight = call.value("indices"), call.value("weight")
    return follow_indexing(weight, 2, {0: index}, index.rows, call.rank("indices"))


def follow_gather(call: Call) -> Value:
    """Follow rows through `gather`, in whose result each element has its own index along `dim`."""
    value, index, dim = call.value(), call.value("index"), call.dim()
    if value.numbered or index.numbered:
        raise Mixed(NUMBER)
    if index.rows is not None and value.rows is None and index.rows.dim != dim:
        raise Mixed(NUMBER)  # row i gets row i of a constant
    if value.rows is not None and (value.rows.dim == dim or value.rows != index.rows):
        raise Mixed("picks rows by an index")
    return Value(index.rows)


def follow_scatter(call: Call) -> Value:
    """Follow rows through `scatter`; raise Mixed if it is along the dimension of the rows."""
    into, dim = call.rows(), call.dim()
    rows_of_each = [value.rows for node, value in call.tensors.items() if sizes(node)]
    if (into is not None and into.dim == dim) or any(rows != into for rows in rows_of_each):
        raise Mixed("puts rows elsewhere by an index")
    return Value(into)


def follow_index_add(call: Call) -> Value:
    """Follow rows through `index_add` and `index_fill`; raise Mixed if they are along the rows."""
    into, dim = call.rows(), call.dim()
    source = "value" if "value" in call.arguments else "source"
    if call.rows("index") or (into is not None and into.dim == dim):
        raise Mixed("puts rows elsewhere by an index")
    if isinstance(call.arguments[source], Node) and call.rank(source) and call.rows(source) != into:
        raise Mixed(WITH_OTHERS)
    return Value(into)


# Operators element by element whose numbers may pick rows; `follow_pointwise` would not know them.
_WITH_NUMBERS: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul"), _follow_arithmetic),
    **dict.fromkeys(("lt", "gt", "ge", "le", "eq", "ne"), _follow_comparison),
    **dict.fromkeys(("bitwise_and", "logical_and"), _follow_and),
}
_KEEP_NUMBERS = frozenset(
    [
        follow_same_elements, _follow_arithmetic, follow_index, follow_index_select,
        follow_embedding, shape_rules.follow_fill, shape_rules.follow_reshape,
        shape_rules.follow_permute, shape_rules.follow_transpose, shape_rules.follow_expand,
        shape_rules.follow_repeat, shape_rules.follow_slice, shape_rules.follow_select,
        shape_rules.follow_split,
    ]
)  # fmt: skip
