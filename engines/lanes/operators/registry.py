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
        """The shape of the first result."""
        return sizes(self.results[0])

    @property
    def dtype(self) -> str:
        """The dtype of the first result, such as "float32"."""
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
    """Registers the rule for rows of operators that have no code here. ValueError if one has a rule
    already."""
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
    build: Builder, op: Operator, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Lowers a call of the ATen operator `target`. Raises NotKnown if there is no code for it.

    An operator whose result has 16 bits is computed in float32 and rounded once, as in eager torch.
    """
    lowering = LOWERINGS[op.name]
    positional, by_name = arguments(op.name, target, args, kwargs)
    narrow = {result.dtype for result in op.results if _dtype(result) in HALF}
    if not narrow:
        return lowering(build, op, *positional, **by_name)
    rounds = narrow.pop() if op.name in _ROUNDS_NUMBERS else None
    wide = [result.float() if _dtype(result) in HALF else result for result in op.results]
    computed = lowering(
        build,
        Operator(op.name, tuple(wide)),
        *_widened(build, positional, rounds),
        **{name: _widened(build, value, rounds) for name, value in by_name.items()},
    )
    if not isinstance(computed, list):
        return _rounded(build, computed, op.results[0])
    pairs = zip(computed, op.results, strict=False)
    return [_rounded(build, tensor, result) for tensor, result in pairs]


# Eager torch rounds the numbers among their arguments to 16 bits too. `mul` and `div` do not.
_ROUNDS_NUMBERS = frozenset(["add", "sub", "rsub", "pow", "fmod", "remainder"])


def _widened(build: Builder, argument: Any, rounds: torch.dtype | None) -> Any:
    """An argument with float32 instead of 16 bits. `rounds`: the dtype to which numbers and tensors
    of one number are rounded before."""
    if isinstance(argument, list | tuple):
        return [_widened(build, inner, rounds) for inner in argument]
    if isinstance(argument, Tensor):
        return build.cast(argument, "float32") if argument.dtype in HALF else argument
    if isinstance(argument, float) and rounds is not None:
        return torch.tensor(argument).to(rounds).item()
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    if rounds is not None and not argument.dim():
        argument = argument.to(rounds)
    return argument.float() if _dtype(argument) in HALF else argument


def _rounded(build: Builder, tensor: Any, result: torch.Tensor) -> Any:
    """The tensor with the dtype of torch's `result`, if that has 16 bits."""
    narrow = isinstance(tensor, Tensor) and _dtype(result) in HALF
    return build.cast(tensor, _dtype(result)) if narrow else tensor


def arguments(
    name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call that the operator's lowering takes, by position and by name. NotKnown
    if it needs one that is missing, or if the call has another whose value is not the default."""
    parameters = _parameters(LOWERINGS[name])
    positional, by_name = list[Any](), dict[str, Any]()
    for argument, value in _in_order(target, args, kwargs):
        default = argument.default_value
        if argument.name in NO_EFFECT or f"{name}.{argument.name}" in NO_EFFECT:
            continue
        if len(positional) < parameters.positional:
            positional.append(value)
        elif argument.name in parameters.names:
            by_name[argument.name] = value
        elif type(value) is not type(default) or value != default:
            raise NotKnown(f"{name} with {argument.name}={value}")
    if len(positional) < parameters.needed or not parameters.needed_names <= by_name.keys():
        raise NotKnown(f"{target}")
    return positional, by_name


def _in_order(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch._C.Argument, Any]]:
    """Each argument of a call with its description in the operator's schema."""
    for number, argument in enumerate(target._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a lowering behind the builder and the op: the number of those by position
    and of those without a default among them, and the names of the others."""

    positional: int
    needed: int
    names: frozenset[str]
    needed_names: frozenset[str]


@cache
def _parameters(function: Callable[..., Any]) -> _Parameters:
    """The parameters of a lowering."""
    parameters = inspect.signature(function).parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_ONLY][2:]
    by_name = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    return _Parameters(
        positional=len(by_position),
        needed=len([p for p in by_position if p.default is p.empty]),
        names=frozenset(p.name for p in by_name),
        needed_names=frozenset(p.name for p in by_name if p.default is p.empty),
    )


def agrees(lowered: Any, result: torch.Tensor) -> bool:
    """True if a lowered result has the dtype and the shape that torch gives it. One that is no
    tensor of rows was computed by torch itself."""
    if not isinstance(lowered, Tensor):
        return True
    return lowered.dtype == _dtype(result) and lowered.shape == sizes(result)


def _dtype(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with UNKNOWN for a size that is known only at run time."""
    return tuple(size if isinstance(size, int) else UNKNOWN for size in tensor.shape)
