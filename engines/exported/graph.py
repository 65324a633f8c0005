"""Functions for the nodes of an exported program's graph."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def insert(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node, with the shape and dtype of its value, which torch's exporters need."""
    node = graph.call_function(function, args, kwargs)
    node.meta["val"] = function(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def as_node(argument: Any) -> Node:
    """The argument, for mypy: a node, as is known where this is called."""
    assert isinstance(argument, Node)
    return argument


def sizes(node: Any) -> tuple[Any, ...]:
    """The sizes of a node's tensor: ints, or expressions that can be compared without adding a
    guard."""
    return sizes_of(node.meta["val"])


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """As `sizes`, for the tensor itself."""
    return tuple(
        size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape
    )


def bounds(size: Any) -> tuple[int, int | None]:
    """The least and the largest value of a size that the program supports; None: no bound."""
    if isinstance(size, int):
        return size, size
    from torch.utils._sympy.numbers import int_oo  # loads sympy, which `open` does not need

    span = size.node.shape_env.bound_sympy(size.node.expr)
    return int(span.lower), None if span.upper is int_oo else int(span.upper)


def bytes_for_bools(program: ExportedProgram) -> None:
    """Make a program read its bool columns as bytes, with every byte except 0 true; in place.

    The memory may contain bytes other than 0 and 1. torch's kernels treat them as true. A compiler
    assumes that a bool is 0 or 1, and would compute with values such as 2 or 255.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    arguments = [
        spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT
    ]
    written = {str(spec.target) for spec in signature.output_specs}
    bools = [
        node
        for node in graph.find_nodes(op="placeholder")
        if node.name in arguments and node.name not in written
        if node.meta["val"].dtype is torch.bool
    ]
    for node in bools:
        _read_as_bytes(graph, node)
    if bools and program.example_inputs is not None:
        places = {arguments.index(node.name) for node in bools}
        examples, named = program.example_inputs
        as_bytes = (
            example.to(torch.uint8) if i in places else example
            for i, example in enumerate(examples)
        )
        program._example_inputs = (tuple(as_bytes), named)
    program.graph_module.recompile()


def _read_as_bytes(graph: Graph, node: Node) -> None:
    """Make a bool placeholder one of bytes, and compute the bools that its users take."""
    node.meta["val"] = node.meta["val"].to(torch.uint8)
    # The users of a matrix are slices of it: so the padding is not read.
    slices = list(node.users) if node.meta["val"].dim() == 2 else []
    for piece in slices:
        piece.meta["val"] = piece.meta["val"].to(torch.uint8)
    for piece in slices or [node]:
        with graph.inserting_after(piece):
            number = insert(graph, aten._to_copy.default, piece, dtype=torch.float32)
        with graph.inserting_after(number):
            truth = insert(graph, aten.ne.Scalar, number, 0)
        piece.replace_all_uses_with(truth, partial(operator.is_not, number))


def without_checks(graph: Graph) -> None:
    """Remove torch's checks of the dtype and the device that tensors have."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def moved_to_gpu(program: ExportedProgram, device: str) -> ExportedProgram:
    """The program on a GPU, "cuda" or "cuda:1". Without its checks, for which these are no names of
    one device."""
    from torch.export.passes import move_to_device_pass

    moved = move_to_device_pass(program, device)
    without_checks(moved.graph)
    moved.graph_module.recompile()
    return moved


_DIVISIONS = ("floor_divide", "remainder", "fmod", "div", "divide")


def zero_by_zero(program: ExportedProgram) -> list[str]:
    """Make integer quotients and remainders by 0 give 0; in place.

    Eager torch raises an error for them, and the code of some compilers ends the process (SIGFPE).
    Returns a stack trace for each division whose divisor may be 0.
    """
    traces: list[str] = []
    replaced: dict[str, str] = {}  # the names of the divisions, and of the values in their place
    for module in program.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in [each for each in module.graph.nodes if _may_divide_by_zero(each)]:
            traces.append(node.meta.get("stack_trace") or "")
            replaced[node.name] = _zero_for_zero(module.graph, node, traces[-1]).name
    if traces:
        for spec in program.graph_signature.output_specs:
            spec.arg.name = replaced.get(spec.arg.name, spec.arg.name)
    program.graph_module.recompile()
    return traces


def _zero_for_zero(graph: Graph, division: Node, trace: str) -> Node:
    """Divide by 1 instead of 0, and put 0 in place of such results; returns the new value."""
    divisor = as_node(division.args[1])
    with graph.inserting_before(division):
        is_zero = insert(graph, aten.eq.Scalar, divisor, 0)
        not_zero = insert(graph, aten.masked_fill.Scalar, divisor, is_zero, 1)
    with graph.inserting_after(division):
        result = insert(graph, aten.masked_fill.Scalar, division, is_zero, 0)
    division.replace_all_uses_with(result, lambda user: user is not result)
    division.update_arg(1, not_zero)
    for node in (is_zero, not_zero, result):
        node.meta["stack_trace"] = trace
    return result


def _may_divide_by_zero(node: Node) -> bool:
    """True for a division of integers whose divisor is a tensor, unless `clamp` makes it 1 or
    more."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target._opname not in _DIVISIONS:
        return False
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return False
    divisor = node.args[1]
    if not isinstance(divisor, Node) or not isinstance(divisor.meta.get("val"), torch.Tensor):
        return False
    clamped = str(getattr(divisor.target, "_opname", "")) in ("clamp", "clamp_min")
    least = divisor.args[1] if clamped and len(divisor.args) > 1 else divisor.kwargs.get("min")
    return not (clamped and isinstance(least, int) and least >= 1)


def placed(name: str, traces: Iterable[str]) -> str:
    """A name with the innermost line of each stack trace that lies outside of torch."""
    places: list[str] = []
    for trace in traces:
        lines = _PLACE.findall(trace)
        ours = [":".join(place) for place in lines if not place[0].startswith(_TORCH)]
        places += ours[-1:]
    return f"{name} ({', '.join(dict.fromkeys(places))})" if places else name
