"""The operators of ONNX as torch operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.errors import CaptureError

MOST_SIZES = 256  # integer constants with at most this many entries may be sizes
# Default values of attributes: an attribute with one of these values need not be read.
_SAYS_NOTHING = (0, "NOTSET", "VALID", "none", [1], [1, 1], [1, 1, 1])


class Node:
    """A node of the graph. A call returns an attribute, or the default if the node has none.

    `read` has the attributes that were read, and those that change no answer: `check` refuses
    others, so that no attribute is overlooked.
    """

    def __init__(self, node: Any) -> None:
        import onnx

        self.kind, self.inputs, self.outputs = node.op_type, list(node.input), list(node.output)
        self.name = f"node {node.name or self.outputs[0]!r} ({self.kind})"
        self.read = {"momentum", "num_outputs", "kernel_shape", "stash_type", "saturate", "sorted"}
        self.attributes: dict[str, Any] = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if isinstance(value, onnx.TensorProto):
                value = onnx.numpy_helper.to_array(value)
            elif attribute.name == "to":
                value = onnx.TensorProto.DataType.Name(value).lower()
            self.attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value

    def __call__(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.attributes.get(name, default)

    def check(self, count: int) -> None:
        """Raise CaptureError if the node has an attribute that was not read but may change the
        answer, or more outputs than `count`, the number that the operation returned."""
        for name, value in self.attributes.items():
            if name not in self.read and value not in _SAYS_NOTHING:
                raise CaptureError(f"{self.name}: {name} = {value} is not known here")
        if count < len(self.outputs):
            raise CaptureError(f"{self.name}: its second output is not known here")


def _is_int(size: Any, number: int) -> bool:
    """Whether a size is the plain integer `number`. A symbol is never: to compare it would fix its
    value."""
    return type(size) is int and size == number


def _expr(size: Any) -> Any:
    """The expression of a symbol, which can be compared without fixing its value. A plain integer
    is returned as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _reshape(node: Node, x: Tensor, shape: list[Any]) -> Tensor:
    """Reshape in a way that lets torch.export keep the row count as a symbol.

    A size of 0 stands for that of `x` at the same axis, unless `allowzero` is set. A size of -1 is
    the number of all elements, divided by the other sizes. Sizes that are equal in `x` and `shape`
    are cancelled first, so that a row count of 0 is no divisor.
    """
    copies = not node("allowzero")
    shape = [x.shape[i] if copies and _is_int(size, 0) else size for i, size in enumerate(shape)]
    numerator, denominator = list(x.shape), 1
    for size in shape:
        equal = [i for i, own in enumerate(numerator) if _expr(own) == _expr(size)]
        if equal:
            del numerator[equal[0]]
        elif not _is_int(size, -1):
            denominator = denominator * size
    return x.reshape(
        [math.prod(numerator) // denominator if _is_int(size, -1) else size for size in shape]
    )


def _expand(node: Node, x: Tensor, shape: list[Any]) -> Tensor:
    """Broadcast `x` and `shape` to each other: the shorter one gets leading axes of size 1."""
    x = x[(None,) * (len(shape) - x.dim())]
    shape = [1] * (x.dim() - len(shape)) + shape
    return x.expand(
        [own if _is_int(size, 1) else size for own, size in zip(x.shape, shape, strict=True)]
    )


def _slice(
    node: Node, x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Tensor:
    """Slice one axis after the other, by default the first ones, with steps of 1. Raises
    CaptureError for a negative step, which torch does not have."""
    for i, start in enumerate(starts):
        axis = axes[i] if axes else i
        step = steps[i] if steps else 1
        if step < 0:
            raise CaptureError(f"{node.name} slices with a negative step, which is not supported")
        x = x[(slice(None),) * (axis % x.dim()) + (slice(start, ends[i], step),)]
    return x


def _unsqueeze(node: Node, x: Tensor, axes: list[int]) -> Tensor:
    """Insert axes of size 1. `axes` are their indices in the result."""
    dims = x.dim() + len(axes)
    for axis in sorted(axis % dims for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    """Remove axes of size 1; by default all whose size is the number 1, not a symbol."""
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if _is_int(size, 1)]
    return x.squeeze(tuple(axes))


def _flatten(node: Node, x: Tensor) -> Tensor:
    """Reshape to a matrix: the axes before the attribute `axis` become its rows, the others its
    columns."""
    axis = node("axis", 1)
    return x.reshape([math.prod(x.shape[:axis]), math.prod(x.shape[axis:])])


def _split(node: Node, x: Tensor, sizes: list[int] | None = None) -> Any:
    """Split `x` along an axis into parts of these sizes. Without sizes, the parts are equal, but
    the last one may be smaller, since their size is rounded up."""
    axis = node("axis", 0)
    return x.split(sizes or -(-x.shape[axis] // len(node.outputs)), axis)


def _top_k(node: Node, x: Tensor, k: list[int]) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) values along an axis, and their indices. Of equal values the
    first is taken, which torch.topk does not promise."""
    axis, largest = node("axis", -1), bool(node("largest", 1))
    values, indices = x.sort(dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k[0]), indices.narrow(axis, 0, k[0])


def _gemm(node: Node, x: Tensor, w: Tensor, c: Tensor | None = None) -> Tensor:
    """Compute alpha · x · w + beta · c, with x and w transposed if the attributes say so. It
    becomes a linear layer where it is one, since engines have the best code for that."""
    x = x.t() if node("transA") else x
    transposed, alpha, beta = node("transB"), node("alpha", 1.0), node("beta", 1.0)
    if transposed and alpha == beta == 1 and (c is None or c.dim() == 1):
        return F.linear(x, w, c)
    product: Tensor = alpha * (x @ (w.t() if transposed else w))
    return product if c is None else product + beta * c


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MAXIMA: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEANS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _convolution(node: Node, x: Tensor, *weights: Any) -> Tensor:
    """A convolution over the axes after the first two, which are rows and channels."""
    convolve = _CONVOLUTIONS[x.dim() - 2]
    options = {"groups": node("group", 1), "dilation": node("dilations", 1)}
    return convolve(x, *weights, **options, **_stride_and_padding(node, x))


def _largest_of_windows(node: Node, x: Tensor) -> Tensor:
    """MaxPool over the axes after the first two."""
    return _MAXIMA[x.dim() - 2](x, dilation=node("dilations", 1), **_pool_options(node, x))


def _mean_of_windows(node: Node, x: Tensor) -> Tensor:
    """AveragePool over the axes after the first two."""
    padding_counts = bool(node("count_include_pad"))
    return _MEANS[x.dim() - 2](x, count_include_pad=padding_counts, **_pool_options(node, x))


def _pool_options(node: Node, x: Tensor) -> dict[str, Any]:
    """The options that torch's pools have in common, by name."""
    return {
        "kernel_size": node("kernel_shape"),
        "ceil_mode": bool(node("ceil_mode")),
        **_stride_and_padding(node, x),
    }


def _stride_and_padding(node: Node, x: Tensor) -> dict[str, Any]:
    """The stride and the padding of a convolution or a pool, by torch's names."""
    dims = x.dim() - 2
    pads = node("pads", [0] * 2 * dims)
    if pads[:dims] != pads[dims:]:
        raise CaptureError(f"{node.name} pads its two ends differently, which is not known here")
    return {"stride": node("strides", 1), "padding": pads[:dims]}


def _reduction(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an operator `Reduce…` from the function `run(x, axes, keepdims)`.

    Older opsets have the axes as an attribute, newer ones as an input. If there are none, all axes
    are reduced, or none if `noop_with_empty_axes` is set.
    """

    def reduced(node: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
        axes, keep = node("axes", axes), bool(node("keepdims", 1))
        if node("noop_with_empty_axes") and not axes:
            return x
        return run(x, axes or list(range(x.dim())), keep).to(x.dtype)

    return reduced


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """The product over several axes. torch multiplies over one at a time; the last axis goes first,
    so that the indices of the others stay valid."""
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keep)
    return x


def _cast(node: Node, x: Tensor) -> Tensor:
    """Convert to another dtype. Raises CaptureError for one that torch does not have, such as
    text."""
    dtype = getattr(torch, node("to"), None)
    if dtype is None:
        raise CaptureError(f"{node.name} makes {node('to')} of numbers, which no column can be")
    return x.to(dtype)


def _plain(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operator, which takes a node and its inputs, from a function of the inputs alone."""
    return lambda node, *inputs: run(*inputs)


def _fill_sizes(node: Node, shape: Any) -> Any:
    """An array of sizes with the shape `shape`, in which all entries are the node's value.

    None if they cannot be sizes: the value is no int64, a size in `shape` is a symbol, or there are
    more than `MOST_SIZES`.
    """
    value = node("value", np.zeros(1, np.float32))
    small = all(type(size) is int for size in shape) and math.prod(shape) <= MOST_SIZES
    return np.full(shape.tolist(), value.item()) if small and value.dtype == np.int64 else None


# Which inputs of an operator are sizes. For Reduce… they are axes.
SIZES_AT = {
    "Reshape": "1", "Expand": "1", "Slice": "1234", "Tile": "1", "Unsqueeze": "1", "Squeeze": "1",
    "Split": "1", "TopK": "1", "ConstantOfShape": "0", "Range": "012", "Trilu": "1", "CumSum": "1",
}  # fmt: skip
# In these tables x and y are data, i indices, w weights and b biases; the order of an operator's
# parameters is that of the specification.
# Operators on sizes alone; None if the result is no size.
ON_SIZES: dict[str, Callable[..., Any]] = {
    "Identity": lambda node, x: x, "Cast": lambda node, x: x if "int" in node("to") else None,
    "Add": _plain(operator.add), "Sub": _plain(operator.sub), "Mul": _plain(operator.mul),
    "Div": _plain(operator.floordiv), "Equal": _plain(operator.eq),
    "Where": lambda node, condition, x, y: np.where(condition.astype(np.bool_), x, y),
    "Gather": lambda node, x, i: x[i.astype(np.int64)],
    "Concat": lambda node, *x: np.concatenate(x),
    "Slice": lambda node, x, start, end, axes=None, step=(1,): x[start[0] : end[0] : step[0]],
    "Unsqueeze": lambda node, x, axes: x.reshape(-1),
    "Squeeze": lambda node, x, axes=None: x.reshape(()),
    "Reshape": lambda node, x, shape: x.reshape(shape.astype(np.int64)),
    "ReduceProd": lambda node, x, axes=None: np.prod(x, keepdims=bool(node("keepdims", 1))),
    "ConstantOfShape": _fill_sizes,
}  # fmt: skip
_NAMED_ALIKE = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal "
    "Relu Round Sigmoid Sign Sin Sinh Sqrt Tan Tanh Add Sub Mul Where MatMul"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name.lower()) for name in _NAMED_ALIKE.split()},
    "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt, "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Not": torch.logical_not, "Softplus": F.softplus,
    "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "Identity": lambda x: x, "Dropout": lambda x, ratio=None: x,
    "PRelu": lambda x, w: torch.where(x < 0, x * w, x),
    "Pow": lambda x, y: x.pow(y).to(x.dtype), "Range": torch.arange, "CastLike": Tensor.type_as,
    "Div": lambda x, y: x / y if x.is_floating_point() else x.div(y, rounding_mode="trunc"),
    "Min": lambda *x: reduce(torch.minimum, x), "Max": lambda *x: reduce(torch.maximum, x),
    "Sum": lambda *x: reduce(torch.add, x), "Mean": lambda *x: reduce(torch.add, x) / len(x),
    "Clip": lambda x, low=None, high=None: x if low is high is None else x.clamp(low, high),
    "Tile": Tensor.repeat, "GatherND": lambda x, i: x[tuple(i.unbind(-1))],
    "ScatterND": lambda x, i, y: x.index_put(tuple(i.unbind(-1)), y),
    "CumSum": lambda x, axis: x.cumsum(axis if isinstance(axis, int) else axis[0]),
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(list(range(2, x.dim())), keepdim=True),
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "Sum": torch.sum, "Mean": torch.mean, "Max": torch.amax, "Min": torch.amin,
    "LogSumExp": torch.logsumexp, "Prod": _product,
    "L1": lambda x, axes, keep: x.abs().sum(axes, keep),
    "L2": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "SumSquare": lambda x, axes, keep: x.square().sum(axes, keep),
    "LogSum": lambda x, axes, keep: x.sum(axes, keep).log(),
}  # fmt: skip
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _plain(run) for name, run in _FUNCTIONS.items()},
    **{f"Reduce{name}": _reduction(run) for name, run in _REDUCTIONS.items()},
    "Reshape": _reshape, "Expand": _expand, "Slice": _slice, "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze, "TopK": _top_k, "Gemm": _gemm, "Conv": _convolution,
    "MaxPool": _largest_of_windows, "AveragePool": _mean_of_windows,
    "Concat": lambda node, *x: torch.cat(x, node("axis")),
    "Transpose": lambda node, x: x.permute(*node("perm", range(x.dim())[::-1])),
    "Flatten": _flatten,
    "Split": _split,
    "Gather": lambda node, x, i: x[(slice(None),) * (node("axis", 0) % x.dim()) + (i,)],
    "GatherElements": lambda node, x, i: x.gather(
        node("axis", 0), torch.where(i < 0, i + x.shape[node("axis", 0)], i)),
    "Cast": _cast,
    "ConstantOfShape": lambda node, shape: torch.from_numpy(
        np.array(node("value", np.zeros(1, np.float32)))).expand(shape),
    "Mod": lambda node, x, y: (torch.fmod if node("fmod") else torch.remainder)(x, y),
    "Gelu": lambda node, x: F.gelu(x, approximate=node("approximate", "none")),
    "LeakyRelu": lambda node, x: F.leaky_relu(x, node("alpha", 0.01)),
    "Elu": lambda node, x: F.elu(x, node("alpha", 1.0)),
    "Celu": lambda node, x: F.celu(x, node("alpha", 1.0)),
    "Selu": lambda node, x: node("gamma", 1.0507009873554805)
    * F.elu(x, node("alpha", 1.6732632423543772)),
    "HardSigmoid": lambda node, x: (node("alpha", 0.2) * x + node("beta", 0.5)).clamp(0, 1),
    "ThresholdedRelu": lambda node, x: torch.where(x > node("alpha", 1.0), x, 0),
    "Softmax": lambda node, x: x.softmax(node("axis", -1)),
    "LogSoftmax": lambda node, x: x.log_softmax(node("axis", -1)),
    "BatchNormalization": lambda node, x, w, b, mean, var: F.batch_norm(
        x, mean, var, w, b, eps=node("epsilon", 1e-5)),
    "LayerNormalization": lambda node, x, w, b=None: F.layer_norm(
        x, x.shape[node("axis", -1) :], w, b, node("epsilon", 1e-5)),
    "InstanceNormalization": lambda node, x, w, b: F.instance_norm(
        x, weight=w, bias=b, eps=node("epsilon", 1e-5)),
    "Einsum": lambda node, *x: torch.einsum(node("equation"), *x),
    "ArgMax": lambda node, x: x.argmax(node("axis", 0), bool(node("keepdims", 1))),
    "ArgMin": lambda node, x: x.argmin(node("axis", 0), bool(node("keepdims", 1))),
    "Trilu": lambda node, x, k=0: (torch.triu if node("upper", 1) else torch.tril)(x, k or 0),
}  # fmt: skip
