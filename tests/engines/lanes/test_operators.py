"""Operators compared with eager torch, many in one library: special numbers, every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.engines.lanes.harness import MOST, Function, compiled_row

pytestmark = pytest.mark.usefixtures("quick_compiler")
Table = Mapping[str, Callable[..., Tensor]]
F = torch.nn.functional
NAN, INF = float("nan"), float("inf")
SPECIAL = (
    0.5, 1.5, 0.0, -0.0, 1.0, -1.0, -0.5, NAN, INF, -INF, 1e-40, -1e-40, 1e20, -1e20, 3.4e38,
    -3.4e38, 1e-20, 2.0, -2.0, 3.0, 10.0, -10.0, 88.0, -88.0, -104.0, 100.0, 0.999, -0.999, 1.0001,
    7.5, -7.5, 2.5, -2.5, 1e-8,
)  # fmt: skip


def _named(module: object, names: str) -> dict[str, Callable[..., Tensor]]:
    """The functions of a module with these names."""
    return {name: getattr(module, name) for name in names.split()}


UNARY: Table = {
    **_named(
        torch,
        "abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid tanh asinh "
        "acosh atanh sin cos tan asin acos atan erf erfc relu floor ceil round trunc frac sign "
        "square isnan isinf isfinite logical_not nan_to_num logit",
    ),
    **_named(
        F,
        "silu softplus elu leaky_relu hardtanh hardswish hardsigmoid celu selu relu6 softsign "
        "hardshrink softshrink",
    ),
    "power of 4": lambda x: x**4,
    "power of -2": lambda x: x**-2,
    "power of 1.5": lambda x: x**1.5,
    "to two places": lambda x: torch.round(x, decimals=2),
    "to tens": lambda x: torch.round(x, decimals=-1),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp, the least above the most": lambda x: x.clamp(2, -1),
    "remainder": lambda x: torch.remainder(x, 1.7),
    "fmod": lambda x: torch.fmod(x, -1.7),
    "times weights": lambda x: x * torch.tensor([2.0, -3.0]),
    "float16": lambda x: x.to(torch.float16) * 3,
    "bfloat16": lambda x: x.to(torch.bfloat16) + 1,
    "float64": lambda x: x.double() / 3,
    "bool": lambda x: x.bool(),
    "masked": lambda x: x.masked_fill(x < 0, -INF),
}
BINARY: Table = {
    **_named(
        torch,
        "add sub mul div maximum minimum fmax fmin atan2 fmod remainder copysign hypot pow eq ne "
        "lt le gt ge logical_and logical_or logical_xor logaddexp heaviside",
    ),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp by a tensor": lambda a, b: torch.clamp(a, min=b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
}
INTEGERS: Table = {
    **_named(torch, "add sub mul maximum minimum bitwise_and bitwise_or bitwise_xor lt eq fmod"),
    "abs": lambda a, b: a.abs(),
    "not": lambda a, b: ~a,
    "divided": lambda a, b: a / b,
    "floor": lambda a, b: a // b,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "rest": lambda a, b: a % b,
    "left": lambda a, b: a << 2,
    "right": lambda a, b: a >> 3,
    "square": lambda a, b: a**2,
    "power of 5": lambda a, b: a**5,
    "a number to a power": lambda a, b: 3 ** (b % 9),
    "to a power": lambda a, b: torch.pow(a, b % 9),
    "to a negative power": lambda a, b: torch.pow(a % 4 - 2, 0 - b % 3),
    "sum": lambda a, b: (a + b).sum(1),
    "product": lambda a, b: a.prod(1),
    "cumulative": lambda a, b: a.cumsum(1),
    "sorted": lambda a, b: a.sort(1).values,
    "largest": lambda a, b: a.argmax(1),
    "as float": lambda a, b: a.float() * 0.5,
    "beside a float": lambda a, b: a * 1.5,
    "above a float": lambda a, b: a > 2.5,
    "sign": lambda a, b: a.sign(),
    "truth": lambda a, b: a.bool(),
}


def _long(x: Tensor) -> Tensor:
    """An expression so long that its parts become variables."""
    return torch.tanh(x * x.abs() + 0.5) * torch.exp(-x.abs()) + torch.sigmoid(x * 0.25) * x.abs()


REDUCTIONS: Table = {
    **{
        f"{name} {dim}": lambda x, name=name, dim=dim: getattr(torch, name)(x, dim=dim)
        for name in ("sum", "mean", "amax", "amin", "logsumexp")
        for dim in (1, (1, 2), -1)
    },
    "all dimensions": lambda x: x.sum((1, 2, 3)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=2),
    "product": lambda x: x.prod(2),
    "any": lambda x: (x > 1).any(2),
    "all": lambda x: (x > -1).all(1),
    "how many": lambda x: (x > 0).sum((1, 2)),
    "argmax": lambda x: x.argmax(2),
    "argmin": lambda x: x.argmin(1),
    "argmax of all": lambda x: x.flatten(1).argmax(1),
    "max": lambda x: x.max(2).values,
    "where the max is": lambda x: x.max(1).indices,
    "softmax": lambda x: x.softmax(2),
    "log softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.nan_to_num(0.0, 0.0, 0.0).abs().cumsum(2),
    "cumprod": lambda x: x.cumprod(1),
    "normalized": lambda x: F.normalize(x, dim=2),
    "of one step, between others": lambda x: _long(_long(x[:, :1]).sum(1)),
}
VIEWS: Table = {
    "permuted": lambda x: x.permute(0, 3, 1, 2) * 1,
    "reshaped": lambda x: x.reshape(-1, 6, 4) * 2,
    "transposed, reshaped": lambda x: x.transpose(1, 3).reshape(-1, 4, 6) + 1,
    "flipped": lambda x: x.flip(1, 3) * 1,
    "rolled": lambda x: torch.roll(x, (1, -1), (1, 2)),
    "sliced": lambda x: x[:, :-1, -3::2] * 1,
    "selected": lambda x: x[:, 1, 2] * x[:, 0, -1],
    "beside each other": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "stacked": lambda x: torch.stack([x, x + 1], 2),
    "moved": lambda x: torch.movedim(x, (1, 2), (3, 1)) * 1,
    "split": lambda x: torch.cat(x.split([1, 3], 2)[::-1], 2),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1) * 1,
    "repeated": lambda x: x.repeat(1, 2, 1, 3),
    "each repeated": lambda x: x.repeat_interleave(2, dim=2),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0),
    "cut": lambda x: F.pad(x, (-1, 0, 1, -1)),
    "mirrored": lambda x: F.pad(x.flatten(2), (2, 2), mode="reflect"),
    "around": lambda x: F.pad(x.flatten(2), (2, 1), mode="circular"),
    "diagonal": lambda x: torch.diagonal(x, 1, 1, 2) * 1,
    "triangle": lambda x: x.triu(1),
    "windows": lambda x: x.unfold(2, 2, 1) * 1,
    "pairs": lambda x: x[:, :, None, :, 0] - x[:, None, :, :, 1],
    "a part replaced": lambda x: torch.slice_scatter(x, x[:, :1] * 9, 1, 1, 2),
    "filled": lambda x: x.new_full((x.shape[0], 2), 3.0) + x[:, 0, :2, 0],
}
WEIGHTS = torch.linspace(-1, 2, 18).reshape(6, 3)
EVEN, ONE, SLICE = torch.tensor([True, False] * 3), torch.ones(()), slice(None)


def _set(x: Tensor, index: Any, values: Any) -> Tensor:
    """A copy in which these elements have other values."""
    changed = x.clone()
    changed[index] = values
    return changed


SELECTIONS: Table = {
    "an index that is a choice of two floats": lambda v, i: v.gather(
        1, torch.where(v[:, :1] > 0, 4.0, 2.0).long()
    ),
    **{
        f"quantile, {how}": lambda v, i, how=how: torch.quantile(v, 0.3, 1, interpolation=how)
        for how in ("linear", "midpoint", "lower", "higher", "nearest")
    },
    "topk": lambda x, i: x.topk(3, 1).values,
    "least": lambda x, i: x.topk(2, 2, largest=False).values,
    "sorted": lambda x, i: x.sort(2, descending=True).values,
    "order": lambda x, i: torch.sort(x, dim=1, stable=True).indices,
    "order, downwards": lambda x, i: torch.sort(x, dim=1, stable=True, descending=True).indices,
    "gathered": lambda x, i: x.gather(1, i.unsqueeze(2).expand(-1, -1, 4)),
    "gathered by topk": lambda x, i: x.gather(1, x.topk(2, 1).indices),
    "index_select": lambda x, i: x.index_select(1, torch.tensor([2, 0, 5, 5])),
    "by constants": lambda x, i: x[:, torch.tensor([2, 0]), torch.tensor([1, -1])],
    "embedding": lambda x, i: F.embedding(i, WEIGHTS),
    "one weight of a column": lambda x, i: x[:, 0, :] + WEIGHTS[:1, 2],
    "weights of a row, turned": lambda x, i: x[:, :3] + WEIGHTS[:1].T,
    "a table by a table": lambda x, i: torch.tensor([3, 0, 5, 1])[
        torch.tensor([1, 0, 2, 3, 3, 0])[i]
    ],
    "weights by two": lambda x, i: WEIGHTS[i, i % 3],
    "scatter": lambda x, i: torch.zeros_like(x[:, :, 0]).scatter(1, i, x[:, :5, 1]),
    "scatter_add": lambda x, i: x[:, :, 0].scatter_add(1, i, x[:, :5, 1]),
    "index_add": lambda x, i: x.index_add(1, torch.tensor([1, 1, 3]), x[:, :3]),
    "index_fill": lambda x, i: x.index_fill(1, torch.tensor([1, 3]), 7.0),
    "one_hot": lambda x, i: F.one_hot(i, 6),
    "put by a mask": lambda x, i: x.index_put((x > 0.5,), torch.tensor(0.0)),
    "put by a mask of some dimensions": lambda x, i: x.index_put((x[:, :, 0] > 0.5,), ONE),
    "added by a mask": lambda x, i: x.index_put((x > 0.5,), ONE, accumulate=True),
    "put by a constant mask": lambda x, i: _set(x, (SLICE, EVEN), x[:, :3] * 2),
    "put by a constant mask, one number": lambda x, i: _set(x, (SLICE, SLICE, EVEN[:4]), 1),
    "scatter_reduce without itself": lambda x, i: x[:, :, 0].scatter_reduce(
        1, i, x[:, :5, 1], "sum", include_self=False
    ),
    **{
        f"{title}, {side}": lambda x, i, edges=edges, side=side: torch.searchsorted(
            torch.tensor(edges), x.reshape(-1, 24).contiguous(), side=side, out_int32=side == "left"
        )
        for side in ("left", "right")
        for title, edges in {
            "edges": [-1.0, 0.0, 0.5],
            "edges with NaN": [-INF, -0.0, INF, NAN],
            "edges out of order": [1.0, 0.0, 3.0, -2.0, 7.0, NAN, NAN],
        }.items()
    },
    "bucketize": lambda x, i: torch.bucketize(x.contiguous(), torch.tensor([-1, 0, 1]), right=True),
    "a bucket of integers": lambda x, i: torch.bucketize(i.contiguous(), torch.tensor([0.5, 2.0])),
    "edges of the row": lambda x, i: torch.searchsorted(
        x[:, :, 0].sort(1).values.contiguous(), x[:, :, 1].contiguous(), right=True
    ),
    "edges by a sorter": lambda x, i: torch.searchsorted(
        x[:, :, 0].contiguous(),
        x[:, :, 1].contiguous(),
        sorter=torch.sort(x[:, :, 0], 1).indices.contiguous(),
    ),
    "the class of a NaN": lambda x, i: WEIGHTS[
        torch.bucketize(x[:, 2].contiguous(), torch.tensor([-0.5, 0.5]))
    ],
    "pairs alike": lambda x, i: (i[:, :, None] == i[:, None, :]).sum(2),
}


def _applied(module: nn.Module, inputs: Literal["vectors", "images"]) -> Callable[..., Tensor]:
    """Applies a module to the vectors or the images; its weights are random, not initial values."""
    for values in (*module.parameters(), *module.buffers()):
        if values.is_floating_point():
            values.data.uniform_(0.1, 0.9)
    module = module.eval().requires_grad_(False)
    if inputs == "images":
        return lambda v, images: module(images)
    return lambda v, images: module(v)


def _steps(module: nn.Module) -> Callable[..., Tensor]:
    """The outputs of a recurrent module at three steps: a first, a middle and a last one."""
    call = _applied(module, "vectors")
    return lambda v, images: call(v[:, :3], images)[0]


def _positive(v: Tensor) -> Tensor:
    """A positive definite matrix (6, 6) for each row."""
    return v @ v.transpose(1, 2) + 3 * torch.eye(6)


def products() -> Table:
    """Matrix products and convolutions of vectors `v` (n, 6, 8) and images (n, 4, 9, 7)."""
    torch.manual_seed(3)
    weights, triangle = torch.randn(7, 8), torch.rand(6, 6) + 2 * torch.eye(6)
    solved = torch.linalg.solve_triangular
    return {
        "weights of ones": lambda v, images: v @ torch.ones(8, 3),
        "one weight": lambda v, images: v[:, :, :1] @ torch.full((1, 1), 0.3),
        "tensordot": lambda v, images: torch.tensordot(v, torch.ones(6, 8), dims=2),
        "vecdot": lambda v, images: torch.linalg.vecdot(v, torch.ones(8)),
        "factor": lambda v, images: torch.linalg.cholesky(_positive(v)),
        "upper factor": lambda v, images: torch.linalg.cholesky(_positive(v), upper=True),
        "no factor": lambda v, images: torch.linalg.cholesky_ex(_positive(v) - 5.5).info,
        "solved": lambda v, images: solved(triangle, v, upper=True),
        "solved, lower": lambda v, images: solved(_positive(v), v, upper=False),
        "solved from the right": lambda v, images: solved(
            triangle, v.transpose(1, 2), upper=False, left=False
        ),
        "solved, ones": lambda v, images: solved(triangle, v, upper=True, unitriangular=True),
        "linear": lambda v, images: F.linear(v, weights),
        "linear, backwards": lambda v, images: F.linear(v, weights).flip(2),
        "matrices": lambda v, images: v @ v.transpose(1, 2),
        "einsum": lambda v, images: torch.einsum("nij,kj->nki", v, weights),
        "weights first": lambda v, images: weights @ v.transpose(1, 2),
        "outer": lambda v, images: torch.einsum("ni,nj->nij", v[:, 0], v[:, :, 0]),
        "addmm": lambda v, images: torch.addmm(
            weights[:, 0], v[:, 1], weights.t(), beta=0.5, alpha=2.0
        ),
        "conv2d": _applied(nn.Conv2d(4, 5, 3, padding=1), "images"),
        "strides, dilated": _applied(nn.Conv2d(4, 5, 2, stride=2, dilation=2), "images"),
        "grouped": _applied(nn.Conv2d(4, 8, 3, groups=2, padding=1), "images"),
        "depthwise": _applied(nn.Conv2d(4, 4, 3, groups=4), "images"),
        "conv1d": _applied(nn.Conv1d(6, 4, 3, stride=2, padding=2), "vectors"),
        "transposed": _applied(nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1), "vectors"),
        "transposed 2d": _applied(
            nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), groups=2), "images"
        ),
        "max_pool": lambda v, images: F.max_pool2d(images, 3, 2, 1),
        "avg_pool": lambda v, images: F.avg_pool2d(images, 3, 2, 1, count_include_pad=False),
        "adaptive": lambda v, images: F.adaptive_avg_pool2d(images, (3, 2)),
        "attention": lambda v, images: F.scaled_dot_product_attention(v, v, v),
    }


def layers() -> Table:
    """Layers of torch.nn on vectors (n, 6, 8)."""
    torch.manual_seed(4)
    return {
        "layer norm": _applied(nn.LayerNorm(8), "vectors"),
        "group norm": _applied(nn.GroupNorm(3, 6), "vectors"),
        "batch norm": _applied(nn.BatchNorm1d(6), "vectors"),
        "RMS norm": _applied(nn.RMSNorm(8), "vectors"),
        "PReLU": _applied(nn.PReLU(6), "vectors"),
        "LSTM": _steps(nn.LSTM(8, 5, batch_first=True)),
        "LSTM of two layers": _steps(nn.LSTM(8, 3, 2, batch_first=True, bidirectional=True)),
        "GRU": _steps(nn.GRU(8, 5, batch_first=True)),
        "RNN": _steps(nn.RNN(8, 5, batch_first=True)),
        "encoder": _applied(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "vectors"),
    }


def _indices(pool: Callable[..., tuple[Tensor, Tensor]], *given: object) -> Callable[..., Tensor]:
    """The places that a pool gives, with ceil_mode if `given` are a window and its parameters."""
    named = {"ceil_mode": True} if len(given) > 1 else {}
    return lambda v, images: pool(images, *given, **named, return_indices=True)[1]


def pools() -> Table:
    """Windows that hang over the input at its end, over padding, and with gaps."""
    over: dict[str, bool] = {"ceil_mode": True}
    return {
        "mean": lambda v, images: F.avg_pool1d(v, 3, 2, **over),
        "mean, padded": lambda v, images: F.avg_pool1d(v, 3, 3, 1, **over),
        "mean without padding": lambda v, images: F.avg_pool1d(v, 4, 3, 2, True, False),
        "mean 2d": lambda v, images: F.avg_pool2d(images, (3, 2), (2, 3), (1, 1), **over),
        "mean 2d without padding": lambda v, images: F.avg_pool2d(images, 4, 3, 2, True, False),
        "own divisor": lambda v, images: F.avg_pool2d(images, 2, 2, 1, True, divisor_override=5),
        "mean 3d": lambda v, images: F.avg_pool3d(images, 2, 2, 1, **over),
        "mean 3d, own divisor": lambda v, images: F.avg_pool3d(
            images, (1, 2, 3), 2, (0, 1, 1), True, divisor_override=3
        ),
        "mean of integers": lambda v, images: F.avg_pool1d((images[:, 0] * 9).long(), 3, 2, 1),
        "norm": lambda v, images: F.lp_pool1d(v, 2.0, 3, 2, **over),
        "norm 2d": lambda v, images: F.lp_pool2d(images, 3.0, (3, 2), 2, **over),
        "adaptive mean": lambda v, images: F.adaptive_avg_pool1d(v, 3),
        "adaptive mean 3d": lambda v, images: F.adaptive_avg_pool3d(images, (3, 4, 3)),
        "adaptive largest": lambda v, images: F.adaptive_max_pool1d(v, 3),
        "adaptive largest 3d": lambda v, images: F.adaptive_max_pool3d(images, (1, 4, 3)),
        "largest": lambda v, images: F.max_pool1d(v, 3, 2, 1, 2, ceil_mode=True),
        "largest 2d": lambda v, images: F.max_pool2d(images, (3, 2), 2, 1, ceil_mode=True),
        "places": lambda v, images: F.max_pool1d(v, 3, 2, 1, 2, True, return_indices=True)[1],
        "places 2d": _indices(F.max_pool2d, (3, 2), 2, 1),
        "places 3d": _indices(F.max_pool3d, (1, 3, 2), 2, (0, 1, 1), (1, 2, 1)),
        "places beside the input": lambda v, images: F.max_pool3d(
            images[:, :, None, :2, :2], (1, 2, 2), 1, (0, 1, 1), (1, 3, 3), return_indices=True
        )[1],
        "adaptive places": _indices(F.adaptive_max_pool2d, (4, 3)),
    }


def distance(answers: Tensor, wanted: Tensor, cancelling: bool) -> float:
    """The largest difference, in units in the last place of the wanted value; infinity for other
    integers or bools.

    If sums may cancel, the unit is that of the largest wanted value.
    """
    assert answers.dtype == wanted.dtype
    same = (answers == wanted) | (answers.isnan() & wanted.isnan())
    if bool(same.all()):
        return 0.0
    if not wanted.is_floating_point():
        return INF
    off = (answers.double() - wanted.double()).abs().nan_to_num(INF)
    size = wanted.double().abs().nan_to_num(0.0, 0.0)
    unit = size.max() if cancelling else size
    place = torch.finfo(wanted.dtype).eps * unit + 1e-43  # so that no unit is 0
    return float(torch.where(same, 0.0, off / place).max())


def _together(calls: list[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """One function with the answers of all functions side by side: (n, elements of a row)."""
    return lambda *inputs: torch.cat([_flat(call(*inputs)) for call in calls], 1)


def _flat(answer: Tensor) -> Tensor:
    """(n, elements of a row), at least one element."""
    return answer.flatten(1) if answer.dim() > 1 else answer.unsqueeze(1)


Answers = Iterator[tuple[str, Tensor, Tensor]]
"""The title of each function, the library's answers, and eager torch's."""


def library_of(table: Table, inputs: list[Tensor]) -> Callable[..., Answers]:
    """A library of all functions. One output per dtype, as an output takes torch.export long."""
    titles: dict[torch.dtype, list[str]] = {}
    for title, call in table.items():
        titles.setdefault(call(*inputs).dtype, []).append(title)
    outputs = {
        str(dtype).removeprefix("torch."): _together([table[title] for title in group])
        for dtype, group in titles.items()
    }
    library = compiled_row(Function(outputs), inputs, list(outputs))

    def answers(*rows: Tensor) -> Answers:
        outputs_of_rows = library(*rows)
        for name, group in zip(outputs, titles.values(), strict=True):
            wanted = [_flat(table[title](*rows)) for title in group]
            parts = outputs_of_rows[name].split([values.shape[1] for values in wanted], 1)
            yield from zip(group, parts, wanted, strict=True)

    return answers


def require_agreement(
    table: Table, inputs: list[Tensor], most: float, cancelling: bool = False
) -> None:
    """Compiles all functions and compares them with eager torch, for many rows and for five. `most`
    is the allowed `distance`."""
    answers = library_of(table, inputs)
    too_far: dict[str, float] = {}
    for n in (MOST, 5):
        for title, answer, wanted in answers(*(values[:n] for values in inputs)):
            off = distance(answer, wanted, cancelling)
            if not off <= most:  # also where `off` is NaN
                too_far[title] = off
    assert too_far == {}


def special(dtype: torch.dtype) -> Tensor:
    """Two columns: the special numbers and others, and the same moved by a row."""
    torch.manual_seed(0)
    first = torch.cat([torch.tensor(SPECIAL), torch.randn(MOST - len(SPECIAL)) * 3])
    other = torch.cat([first[1:], first[:1]])  # the first row is finite
    return torch.stack([first, other], 1).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)]
)
def test_functions_of_one_number_agree_with_eager_torch(dtype: torch.dtype) -> None:
    require_agreement(
        UNARY, [special(dtype)], 8 if dtype is torch.float32 else 128
    )  # 128: pow in double


def test_functions_of_two_numbers_agree_with_eager_torch() -> None:
    values = special(torch.float32)
    other = values.roll(7, 0)
    other[other.abs() < 1e-30] = 0  # eager's remainder by a subnormal number is NaN
    require_agreement(BINARY, [values, other], 4)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int8,
        pytest.param(torch.int32, marks=pytest.mark.long),
        pytest.param(torch.uint8, marks=pytest.mark.long),
    ],
)
def test_functions_of_integers_agree_with_eager_torch(dtype: torch.dtype) -> None:
    """Around the ends of the range, and between them; divisors are positive."""
    limit = torch.iinfo(dtype)
    ends = [0, 1, limit.max, limit.min, limit.max - 1, limit.min + 1, 5, 7]
    divisors_of_ends = [1, 2, 3, limit.max, 7, 9, 1, 1]
    generator = torch.Generator().manual_seed(1)
    rest = torch.randint(limit.min // 2, limit.max // 2, (MOST - len(ends),), generator=generator)
    values = torch.cat([torch.tensor(ends), rest]).to(dtype)
    divisors = torch.cat([torch.tensor(divisors_of_ends), rest.abs().clamp(min=1)]).to(dtype)
    columns = torch.stack([values, values.flip(0)], 1)
    require_agreement(INTEGERS, [columns, torch.stack([divisors, divisors], 1)], 1)


SLOW = {
    "upper factor", "solved, lower", "solved from the right", "solved, ones", "LSTM of two layers",
    "RNN", "encoder", "transposed", "quantile, midpoint", "quantile, higher", "quantile, nearest",
    *(f"{name} {dim}" for name in ("mean", "amax", "amin", "logsumexp") for dim in (1, -1)),
}  # fmt: skip
"""What is compiled for long, and close to another one of its table."""
quick_and_slow = pytest.mark.parametrize(
    "slow", [False, pytest.param(True, marks=pytest.mark.long)]
)


def of_speed(table: Table, slow: bool) -> Table:
    """The functions of a table that are slow to compile, or the others."""
    return {name: call for name, call in table.items() if (name in SLOW) == slow}


@quick_and_slow
def test_reductions_agree_with_eager_torch(slow: bool) -> None:
    torch.manual_seed(2)
    values = torch.randn(MOST, 3, 5, 4)
    values[-3:, :, :, ::2] = torch.tensor([NAN, INF, -INF]).view(3, 1, 1, 1)
    require_agreement(of_speed(REDUCTIONS, slow), [values], 8, cancelling=True)


def test_views_agree_with_eager_torch() -> None:
    torch.manual_seed(2)
    require_agreement(VIEWS, [torch.randn(MOST, 3, 4, 2)], 0)


@quick_and_slow
def test_selections_agree_with_eager_torch(slow: bool) -> None:
    torch.manual_seed(2)
    values = torch.randn(MOST, 6, 4)
    values[:5] = values[:5].round()  # with ties
    values[7, 2, 1], values[8, 3], values[9, 1], values[10] = NAN, INF, -INF, -0.0
    require_agreement(of_speed(SELECTIONS, slow), [values, torch.randint(0, 6, (MOST, 5))], 1)


@pytest.fixture
def tied_images() -> Tensor:
    """Images in which several pixels of a window may be the largest."""
    torch.manual_seed(2)
    return torch.rand(MOST, 4, 9, 7).mul(5).round() / 5 + 0.1


def test_pools_agree_with_eager_torch(tied_images: Tensor) -> None:
    require_agreement(pools(), [torch.rand(MOST, 6, 8), tied_images], 16)


def test_the_places_of_pools_over_nan_and_infinity_agree(tied_images: Tensor) -> None:
    tied_images[:, 1, ::3, 1::2], tied_images[:, 2, 1:4], tied_images[:, 3] = NAN, NAN, -INF
    places = {name: call for name, call in pools().items() if "places" in name and "2d" in name}
    require_agreement(places, [torch.rand(MOST, 6, 8), tied_images], 0)


@quick_and_slow
def test_products_agree_with_eager_torch(slow: bool) -> None:
    torch.manual_seed(2)
    vectors, images = torch.rand(MOST, 6, 8), torch.rand(MOST, 4, 9, 7)
    require_agreement(of_speed(products(), slow), [vectors, images], 16, cancelling=True)


@quick_and_slow
def test_layers_agree_with_eager_torch(slow: bool) -> None:
    torch.manual_seed(2)
    calls = {
        name: lambda v, call=call: call(v, None)  # without images
        for name, call in of_speed(layers(), slow).items()
    }
    require_agreement(calls, [torch.rand(MOST, 6, 8)], 16, cancelling=True)


OUTSIDE: Table = {
    "put from before the begin": lambda x, _: _set(x, (SLICE, slice(-10, 2)), 5.0),
    "put nothing": lambda x, _: _set(x, (SLICE, slice(4, 2)), 5.0),
    "slice from before the begin": lambda x, _: x[:, -100:3],
    "power of -0.5": lambda x, _: x**-0.5,
    "sums so far": lambda x, _: x[:, :2].cumsum(1),
    "products so far": lambda x, _: x[:, :2].cumprod(1),
    "a constant of both zeros": lambda x, _: torch.atan2(x[:, :2], torch.tensor([0.0, -0.0])),
    "a constant above float32": lambda x, _: x * 1e39,
}
DIVIDED: Table = {
    "by itself": lambda _, k: k.clamp(min=1) // k.clamp(min=1),
    "by itself, long": lambda _, k: k.long().clamp(min=1) // k.long().clamp(min=1),
}
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
CASTS: Table = {
    f"{a} to {b}".replace("torch.", ""): lambda _, k, a=a, b=b: k.to(a).to(b).long()
    for a in WHOLE
    for b in WHOLE
    if a is not b
}


def test_slices_beyond_the_size_casts_and_constants_agree() -> None:
    """The numbers and their signs: a wrong answer may differ by the sign of a zero only."""
    torch.manual_seed(0)
    x = torch.randn(MOST, 6)
    x[0] = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0])
    x[1, :2] = -0.0
    whole = torch.randint(-40_000, 40_000, (MOST, 6)).to(torch.int32)
    answers = library_of({**OUTSIDE, **DIVIDED, **CASTS}, [x, whole])
    for name, answer, wanted in answers(x, whole):
        torch.testing.assert_close(
            answer.double(), wanted.double(), rtol=1e-6, atol=0, equal_nan=True, msg=name
        )
        known = ~wanted.isnan()
        assert torch.equal(answer[known].signbit(), wanted[known].signbit()), name


BOOLS: Table = {
    **{
        f.__name__: lambda a, b, f=f: f(a, b)
        for f in (
            torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.maximum,
            torch.minimum, torch.fmax, torch.fmin, torch.add, torch.mul, torch.bitwise_xor,
        )
    },
    "sign": lambda a, _: torch.sign(a),
    "isinf": lambda a, _: torch.isinf(a),
    "amax": lambda a, _: a.amax(1),
    "amin": lambda a, _: a.amin(1),
    "max": lambda a, _: a.max(1).values,
    "sum": lambda a, _: a.sum(1, dtype=torch.bool),
    "prod": lambda a, _: a.prod(1, dtype=torch.bool),
    "sort": lambda a, _: a.sort(1).values,
    "sort descending": lambda a, _: torch.sort(a, dim=1, descending=True, stable=True).indices,
    "scatter_add": lambda a, b: a.scatter_add(1, torch.arange(6) // 3 + 0 * a.long(), b),
}  # fmt: skip
NARROW: Table = {
    "sum of uint8": lambda a, b: (a.byte() + 200 * b.byte()).sum(1, dtype=torch.uint8).float(),
    "prod of int8": lambda a, b: (a.char() + 7).prod(1, dtype=torch.int8).float(),
    "cumsum of int8": lambda a, b: (a.char() + 100).cumsum(1, dtype=torch.int8).float(),
    "scatter_add of uint8": lambda a, b: (a.byte() + 200).scatter_add(
        1, torch.arange(6) // 3 + 0 * a.long(), b.byte() * 99
    ).float(),
}  # fmt: skip


def test_bools_and_narrow_integers_agree_with_eager_torch() -> None:
    """true is -1 in the code, and a sum of narrow integers is computed with 32 bits."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(MOST, 6, generator=generator) < share for share in (0.5, 0.7))
    a[:2], b[:2] = torch.tensor([[False], [True]]), torch.tensor([[True], [False]])
    require_agreement({**BOOLS, **NARROW}, [a, b], 0)


def test_a_row_without_dimensions_is_reduced_along_dim_0() -> None:
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "amax": lambda row: row.amax(0),
        "argmax": lambda row: row.argmax(0).float(),
        "var": lambda row: row.var(0, correction=0),
    }
    model = Function({name: torch.vmap(reduce) for name, reduce in reductions.items()})
    x = torch.randn(MOST)
    answers = compiled_row(model, [x], [f"y{i}" for i in range(len(reductions))], vmapped=True)(x)
    for answer, expected in zip(answers.values(), model(x), strict=True):
        torch.testing.assert_close(answer.flatten(), expected, equal_nan=True)
