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

_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def insert(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of `function` at the graph's insertion point, and return its node.

    The node records the shape and dtype of its value (`meta["val"]`), which torch's exporters need.
    """
    node = graph.call_function(function, args, kwargs)
    node.meta["val"] = function(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def as_node(argument: Any) -> Node:
    """Return the argument, which must be a node. This tells mypy so."""
    assert isinstance(argument, Node)
    return argument


def sizes(node: Any) -> tuple[Any, ...]:
    """The sizes of the tensor that a node returns: ints, or expressions of symbols.

    To compare torch's own SymInts would add a guard to the program; expressions can be compared.
    """
    return sizes_of(node.meta["val"])


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The sizes of a tensor, as `sizes` gives them for a node."""
    return tuple(
        size.node.expr if isinstance(size, torch.SymInt) else size for size in tensor.shape
    )


def bounds(size: Any) -> tuple[int, int | None]:
    """The least and the largest value of a size that the program supports.

    None instead of the largest value means that there is no upper bound.
    """
    if isinstance(size, int):
        return size, size
    from torch.utils._sympy.numbers import int_oo  # loads sympy, which `open` does not need

    span = size.node.shape_env.bound_sympy(size.node.expr)
    return int(span.lower), None if span.upper is int_oo else int(span.upper)


def read_bools_as_bytes(program: ExportedProgram) -> None:
    """Change a program so that it reads its bool columns as bytes, of which all but 0 are true.

    The memory of a bool column may contain bytes other than 0 and 1. torch's kernels treat them as
    true. A compiler assumes that a bool is 0 or 1, and would compute with values such as 2 or 255.
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
        _read_input_as_bytes(graph, node)
    if bools and program.example_inputs is not None:
        indices = {arguments.index(node.name) for node in bools}
        examples, keyword_examples = program.example_inputs
        as_bytes = (
            example.to(torch.uint8) if i in indices else example
            for i, example in enumerate(examples)
        )
        program._example_inputs = (tuple(as_bytes), keyword_examples)
    program.graph_module.recompile()


def _read_input_as_bytes(graph: Graph, node: Node) -> None:
    """Change a bool input (a placeholder) to bytes, and give its users bools computed from them."""
    node.meta["val"] = node.meta["val"].to(torch.uint8)
    # The users of a matrix are slices of it. To convert these leaves its padding unread.
    slices = list(node.users) if node.meta["val"].dim() == 2 else []
    for piece in slices:
        piece.meta["val"] = piece.meta["val"].to(torch.uint8)
    for piece in slices or [node]:
        with graph.inserting_after(piece):
            number = insert(graph, aten._to_copy.default, piece, dtype=torch.float32)
        with graph.inserting_after(number):
            truth = insert(graph, aten.ne.Scalar, number, 0)
        piece.replace_all_uses_with(truth, partial(operator.is_not, number))


def erase_checks(graph: Graph) -> None:
    """Erase the nodes with which torch checks the dtype and the device of tensors."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def move_to_gpu(program: ExportedProgram, device: str) -> ExportedProgram:
    """Return the program for a GPU, such as "cuda" or "cuda:1".

    Its checks of devices are erased: they would fail, since "cuda" and "cuda:0" differ for them.
    """
    from torch.export.passes import move_to_device_pass

    moved = move_to_device_pass(program, device)
    erase_checks(moved.graph)
    moved.graph_module.recompile()
    return moved


_DIVISIONS = ("floor_divide", "remainder", "fmod", "div", "divide")


def make_zero_divisions_zero(program: ExportedProgram) -> list[str]:
    """Change a program so that integer quotients and remainders by 0 are 0.

    Eager torch raises an error for them, and the code of some compilers ends the process (SIGFPE).
    Returns the stack trace of each division whose divisor may be 0: where the model divides.
    """
    traces: list[str] = []
    replaced: dict[str, str] = {}  # the names of the divisions, and of the values in their place
    for module in program.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for division in [node for node in module.graph.nodes if _may_divide_by_zero(node)]:
            traces.append(division.meta.get("stack_trace") or "")
            result = _replace_zero_divisor(module.graph, division, traces[-1])
            replaced[division.name] = result.name
    if traces:
        for spec in program.graph_signature.output_specs:
            spec.arg.name = replaced.get(spec.arg.name, spec.arg.name)
    program.graph_module.recompile()
    return traces


def _replace_zero_divisor(graph: Graph, division: Node, trace: str) -> Node:
    """Let a division divide by 1 instead of 0, and replace such results by 0.

    Returns the node of the new result. `trace`: the stack trace that new nodes get.
    """
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
    """Return whether a node divides integers by a tensor that may contain 0.

    A divisor cannot be 0 if it is the result of a `clamp` to at least 1.
    """
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


def with_model_lines(name: str, traces: Iterable[str]) -> str:
    """Return `name` with the model's lines from stack traces: `aten.sum (model.py:12)`.

    Of each trace this is the innermost line outside of torch. A line is not repeated.
    """
    model_lines: list[str] = []
    for trace in traces:
        lines = _TRACE_LINE.findall(trace)
        outside_torch = [f"{file}:{line}" for file, line in lines if not file.startswith(_TORCH)]
        model_lines += outside_torch[-1:]
    return f"{name} ({', '.join(dict.fromkeys(model_lines))})" if model_lines else name
