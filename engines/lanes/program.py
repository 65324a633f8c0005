"""The program for one row: a captured program, exported again at one row, as tensors.

The batch dimension is gone then, every shape is a constant, and what depends on weights alone is
worked out here. Operators that no file of operators/ lowers are taken apart by torch, or named.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from engines.errors import EngineError, first_line
from engines.exported import load_program, quiet_torch
from engines.lanes.builder import Builder, NotKnown
from engines.lanes.operators import LOWERINGS, Step
from engines.lanes.tensors import Argument, Program, Tensor
from engines.lanes.values import Value

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
# Decompositions that lose what a lowering of the whole would keep.
_ARITHMETIC = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def row_program(file: Path) -> Program:
    """Of a program.pt2 whose rows do not see each other. Raises EngineError for what it cannot be."""
    with quiet_torch(), torch.no_grad():
        captured = load_program(file)
        try:
            exported = at_one_row(captured)
        except Exception as error:  # torch names no type for what it cannot export
            raise EngineError(f"it does not export at one row: {first_line(error)}") from error
    return _Walk(exported, [_moves(value) for value in _arguments(captured)]).program


def at_one_row(captured: ExportedProgram) -> ExportedProgram:
    """The same program with all rows and padded lengths 1."""
    from torch.fx import traceback
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inner = captured.module(check_guards=False)

    class OneRow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.training = False
            self.inner = inner

        def forward(self, *arguments: torch.Tensor) -> Any:
            with traceback.preserve_node_meta():  # the model's lines
                return torch.fx.Interpreter(self.inner).run(*arguments)

    with sdpa_kernel(SDPBackend.MATH):
        exported = torch.export.export(OneRow(), tuple(_examples(captured)), strict=False)
        return exported.run_decompositions(_decompositions())  # type: ignore[no-any-return]


def _arguments(captured: ExportedProgram) -> list[torch.Tensor]:
    """torch's stand-ins for the arguments, with the sizes that they may have."""
    names = captured.graph_signature.user_inputs
    nodes = captured.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in nodes if node.name in names]


def _moves(argument: torch.Tensor) -> bool:
    """Whether it has an element for each row: a column or a matrix, not a scalar."""
    return any(not isinstance(size, int) for size in argument.shape)


def _examples(captured: ExportedProgram) -> list[torch.Tensor]:
    return [
        torch.empty([n if isinstance(n, int) else 1 for n in value.shape], dtype=value.dtype)
        for value in _arguments(captured)
    ]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Everything that torch takes apart, but for what is lowered here."""
    from torch._decomp import decomposition_table

    known = {**decomposition_table, **dict(torch.export.default_decompositions().items())}
    return {overload: each for overload, each in known.items() if _name(overload) not in LOWERINGS}


def _name(target: Any) -> str:
    """Of an operator, without namespace and overload: `aten.add.Tensor` is `add`."""
    parts = str(target).split(".")
    return parts[1] if parts[0] in ("aten", "prims") and len(parts) > 1 else str(target)


class _Walk:
    """One step of the graph after the other."""

    def __init__(self, exported: ExportedProgram, moves: Sequence[bool]) -> None:
        self.exported = exported
        self.moves = iter(moves)
        self.build = Builder()
        self.program = self.build.program
        self.found: dict[Node, Any] = {}
        self.columns = 0
        specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        for node in exported.graph.nodes:
            self.build.line = model_line(node)
            if node.op == "placeholder":
                self.found[node] = self.input(node, specs[node.name])
            elif node.op == "call_function":
                self.found[node] = self.call(node)
            elif node.op == "output":
                self.outputs(node)

    def input(self, node: Node, spec: Any) -> Any:
        if spec.kind.name != "USER_INPUT":
            tensors = {**self.exported.state_dict, **self.exported.constants}
            return tensors[spec.target]
        moves, shape = next(self.moves), tuple(node.meta["val"].shape)
        dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        self.program.dtypes.append(dtype)
        if shape == (1, 0):
            self.program.kinds += "n"
            return None
        self.program.kinds += "-" if not moves else "m" if len(shape) == 2 else "c"
        rows = len(shape) - 1 if moves else None
        made = Argument(self.build.values, shape, dtype, self.columns, rows)
        self.columns += shape[0] if len(shape) == 2 else 1
        return self.build.add(made)

    def call(self, node: Node) -> Any:
        """What a step gives: tensors of the program, or torch's where no row has a part in it."""
        arguments = _known(node.args, self.found)
        named = _known(node.kwargs, self.found)
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        if "assert" in str(node.target) or not node.users:
            return None
        if not _of_rows([*_flat(arguments), *_flat(list(named.values()))]):
            return node.target(*arguments, **named)  # type: ignore[operator]
        name = _name(node.target)
        value = node.meta["val"]
        step = Step(name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if name not in LOWERINGS:
            raise EngineError(f"it has no code for {name}{_at(self.build.line)}")
        try:
            return LOWERINGS[name](self.build, step, *arguments, **named)
        except NotKnown as what:
            raise EngineError(f"it has no code for {what}{_at(self.build.line)}") from None

    def outputs(self, node: Node) -> None:
        """What the program writes into its arguments."""
        places = {n.name: n for n in self.exported.graph.find_nodes(op="placeholder")}
        specs = self.exported.graph_signature.output_specs
        for spec, made in zip(specs, node.args[0], strict=True):  # type: ignore[arg-type]
            if spec.kind.name == "USER_INPUT_MUTATION":
                argument = self.found[places[spec.target]]
                found = self.build.tensor(self.found[made], argument.dtype)
                self.program.outputs.append((argument, found))


def _known(given: Any, found: Mapping[Node, Any]) -> Any:
    return torch.fx.node.map_arg(given, lambda node: found[node])


def _flat(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return [inner for each in given for inner in _flat(each)]
    return [given]


def _of_rows(arguments: Sequence[Any]) -> bool:
    return any(isinstance(each, Tensor | Value) for each in arguments)


def model_line(node: Node) -> str:
    """`model.py:17`, the innermost line that is not torch's; empty where the program has none."""
    found = _PLACE.findall(node.meta.get("stack_trace") or "")
    own = [place for place in found if "/torch/" not in place[0]]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _at(line: str) -> str:
    return f" ({line})" if line else ""
