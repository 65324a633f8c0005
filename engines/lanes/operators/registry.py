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
from engines.lanes.values import Tensor, Value


@dataclass(frozen=True)
class Operator:
    """A call of an ATen operator in the program for one row.

    `name` is without the overload, such as "add". `results` are torch's fake tensors for the
    results, with shape and dtype but without memory.
    """

    name: str
    results: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: str) -> Operator:
        """A call with one result, of this shape and dtype."""
        return cls(name, (torch.empty(shape, dtype=getattr(torch, dtype), device="meta"),))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return shape_of(self.results[0])

    @property
    def dtype(self) -> str:
        """The dtype of the first result, such as "float32"."""
        return dtype_name(self.results[0])


Lowering = TypeVar("Lowering", bound=Callable[..., Any])
LOWERINGS: dict[str, Callable[..., Any]] = {}
"""The function that lowers each operator, by the operator's name without the overload."""
ROWS: dict[str, Rule] = {}
"""The rule for rows of each operator: see row_rules.py in engines/exported/."""


def lowers(*names: str, rows: Rule | None = None) -> Callable[[Lowering], Lowering]:
    """A decorator that registers a function to lower all overloads of the operators named here.

    `rows` is the operators' rule for rows. They need none if torch tags them as pointwise, or takes
    them apart into operators that have a rule.

    The function takes the builder, the Operator and the arguments of the call: by position up to a
    `/`, the others by their names in ATen. It does not get those in `NO_EFFECT`, and a call with
    other arguments that it does not take is refused. It returns a tensor, or a list if the operator
    has several results. It raises NotKnown for arguments that it cannot lower.
    """

    def register(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    if rows is not None:
        register_rule(rows, *names)
    return register


def register_rule(rows: Rule, *names: str) -> None:
    """Registers the rule for rows of these operators. Raises ValueError if one of them has a rule
    or a lowering already."""
    if registered := (ROWS.keys() | LOWERINGS.keys()).intersection(names):
        raise ValueError(f"operators in two places: {', '.join(sorted(registered))}")
    ROWS.update(dict.fromkeys(names, rows))


_RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze",
             "unflatten", "flatten", "expand")  # fmt: skip
_FILLS = ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty_like",
          "new_empty", "full", "zeros", "ones")  # fmt: skip
NO_EFFECT = frozenset(
    [
        # These say where and how torch stores the result, or how it computes it.
        "device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad",
        "benchmark", "deterministic", "cudnn_enabled", "allow_tf32", "sparse_grad",
        "embedding.padding_idx", "embedding.scale_grad_by_freq", "embedding.sparse",
        "_native_batch_norm_legit_no_training.momentum", "_cdist_forward.compute_mode",
        # These are seen in the dtype or the shape of the result.
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

# Operators of which eager torch rounds all arguments, also integers and plain numbers, to 16 bits
# if the result has 16 bits. (`maximum`, `where` and their like give the same numbers either way.)
_ROUNDS_ARGUMENTS = frozenset(["add", "sub", "rsub", "mul", "div", "floor_divide", "fmod",
                               "remainder", "pow", "atan2", "hypot"])  # fmt: skip
# Those of them of which it takes the second argument as it is if that is one number for all rows.
_TAKES_SECOND_AS_IS = frozenset(["mul", "div", "floor_divide"])


def lower_call(
    build: Builder, op: Operator, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Lowers a call of the ATen operator `target`: adds its tensors to the program, and returns
    what the operator's lowering returns. Raises NotKnown if there is no code for the call.

    An operator whose result has 16 bits is computed in float32 and rounded once, as in eager torch.
    """
    lowering = LOWERINGS[op.name]
    positional, by_name = bind_arguments(op.name, target, args, kwargs)
    half_dtypes = {dtype_name(result) for result in op.results}.intersection(HALF)
    if not half_dtypes:
        return lowering(build, op, *positional, **by_name)
    rounding = half_dtypes.pop() if op.name in _ROUNDS_ARGUMENTS else None
    widened = [_widen(build, value, rounding) for value in positional]
    if op.name in _TAKES_SECOND_AS_IS and _is_one_number(positional[1]):
        widened[1] = _widen(build, positional[1], None)
    wide = [result.float() if dtype_name(result) in HALF else result for result in op.results]
    computed = lowering(
        build,
        Operator(op.name, tuple(wide)),
        *widened,
        **{name: _widen(build, value, rounding) for name, value in by_name.items()},
    )
    if not isinstance(computed, list):
        return _narrow(build, computed, op.results[0])
    pairs = zip(computed, op.results, strict=False)
    return [_narrow(build, tensor, result) for tensor, result in pairs]


def _widen(build: Builder, argument: Any, rounding: str | None) -> Any:
    """Returns an argument with float32 in place of 16 bits. If `rounding` is not None, numbers and
    tensors are rounded to this dtype before."""
    if isinstance(argument, list | tuple):
        return [_widen(build, inner, rounding) for inner in argument]
    if rounding is not None:
        argument = _round(build, argument, rounding)
    if isinstance(argument, Tensor | torch.Tensor) and dtype_name(argument) in HALF:
        return _cast(build, argument, "float32")
    return argument


def _round(build: Builder, argument: Any, dtype: str) -> Any:
    """Returns a number or a tensor rounded to a dtype; any other argument as it is."""
    if isinstance(argument, int | float):
        return torch.tensor(argument).to(getattr(torch, dtype)).item()
    if isinstance(argument, Value):
        argument = build.as_tensor(argument)
    return _cast(build, argument, dtype)


def _is_one_number(argument: Any) -> bool:
    """True if an argument is one number for all rows, also as a tensor of torch."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() == 1
    return not isinstance(argument, Tensor)


def _narrow(build: Builder, computed: Any, result: torch.Tensor) -> Any:
    """Returns a computed tensor cast to the dtype of torch's `result`, if that has 16 bits; else
    the tensor itself."""
    dtype = dtype_name(result)
    return _cast(build, computed, dtype) if dtype in HALF else computed


def _cast(build: Builder, argument: Any, dtype: str) -> Any:
    """Returns a tensor of the program or of torch cast to a dtype; any other argument as it is."""
    if isinstance(argument, torch.Tensor):
        return argument.to(getattr(torch, dtype))
    return build.cast(argument, dtype) if isinstance(argument, Tensor) else argument


def bind_arguments(
    name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns those arguments of a call that the operator's lowering takes: by position, and by
    name. `name` is that of the operator, and `target` the overload that is called.

    Raises NotKnown if the lowering needs an argument that the call does not have, or if the call
    has one that the lowering does not take and whose value is not the default.
    """
    parameters = _read_parameters(LOWERINGS[name])
    positional, by_name = list[Any](), dict[str, Any]()
    for argument, value in _with_schema(target, args, kwargs):
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


def _with_schema(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch._C.Argument, Any]]:
    """Yields each argument that a call gives, with its description in the operator's schema, in the
    order of the schema."""
    for number, argument in enumerate(target._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a lowering after the builder and the Operator.

    positional, needed : the number of those by position, and of those that have no default.
    names, needed_names : the names of all others, and of those that have no default.
    """

    positional: int
    needed: int
    names: frozenset[str]
    needed_names: frozenset[str]


@cache
def _read_parameters(function: Callable[..., Any]) -> _Parameters:
    """Reads the parameters of a lowering from its signature."""
    parameters = inspect.signature(function).parameters.values()
    # [2:]: without the builder and the Operator.
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_ONLY][2:]
    by_name = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    return _Parameters(
        positional=len(by_position),
        needed=len([p for p in by_position if p.default is p.empty]),
        names=frozenset(p.name for p in by_name),
        needed_names=frozenset(p.name for p in by_name if p.default is p.empty),
    )


def agrees(lowered: Any, result: torch.Tensor) -> bool:
    """True if a lowered result has the dtype and the shape of torch's `result`. A lowered result
    that is no Tensor was computed by torch itself, so it always agrees."""
    if not isinstance(lowered, Tensor):
        return True
    return lowered.dtype == dtype_name(result) and lowered.shape == shape_of(result)


def dtype_name(tensor: torch.Tensor | Tensor) -> str:
    """The name of the dtype of a tensor, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor, with UNKNOWN for a size that is known only at run time."""
    return tuple(size if isinstance(size, int) else UNKNOWN for size in tensor.shape)
