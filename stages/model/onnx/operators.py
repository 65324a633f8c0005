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
    """A node. A call returns an attribute; `read` has the attributes that were read, and those that
    change no answer."""

    def __init__(self, node: Any) -> None:
        import onnx

        self.kind, self.inputs, self.outputs = node.op_type, list(node.input), list(node.output)
        self.name = f"node {node.name or self.outputs[0]!r} ({self.kind})"
        self.read = {"momentum", "num_outputs", "kernel_shape", "stash_type", "saturate", "sorted"}
        self.attributes: dict[str, Any] = {}
        for each in node.attribute:
            value = onnx.helper.get_attribute_value(each)
            if isinstance(value, onnx.TensorProto):
                value = onnx.numpy_helper.to_array(value)
            elif each.name == "to":
                value = onnx.TensorProto.DataType.Name(value).lower()
            self.attributes[each.name] = value.decode() if isinstance(value, bytes) else value

    def __call__(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.attributes.get(name, default)

    def check(self, count: int) -> None:
        """Refuse an attribute that was not read but changes the answer, and missing outputs."""
        for name, value in self.attributes.items():
            if name not in self.read and value not in _SAYS_NOTHING:
                raise CaptureError(f"{self.name}: {name} = {value} is not known here")
        if count < len(self.outputs):
            raise CaptureError(f"{self.name}: its second output is not known here")


def _is(size: Any, number: int) -> bool:
    """Whether a size is this number. A symbol is not compared: that would fix its value."""
    return type(size) is int and size == number


def _symbol(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _reshape(a: Node, x: Tensor, shape: list[Any]) -> Tensor:
    """Reshape, so that torch.export keeps the row count as a symbol."""
    copy = not a("allowzero")
    shape = [x.shape[i] if copy and _is(s, 0) else s for i, s in enumerate(shape)]
    left, over = list(x.shape), 1
    for size in shape:  # equal sizes cancel, so that a row count of 0 does not divide
        same = [i for i, have in enumerate(left) if _symbol(have) == _symbol(size)]
        if same:
            del left[same[0]]
        elif not _is(size, -1):
            over = over * size
    return x.reshape([math.prod(left) // over if _is(s, -1) else s for s in shape])


def _expand(a: Node, x: Tensor, shape: list[Any]) -> Tensor:
    x = x[(None,) * (len(shape) - x.dim())]
    shape = [1] * (x.dim() - len(shape)) + shape
    return x.expand([h if _is(s, 1) else s for h, s in zip(x.shape, shape, strict=True)])


def _slice(a: Node, x: Tensor, starts: Any, ends: Any, axes: Any = None, by: Any = None) -> Tensor:
    for i, start in enumerate(starts):
        axis, step = axes[i] if axes else i, by[i] if by else 1
        if step < 0:
            raise CaptureError(f"{a.name} slices with a negative step, which is not supported")
        x = x[(slice(None),) * (axis % x.dim()) + (slice(start, ends[i], step),)]
    return x


def _unsqueeze(a: Node, x: Tensor, axes: list[int]) -> Tensor:
    for axis in sorted(each % (x.dim() + len(axes)) for each in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(a: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
    ones = [i for i, size in enumerate(x.shape) if _is(size, 1)]
    return x.squeeze(tuple(ones if axes is None else axes))


def _top(a: Node, x: Tensor, k: list[int]) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest); of equal values the first. torch.topk does not fix this
    order."""
    axis, largest = a("axis", -1), bool(a("largest", 1))
    values, places = x.sort(dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, k[0]), places.narrow(axis, 0, k[0])


def _gemm(a: Node, x: Tensor, w: Tensor, c: Tensor | None = None) -> Tensor:
    x = x.t() if a("transA") else x
    turned, alpha, beta = a("transB"), a("alpha", 1.0), a("beta", 1.0)
    if turned and alpha == beta == 1 and (c is None or c.dim() == 1):
        return F.linear(x, w, c)
    product: Tensor = alpha * (x @ (w.t() if turned else w))
    return product if c is None else product + beta * c


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_LARGEST: dict[int, Callable[..., Tensor]] = {
    1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d
}  # fmt: skip
_MEANS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _convolution(a: Node, x: Tensor, *weights: Any) -> Tensor:
    run = _CONVOLUTIONS[x.dim() - 2]
    return run(x, *weights, groups=a("group", 1), dilation=a("dilations", 1), **_steps(a, x))


def _largest_of_windows(a: Node, x: Tensor) -> Tensor:
    return _LARGEST[x.dim() - 2](x, dilation=a("dilations", 1), **_pool(a, x))


def _mean_of_windows(a: Node, x: Tensor) -> Tensor:
    padding_counts = bool(a("count_include_pad"))
    return _MEANS[x.dim() - 2](x, count_include_pad=padding_counts, **_pool(a, x))


def _pool(a: Node, x: Tensor) -> dict[str, Any]:
    ceil_mode = bool(a("ceil_mode"))
    return {"kernel_size": a("kernel_shape"), "ceil_mode": ceil_mode, **_steps(a, x)}


def _steps(a: Node, x: Tensor) -> dict[str, Any]:
    """The stride and the padding of a convolution or a pool."""
    dims = x.dim() - 2
    pads = a("pads", [0] * 2 * dims)
    if pads[:dims] != pads[dims:]:
        raise CaptureError(f"{a.name} pads its two ends differently, which is not known here")
    return {"stride": a("strides", 1), "padding": pads[:dims]}


def _reduction(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(a: Node, x: Tensor, axes: list[int] | None = None) -> Tensor:
        axes, keep = a("axes", axes), bool(a("keepdims", 1))
        if a("noop_with_empty_axes") and not axes:
            return x
        return run(x, axes or list(range(x.dim())), keep).to(x.dtype)

    return reduced


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keep)
    return x


def _cast(a: Node, x: Tensor) -> Tensor:
    dtype = getattr(torch, a("to"), None)
    if dtype is None:
        raise CaptureError(f"{a.name} makes {a('to')} of numbers, which no column can be")
    return x.to(dtype)


def _plain(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, *given: run(*given)


def _filled(a: Node, shape: Any) -> Any:
    """Constant integers count as sizes if they are few."""
    value = a("value", np.zeros(1, np.float32))
    few = all(type(size) is int for size in shape) and math.prod(shape) <= MOST_SIZES
    return np.full(shape.tolist(), value.item()) if few and value.dtype == np.int64 else None


# Which inputs of an operator are sizes. For Reduce… they are axes.
SIZES_AT = {
    "Reshape": "1", "Expand": "1", "Slice": "1234", "Tile": "1", "Unsqueeze": "1", "Squeeze": "1",
    "Split": "1", "TopK": "1", "ConstantOfShape": "0", "Range": "012", "Trilu": "1", "CumSum": "1",
}  # fmt: skip
# Operators on sizes alone; None if the result is no size.
ON_SIZES: dict[str, Callable[..., Any]] = {
    "Identity": lambda a, x: x, "Cast": lambda a, x: x if "int" in a("to") else None,
    "Add": _plain(operator.add), "Sub": _plain(operator.sub), "Mul": _plain(operator.mul),
    "Div": _plain(operator.floordiv), "Equal": _plain(operator.eq),
    "Where": lambda a, c, x, y: np.where(c.astype(np.bool_), x, y),
    "Gather": lambda a, x, i: x[i.astype(np.int64)], "Concat": lambda a, *x: np.concatenate(x),
    "Slice": lambda a, x, s, e, axes=None, by=(1,): x[s[0] : e[0] : by[0]],
    "Unsqueeze": lambda a, x, axes: x.reshape(-1), "Squeeze": lambda a, x, axes=None: x.reshape(()),
    "Reshape": lambda a, x, shape: x.reshape(shape.astype(np.int64)),
    "ReduceProd": lambda a, x, axes=None: np.prod(x, keepdims=bool(a("keepdims", 1))),
    "ConstantOfShape": _filled,
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
    "Squeeze": _squeeze, "TopK": _top, "Gemm": _gemm, "Conv": _convolution,
    "MaxPool": _largest_of_windows, "AveragePool": _mean_of_windows,
    "Concat": lambda a, *x: torch.cat(x, a("axis")),
    "Transpose": lambda a, x: x.permute(*a("perm", range(x.dim())[::-1])),
    "Flatten": lambda a, x: x.reshape([math.prod(x.shape[: a("axis", 1)]),
                                       math.prod(x.shape[a("axis", 1) :])]),
    "Split": lambda a, x, sizes=None: x.split(sizes or -(-x.shape[a("axis", 0)] // len(a.outputs)),
                                              a("axis", 0)),
    "Gather": lambda a, x, i: x[(slice(None),) * (a("axis", 0) % x.dim()) + (i,)],
    "GatherElements": lambda a, x, i: x.gather(
        a("axis", 0), torch.where(i < 0, i + x.shape[a("axis", 0)], i)),
    "Cast": _cast,
    "ConstantOfShape": lambda a, shape: torch.from_numpy(
        np.array(a("value", np.zeros(1, np.float32)))).expand(shape),
    "Mod": lambda a, x, y: (torch.fmod if a("fmod") else torch.remainder)(x, y),
    "Gelu": lambda a, x: F.gelu(x, approximate=a("approximate", "none")),
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a("alpha", 0.01)),
    "Elu": lambda a, x: F.elu(x, a("alpha", 1.0)), "Celu": lambda a, x: F.celu(x, a("alpha", 1.0)),
    "Selu": lambda a, x: a("gamma", 1.0507009873554805)
    * F.elu(x, a("alpha", 1.6732632423543772)),
    "HardSigmoid": lambda a, x: (a("alpha", 0.2) * x + a("beta", 0.5)).clamp(0, 1),
    "ThresholdedRelu": lambda a, x: torch.where(x > a("alpha", 1.0), x, 0),
    "Softmax": lambda a, x: x.softmax(a("axis", -1)),
    "LogSoftmax": lambda a, x: x.log_softmax(a("axis", -1)),
    "BatchNormalization": lambda a, x, w, b, mean, var: F.batch_norm(
        x, mean, var, w, b, eps=a("epsilon", 1e-5)),
    "LayerNormalization": lambda a, x, w, b=None: F.layer_norm(
        x, x.shape[a("axis", -1) :], w, b, a("epsilon", 1e-5)),
    "InstanceNormalization": lambda a, x, w, b: F.instance_norm(
        x, weight=w, bias=b, eps=a("epsilon", 1e-5)),
    "Einsum": lambda a, *x: torch.einsum(a("equation"), *x),
    "ArgMax": lambda a, x: x.argmax(a("axis", 0), bool(a("keepdims", 1))),
    "ArgMin": lambda a, x: x.argmin(a("axis", 0), bool(a("keepdims", 1))),
    "Trilu": lambda a, x, k=0: (torch.triu if a("upper", 1) else torch.tril)(x, k or 0),
}  # fmt: skip
