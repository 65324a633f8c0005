"""How much a model's own answers move under rounding errors.

Engines round in other places, so an artifact may lie as far from the eager model as that lies from
exact arithmetic. The captured program is run in float64 as it is, and several times with random
rounding: inputs and weights are changed by a few units in the last place of float32, and the result
of each operation is rounded up or down at random (Monte Carlo arithmetic: D. S. Parker, 1997). A
row in which these answers differ as much as the artifact's proves nothing: it is ill-conditioned,
or a near tie (two neighbours equally near).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runtime.opening import open_candidate
from soa.memory import argument_tensors, read_block
from soa.signature import Signature
from stages.reference import Arrays, Case, few_digits, filled_collections

Answers = Mapping[str, torch.Tensor]

CHANGE = 2.0**-21
"""The largest relative change of an input or weight: four roundings of float32."""
_ROUNDING = 2.0**-22  # the largest relative change of a result
_TRIES = 12
_FACTOR = 4.0  # a sum of many roundings may be further off than the changes tried here
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _InDouble(TorchDispatchMode):
    """Runs each operation in float64. With `seed`, numbers from outside are changed, and each
    result is rounded to float32 at random; what is exact in float32 stays as it is."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        found = function(*args, **kwargs)
        if self._generator is not None:
            tree_map(self._round, found)
        return found

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
            known = self._kept.get(id(value))
            if known is None:  # the tensor is kept too, so that its id stays its own
                known = self._kept[id(value)] = (value, self._from_outside(value.double()))
            return known[1]
        return torch.float64 if value in _NARROW else value

    def _from_outside(self, wide: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            return wide
        return torch.where(few_digits(wide), wide, self._changed(wide, CHANGE))

    def _round(self, found: Any) -> None:
        """Round a result in place: an operation may have written it into another tensor."""
        if not isinstance(found, torch.Tensor) or found.dtype != torch.float64:
            return
        exact = (found == found.float().double()) | found.isnan()
        if not exact.all():
            found.copy_(torch.where(exact, found, self._changed(found, _ROUNDING)))

    def _changed(self, wide: torch.Tensor, most: float) -> torch.Tensor:
        share = torch.rand(wide.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (wide * (1 + most * share)).float().double()


class Sensitivity:
    """The captured program, run in float32, in float64, and with random rounding."""

    def __init__(self, signature: Signature, program: Path) -> None:
        self._signature = signature
        self._program = open_candidate("exported", program, torch.device("cpu"))

    def exact(self, inputs: Arrays, case: Case) -> dict[str, torch.Tensor]:
        """The answers in float64 arithmetic, as float64."""
        return self._in_double(inputs, case, None)

    def moves(
        self, inputs: Arrays, case: Case, exact: Answers, bands: Answers
    ) -> dict[str, torch.Tensor]:
        """By output, how far the model's answers to a row move, in units of its tolerance: `(n,)`.

        `bands`: the tolerance of each element. The number is the largest over a row's elements.
        """
        found = {name: torch.zeros(len(rows(band))) for name, band in bands.items()}
        others = (self._in_double(inputs, case, seed) for seed in range(_TRIES))
        for other in (self._in_float(inputs, case), *others):
            for name, band in bands.items():
                apart = rows(distance(other[name], exact[name]) / band).amax(1)
                found[name] = torch.maximum(found[name], apart.float())
        return found

    def _in_float(self, inputs: Arrays, case: Case) -> dict[str, torch.Tensor]:
        signature = self._signature
        given, written = filled_collections(signature, inputs, case, torch.device("cpu"))
        self._program(argument_tensors(signature, {**given, **written}, case))
        return {
            b.name: read_block(b, written[b.block.collection]).double() for b in signature.outputs
        }

    def _in_double(self, inputs: Arrays, case: Case, seed: int | None) -> dict[str, torch.Tensor]:
        signature = self._signature
        given, high = filled_collections(signature, inputs, case, torch.device("cpu"))
        _, low = filled_collections(signature, inputs, case, torch.device("cpu"))
        arguments = argument_tensors(signature, {**given, **high}, case)
        rest = argument_tensors(signature, {**given, **low}, case)
        writes = [argument.role == "output" for argument in signature.arguments]
        doubles = [
            argument.double() if output and argument.is_floating_point() else argument
            for argument, output in zip(arguments, writes, strict=True)
        ]
        with _InDouble(seed):
            self._program(doubles)
        # Two columns of the narrow dtype hold a double: the number, and what rounding took.
        for k, output in enumerate(writes):
            if output and arguments[k].is_floating_point():
                arguments[k].copy_(doubles[k])
                taken = doubles[k] - arguments[k].double()
                rest[k].copy_(taken.nan_to_num(0.0, 0.0, 0.0))
        found = {}
        for bound in signature.outputs:
            value = read_block(bound, high[bound.block.collection])
            found[bound.name] = value.double()
            if value.is_floating_point():
                found[bound.name] += read_block(bound, low[bound.block.collection]).double()
        return found


def rows(values: torch.Tensor) -> torch.Tensor:
    """The elements of each row: `(n, elements of a row)`."""
    return values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """|one - other|; 0 for equal infinities and for NaN in both, else infinity if one is not
    finite."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    finite = one.isfinite() & other.isfinite()
    return torch.where(same, 0.0, torch.where(finite, (one - other).abs(), torch.inf))


def explained(deviation: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
    """Which rows' deviations, `(n,)` in units of the tolerance, the model's own moves explain."""
    return (deviation <= 1 + _FACTOR * moves) | (moves.isinf() & deviation.isinf())
