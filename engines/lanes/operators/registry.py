"""The registry of functions that lower ATen's operators. `@lowers` adds a function to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from engines.exported import Rule
from engines.lanes.tensor_builder import HALF, Builder, NotKnown
from engines.lanes.tensors import UNKNOWN
from engines.lanes.values import Tensor


@dataclass(frozen=True)
class Operator:
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
        return _dtype(self.results[0])


Lowering = TypeVar("Lowering", bound=Callable[..., Any])
LOWERINGS: dict[str, Callable[..., Any]] = {}
ROWS: dict[str, Rule] = {}
"""The rules for rows: see row_rules.py in engines/exported/."""


def lowers(*names: str, rows: Rule | None = None) -> Callable[[Lowering], Lowering]:
    """Registers a function that lowers the operators with these names, for all overloads.

    `rows` is their rule for rows. They need none if torch tags them as pointwise, or takes them
    apart into operators that have a rule.

    It takes the builder, the op and the operator's arguments: by position up to a `/`, the others
    by their names in ATen. `lowered` drops those in `NO_EFFECT`, and refuses those that it does not
    take. It returns a tensor, or a list if the operator has several results. It raises NotKnown for
    arguments that it cannot lower.
    """

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    if rows is not None:
        has_rule(rows, *names)
    return register


def has_rule(rows: Rule, *names: str) -> None:
    """Registers the rule for rows of operators that have no code here. Each has one place only."""
    if twice := (ROWS.keys() | LOWERINGS.keys()).intersection(names):
        raise ValueError(f"operators in two places: {', '.join(sorted(twice))}")
    ROWS.update(dict.fromkeys(names, rows))


_RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze",
             "unflatten", "flatten", "expand")  # fmt: skip
_FILLS = ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty_like",
          "new_empty", "full", "zeros", "ones")  # fmt: skip
NO_EFFECT = frozenset(
    [
        # They say where and how torch stores the result, or how it computes it.
        "device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad",
        "benchmark", "deterministic", "cudnn_enabled", "allow_tf32", "sparse_grad",
        "embedding.padding_idx", "embedding.scale_grad_by_freq", "embedding.sparse",
        "_native_batch_norm_legit_no_training.momentum", "_cdist_forward.compute_mode",
        # They are seen in the dtype or the shape of the result.
        "dtype", "out_dtype", "out_int32", "half_to_float", "ceil_mode",
        "output_size", "output_padding",
        *(f"{name}.{size}" for name in _RESHAPES for size in (
            "size", "sizes", "shape", "stride", "dim", "start_dim", "end_dim", "implicit")),
        *(f"{name}.{like}" for name in _FILLS for like in ("self", "size")),
        "unfold.size", "slice.end", "slice_scatter.end",
        "copy.self",
        "split.split_size", "split.split_sizes", "split_with_sizes.split_sizes", "chunk.chunks",
        # Where eager torch raises an error, the factor is NaN.
        "linalg_cholesky_ex.check_errors",
        # Every sort is stable, and `topk` always sorts.
        "sort.stable", "topk.sorted",
    ]
)  # fmt: skip
"""The arguments that no lowering reads: `name` for all operators, `operator.name` for one."""


def lowered(
    build: Builder, op: Operator, target: Any, given: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Lowers a call of the ATen operator `target`. Raises NotKnown if there is no code for it.

    An operator whose result has 16 bits is computed in float32 and rounded once, as in eager torch.
    """
    function = LOWERINGS[op.name]
    positional, by_name = arguments(op.name, target, given, named)
    half = {each.dtype for each in op.results if _dtype(each) in HALF}
    if not half:
        return function(build, op, *positional, **by_name)
    rounds = half.pop() if op.name in _ROUNDS_NUMBERS else None
    results = [each.float() if _dtype(each) in HALF else each for each in op.results]
    result = function(
        build,
        Operator(op.name, tuple(results)),
        *_wider(build, positional, rounds),
        **{name: _wider(build, value, rounds) for name, value in by_name.items()},
    )
    if not isinstance(result, list):
        return _rounded(build, result, op.results[0])
    return [_rounded(build, each, to) for each, to in zip(result, op.results, strict=False)]


# Eager torch rounds the numbers among their arguments to 16 bits too. `mul` and `div` do not.
_ROUNDS_NUMBERS = frozenset(["add", "sub", "rsub", "pow", "fmod", "remainder"])


def _wider(build: Builder, given: Any, rounds: torch.dtype | None) -> Any:
    """An argument with float32 instead of 16 bits. `rounds`: the dtype to which numbers and tensors
    of one number are rounded before."""
    if isinstance(given, list | tuple):
        return [_wider(build, each, rounds) for each in given]
    if isinstance(given, Tensor):
        return build.cast(given, "float32") if given.dtype in HALF else given
    if isinstance(given, float) and rounds is not None:
        return torch.tensor(given).to(rounds).item()
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        return given
    given = given.to(rounds) if rounds is not None and not given.dim() else given
    return given.float() if _dtype(given) in HALF else given


def _rounded(build: Builder, made: Any, result: torch.Tensor) -> Any:
    half = isinstance(made, Tensor) and _dtype(result) in HALF
    return build.cast(made, _dtype(result)) if half else made


def arguments(
    name: str, target: Any, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that the operator's lowering takes, by position and by name."""
    own, positional, by_name = _parameters(LOWERINGS[name]), list[Any](), dict[str, Any]()
    for argument, value in _in_order(target, given, named):
        if argument.name in NO_EFFECT or f"{name}.{argument.name}" in NO_EFFECT:
            continue
        if len(positional) < own.positional:
            positional.append(value)
        elif argument.name in own.names:
            by_name[argument.name] = value
        elif not (type(value) is type(argument.default_value) and value == argument.default_value):
            raise NotKnown(f"{name} with {argument.name}={value}")
    if len(positional) < own.needed or not own.needed_names <= by_name.keys():
        raise NotKnown(f"{target}")
    return positional, by_name


def _in_order(
    target: Any, given: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[torch._C.Argument, Any]]:
    """Each argument of a call with its description in the operator's schema."""
    for number, argument in enumerate(target._schema.arguments):
        if number < len(given):
            yield argument, given[number]
        elif argument.name in named:
            yield argument, named[argument.name]


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a lowering behind the builder and the op: the number of those by position
    and of the needed ones among them, and the names of the others."""

    positional: int
    needed: int
    names: frozenset[str]
    needed_names: frozenset[str]


@cache
def _parameters(function: Callable[..., Any]) -> _Parameters:
    """How many positional parameters a lowering has, and the names of its keywords."""
    every = list(inspect.signature(function).parameters.values())
    first = [each for each in every if each.kind is each.POSITIONAL_ONLY][2:]
    rest = [each for each in every if each.kind is not each.POSITIONAL_ONLY]
    return _Parameters(
        len(first),
        sum(each.default is each.empty for each in first),
        frozenset(each.name for each in rest),
        frozenset(each.name for each in rest if each.default is each.empty),
    )


def agrees(made: Any, result: torch.Tensor) -> bool:
    """True if a lowered result has the dtype and the shape that torch gives it."""
    if not isinstance(made, Tensor):
        return True
    return made.dtype == _dtype(result) and made.shape == sizes(result)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with UNKNOWN for a size that is known only at run time."""
    return tuple(size if isinstance(size, int) else UNKNOWN for size in tensor.shape)
