"""Which function lowers which of ATen's operators. A new one is a function with `@lowers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engines.lanes.tensors import UNKNOWN


@dataclass(frozen=True)
class Step:
    """An operator in the program for one row.

    `results` are torch's own stand-ins for what it gives, with shape and dtype and no memory.
    """

    name: str
    results: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sizes(self.results[0])

    @property
    def dtype(self) -> str:
        return str(self.results[0].dtype).removeprefix("torch.")


Lowering = TypeVar("Lowering", bound=Callable[..., Any])
LOWERINGS: dict[str, Callable[..., Any]] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Says that a function lowers the operators of these names, whatever their overloads.

    It takes the builder, the step and the operator's arguments, and returns a tensor, or as many
    as the operator has results. It raises NotKnown for a use that it has no code for.
    """

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return register


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape; a size that is known only at run time is UNKNOWN."""
    return tuple(size if isinstance(size, int) else UNKNOWN for size in tensor.shape)
