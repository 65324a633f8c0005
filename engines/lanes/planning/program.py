"""Makes the program for one row: traces the captured program again, with one row.

Then there is no batch dimension, every shape is a constant, and values that depend only on weights
are computed here. Operators that operators/ does not lower are decomposed by torch. If torch cannot
do so, an error names the operator.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, traceback
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from engines.errors import NotApplicableError, first_line
from engines.exported import (
    Dependence,
    decompositions,
    graph_of,
    load_program,
    name_of,
    quiet_torch,
    writes,
)
from engines.exported import why_dependent as dependence_by_rules
from engines.lanes.operators import LOWERINGS, ROWS, Operator, agrees, lowered, sizes
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Argument, Program, no_code
from engines.lanes.values import Tensor, Value

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
# Example numbers of items: primes that are unlikely to be a size in a model.
_ITEMS = (1009, 2003, 3001, 4001, 5003, 6007, 7001, 8009)
_ARITHMETIC: dict[Any, str] = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def why_dependent(program: ExportedProgram) -> Dependence | None:
    """Why a row's result may depend on other rows or on their number; None if it does not."""
    return dependence_by_rules(program, ROWS)


def row_program(file: Path) -> Program:
    """The program for one row of a program.pt2. NotApplicableError if rows may depend on each other
    or if there is no code for an operator."""
    return lowered_row(*traced_row(file))


def traced_row(file: Path) -> tuple[OneRow, list[Given]]:
    """The operations of one row of a program.pt2 and its arguments. Errors: see `row_program`."""
    with quiet_torch(), torch.no_grad():
        captured = load_program(file)
        why = why_dependent(captured)
        if why is not None and why.known:
            raise NotApplicableError(f"a row may see other rows: {why.text}")
        arguments = _arguments(captured)
        try:
            row = at_one_row(captured, arguments)
        except NotApplicableError:
            raise
        except Exception as error:  # torch has no exception type for failures of tracing
            raise NotApplicableError(
                f"it cannot be traced at one row: {first_line(error)}"
            ) from error
    return row, arguments


def lowered_row(row: OneRow, arguments: Sequence[Given]) -> Program:
    """The program of operations of one row. NotApplicableError if there is no code for one."""
    return _Walk(row, arguments).walk()


@dataclass(frozen=True)
class Given:
    """An argument of the captured program. `kind`: the letter in `Program.kinds`.

    `items`: the symbol of its number of items; None if it belongs to the rows or is shared.
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
        raise NotApplicableError("its outputs do not all have the same rows")
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
    """torch's symbol for the number of rows or items of an argument. A matrix may be longer: the
    number is found from the slices that are read from it or written into it."""
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


@dataclass(frozen=True)
class OneRow:
    """The operations of one row. `graph` takes the arguments and returns the new contents of the
    arguments whose indices are in `written`."""

    graph: GraphModule
    written: list[int]


def at_one_row(captured: ExportedProgram, arguments: Sequence[Given]) -> OneRow:
    """The same program with one row, padded lengths of 1, and any number of items."""
    found = captured.graph_signature
    tensors = {**captured.state_dict, **captured.constants}
    written = [
        spec.target if spec.kind.name == "USER_INPUT_MUTATION" else None
        for spec in found.output_specs
    ]

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        own = iter(given)
        every = [
            next(own) if spec.kind.name == "USER_INPUT" else tensors[spec.target]
            for spec in found.input_specs
        ]
        with traceback.preserve_node_meta():  # keeps the lines of the model
            made = _Reshaping(captured.graph_module).run(*every)
        return [value for value, name in zip(made, written, strict=True) if name is not None]

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    items = dict.fromkeys(given.items for given in arguments if given.items is not None)
    sizes = {symbol: _ITEMS[k] for k, symbol in enumerate(items)}
    examples = [_example(each, sizes, mode) for each in arguments]
    graph = traced(run, examples, mode)
    if shapes.guards:
        numbers = ", ".join(str(guard.expr) for guard in shapes.guards)
        raise NotApplicableError(f"the program depends on the numbers of items: {numbers}")
    return OneRow(graph, [found.user_inputs.index(name) for name in written if name is not None])


def traced(
    run: Callable[..., Any], examples: Sequence[torch.Tensor], mode: FakeTensorMode
) -> GraphModule:
    """The operators of a call with fake tensors. None of them changes a tensor in place."""
    with mode:
        return graph_of(run, examples, decompositions(frozenset(LOWERINGS)))


class _Reshaping(torch.fx.Interpreter):
    """Replaces `view` by `reshape`: at one row, strides may differ and `view` could fail.

    A program that runs a graph for each row (`map_impl`) runs it for the one row.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        if target is torch.ops.higher_order.map_impl:
            return _run_once(*args)
        return super().call_function(target, args, kwargs)


def _run_once(
    body: GraphModule, of_rows: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What `map_impl` returns for one row."""
    outputs = _Reshaping(body).run(*[each.select(0, 0) for each in of_rows], *shared)
    return tuple(each.unsqueeze(0) for each in outputs)


def _example(given: Given, sizes: Mapping[Any, int], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor for an argument, with a symbol for each number of items and for the length of
    each matrix of items."""
    length, kind = 1, DimDynamic.STATIC
    if given.items is not None:
        length, kind = sizes[given.items], DimDynamic.DUCK
        if given.kind == "m":
            length, kind = 2 * length, DimDynamic.DYNAMIC
    shape = [n if isinstance(n, int) else length for n in given.value.shape]
    symbolic = [DimDynamic.STATIC if isinstance(n, int) else kind for n in given.value.shape]
    return mode.from_tensor(
        torch.empty(shape, dtype=given.value.dtype),
        symbolic_context=StatelessSymbolicContext(symbolic),
    )


class _Walk:
    """Visits the nodes of the graph in order and builds `program` from them."""

    def __init__(self, row: OneRow, arguments: Sequence[Given]) -> None:
        self.row = row
        self.arguments = iter(arguments)
        self.build = Builder()
        self.program = self.build.program
        self.found: dict[Node, Any] = {}
        self.columns = 0
        self.symbols: dict[Any, int] = {}

    def walk(self) -> Program:
        for node in self.row.graph.graph.nodes:
            self.build.line, self.build.operator = model_line(node), str(node.target)
            if node.op == "output":
                self.outputs(node)
            else:
                self.found[node] = self.value_of(node)
        return self.program

    def value_of(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.input(node)
        if node.op == "get_attr":
            return getattr(self.row.graph, str(node.target))
        if node.op == "call_function":
            return self.call(node)
        raise NotApplicableError(f"it has no code for {node.op} of {node.target}")

    def input(self, node: Node) -> Any:
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
        """A node's result: tensors of the program, or torch tensors if it depends on no row. None
        for torch's own checks, and for a result that nothing reads."""
        arguments = _known(node.args, self.found)
        named = _known(node.kwargs, self.found)
        name = name_of(node.target)
        if node.target is operator.getitem:
            return self.one_of(node, *arguments)
        if writes(node):
            raise NotApplicableError(f"it has no code for {name}{_at(self.build.line)}")
        checks = "assert" in str(node.target)
        if checks or not node.users:
            return None
        if not _of_rows([*_flat(arguments), *_flat(list(named.values()))]):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotApplicableError(f"{name} is random{_at(self.build.line)}")
            return node.target(*arguments, **named)  # type: ignore[operator]
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return self.size(node, arguments)
        return self.lowered(node, arguments, named)

    def one_of(self, node: Node, results: Sequence[Any], number: int) -> Any:
        """One of the results of an operator that has several."""
        made = results[number]
        if node.users and not agrees(made, node.meta["val"]):
            what = f"{node.args[0]} with these arguments"
            raise NotApplicableError(f"it has no code for {what}{_at(self.build.line)}")
        return made

    def lowered(self, node: Node, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """A node's result by the operator's lowering. NotApplicableError, whatever goes wrong."""
        name, value = name_of(node.target), node.meta["val"]
        op = Operator(name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if name not in LOWERINGS:
            raise NotApplicableError(f"it has no code for {name}{_at(self.build.line)}")
        try:
            made = lowered(self.build, op, node.target, arguments, named)
            if not isinstance(made, list) and not agrees(made, value):
                raise NotKnown(f"{node.target} with these arguments")
            return made
        except NotKnown as what:
            raise NotApplicableError(f"it has no code for {what}{_at(self.build.line)}") from None
        except Exception as error:  # arguments that the lowering did not expect
            raise no_code(str(node.target), self.build.line, error) from error

    def size(self, node: Node, arguments: Sequence[Any]) -> Any:
        """A number of items, or a value computed from such numbers."""
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
        """Records the tensors that the program writes into its arguments."""
        places = self.row.graph.graph.find_nodes(op="placeholder")
        for place, made in zip(self.row.written, node.args[0], strict=True):  # type: ignore[arg-type]
            argument = self.found[places[place]]
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
    """The innermost line that is not in torch, and the layer, such as `model.py:17 blocks.0`. Empty
    if no line is known."""
    found = _PLACE.findall(node.meta.get("stack_trace") or "")
    own = [place for place in found if "/torch/" not in place[0]]
    if not own:
        return ""
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layer = modules[-1].partition(".")[2] if modules else ""  # `model.` is what we call it
    return f"{Path(own[-1][0]).name}:{own[-1][1]} {layer}".rstrip()


def _at(line: str) -> str:
    return f" ({line})" if line else ""
