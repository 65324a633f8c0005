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
    """The arguments of a captured program. NotApplicableError if not exactly one number of rows is
    the length of what it writes."""
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
    return [_argument(node, rows) for node in nodes]


def _argument(node: Node, rows: set[Any]) -> Given:
    """An argument of the captured program. `rows`: torch's symbol for the number of rows. Other
    symbols are numbers of items; an argument without elements only carries a number."""
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
    """torch's symbol for a size; None if the size is a number."""
    return None if isinstance(size, int) else size.node.expr


@dataclass(frozen=True)
class OneRow:
    """The operations of one row. `graph` takes the arguments and returns the new contents of the
    arguments whose indices are in `written`."""

    graph: GraphModule
    written: list[int]


def at_one_row(captured: ExportedProgram, arguments: Sequence[Given]) -> OneRow:
    """The same program with one row, padded lengths of 1, and any number of items.
    NotApplicableError if it depends on the numbers of items."""
    signature = captured.graph_signature
    tensors = {**captured.state_dict, **captured.constants}
    written = [  # the argument that each output overwrites; None for an output of another kind
        spec.target if spec.kind.name == "USER_INPUT_MUTATION" else None
        for spec in signature.output_specs
    ]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(values)
        inputs = [
            next(remaining) if spec.kind.name == "USER_INPUT" else tensors[spec.target]
            for spec in signature.input_specs
        ]
        with traceback.preserve_node_meta():  # keeps the lines of the model
            outputs = _Reshaping(captured.graph_module).run(*inputs)
        return [value for value, name in zip(outputs, written, strict=True) if name is not None]

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    symbols = dict.fromkeys(a.items for a in arguments if a.items is not None)
    sizes = {symbol: _ITEMS[k] for k, symbol in enumerate(symbols)}
    examples = [_example(argument, sizes, mode) for argument in arguments]
    graph = traced(run, examples, mode)
    if shapes.guards:
        numbers = ", ".join(str(guard.expr) for guard in shapes.guards)
        raise NotApplicableError(f"the program depends on the numbers of items: {numbers}")
    places = [signature.user_inputs.index(name) for name in written if name is not None]
    return OneRow(graph, places)


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
    """What `map_impl` returns for one row: the outputs of `body`, each with one row."""
    row = [values.select(0, 0) for values in of_rows]
    outputs = _Reshaping(body).run(*row, *shared)
    return tuple(output.unsqueeze(0) for output in outputs)


def _example(argument: Given, sizes: Mapping[Any, int], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor for an argument, with a symbol for each number of items and for the length of
    each matrix of items. DUCK: lengths of the same size have the same symbol."""
    length, kind = 1, DimDynamic.STATIC
    if argument.items is not None:
        length, kind = sizes[argument.items], DimDynamic.DUCK
        if argument.kind == "m":  # it may be longer than its items: it has a length of its own
            length, kind = 2 * length, DimDynamic.DYNAMIC
    shape = [n if isinstance(n, int) else length for n in argument.value.shape]
    symbolic = [DimDynamic.STATIC if isinstance(n, int) else kind for n in argument.value.shape]
    return mode.from_tensor(
        torch.empty(shape, dtype=argument.value.dtype),
        symbolic_context=StatelessSymbolicContext(symbolic),
    )


class _Walk:
    """Visits the nodes of the graph in order and builds `program` from them.

    `results`: of each node so far. `columns`: the number of columns of the arguments so far.
    `collections`: the index of each jagged collection, by the symbol of its number of items.
    """

    def __init__(self, row: OneRow, arguments: Sequence[Given]) -> None:
        self.row = row
        self.arguments = iter(arguments)
        self.build = Builder()
        self.program = self.build.program
        self.results: dict[Node, Any] = {}
        self.columns = 0
        self.collections: dict[Any, int] = {}

    def walk(self) -> Program:
        """Visits all nodes, and returns the program."""
        for node in self.row.graph.graph.nodes:
            self.build.line, self.build.operator = model_line(node), str(node.target)
            if node.op == "output":
                self.outputs(node)
            else:
                self.results[node] = self.result(node)
        return self.program

    def result(self, node: Node) -> Any:
        """The result of a node that is no output: see `call`."""
        if node.op == "placeholder":
            return self.input(node)
        if node.op == "get_attr":
            return getattr(self.row.graph, str(node.target))
        if node.op == "call_function":
            return self.call(node)
        raise NotApplicableError(f"it has no code for {node.op} of {node.target}")

    def input(self, node: Node) -> Any:
        """Adds an argument to the program. Returns its columns, or the number that it carries."""
        argument, value = next(self.arguments), node.meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        self.program.kinds += argument.kind
        self.program.dtypes.append(dtype)
        if argument.kind == "i":
            number = self.build.counts[_symbol(value.shape[0])] = len(self.collections)
            self.collections[argument.items] = number
        if argument.kind in "ni":
            return self.build.count_of(value.shape[0])
        shape = sizes(value)
        items = None if argument.items is None else self.collections[argument.items]
        columns = Argument(self.build.values, shape, dtype, self.columns, argument.kind, items)
        self.columns += shape[0] if argument.kind == "m" else 1
        return self.build.add(columns)

    def call(self, node: Node) -> Any:
        """A node's result: tensors of the program, or torch tensors if it depends on no row. None
        for torch's own checks, and for a result that nothing reads."""
        args, kwargs = self.known(node.args), self.known(node.kwargs)
        name = name_of(node.target)
        if node.target is operator.getitem:
            return self.one_of(node, *args)
        if writes(node):
            raise NotApplicableError(f"it has no code for {name}{_at(self.build.line)}")
        checks = "assert" in str(node.target)
        if checks or not node.users:
            return None
        if not _of_rows([*_flat(args), *_flat(list(kwargs.values()))]):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotApplicableError(f"{name} is random{_at(self.build.line)}")
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(node.meta["val"], torch.SymInt):
            return self.size(node, args)
        return self.lowered(node, args, kwargs)

    def known(self, arguments: Any) -> Any:
        """Arguments of a node, with the results in place of the nodes among them."""
        return torch.fx.node.map_arg(arguments, lambda node: self.results[node])

    def one_of(self, node: Node, results: Sequence[Any], number: int) -> Any:
        """One of the results of an operator that has several."""
        result = results[number]
        if node.users and not agrees(result, node.meta["val"]):
            raise NotApplicableError(
                f"it has no code for {node.args[0]} with these arguments{_at(self.build.line)}"
            )
        return result

    def lowered(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A node's result by the operator's lowering. NotApplicableError, whatever goes wrong."""
        name, value = name_of(node.target), node.meta["val"]
        op = Operator(name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if name not in LOWERINGS:
            raise NotApplicableError(f"it has no code for {name}{_at(self.build.line)}")
        try:
            result = lowered(self.build, op, node.target, args, kwargs)
            if not isinstance(result, list) and not agrees(result, value):
                raise NotKnown(f"{node.target} with these arguments")
            return result
        except NotKnown as refusal:
            text = f"it has no code for {refusal}{_at(self.build.line)}"
            raise NotApplicableError(text) from None
        except Exception as error:  # arguments that the lowering did not expect
            raise no_code(str(node.target), self.build.line, error) from error

    def size(self, node: Node, arguments: Sequence[Any]) -> Any:
        """A number of items, or a value computed from such numbers."""
        items = self.build.count_of(node.meta["val"])
        if items is not None:
            return items
        function = _ARITHMETIC.get(node.target)
        if function is None:
            raise NotApplicableError(
                f"it has no code for sizes by {node.target}{_at(self.build.line)}"
            )
        values = self.build.values
        numbers = [n if isinstance(n, Value) else values.literal(n, "int64") for n in arguments]
        return values.call(function, *numbers, dtype="int64")

    def outputs(self, node: Node) -> None:
        """Records the tensors that the program writes into its arguments."""
        inputs = self.row.graph.graph.find_nodes(op="placeholder")
        for place, output in zip(self.row.written, node.args[0], strict=True):  # type: ignore[arg-type]
            argument = self.results[inputs[place]]
            tensor = self.build.tensor(self.results[output], argument.dtype)
            self.program.outputs.append((argument, tensor))


def _flat(argument: Any) -> list[Any]:
    """The arguments in nested lists, as one list."""
    if isinstance(argument, list | tuple):
        return [value for inner in argument for value in _flat(inner)]
    return [argument]


def _of_rows(arguments: Sequence[Any]) -> bool:
    """True if an argument is a tensor or a number of the program."""
    return any(isinstance(argument, Tensor | Value) for argument in arguments)


def model_line(node: Node) -> str:
    """The innermost line that is not in torch, and the layer, such as `model.py:17 blocks.0`. Empty
    if no line is known."""
    places = _PLACE.findall(node.meta.get("stack_trace") or "")
    own_places = [(file, line) for file, line in places if "/torch/" not in file]
    if not own_places:
        return ""
    file, line = own_places[-1]
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    layer = modules[-1].partition(".")[2] if modules else ""  # `model.` is what we call it
    return f"{Path(file).name}:{line} {layer}".rstrip()


def _at(line: str) -> str:
    """Where an operator stands in the model, behind its name in an error."""
    return f" ({line})" if line else ""
