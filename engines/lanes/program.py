"""The program for one row: a captured program, exported again at one row, as tensors.

The batch dimension is gone then, every shape is a constant, and what depends on weights alone is
worked out here. Operators that no file of operators/ lowers are taken apart by torch, or named.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from engines.errors import NotApplicableError, first_line
from engines.exported import load_program, quiet_torch, why_dependent
from engines.lanes.builder import Builder, NotKnown
from engines.lanes.operators import LOWERINGS, Step, sizes
from engines.lanes.tensors import Argument, Program, Tensor
from engines.lanes.values import Value

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
# Example numbers of items: primes that are no size of a model by chance.
_ITEMS = (1009, 2003, 3001, 4001, 5003, 6007, 7001, 8009)
_ARITHMETIC: dict[Any, str] = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def row_program(file: Path) -> Program:
    """Of a program.pt2 whose rows do not see each other; NotApplicableError where it has none."""
    with quiet_torch(), torch.no_grad():
        captured = load_program(file)
        if why := why_dependent(captured):
            raise NotApplicableError(f"a row may see other rows: {why}")
        arguments = _arguments(captured)
        try:
            exported = at_one_row(captured, arguments)
        except Exception as error:  # torch names no type for what it cannot export
            raise NotApplicableError(
                f"it does not export at one row: {first_line(error)}"
            ) from error
    return _Walk(exported, arguments).program


@dataclass(frozen=True)
class Given:
    """An argument of the captured program: `kind` is the letter of `Program.kinds`.

    `items` is the symbol of how many items it has; None for what is of the rows, or shared.
    """

    value: torch.Tensor
    kind: str
    items: Any = None


def _arguments(captured: ExportedProgram) -> list[Given]:
    names = captured.graph_signature.user_inputs
    nodes = [n for n in captured.graph.find_nodes(op="placeholder") if n.name in names]
    mutated = [
        spec.target
        for spec in captured.graph_signature.output_specs
        if spec.kind.name == "USER_INPUT_MUTATION"
    ]
    rows = {_length(node) for node in nodes if node.name in mutated} - {None}
    if len(rows) != 1:
        raise NotApplicableError("its outputs are not all of the same rows")
    return [_given(node, rows) for node in nodes]


def _given(node: Node, rows: set[Any]) -> Given:
    value = node.meta["val"]
    length = _length(node)
    items = None if length in rows else length
    if len(value.shape) == 2 and value.shape[1] == 0:
        return Given(value, "i" if items is not None else "n", items)
    if all(isinstance(size, int) for size in value.shape):
        return Given(value, "-")
    return Given(value, "m" if len(value.shape) == 2 else "c", items)


def _length(node: Node) -> Any:
    """torch's symbol of how many rows or items an argument has; a matrix is longer than that, but
    is narrowed, and is as long as what is put into it."""
    shape = node.meta["val"].shape
    if len(shape) == 2 and shape[1] != 0:
        cuts = [user.meta["val"] for user in node.users if "slice.Tensor" in str(user.target)]
        puts = [
            user.args[1].meta["val"]  # type: ignore[union-attr]
            for user in node.users
            if "slice_scatter" in str(user.target)
        ]
        lengths = {_symbol(value.shape[1]) for value in (*cuts, *puts)}
        return lengths.pop() if len(lengths) == 1 else None
    return _symbol(shape[0])


def _symbol(size: Any) -> Any:
    return None if isinstance(size, int) else size.node.expr


def at_one_row(captured: ExportedProgram, arguments: Sequence[Given]) -> ExportedProgram:
    """The same program with one row, padded lengths of 1, and any number of items."""
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
                return _Reshaping(self.inner).run(*arguments)

    items = dict.fromkeys(given.items for given in arguments if given.items is not None)
    sizes = {symbol: _ITEMS[k] for k, symbol in enumerate(items)}
    examples = tuple(_example(given, sizes) for given in arguments)
    dims = {symbol: Dim(f"items_{k}", min=2) for k, symbol in enumerate(items)}
    shapes = tuple(_shape(given, dims) for given in arguments)
    with sdpa_kernel(SDPBackend.MATH):
        exported = torch.export.export(
            OneRow(), examples, dynamic_shapes={"arguments": shapes}, strict=False
        )
        decomposed: ExportedProgram = exported.run_decompositions(_decompositions())
        return decomposed


class _Reshaping(torch.fx.Interpreter):
    """Steps of one row may differ from those of many: `view` would refuse some that it takes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _example(given: Given, sizes: Mapping[Any, int]) -> torch.Tensor:
    length = 1 if given.items is None else sizes[given.items]
    shape = [n if isinstance(n, int) else length for n in given.value.shape]
    return torch.empty(shape, dtype=given.value.dtype)


def _shape(given: Given, dims: Mapping[Any, Any]) -> dict[int, Any] | None:
    """One symbol for all that have as many items; a matrix is longer by whatever it is."""
    if given.items is None:
        return None
    along = Dim.AUTO if given.kind == "m" else dims[given.items]
    return {d: along for d, n in enumerate(given.value.shape) if not isinstance(n, int)}


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

    def __init__(self, exported: ExportedProgram, arguments: Sequence[Given]) -> None:
        self.exported = exported
        self.arguments = iter(arguments)
        self.build = Builder()
        self.program = self.build.program
        self.found: dict[Node, Any] = {}
        self.columns = 0
        self.symbols: dict[Any, int] = {}
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
        given, value = next(self.arguments), node.meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        self.program.kinds += given.kind
        self.program.dtypes.append(dtype)
        if given.kind == "i":
            number = self.build.counts[_symbol(value.shape[0])] = len(self.symbols)
            self.symbols[given.items] = number
        if given.kind in "ni":
            return self.build.count_of(value.shape[0])
        shape = sizes(value)
        items = None if given.items is None else self.symbols[given.items]
        made = Argument(self.build.values, shape, dtype, self.columns, given.kind, items)
        self.columns += shape[0] if given.kind == "m" else 1
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
        if isinstance(value, torch.SymInt):
            return self.size(node, arguments)
        step = Step(name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if name not in LOWERINGS:
            raise NotApplicableError(f"it has no code for {name}{_at(self.build.line)}")
        try:
            return LOWERINGS[name](self.build, step, *arguments, **named)
        except NotKnown as what:
            raise NotApplicableError(f"it has no code for {what}{_at(self.build.line)}") from None

    def size(self, node: Node, arguments: Sequence[Any]) -> Any:
        """A number of items, or what is reckoned from one."""
        known = self.build.count_of(node.meta["val"])
        if known is not None:
            return known
        function = _ARITHMETIC.get(node.target)
        if function is None:
            raise NotApplicableError(
                f"it has no code for sizes by {node.target}{_at(self.build.line)}"
            )
        values = self.build.values
        given = [a if isinstance(a, Value) else values.literal(a, "int64") for a in arguments]
        return values.call(function, *given, dtype="int64")

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
