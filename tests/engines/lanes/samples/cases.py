"""The cases of an operator: torch's own samples as one row, and the rows that each of them gets.

`op_db` of torch.testing has, for each operator, the arguments that torch tests itself with. The
tensors among them become a row. The other rows have the same numbers in another order or on another
scale, so that most of them stay in the operator's domain. The last rows have special values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.engines.lanes.harness import MOST

Results = tuple[Tensor, ...]
RowFunction = Callable[..., Results]

_LARGEST = 2500  # elements of a row, of all inputs or of all results
_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, -1e-40, 1e20)
ORDINARY = MOST - 3 * len(_SPECIAL)
"""The number of rows without special values; these come first."""
_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class NoSampleError(Exception):
    """A sample, or an operator, cannot be a case; the text says why."""


@dataclass(frozen=True)
class Sample:
    """One sample of an operator. `inputs`: its tensors, each with a value for each row."""

    operator: str
    number: int
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A function of one row of the first `takes` inputs of a sample, computed in eager torch.

    `kind`: "rows", all tensors are from rows; "constant", all but the first are constants; "views",
    all are transposed, flipped or sliced in front of the operator.
    """

    sample: Sample
    kind: str
    takes: int
    function: RowFunction

    @property
    def title(self) -> str:
        """A name that no other case has."""
        return f"{self.sample.operator}, sample {self.sample.number}, {self.kind}"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs that the function takes, each with a value for each row."""
        return self.sample.inputs[: self.takes]

    @cached_property
    def wanted(self) -> list[Results | None]:
        """The results of eager torch for each row; None if it raises an error for a row."""
        return [self._row(row) for row in range(MOST)]

    def precise(self, row: int) -> Results | None:
        """The results of eager torch in float64."""
        return self._row(row, torch.float64)

    def _row(self, row: int, dtype: torch.dtype | None = None) -> Results | None:
        """The results of eager torch for one row, whose floats have this dtype, or their own."""
        tensors = [values[row].clone() for values in self.inputs]
        if dtype is not None:
            tensors = [x.to(dtype) if x.is_floating_point() else x for x in tensors]
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                return self.function(*tensors)
        except Exception:  # each operator has its own errors
            return None


def cases_of(operator: Any, most: int, seed: int) -> list[Case]:
    """The cases of at most `most` samples of an OpInfo. NoSampleError if none fits."""
    cases: list[Case] = []
    why = "it has no sample"
    for number, sample in enumerate(_chosen(_samples(operator), most)):
        try:
            cases += _cases(title_of(operator), number, operator, sample, seed)
        except NoSampleError as reason:
            why = str(reason)
    if not cases:
        raise NoSampleError(why)
    return cases


def case_of(
    name: str, number: int, function: Callable[..., Any], tensors: Sequence[Tensor]
) -> Case:
    """A case whose first row are these tensors. NoSampleError if eager torch refuses them."""

    def call(*row: Tensor) -> Results:
        return _results(function(*row))

    _called(call, tensors)
    _check_result(call, tensors)
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(_rows(tensor, generator) for tensor in tensors)
    return Case(Sample(name, number, inputs), "rows", len(inputs), call)


def title_of(operator: Any) -> str:
    """The name of an OpInfo, with that of its variant."""
    variant = operator.variant_test_name
    return f"{operator.name}.{variant}" if variant else str(operator.name)


def _samples(operator: Any) -> list[Any]:
    """The samples for float32, else for int64, else for bool."""
    supported = operator.supported_dtypes("cpu")
    dtype = next(
        (d for d in (torch.float32, torch.int64, torch.bool) if d in supported), torch.float32
    )
    if dtype not in supported:
        raise NoSampleError("it supports neither float32 nor int64 nor bool on a CPU")
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(operator.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception as error:
        raise NoSampleError(f"torch cannot make its samples here: {_line(error)}") from None


def _chosen(samples: Sequence[Any], most: int) -> list[Any]:
    """The samples that differ most: one for each set of arguments by name and of dimensions."""
    fit = [s for s in samples if 0 < _elements(s) <= _LARGEST]
    kinds: dict[str, Any] = {}
    for sample in fit:
        tensors = [t.dim() for t in _tensors(sample)]
        kinds.setdefault(f"{tensors} {_plain(sample.args)} {_plain(sample.kwargs)}", sample)
    every = list(kinds.values())
    if not every and samples:
        raise NoSampleError("its samples have no tensor, or one without elements or with too many")
    step = max(len(every) / most, 1.0)
    return [every[int(k * step)] for k in range(min(most, len(every)))]


def _tensors(sample: Any) -> list[Tensor]:
    """The tensors of a sample's arguments."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _elements(sample: Any) -> int:
    """The number of elements of a sample's tensors; 0 if one of them has none."""
    sizes = [tensor.numel() for tensor in _tensors(sample)]
    return 0 if 0 in sizes else sum(sizes)


def _plain(arguments: Any) -> str:
    """The arguments as text, in which all tensors are alike."""
    return repr(pytree.tree_map(lambda x: "T" if isinstance(x, Tensor) else x, arguments))


def _cases(name: str, number: int, operator: Any, sample: Any, seed: int) -> Iterator[Case]:
    """The cases of each kind of a sample, the `number`-th of an OpInfo."""
    if "empty" in name:
        raise NoSampleError("its result is memory as it was")
    leaves, shape = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    own = [leaves[k].detach() for k in places]
    if any(x.dtype not in _DTYPES or x.layout != torch.strided for x in own):
        raise NoSampleError("its samples are complex or sparse")
    takes_floats = torch.float32 in operator.supported_dtypes("cpu")
    if takes_floats and not any(x.is_floating_point() for x in own):
        raise NoSampleError("no sample has a tensor of numbers")
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(_rows(x, generator) for x in own)

    def call(*tensors: Tensor) -> Results:
        arguments = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        first, others, named = pytree.tree_unflatten(arguments, shape)
        return _defined(name, _results(operator(first, *others, **named)))

    writes = any(x._version for x in _called(call, own))  # torch counts writes into a tensor

    def apart(*tensors: Tensor) -> Results:
        return call(*[x.clone() for x in tensors]) if writes else call(*tensors)

    _check_result(apart, own)
    of_rows = Sample(name, number, inputs)
    yield Case(of_rows, "rows", len(inputs), apart)
    if len(inputs) > 1:
        yield Case(of_rows, "constant", 1, lambda first: apart(first, *_constants(first, own[1:])))
    yield Case(of_rows, "views", len(inputs), lambda *row: apart(*[_viewed(x) for x in row]))


def _called(call: RowFunction, own: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, after a call with them. NoSampleError if eager torch refuses them."""
    copies = [x.clone() for x in own]
    try:
        call(*copies)
    except NoSampleError:
        raise
    except Exception as error:
        raise NoSampleError(f"eager torch refuses the sample: {_line(error)}") from None
    return copies


def _check_result(call: RowFunction, own: Sequence[Tensor]) -> None:
    """NoSampleError if the results are random, or have no elements or too many."""
    torch.manual_seed(1)
    once = call(*[x.clone() for x in own])
    torch.manual_seed(2)
    again = call(*[x.clone() for x in own])
    for first, second in zip(once, again, strict=True):
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise NoSampleError("it is random")
    if not 0 < sum(result.numel() for result in once) <= _LARGEST:
        raise NoSampleError("its results have no element, or too many")


def _defined(name: str, results: Results) -> Results:
    """The results that torch defines."""
    if name == "topk":
        return results[:1]  # it may number equal elements in any order
    if name == "linalg.cholesky_ex":  # without a factor, LAPACK leaves what it had
        factor, info = results
        return torch.where(info[..., None, None] == 0, factor, torch.nan), info
    return results


def _results(result: Any) -> Results:
    """The tensors of an operator's result. NoSampleError if no column can hold them."""
    tensors = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    if any(x.layout != torch.strided for x in tensors):
        raise NoSampleError("its result is sparse")
    if any(x.is_complex() for x in tensors):
        raise NoSampleError("its result is complex")
    if any(x.dtype not in _DTYPES for x in tensors):
        raise NoSampleError("its result has a dtype that no column has")
    tensors = tuple(x for x in tensors if x.numel())
    if not tensors:
        raise NoSampleError("its result is no tensor")
    return tensors


def _constants(like: Tensor, own: Sequence[Tensor]) -> list[Tensor]:
    """The sample's other tensors, in float64 if the first one is."""
    wide = like.dtype == torch.float64
    return [x.double() if wide and x.is_floating_point() else x for x in own]


def _viewed(x: Tensor) -> Tensor:
    """A view with other strides, with the shape of `x` and its numbers in another order."""
    if x.dim() > 1 and x.shape[-1] == x.shape[-2]:
        return x.transpose(-1, -2)
    if x.dim() > 1:
        turned = x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2])
        return turned.transpose(-1, -2)
    if x.dim() == 1:
        return torch.cat([x, x])[::2] if x.shape[0] % 2 else x.flip(0)
    return torch.stack([x, x])[1]


def _rows(own: Tensor, generator: torch.Generator) -> Tensor:
    """Values for each row: the sample's own, then others, then special ones.

    Of three rows, one has the elements in another order, one in another order and each on a scale
    of its own, and one in the same order, all on one scale. The special values come three times:
    once from some element to the end, then twice as one element."""
    rows = [own]
    for row in range(1, MOST):
        x = own.flatten().roll(row // 3 if row % 3 else 0).reshape(own.shape)
        if own.is_floating_point() and row % 3 != 1:
            scale = torch.rand(own.shape if row % 3 == 2 else (), generator=generator)
            x = x * (0.5 + scale.to(own.dtype))
        rows.append(x)
    values = torch.stack(rows)
    if own.is_floating_point():
        for k, special in enumerate(_SPECIAL * 3):
            elements = values[ORDINARY + k].view(-1)
            begin = k % len(elements)
            end = len(elements) if k < len(_SPECIAL) else begin + 1
            elements[begin:end] = special
    return values


def _line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
