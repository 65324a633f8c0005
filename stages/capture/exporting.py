"""Exports a model inside the calling convention, with free numbers of rows.

If this fails, the bare model is exported on row-major tensors: the error of that export names the
user's own line, where the model keeps state, fixes n, or does not export.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.dtypes import itemsize
from soa.memory import Collection, argument_tensors
from soa.signature import Argument, Signature
from stages.errors import CaptureError
from stages.model import (
    RowWise,
    SoaProgram,
    find_written_state,
    mutation_line,
    restore_columns,
    stack_arguments,
    stacks_of,
    where_raised,
    why_not_exported,
)
from stages.reference import Arrays, Case

# Row counts to export at: primes, so that no size in a model is equal to one of them by chance.
_EXAMPLE_ROWS = (37, 41, 43, 47, 53)


def example_case(signature: Signature) -> Case:
    """Choose the number of rows of each dimension for the example with which a model is exported.

    They lie inside the dimension's range and differ from each other, if possible. They are at least
    2, because torch.export takes a row count of 0 or 1 for a constant; and below the largest,
    because a compiler may conclude that n >= the example's n, and other n must then remain.
    """
    case: Case = {}
    for dim, preferred in zip(signature.dims, _EXAMPLE_ROWS, strict=False):
        rows = signature.ranges[dim]
        if rows.min <= preferred < rows.max:
            case[dim] = preferred
            continue
        # A few are enough: more of them than there are dimensions.
        smaller_sizes = range(rows.max - 1, max(rows.min, 2) - 1, -1)[:8]
        free = [n for n in (*smaller_sizes, rows.max) if n not in case.values()]
        case[dim] = free[0] if free else rows.max
    return case


def convention_arguments(signature: Signature, inputs: Arrays, case: Case) -> list[torch.Tensor]:
    """The arguments of the calling convention for a case, in new memory: the inputs have the first
    rows of `inputs`, the outputs are not filled.

    Each collection gets spare room, so that the padded length is not equal to a row count by
    chance.
    """
    collections: dict[str, Collection] = {}
    for i, (name, layout) in enumerate(signature.layouts.items()):
        n = case[signature.rows_of[name]]
        collections[name] = Collection(layout, n, capacity=n + 64 * (i + 1))
        if name in inputs:
            for column in layout.numbers:
                collections[name].fill(column.name, inputs[name][column.name])
    # Clones, since torch cannot save example inputs that share memory under different dtypes.
    return [tensor.clone() for tensor in argument_tensors(signature, collections, case)]


def _row_symbols(signature: Signature) -> dict[str, Any]:
    """The size of each row dimension as torch.export takes it: a symbol with its range, or None,
    which stands for a fixed size, if the range has one value only.

    Unbounded rows get no maximum. With that of a tile, torch would take `n > 5000` for false, and
    not report that the model takes another path there.
    """
    ranges = {dim: signature.ranges[dim] for dim in signature.dims}
    return {
        dim: None
        if rows.min == rows.max
        else Dim(f"rows_{dim}", min=rows.min, max=None if rows.unbounded else rows.max)
        for dim, rows in ranges.items()
    }


def _limit_to_tiles(program: ExportedProgram, signature: Signature) -> None:
    """Give the symbol of unbounded rows the range of a tile, in place: an artifact runs no more
    rows than that at a time, and an engine may make use of it."""
    carriers = program.graph.find_nodes(op="placeholder")[-len(signature.arguments) :]
    for dim, node in zip(signature.dims, carriers, strict=False):
        rows = signature.ranges[dim]
        if rows.unbounded:
            symbol = node.meta["val"].shape[0].node.expr
            program.range_constraints[symbol] = ValueRanges(rows.min, rows.max)


@dataclass(frozen=True)
class Exported:
    """A program in the calling convention.

    `row_wise` is empty if the program runs all rows at once. Else torch.export took the model at
    one row only, and the program runs each row on its own; the text says why.
    """

    program: ExportedProgram
    row_wise: str = ""


def export_with_fallback(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
) -> Exported:
    """Export the model in the calling convention; if this fails, as a program that runs each row on
    its own.

    `arguments` are row-major, for the bare model; `soa_arguments` are the same rows in the calling
    convention. Raises CaptureError, which names the model's own line, if both fail, or if the model
    writes into its own state.
    """
    try:
        program = export_convention(model, signature, soa_arguments)
    except CaptureError as error:
        refusal = why_refused(model, signature, arguments) or error
        by_row = _export_row_wise(model, signature, arguments, soa_arguments)
        if by_row is None:
            raise refusal from error
        if numbers := _numbers_of_row_count(model, signature, arguments):
            raise CaptureError(
                f"{refusal}. Captured one by one, its rows are wrong: its graph has other numbers "
                f"at another row count ({', '.join(numbers)})"
            ) from error
        return Exported(by_row, str(refusal))
    if find_written_state(program):
        without_line = CaptureError("the model writes into its own state: an artifact keeps none")
        raise why_refused(model, signature, arguments) or without_line
    return Exported(program)


def _export_row_wise(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    soa_arguments: list[torch.Tensor],
) -> ExportedProgram | None:
    """Export the model at one row, as a program that runs each row on its own.

    None if the model does not export at one row either, or if rows cannot run on their own: jagged
    rows, rows of several dimensions, at least two rows, or an output that all rows share.
    """
    if signature.jagged or signature.tile_kinds is None:
        return None
    try:
        with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            by_row = RowWise(model, signature, arguments)
        return export_convention(by_row, signature, soa_arguments)
    except Exception:  # torch has no exception type for this; the first refusal says more
        return None


def _numbers_of_row_count(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor]
) -> list[str]:
    """The numbers with which the model computes at two or at three rows only, as text: the row
    count, or what Python made of it. Sizes and indices are not meant. Empty if the model does not
    export at these row counts."""
    most = min(3, *example_case(signature).values())
    numbers: list[set[str]] = []
    for n in (most - 1, most):
        rows = [
            x if bound.rowless else x[:n].clone()
            for x, bound in zip(arguments, signature.inputs, strict=True)
        ]
        try:
            with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                program = torch.export.export(model, tuple(rows), strict=False)
                numbers.append(set(_numbers_in(program.run_decompositions({}))))
        except Exception:  # torch raises many types; the trial of the eager model goes on
            return []
    return sorted(numbers[0] ^ numbers[1])


def _numbers_in(program: ExportedProgram) -> Iterator[str]:
    """Yield each number with which a graph computes, as text: floats, integers of elementwise
    operations or that fill a tensor, and constants without dimensions."""
    aten = torch.ops.aten
    fills = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
    for node in program.graph.nodes:
        whole = node.target in fills or torch.Tag.pointwise in getattr(node.target, "tags", ())
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, float) or (whole and isinstance(value, int)):
                yield str(value)
    for constant in program.constants.values():
        if isinstance(constant, torch.Tensor) and constant.dim() == 0:
            yield str(constant.item())


def why_refused(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor]
) -> CaptureError | None:
    """Export the bare model on row-major tensors with free row counts, to find out why it does not
    export. Returns the error, which names the line at fault; None if it does export."""
    dims = _row_symbols(signature)
    shapes: tuple[Any, ...] = tuple(
        None if bound.rowless else {0: dims[bound.rows]} for bound in signature.inputs
    )
    parameters = inspect.signature(model.forward).parameters.values()
    if [parameter.kind for parameter in parameters] == [inspect.Parameter.VAR_POSITIONAL]:
        shapes = (shapes,)  # *inputs is one parameter
    with quiet_torch():
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # torch prints graphs
                exported = torch.export.export(
                    model, tuple(arguments), dynamic_shapes=shapes, strict=False
                )
            functional = exported.run_decompositions({})
        except Exception as error:
            return CaptureError(why_not_exported(model, arguments, shapes, error))
    if state := find_written_state(functional):
        return CaptureError(
            f"the model writes into {', '.join(map(repr, state))}{mutation_line(exported)}: an "
            "artifact keeps no state; use the out-of-place operation"
        )
    return None


def export_convention(
    model: torch.nn.Module, signature: Signature, arguments: list[torch.Tensor]
) -> ExportedProgram:
    """Export the model in the calling convention. `arguments` are those of an example; the row
    counts of the program are free. Raises CaptureError if torch.export refuses the model."""
    dims = _row_symbols(signature)
    shapes: list[dict[int, Any] | None] = []
    for i, argument in enumerate(signature.arguments):
        if argument.kind == "matrix":
            shapes.append({1: Dim(f"padded_{i}", min=_least_padded(signature, argument))})
        elif argument.kind == "scalar":
            shapes.append(None)
        else:
            shapes.append({0: dims[argument.rows]})
    stacks = stacks_of(signature)
    wrapped = SoaProgram(model, signature, frozenset(stack.block for stack in stacks))
    stacked = tuple(stack_arguments(arguments, stacks, lambda columns: torch.stack(columns, 1)))
    shapes = stack_arguments(shapes, stacks, lambda columns: columns[0])
    with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            # Functional form: torch 2.13 cannot save a program that returns nothing, and here the
            # written outputs are the program's results.
            exported = torch.export.export(
                wrapped, stacked, dynamic_shapes=(tuple(shapes),), strict=False
            )
            functional = restore_columns(exported.run_decompositions({}), stacks, arguments)
            _remove_stacks(functional)
            _limit_to_tiles(functional, signature)
            return functional
        except Exception as error:
            if "data-dependent" in str(error):  # from state that changes, such as a counter
                why = why_not_exported(wrapped, list(stacked), (tuple(shapes),), error)
                raise CaptureError(why) from error
            raise CaptureError(
                "the model exports alone, but not in the calling convention "
                f"({where_raised(error)}): {first_line(error)}"
            ) from error


def _remove_stacks(program: ExportedProgram) -> None:
    """Let the graph read a column directly where it stacks columns and then selects one of them,
    since the stack would be a copy. The graph is changed in place."""
    aten: Any = torch.ops.aten
    for node in program.graph.nodes:
        if node.target is not aten.select.int:
            continue
        stack, *axis, index = node.args
        if stack.target is aten.stack.default and list(stack.args[1:]) == axis:
            columns = stack.args[0]
            node.replace_all_uses_with(columns[index])
    program.graph.eliminate_dead_code()


def _least_padded(signature: Signature, argument: Argument) -> int:
    """The least padded length S of a matrix that export may assume: at least the least n, and one
    aligned line.

    Torch also requires S > 2, since it sorts strides, and S != n if the rows are fixed. The
    operations need neither. No engine checks this at run time; validation runs such sizes.
    """
    rows = signature.ranges[argument.rows]
    line = signature.layouts[argument.collection].alignment // itemsize(argument.dtype)
    least = rows.min + 1 if rows.min == rows.max else rows.min
    return max(least, line, 4)
