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
    find_dependence,
    load_program,
    name_of,
    quiet_torch,
    trace_call,
    writes_in_place,
)
from engines.lanes.operators import LOWERINGS, ROWS, Operator, agrees, lower_call, shape_of
from engines.lanes.tensor_builder import Builder, NotKnown
from engines.lanes.tensors import Argument, Program, no_code_error
from engines.lanes.values import Tensor, Value

_STACK_ENTRY = re.compile(r'File "([^"]+)", line (\d+)')
# The numbers of items to trace with: primes, which are unlikely to be a size in a model.
_ITEMS = (1009, 2003, 3001, 4001, 5003, 6007, 7001, 8009)
_ARITHMETIC: dict[Any, str] = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def why_dependent(program: ExportedProgram) -> Dependence | None:
    """Why a row's result may depend on other rows or on the number of rows; None if it depends on
    neither."""
    return find_dependence(program, ROWS)


def make_row_program(file: Path) -> Program:
    """Load a program.pt2 and make its program for one row. Raises NotApplicableError if rows may
    depend on each other or if there is no code for an operator."""
    return lower_row(*trace_row(file))


def trace_row(file: Path) -> tuple[OneRow, list[Given]]:
    """Load a program.pt2 and trace it with one row. Returns the operations of the row, and the
    program's arguments. Raises the same errors as `make_row_program`."""
    with quiet_torch(), torch.no_grad():
        captured = load_program(file)
        why = why_dependent(captured)
        if why is not None and why.known:
            raise NotApplicableError(f"a row may see other rows: {why.text}")
        arguments = _describe_arguments(captured)
        try:
            row = trace_at_one_row(captured, arguments)
        except NotApplicableError:
            raise
        except Exception as error:  # torch has no exception type for failures of tracing
            raise NotApplicableError(
                f"it cannot be traced at one row: {first_line(error)}"
            ) from error
    return row, arguments


def lower_row(row: OneRow, arguments: Sequence[Given]) -> Program:
    """Translate the operations of one row into a program. Raises NotApplicableError if there is no
    code for one of them."""
    return _Walk(row, arguments).walk()


@dataclass(frozen=True)
class Given:
    """An argument of the captured program.

    `kind` is its letter in `Program.kinds`. `items` is torch's symbol for its number of items, or
    None if it has rows or is shared by all rows.
    """

    value: torch.Tensor
    kind: str
    items: Any = None


def _describe_arguments(captured: ExportedProgram) -> list[Given]:
    """Describe the arguments of a captured program. Raises NotApplicableError unless all arguments
    that it writes have the same number of rows."""
    names = captured.graph_signature.user_inputs
    nodes = [node for node in captured.graph.find_nodes(op="placeholder") if node.name in names]
    mutated = [
        spec.target
        for spec in captured.graph_signature.output_specs
        if spec.kind.name == "USER_INPUT_MUTATION"
    ]
    rows = {_length_symbol(node) for node in nodes if node.name in mutated} - {None}
    if len(rows) != 1:
        raise NotApplicableError("its outputs do not all have the same rows")
    return [_describe_argument(node, rows) for node in nodes]


def _describe_argument(node: Node, rows: set[Any]) -> Given:
    """Describe an argument of the captured program. `rows` has torch's symbol for the number of
    rows; every other symbol is a number of items. An argument without elements only carries a
    number."""
    value = node.meta["val"]
    length = _length_symbol(node)
    items = None if length in rows else length
    if len(value.shape) == 2 and value.shape[1] == 0:
        return Given(value, "i" if items is not None else "n", items)
    if all(isinstance(size, int) for size in value.shape):
        return Given(value, "-")
    return Given(value, "m" if len(value.shape) == 2 else "c", items)


def _length_symbol(node: Node) -> Any:
    """torch's symbol for the number of rows or items of an argument; None if it has no such number.

    A matrix may be longer than its rows. So its number is that of the slices which the program
    reads from it or writes into it.
    """
    shape = node.meta["val"].shape
    if len(shape) == 2 and shape[1] != 0:
        read = [user.meta["val"] for user in node.users if "slice.Tensor" in str(user.target)]
        written = [
            user.args[1].meta["val"]  # type: ignore[union-attr]
            for user in node.users
            if "slice_scatter" in str(user.target)
        ]
        lengths = {_symbol(value.shape[1]) for value in (*read, *written)}
        return lengths.pop() if len(lengths) == 1 else None
    return _symbol(shape[0])


def _symbol(size: Any) -> Any:
    """torch's symbol for a size; None if the size is a number."""
    return None if isinstance(size, int) else size.node.expr


@dataclass(frozen=True)
class OneRow:
    """The operations of one row. `graph` takes all arguments of the program, and returns the new
    contents of those whose indices are in `written`, in that order."""

    graph: GraphModule
    written: list[int]


def trace_at_one_row(captured: ExportedProgram, arguments: Sequence[Given]) -> OneRow:
    """Trace the captured program again, with one row, padded lengths of 1 and any number of items.

    Raises NotApplicableError if its operations depend on the numbers of items.
    """
    signature = captured.graph_signature
    tensors = {**captured.state_dict, **captured.constants}
    written = [  # the argument that each output overwrites; None for an output of another kind
        spec.target if spec.kind.name == "USER_INPUT_MUTATION" else None
        for spec in signature.output_specs
    ]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        """Run the captured program. Returns the new contents of the arguments that it writes."""
        remaining = iter(values)
        inputs = [
            next(remaining) if spec.kind.name == "USER_INPUT" else tensors[spec.target]
            for spec in signature.input_specs
        ]
        with traceback.preserve_node_meta():  # keeps the lines of the model
            outputs = _RunAtOneRow(captured.graph_module).run(*inputs)
        return [value for value, name in zip(outputs, written, strict=True) if name is not None]

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    items = (argument.items for argument in arguments)
    symbols = dict.fromkeys(symbol for symbol in items if symbol is not None)
    sizes = {symbol: _ITEMS[k] for k, symbol in enumerate(symbols)}
    examples = [_fake_argument(argument, sizes, mode) for argument in arguments]
    graph = trace_operators(run, examples, mode)
    if shapes.guards:
        conditions = ", ".join(str(guard.expr) for guard in shapes.guards)
        raise NotApplicableError(f"the program depends on the numbers of items: {conditions}")
    indices = [signature.user_inputs.index(name) for name in written if name is not None]
    return OneRow(graph, indices)


def trace_operators(
    run: Callable[..., Any], examples: Sequence[torch.Tensor], mode: FakeTensorMode
) -> GraphModule:
    """Record the operators of the call `run(*examples)`, whose arguments are fake tensors of
    `mode`. Operators that lanes does not know are decomposed, and none changes a tensor in
    place."""
    with mode:
        return trace_call(run, examples, decompositions(frozenset(LOWERINGS)))


class _RunAtOneRow(torch.fx.Interpreter):
    """Runs the captured graph with one row.

    It calls `reshape` in place of `view`, which could fail because strides may differ at one row.
    Where the program runs a graph for each row (`map_impl`), it runs that graph once.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, or what stands in its place here. torch.fx calls this for each node."""
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        if target is torch.ops.higher_order.map_impl:
            return _run_map_once(*args)
        return super().call_function(target, args, kwargs)


def _run_map_once(
    body: GraphModule, of_rows: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run the graph `body` for the only row, and return what `map_impl` would: the outputs, each
    with a dimension of one row. `body` takes one row of each tensor in `of_rows`, and all of
    `shared`."""
    row = [values.select(0, 0) for values in of_rows]
    outputs = _RunAtOneRow(body).run(*row, *shared)
    return tuple(output.unsqueeze(0) for output in outputs)


def _fake_argument(argument: Given, items: Mapping[Any, int], mode: FakeTensorMode) -> torch.Tensor:
    """Make a fake tensor for an argument, with one row.

    Its number of items, if it has one, is a symbol. With torch's DUCK, all arguments of the same
    collection share that symbol, because they have the same size.
    """
    length, kind = 1, DimDynamic.STATIC
    if argument.items is not None:
        length, kind = items[argument.items], DimDynamic.DUCK
        if argument.kind == "m":  # it may be longer than its items: it has a length of its own
            length, kind = 2 * length, DimDynamic.DYNAMIC
    sizes = argument.value.shape
    shape = [size if isinstance(size, int) else length for size in sizes]
    symbolic = [DimDynamic.STATIC if isinstance(size, int) else kind for size in sizes]
    return mode.from_tensor(
        torch.empty(shape, dtype=argument.value.dtype),
        symbolic_context=StatelessSymbolicContext(symbolic),
    )


class _Walk:
    """Visits the nodes of the graph in order and builds `program` from them.

    `results` has the result of each node visited so far, and `columns` is the number of columns of
    the arguments so far. `collections` maps the symbol of a number of items to the index of its
    jagged collection.
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
        """Visit all nodes. Returns the program."""
        for node in self.row.graph.graph.nodes:
            self.build.line, self.build.operator = model_line(node), str(node.target)
            if node.op == "output":
                self.add_outputs(node)
            else:
                self.results[node] = self.translate_node(node)
        return self.program

    def translate_node(self, node: Node) -> Any:
        """Compute the result of a node other than the output, and add its tensors to the program.
        For a call of an operator see `translate_call`."""
        if node.op == "placeholder":
            return self.add_input(node)
        if node.op == "get_attr":
            return getattr(self.row.graph, str(node.target))
        if node.op == "call_function":
            return self.translate_call(node)
        raise NotApplicableError(f"it has no code for {node.op} of {node.target}")

    def add_input(self, node: Node) -> Any:
        """Add the next argument to the program. Returns its columns as a tensor, or the number that
        it carries if it has no elements."""
        argument, value = next(self.arguments), node.meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        self.program.kinds += argument.kind
        self.program.dtypes.append(dtype)
        if argument.kind == "i":
            number = self.build.counts[_symbol(value.shape[0])] = len(self.collections)
            self.collections[argument.items] = number
        if argument.kind in "ni":
            return self.build.count_of(value.shape[0])
        shape = shape_of(value)
        items = None if argument.items is None else self.collections[argument.items]
        columns = Argument(self.build.values, shape, dtype, self.columns, argument.kind, items)
        self.columns += shape[0] if argument.kind == "m" else 1
        return self.build.add(columns)

    def translate_call(self, node: Node) -> Any:
        """Translate a call of an operator.

        Returns tensors of the program, or torch tensors if the result depends only on weights:
        these are computed now. Returns None for torch's own checks, and if nothing reads the
        result.
        """
        args, kwargs = self.with_results(node.args), self.with_results(node.kwargs)
        name = name_of(node.target)
        if node.target is operator.getitem:
            return self.pick_result(node, *args)
        if writes_in_place(node):
            raise NotApplicableError(f"it has no code for {name}{_where(self.build.line)}")
        checks = "assert" in str(node.target)
        if checks or not node.users:
            return None
        if not _depends_on_rows([*_flatten(args), *_flatten(list(kwargs.values()))]):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotApplicableError(f"{name} is random{_where(self.build.line)}")
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(node.meta["val"], torch.SymInt):
            return self.translate_size(node, args)
        return self.lower(node, args, kwargs)

    def with_results(self, arguments: Any) -> Any:
        """Return a node's arguments with each node among them replaced by its result."""
        return torch.fx.node.map_arg(arguments, lambda node: self.results[node])

    def pick_result(self, node: Node, results: Sequence[Any], number: int) -> Any:
        """Take result `number` of an operator that has several. Raises NotApplicableError if it
        does not agree with torch's: lanes has then no code for these arguments."""
        result = results[number]
        if node.users and not agrees(result, node.meta["val"]):
            raise NotApplicableError(
                f"it has no code for {node.args[0]} with these arguments{_where(self.build.line)}"
            )
        return result

    def lower(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Translate a call by the operator's entry in LOWERINGS. Raises NotApplicableError,
        whatever goes wrong."""
        name, value = name_of(node.target), node.meta["val"]
        op = Operator(name, tuple(value) if isinstance(value, list | tuple) else (value,))
        if name not in LOWERINGS:
            raise NotApplicableError(f"it has no code for {name}{_where(self.build.line)}")
        try:
            result = lower_call(self.build, op, node.target, args, kwargs)
            if not isinstance(result, list) and not agrees(result, value):
                raise NotKnown(f"{node.target} with these arguments")
            return result
        except NotKnown as refusal:
            text = f"it has no code for {refusal}{_where(self.build.line)}"
            raise NotApplicableError(text) from None
        except Exception as error:  # arguments that the lowering did not expect
            raise no_code_error(str(node.target), self.build.line, error) from error

    def translate_size(self, node: Node, arguments: Sequence[Any]) -> Any:
        """Translate a size that torch computes: a number of items, or the result of +, - or * of
        such numbers."""
        items = self.build.count_of(node.meta["val"])
        if items is not None:
            return items
        function = _ARITHMETIC.get(node.target)
        if function is None:
            raise NotApplicableError(
                f"it has no code for sizes by {node.target}{_where(self.build.line)}"
            )
        values = self.build.values
        operands = [x if isinstance(x, Value) else values.literal(x, "int64") for x in arguments]
        return values.call(function, *operands, dtype="int64")

    def add_outputs(self, node: Node) -> None:
        """Add to the program which tensors it writes into its arguments."""
        inputs = self.row.graph.graph.find_nodes(op="placeholder")
        for index, output in zip(self.row.written, node.args[0], strict=True):  # type: ignore[arg-type]
            argument = self.results[inputs[index]]
            tensor = self.build.as_tensor(self.results[output], argument.dtype)
            self.program.outputs.append((argument, tensor))


def _flatten(argument: Any) -> list[Any]:
    """All arguments in nested lists and tuples, as one list."""
    if isinstance(argument, list | tuple):
        return [value for inner in argument for value in _flatten(inner)]
    return [argument]


def _depends_on_rows(arguments: Sequence[Any]) -> bool:
    """True if one of the arguments is a tensor or a number of the program for one row."""
    return any(isinstance(argument, Tensor | Value) for argument in arguments)


def model_line(node: Node) -> str:
    """The line of the model that made a node, and its layer, such as `model.py:17 blocks.0`. This
    is the innermost line of the stack trace outside of torch. Empty if no line is known."""
    entries = _STACK_ENTRY.findall(node.meta.get("stack_trace") or "")
    own_entries = [(file, line) for file, line in entries if "/torch/" not in file]
    if not own_entries:
        return ""
    file, line = own_entries[-1]
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    # Without `model.`, our own name for the user's model.
    layer = modules[-1].partition(".")[2] if modules else ""
    return f"{Path(file).name}:{line} {layer}".rstrip()


def _where(line: str) -> str:
    """The line of the model as it follows an operator's name in an error; empty if it is not
    known."""
    return f" ({line})" if line else ""
