"""The registry of functions that lower ATen's operators. `@lowers` adds a function to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engines.lanes.tensors import UNKNOWN


@dataclass(frozen=True)
class Step:
    """An operator in the program for one row.

    `results` are torch's fake tensors for its results, with shape and dtype but without memory.
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
    """Registers a function that lowers the operators with these names, for all overloads.

    It takes the builder, the step and the operator's arguments. It returns a tensor, or a list if
    the operator has several results. It raises NotKnown for arguments that it cannot lower.
    """

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return register


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with UNKNOWN for a size that is known only at run time."""
    return tuple(size if isinstance(size, int) else UNKNOWN for size in tensor.shape)
