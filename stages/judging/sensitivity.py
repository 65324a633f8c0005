"""How far answers are from the eager model's, and which differences its rounding errors explain.

Engines round in other places, so an artifact may lie as far from the eager model as that lies from
exact arithmetic. The captured program is run in float64 as it is, and several times with random
rounding: inputs and weights are changed by a few units in the last place of float32, and the result
of each operation is rounded up or down at random (Monte Carlo arithmetic: D. S. Parker, 1997). A
row in which these answers differ as much as the artifact's proves nothing: it is ill-conditioned,
or a near tie (two neighbours equally near).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from engines.base import Executable
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from soa.memory import argument_tensors, read_block
from soa.signature import Signature
from soa.text import logger, number
from stages.reference import Arrays, Case, filled_collections, has_few_digits, run_session

log = logger("soa-pipeline")

CHANGE = 2.0**-21
"""The largest relative change of an input or weight: four roundings of float32."""
_ROUNDING = 2.0**-22  # the largest relative change of a result
_TRIES = 12
_FACTOR = 4.0  # a sum of many roundings may be further off than the changes tried here
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _InDouble(TorchDispatchMode):
    """A mode in which torch runs each operation in float64.

    With a `seed`, inputs and weights are changed a little, and each result is rounded to float32,
    up or down at random; a result that is exact in float32 stays as it is. With None nothing is
    changed.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        # By id: each narrow tensor that was seen, and its float64. The first is stored so that no
        # other tensor gets its id.
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, which torch passes to this method, on arguments in float64."""
        args, kwargs = tree_map(self._widen, (args, kwargs or {}))
        result = function(*args, **kwargs)
        if self._generator is not None:
            tree_map(self._round, result)
        return result

    def _widen(self, value: Any) -> Any:
        """An argument of an operation, in float64 if it is a tensor of narrower floats. A narrower
        dtype becomes float64; any other argument is returned as it is."""
        if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
            if id(value) not in self._seen:
                self._seen[id(value)] = value, self._change_if_seeded(value.double())
            _, wide = self._seen[id(value)]
            return wide
        return torch.float64 if value in _NARROW else value

    def _change_if_seeded(self, wide: torch.Tensor) -> torch.Tensor:
        """The values of an input or a weight, which come from outside the program. If there is a
        seed, those with many digits are changed at random; short ones may be categories."""
        if self._generator is None:
            return wide
        return torch.where(has_few_digits(wide), wide, self._change_at_random(wide, CHANGE))

    def _round(self, result: Any) -> None:
        """Round a result in place, since an operation may have written it into a tensor that is
        read again. Only float64 tensors are rounded."""
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64:
            return
        exact = (result == result.float().double()) | result.isnan()
        if not exact.all():
            result.copy_(torch.where(exact, result, self._change_at_random(result, _ROUNDING)))

    def _change_at_random(self, wide: torch.Tensor, most: float) -> torch.Tensor:
        """A copy of the values, each changed at random by at most the fraction `most`, and rounded
        to float32."""
        share = torch.rand(wide.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (wide * (1 + most * share)).float().double()


@dataclass(frozen=True)
class Answers:
    """An artifact's and the eager model's answers for one output. All four tensors have one shape.

    `band` is the tolerance of each element, which is > 0. `apart` is the distance of the two
    answers, see `distance`.
    """

    artifact: torch.Tensor
    eager: torch.Tensor
    band: torch.Tensor
    apart: torch.Tensor

    @classmethod
    def of(cls, artifact: torch.Tensor, expected: torch.Tensor, allowed: Tolerance) -> Answers:
        """Compare an artifact's answers with the eager model's, `expected`, which may have another
        shape and dtype. `allowed` is the tolerance of the output."""
        eager = expected.reshape(artifact.shape).to(artifact.dtype)
        apart = distance(artifact, eager)
        if not artifact.is_floating_point():  # different large int64 may be the same float64
            apart = torch.where(artifact == eager, 0.0, apart.clamp_min(1.0))
        size = eager.double().nan_to_num(0.0, 0.0, 0.0).abs()
        # A tolerance of 0 is made positive, since deviations are divided by it.
        band = (allowed.atol + allowed.rtol * size).clamp_min(1e-300)
        return cls(artifact, eager, band, apart)

    @property
    def outside(self) -> torch.Tensor:
        """For each element: whether the answers are further apart than the tolerance."""
        return self.apart > self.band

    @property
    def finite(self) -> torch.Tensor:
        """For each element: whether both answers are finite. Integers and bools always are."""
        return self.artifact.isfinite() & self.eager.isfinite()

    def describe_first(self, name: str, bad: torch.Tensor) -> str:
        """A sentence about the first element that `bad` marks, with both answers. `name` is the
        output's name."""
        row = int(row_maxima(bad).double().argmax())
        element = int(elements_by_row(bad)[row].double().argmax())
        artifact = number(float(elements_by_row(self.artifact)[row, element]))
        eager = number(float(elements_by_row(self.eager)[row, element]))
        return f"output {name!r} differs from eager, row {row}: {artifact}, eager has {eager}"


@dataclass(frozen=True)
class InFloat64:
    """A comparison with the model in float64, by output.

    `exact` are the model's answers in float64, `unexplained` marks the elements that are outside
    the tolerance, and whose difference the model's rounding errors do not explain.
    """

    exact: Mapping[str, torch.Tensor]
    unexplained: Mapping[str, torch.Tensor]


def compare_in_float64(
    signature: Signature, program: Path, inputs: Arrays, case: Case, answers: Mapping[str, Answers]
) -> InFloat64 | None:
    """Run the captured program in float64, as it is and with random rounding, and find the
    differences in `answers` that rounding errors explain.

    Returns None if the program does not run in float64; the error is then in the log.
    """
    try:
        model = open_candidate("exported", program, torch.device("cpu"))
        exact = _run_in_double(model, signature, inputs, case, None)
        others = [run_session(Session(signature, model), inputs, case)]
        others += [_run_in_double(model, signature, inputs, case, seed) for seed in range(_TRIES)]
    except Exception:  # torch raises many types
        log.info("the program does not run in float64", exc_info=True)
        return None
    unexplained = {
        name: _find_unexplained(answer, exact[name], [other[name] for other in others])
        for name, answer in answers.items()
    }
    return InFloat64(exact, unexplained)


def _find_unexplained(
    answers: Answers, exact: torch.Tensor, others: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Mark the elements outside the tolerance whose difference rounding errors do not explain.

    `others` are answers of the model itself that were computed in other ways, in float32 or with
    random rounding. A row is explained if the artifact lies no further from eager than its
    tolerance, plus `_FACTOR` times the largest distance of the others from `exact`.
    """
    moved = torch.stack([row_maxima(distance(other, exact) / answers.band) for other in others])
    largest = moved.amax(0)  # by row, in tolerances
    deviation = row_maxima(answers.apart / answers.band)
    explained = (deviation <= 1 + _FACTOR * largest) | (largest.isinf() & deviation.isinf())
    # One bool for each row, in a shape that is broadcast over the elements of the row.
    over_elements = explained.reshape(-1, *[1] * (answers.apart.ndim - 1))
    return answers.outside & ~over_elements


def _run_in_double(
    program: Executable, signature: Signature, inputs: Arrays, case: Case, seed: int | None
) -> dict[str, torch.Tensor]:
    """Run the program in float64 arithmetic. Returns its outputs by name. `seed`: see `_InDouble`.

    An output's columns may hold narrower floats only. So an answer is split over two collections:
    `high` gets the rounded number, `low` what the rounding cut off, and their sum is returned.
    """
    cpu = torch.device("cpu")
    sources, high = filled_collections(signature, inputs, case, cpu)
    _, low = filled_collections(signature, inputs, case, cpu)
    arguments = argument_tensors(signature, {**sources, **high}, case)
    remainders = argument_tensors(signature, {**sources, **low}, case)
    floats = [
        i
        for i, argument in enumerate(signature.arguments)
        if argument.role == "output" and arguments[i].is_floating_point()
    ]
    doubles = list(arguments)
    for i in floats:
        doubles[i] = arguments[i].double()
    with _InDouble(seed):
        program(doubles)
    for i in floats:
        arguments[i].copy_(doubles[i])
        remainder = doubles[i] - arguments[i].double()
        remainders[i].copy_(remainder.nan_to_num(0.0, 0.0, 0.0))
    answers = {}
    for bound in signature.outputs:
        value = read_block(bound, high[bound.block.collection])
        answers[bound.name] = value.double()
        if value.is_floating_point():
            answers[bound.name] += read_block(bound, low[bound.block.collection]).double()
    return answers


def elements_by_row(values: torch.Tensor) -> torch.Tensor:
    """The values as a matrix `(n, elements of a row)`. A scalar becomes `(1, 1)`."""
    return values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)


def row_maxima(values: torch.Tensor) -> torch.Tensor:
    """The largest element of each row, `(n,)`."""
    return elements_by_row(values).amax(1)


def distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """|first - second| for each element, as float64. It is 0 if both are NaN or the same infinity,
    and infinity for any other pair in which one is not finite."""
    first, second = first.double(), second.double()
    equal = (first == second) | (first.isnan() & second.isnan())
    finite = first.isfinite() & second.isfinite()
    return torch.where(equal, 0.0, torch.where(finite, (first - second).abs(), torch.inf))
