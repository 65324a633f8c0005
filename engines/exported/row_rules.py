"""How operators treat rows: one function for each kind, and a table of the operators at the end.

A function returns where the rows of an answer (a returned tensor) lie, or raises Mixed. To add an
operator, add its ATen name to the table, next to the function of its kind. Most operators that work
element by element need no entry, because torch tags them as pointwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from engines.exported import shape_rules
from engines.exported.calls import Answer, Call
from engines.exported.graph import sizes
from engines.exported.row_places import (
    ACROSS,
    COUNT,
    NUMBER,
    WITH_OTHERS,
    Mixed,
    Numbers,
    Rows,
    Unknown,
    Value,
    picked,
    together,
)

Kind = Callable[[Call], Answer]


def answers(call: Call) -> tuple[Value, ...]:
    """The facts of each tensor that a call returns. Raises Mixed if rows depend on each other."""
    kind = _kind_of(call)
    given = call.tensors.values()
    if call.counted and kind not in (_compared, _where):
        raise Mixed(COUNT)
    if kind not in _KEEP_NUMBERS and any(value.numbered for value in given):
        raise Mixed(NUMBER)
    padded = any(value.padded for value in given)
    if padded and kind not in (shape_rules.sliced, shape_rules.put_in):
        raise Mixed("reads behind the rows")
    found = kind(call)
    each = found if isinstance(found, tuple) else (found,) * len(call.shapes)
    kept = kind is shape_rules.filled or any(value.rows for value in each)
    if not kept and any(value.rows for value in given):
        raise Mixed(ACROSS)
    return each


def _kind_of(call: Call) -> Kind:
    tags = getattr(call.node.target, "tags", ())
    if call.name in _KIND_OF:
        return _KIND_OF[call.name]
    if torch.Tag.nondeterministic_seeded in tags:
        raise Mixed("is random")
    if call.name and torch.Tag.pointwise in tags:
        return _pointwise
    if call.name and "empty" not in call.name:
        if not call.tensors:
            return shape_rules.filled
        if not any(value.rows or value.padded for value in call.tensors.values()):
            return _constant
    raise Unknown("is an operator that is not known here")


# -- element by element ----------------------------------------------------------------------------


def _pointwise(call: Call) -> Value:
    return Value(call.broadcast())


def _constant(call: Call) -> Value:
    """Any operator on tensors without rows, such as weights."""
    return Value()


def _same(call: Call) -> Value:
    """The same elements, perhaps with another dtype."""
    found = call.value()
    if found.numbered and call.node.meta["val"].is_floating_point():
        raise Mixed(NUMBER)
    return found


def _arithmetic(call: Call) -> Value:
    """`add`, `sub` and `mul`. Their results may be numbers that pick rows."""
    first, second, found = _numbers(call, "self"), _numbers(call, "other"), None
    if first and second and call.number("alpha") in (None, 1):
        if call.name == "mul":
            found = first.times(second) or second.times(first)
        elif call.name == "add":
            found = first.plus(second)
        elif (negative := second.times(Numbers(-1, -1))) is not None:
            found = first.plus(negative)
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


def _where(call: Call) -> Value:
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


def _mixed(call: Call) -> Value:
    """An operator for which every element counts, or that reads other places of the memory."""
    if any(value.rows for value in call.tensors.values()):
        raise Mixed(ACROSS)
    return Value()


# -- along dimensions ------------------------------------------------------------------------------


def _along(call: Call) -> Answer:
    """An operator along dimensions that the answer keeps."""
    rows, dims = call.broadcast(), call.dims(call.most)
    if rows is not None and rows.dim in dims:
        raise Mixed(ACROSS)
    return _with_places(call, rows, dims)


def _reduced(call: Call) -> Answer:
    """A reduction: an operator along dimensions that the answer loses (without `keepdim`)."""
    rows, dims = call.broadcast(), call.dims(call.most)
    if rows is not None and rows.dim in dims:
        raise Mixed(ACROSS)
    if not call.given.get("keepdim"):
        rows = rows and rows.without(dims)
    return _with_places(call, rows, dims)


def _largest(call: Call) -> Answer:
    """`max` and `min`, element by element of two tensors or along a dimension."""
    return _pointwise(call) if "other" in call.given else _reduced(call)


def _with_places(call: Call, rows: Rows | None, dims: list[int]) -> Answer:
    """The answers of an operator along `dims`. If its last answer holds indices along one
    dimension, these are numbers below the size of the dimension."""
    *others, last = (Value(rows),) * len(call.shapes)
    places = call.name.startswith("arg") or (call.name in _GIVE_PLACES and len(call.shapes) == 2)
    if places and len(dims) == 1:
        size = sizes(next(iter(call.tensors)))[dims[0]]
        last = replace(last, numbers=Numbers(0, size - 1) if isinstance(size, int) else None)
    return (*others, last)


def _behind(call: Call, dims: int) -> Value:
    """Combines elements along the last `dims` dimensions; those before are a batch."""
    rows = call.broadcast()
    if rows is not None and rows.dim >= call.most - dims:
        raise Mixed(ACROSS)
    return Value(rows)


def _weight_norm(call: Call) -> Value:
    """Divides by a norm along all dimensions but one."""
    rows, dim = call.broadcast(), call.dim(rank=call.most)
    if rows is not None and rows.dim != dim:
        raise Mixed(ACROSS)
    return Value(rows)


def _normalised(call: Call) -> Value:
    return _behind(call, len(call.given["normalized_shape"]))


def _attention(call: Call) -> Value:
    if call.given["dropout_p"]:
        raise Mixed("is random")
    return _behind(call, 2)


def _searched(call: Call) -> Value:
    """Finds values among sorted ones, which must be the same for all rows or of the same row."""
    name = "boundaries" if "boundaries" in call.given else "sorted_sequence"
    limits = call.rows(name)
    if limits is not None and (limits.dim == call.rank(name) - 1 or limits != call.rows()):
        raise Mixed(WITH_OTHERS)
    return Value(call.rows())


# -- products, and layers with weights -------------------------------------------------------------


def _product(call: Call, left: str, right: str, added: str = "", turned: bool = False) -> Value:
    """A matrix product, plus `added`. `turned`: the sum is over the last dimension of both."""
    rank, vector = len(call.shape), call.rank(right) == 1
    found: list[Rows | None] = []
    if rows := call.rows(left):
        behind = call.rank(left) - 1 - rows.dim
        if behind == 0:
            raise Mixed(ACROSS)
        found.append(rows.at(rank - 1 - behind + vector))
    if rows := call.rows(right):
        behind = call.rank(right) - 1 - rows.dim
        if behind == (0 if turned or vector else 1):
            raise Mixed(ACROSS)
        if behind == 1:  # the other dimension of a turned matrix
            behind = 0
        elif behind > 1 and call.rank(left) == 1:
            behind -= 1
        found.append(rows.at(rank - 1 - behind))
    if added and (rows := call.rows(added)):
        found.append(rows.moved(rank - call.rank(added)))
    return Value(together(found))


def _einsum(call: Call) -> Value:
    terms, arrow, result = call.given["equation"].replace(" ", "").partition("->")
    if not arrow or "." in terms:
        raise Unknown("is written in a way that is not known here")
    found: set[tuple[str, Rows]] = set()
    for letters, node in zip(terms.split(","), call.given["tensors"], strict=True):
        value = call.values[node]
        if isinstance(value, Value) and value.rows is not None:
            letter = letters[value.rows.dim]
            if letters.count(letter) > 1 or letter not in result:
                raise Mixed(ACROSS)
            found.add((letter, value.rows.at(result.index(letter))))
    return Value(together(rows for _, rows in found))


def _of_one(call: Call) -> Rows | None:
    """The rows of the input. Raises Mixed if another tensor, which is a weight, has rows."""
    if any(call.rows(name) for name in call.given if name != "input"):
        raise Mixed("uses rows as weights")
    return call.rows("input")


def _convolved(call: Call) -> Value:
    if call.rank("input") != call.rank("weight"):  # there is no batch
        raise Mixed(ACROSS)
    return _grouped(call)


def _grouped(call: Call) -> Value:
    """Combines channels and positions of each row. The rows must be dimension 0 of the input."""
    rows = _of_one(call)
    if rows is not None and rows.dim != 0:
        raise Mixed(ACROSS)
    return Value(rows)


def _batch_norm(call: Call) -> Answer:
    """Batch normalisation with the statistics of the training, one for each channel."""
    rows = _of_one(call)
    if rows is not None and rows.dim == 1:
        raise Mixed("uses rows as channels")
    return (Value(rows), *[Value()] * (len(call.shapes) - 1))


def _recurrent(call: Call) -> Answer:
    """LSTM, GRU and RNN: the steps belong to a row, the states have shape (layers, rows, width)."""
    rows, batch = call.rows("input"), 0 if call.given["batch_first"] else 1
    if rows is None or rows.dim != batch or call.rank("input") != 3:
        raise Mixed(ACROSS)
    if call.given["train"] and call.given["dropout"]:
        raise Mixed("is random")
    _, *others = call.tensors.values()
    if any(value.rows not in (None, rows.at(1)) for value in others):
        raise Mixed(WITH_OTHERS)
    return (Value(rows), *[Value(rows.at(1))] * (len(call.shapes) - 1))


# -- by index --------------------------------------------------------------------------------------


def _indexed(call: Call) -> Value:
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
    found = picked(call.value(), call.rank(), chosen, into, rank)
    return (
        _stored(call, found, call.rank() - len(nodes) + rank) if "values" in call.given else found
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


def _index_select(call: Call) -> Value:
    index, dim = call.value("index"), call.dim()
    return picked(call.value(), call.rank(), {dim: index}, index.rows, call.rank("index"))


def _embedding(call: Call) -> Value:
    index = call.value("indices")
    return picked(call.value("weight"), 2, {0: index}, index.rows, call.rank("indices"))


def _gathered(call: Call) -> Value:
    """`gather`: each element of the answer has its own index along one dimension."""
    value, index, dim = call.value(), call.value("index"), call.dim()
    if value.numbered or index.numbered:
        raise Mixed(NUMBER)
    if index.rows is not None and value.rows is None and index.rows.dim != dim:
        raise Mixed(NUMBER)  # row i gets row i of a constant
    if value.rows is not None and (value.rows.dim == dim or value.rows != index.rows):
        raise Mixed("picks rows by an index")
    return Value(index.rows)


def _scattered(call: Call) -> Value:
    """`scatter` along a dimension, which must not be the dimension of the rows."""
    into, dim = call.rows(), call.dim()
    every = [value.rows for node, value in call.tensors.items() if sizes(node)]
    if (into is not None and into.dim == dim) or any(rows != into for rows in every):
        raise Mixed("puts rows elsewhere by an index")
    return Value(into)


def _index_added(call: Call) -> Value:
    into, dim = call.rows(), call.dim()
    source = "value" if "value" in call.given else "source"
    if call.rows("index") or (into is not None and into.dim == dim):
        raise Mixed("puts rows elsewhere by an index")
    if isinstance(call.given[source], Node) and call.rank(source) and call.rows(source) != into:
        raise Mixed(WITH_OTHERS)
    return Value(into)


# -- which operator is of which kind ---------------------------------------------------------------

_KINDS: dict[Kind, str] = {
    # Pointwise operators that torch does not tag.
    _pointwise: "masked_fill prelu log_sigmoid log_sigmoid_forward hardswish float_power square "
    "floor_divide true_divide divide multiply subtract rsub negative absolute fix arccos arccosh "
    "arcsin arcsinh arctan arctan2 arctanh greater greater_equal less less_equal not_equal isclose "
    "isreal real imag conj complex polar view_as_real special_expit special_expm1 special_erf "
    "special_log1p fill copy __or__ one_hot broadcast_tensors",
    _same: "clone alias detach _to_copy to contiguous lift_fresh_copy type_as positive",
    _arithmetic: "add sub mul",
    _compared: "lt gt ge le eq ne",
    _both: "bitwise_and __and__ logical_and",
    _where: "where",
    _mixed: "as_strided nonzero masked_select unique_dim _unique2 unique_consecutive bincount "
    "histc dot vdot trace _native_batch_norm_legit native_batch_norm",
    shape_rules.filled: (
        "zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like"
    ),
    shape_rules.counting: "arange",
    shape_rules.reshaped: (
        "view _unsafe_view reshape flatten unflatten unsqueeze view_as reshape_as"
    ),
    shape_rules.squeezed: "squeeze",
    shape_rules.permuted: "permute",
    shape_rules.transposed: "transpose t mT swapaxes",
    shape_rules.expanded: "expand expand_as broadcast_to",
    shape_rules.repeated: "repeat",
    shape_rules.interleaved: "repeat_interleave",
    shape_rules.sliced: "slice",
    shape_rules.selected: "select unbind",
    shape_rules.split: "split split_with_sizes chunk tensor_split",
    shape_rules.diagonal: "diagonal",
    shape_rules.unfolded: "unfold",
    shape_rules.joined: "cat",
    shape_rules.stacked: "stack",
    shape_rules.put_in: "slice_scatter select_scatter",
    shape_rules.edged: "pad constant_pad_nd",
    _along: "softmax log_softmax _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp "
    "sort argsort topk flip roll glu diff linalg_cross fft_fft fft_ifft fft_rfft fft_irfft",
    _reduced: "sum mean amax amin argmax argmin aminmax prod any all var std var_mean std_mean "
    "logsumexp norm linalg_vector_norm linalg_norm median nanmedian kthvalue mode nansum nanmean "
    "count_nonzero quantile nanquantile cosine_similarity linalg_vecdot",
    _largest: "max min",
    partial(
        _behind, dims=1
    ): "max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d "
    "upsample_nearest1d upsample_linear1d",
    partial(
        _behind, dims=2
    ): "max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d tril triu linalg_det linalg_inv "
    "linalg_cholesky linalg_cholesky_ex linalg_inv_ex linalg_slogdet linalg_solve_triangular",
    partial(
        _behind, dims=3
    ): "max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
    "upsample_nearest3d upsample_trilinear3d pixel_shuffle pixel_unshuffle im2col",
    _weight_norm: "_weight_norm",
    _normalised: "layer_norm rms_norm",
    _attention: "scaled_dot_product_attention",
    _searched: "bucketize searchsorted",
    partial(_product, left="self", right="mat2"): "mm bmm",
    partial(_product, left="self", right="other"): "matmul",
    partial(_product, left="self", right="vec"): "mv",
    partial(_product, left="mat1", right="mat2", added="self"): "addmm",
    partial(_product, left="batch1", right="batch2", added="self"): "baddbmm",
    partial(_product, left="input", right="weight", added="bias", turned=True): "linear",
    partial(_product, left="x1", right="x2", turned=True): "cdist",
    _einsum: "einsum",
    _convolved: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "convolution",
    _grouped: "group_norm instance_norm",
    _batch_norm: "_native_batch_norm_legit_no_training",
    _recurrent: "lstm gru rnn_tanh rnn_relu",
    _indexed: "index index_put",
    _index_select: "index_select",
    _embedding: "embedding",
    _gathered: "gather",
    _scattered: "scatter scatter_add scatter_reduce",
    _index_added: "index_add index_copy index_fill",
}
_KIND_OF: dict[str, Kind] = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_KEEP_NUMBERS = frozenset(
    [
        _same, _arithmetic, _indexed, _index_select, _embedding,
        shape_rules.filled, shape_rules.reshaped, shape_rules.squeezed, shape_rules.permuted,
        shape_rules.transposed, shape_rules.expanded, shape_rules.repeated, shape_rules.sliced,
        shape_rules.selected, shape_rules.split,
    ]
)  # fmt: skip
_GIVE_PLACES = (  # their last answer holds indices along a dimension
    "argmax", "argmin", "argsort", "sort", "topk", "max", "min", "median", "kthvalue", "mode",
    "cummax", "cummin",
)  # fmt: skip
