"""The modes of functions: each combination of the arguments that change what is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.engines.lanes.samples.cases import Case, NoSampleError, case_of

F = torch.nn.functional
Values = Sequence[Any]
_BOTH = (False, True)
_DIMS = {"dim": (0, 1, -1), "keepdim": _BOTH}
_REDUCTION = {"reduction": ("none", "mean", "sum")}


@dataclass(frozen=True)
class Modes:
    """A function of the tensors of a row, and the values of its arguments.

    `shapes`: of the tensors. A combination that eager torch refuses is left out.
    """

    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    arguments: Mapping[str, Values] = field(default_factory=dict)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Each combination of a value of every argument."""
        for values in itertools.product(*self.arguments.values()):
            yield dict(zip(self.arguments, values, strict=True))


def _pool(function: Callable[..., Any], shape: tuple[int, ...], **more: Values) -> Modes:
    """The modes of a pool, and `more` arguments."""
    window = {"kernel_size": (2, 3), "stride": (1, 2), "padding": (0, 1), "ceil_mode": _BOTH}
    return Modes(function, [shape], {**window, **more})


def _resized(modes: Values, shape: tuple[int, ...], **more: Values) -> Modes:
    """The modes of `interpolate`; `scale_factor` makes the input larger and smaller."""
    scales = {"mode": modes, "scale_factor": (2.0, 1.5, 0.5)}

    def resized(x: Tensor, **options: Any) -> Tensor:
        return F.interpolate(x[None], **options)[0]

    return Modes(resized, [shape], {**scales, **more})


def _loss(function: Callable[..., Any], **more: Values) -> Modes:
    """A loss of two tensors of the row; inputs and targets are between 0 and 1."""

    def loss(x: Tensor, target: Tensor, **options: Any) -> Any:
        return function(x.sigmoid(), target.sigmoid(), **options)

    return Modes(loss, [(2, 3), (2, 3)], {**_REDUCTION, **more})


def _scattered(x: Tensor, source: Tensor, **options: Any) -> Tensor:
    """scatter_reduce by a constant index, which meets some elements twice."""
    index = torch.tensor([[0, 2, 2], [1, 1, 0]])
    return x.scatter_reduce(0, index, source, **options)


def _by_index(x: Tensor, source: Tensor, **options: Any) -> Tensor:
    """index_reduce by a constant index."""
    return x.index_reduce(0, torch.tensor([2, 0]), source, **options)


def _classes(function: Callable[..., Any], **more: Values) -> Modes:
    """A loss of five numbers for each of three items, whose classes are constants."""
    target = torch.tensor([0, 3, 4])
    weight = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.25])

    def loss(x: Tensor, weighted: bool, **options: Any) -> Any:
        return function(x, target, weight=weight if weighted else None, **options)

    return Modes(loss, [(3, 5)], {**_REDUCTION, "weighted": _BOTH, **more})


def _bags(table: Tensor, **options: Any) -> Tensor:
    """embedding_bag of two constant bags of three."""
    index = torch.tensor([[0, 2, 1], [3, 3, 0]])
    return F.embedding_bag(index, table, **options)


def _sampled(x: Tensor, grid: Tensor, **options: Any) -> Tensor:
    """grid_sample of one image."""
    return F.grid_sample(x[None], grid[None], **options)[0]


def _convolved(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """conv2d of one image."""
    return F.conv2d(x, weight, **options)


_EDGES: dict[str, Values] = {"mode": ("constant", "reflect", "replicate", "circular")}
MODES: dict[str, Modes] = {
    "avg_pool1d": _pool(F.avg_pool1d, (2, 7), count_include_pad=_BOTH),
    "avg_pool2d": _pool(
        F.avg_pool2d, (2, 5, 6), count_include_pad=_BOTH, divisor_override=(None, 5)
    ),
    "avg_pool3d": _pool(F.avg_pool3d, (1, 4, 5, 4), count_include_pad=_BOTH),
    "max_pool1d": _pool(F.max_pool1d, (2, 7), dilation=(1, 2)),
    "max_pool2d": _pool(F.max_pool2d, (2, 5, 6), dilation=(1, 2), return_indices=_BOTH),
    "max_pool3d": _pool(F.max_pool3d, (1, 5, 4, 5)),
    "lp_pool1d": Modes(
        F.lp_pool1d,
        [(2, 7)],
        {"norm_type": (1, 2, 3.5), "kernel_size": (2, 3), "stride": (1, 2), "ceil_mode": _BOTH},
    ),
    "lp_pool2d": Modes(
        F.lp_pool2d,
        [(2, 5, 6)],
        {"norm_type": (1, 2), "kernel_size": (2, 3), "stride": (1, 2), "ceil_mode": _BOTH},
    ),
    "adaptive_avg_pool1d": Modes(F.adaptive_avg_pool1d, [(2, 7)], {"output_size": (1, 3, 7, 9)}),
    "adaptive_avg_pool2d": Modes(
        F.adaptive_avg_pool2d, [(2, 5, 6)], {"output_size": (1, (3, 4), (None, 2), 7)}
    ),
    "adaptive_max_pool1d": Modes(F.adaptive_max_pool1d, [(2, 7)], {"output_size": (1, 3, 7)}),
    "adaptive_max_pool2d": Modes(
        F.adaptive_max_pool2d, [(2, 5, 6)], {"output_size": (1, (3, 4), (None, 2))}
    ),
    "pad, 1 dimension": Modes(F.pad, [(3, 5)], {"pad": ((1, 2), (0, 3), (2, 0)), **_EDGES}),
    "pad, 2 dimensions": Modes(
        F.pad, [(2, 4, 5)], {"pad": ((1, 2, 3, 0), (0, 1, 1, 1)), **_EDGES}
    ),
    "pad, 3 dimensions": Modes(F.pad, [(2, 3, 4, 3)], {"pad": ((1, 2, 1, 0, 2, 1),), **_EDGES}),
    "pad, a constant": Modes(
        F.pad, [(2, 5)], {"pad": ((1, -2), (-1, 3), (1, 1, -1, 2)), "value": (0.0, -1.5)}
    ),
    "interpolate, 1 dimension": _resized(
        ("nearest", "nearest-exact", "area", "linear"), (2, 6), align_corners=(None, *_BOTH)
    ),
    "interpolate, 2 dimensions": _resized(
        ("nearest", "nearest-exact", "area", "bilinear", "bicubic"),
        (2, 4, 6),
        align_corners=(None, *_BOTH),
        antialias=_BOTH,
    ),
    "interpolate, 3 dimensions": _resized(
        ("nearest", "nearest-exact", "area", "trilinear"),
        (1, 4, 2, 4),
        align_corners=(None, *_BOTH),
    ),
    "grid_sample": Modes(
        _sampled,
        [(2, 4, 5), (3, 3, 2)],
        {
            "mode": ("bilinear", "nearest", "bicubic"),
            "padding_mode": ("zeros", "border", "reflection"),
            "align_corners": _BOTH,
        },
    ),
    "conv2d": Modes(
        _convolved,
        [(4, 5, 6), (4, 2, 3, 2)],
        {"padding": ("same", "valid", 1), "stride": (1, 2), "dilation": (1, 2), "groups": (2,)},
    ),
    **{
        name: Modes(getattr(torch, name), [(3, 4)], _DIMS)
        for name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "all",
                     "any", "logsumexp", "nansum", "nanmean", "median", "nanmedian", "mode")
    },
    "count_nonzero": Modes(torch.count_nonzero, [(3, 4)], {"dim": (0, 1, (0, 1))}),
    "std, var": Modes(
        lambda x, **options: (torch.std(x, **options), torch.var(x, **options)),
        [(3, 4)],
        {**_DIMS, "correction": (0, 1, 2)},
    ),
    "quantile, nanquantile": Modes(
        lambda x, **options: (torch.quantile(x, **options), torch.nanquantile(x, **options)),
        [(3, 4)],
        {
            "q": (0.0, 0.3, 1.0),
            "dim": (0, 1),
            "interpolation": ("linear", "lower", "higher", "nearest", "midpoint"),
        },
    ),
    "vector_norm": Modes(
        torch.linalg.vector_norm,
        [(3, 4)],
        {**_DIMS, "ord": (0, 1, 2, 3.5, -1, float("inf"), -float("inf"))},
    ),
    "matrix_norm": Modes(
        torch.linalg.matrix_norm, [(3, 4)], {"ord": ("fro", 1, -1, float("inf"), -float("inf"))}
    ),
    "cumulative": Modes(
        lambda x, **options: (
            x.cumsum(**options), x.cumprod(**options), x.logcumsumexp(**options),
        ),
        [(3, 4)],
        {"dim": (0, 1, -1)},
    ),
    "softmax, log_softmax, softmin": Modes(
        lambda x, dim: (x.softmax(dim), x.log_softmax(dim), F.softmin(x, dim)),
        [(3, 4)],
        {"dim": (0, 1, -1)},
    ),
    "scatter_reduce": Modes(
        _scattered,
        [(3, 3), (2, 3)],
        {"reduce": ("sum", "prod", "mean", "amax", "amin"), "include_self": _BOTH},
    ),
    "index_reduce": Modes(
        _by_index,
        [(3, 3), (2, 3)],
        {"reduce": ("prod", "mean", "amax", "amin"), "include_self": _BOTH},
    ),
    "embedding_bag": Modes(_bags, [(4, 3)], {"mode": ("sum", "mean", "max")}),
    "sort, argsort": Modes(
        lambda x, **options: (*torch.sort(x, **options), torch.argsort(x, **options)),
        [(3, 4)],
        {"dim": (0, 1), "descending": _BOTH, "stable": (True,)},
    ),
    "topk": Modes(
        lambda x, **options: torch.topk(x, **options)[0],
        [(3, 4)],
        {"k": (1, 2, 3), "dim": (0, 1), "largest": _BOTH},
    ),
    "bucketize": Modes(
        lambda x, right: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.0, 2.0]), right=right),
        [(3, 4)],
        {"right": _BOTH},
    ),
    "searchsorted": Modes(
        lambda edges, x, side: torch.searchsorted(edges.nan_to_num().sort()[0], x, side=side),
        [(2, 5), (2, 3)],
        {"side": ("left", "right")},
    ),
    "div": Modes(
        torch.div, [(3, 4), (3, 4)], {"rounding_mode": (None, "trunc", "floor")}
    ),
    "gelu": Modes(F.gelu, [(3, 4)], {"approximate": ("none", "tanh")}),
    "round": Modes(torch.round, [(3, 4)], {"decimals": (0, 2, -1)}),
    "mse_loss": _loss(F.mse_loss),
    "l1_loss": _loss(F.l1_loss),
    "smooth_l1_loss": _loss(F.smooth_l1_loss, beta=(0.1, 1.0)),
    "huber_loss": _loss(F.huber_loss, delta=(0.1, 1.0)),
    "binary_cross_entropy": _loss(F.binary_cross_entropy),
    "binary_cross_entropy_with_logits": _loss(F.binary_cross_entropy_with_logits),
    "kl_div": _loss(F.kl_div, log_target=_BOTH),
    "poisson_nll_loss": _loss(F.poisson_nll_loss, log_input=_BOTH, full=_BOTH),
    "soft_margin_loss": _loss(F.soft_margin_loss),
    "nll_loss": _classes(F.nll_loss, ignore_index=(-100, 3)),
    "cross_entropy": _classes(F.cross_entropy, label_smoothing=(0.0, 0.1)),
    "multi_margin_loss": _classes(F.multi_margin_loss, p=(1, 2)),
}  # fmt: skip


def cases_of_modes(name: str) -> list[Case]:
    """A case for each combination that eager torch takes."""
    modes, cases = MODES[name], list[Case]()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) * 2 for shape in modes.shapes]
    for number, options in enumerate(modes.combinations()):

        def of_row(*row: Tensor, options: dict[str, Any] = options) -> Any:
            return modes.function(*row, **options)

        title = ", ".join(f"{key}={value}" for key, value in options.items())
        try:
            cases.append(case_of(f"{name} {title}", number, of_row, tensors))
        except NoSampleError:  # eager torch refuses these arguments together
            continue
    return cases
