"""Finds from a program's graph whether its rows depend on each other.

The analysis follows the row dimension through every operator and records where the rows of each
value lie (row_places.py). The rows are dependent if an operator works across rows, picks some of
them, or uses their number other than as a size. They may be dependent if there is no rule for an
operator (row_rules.py), and torch does not take it apart into operators that have one (parts.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from engines.exported.calls import Call, Facts, Rule, shapes_of
from engines.exported.graph import sizes, with_model_lines
from engines.exported.parts import Decompositions, decompose_call, decompositions
from engines.exported.row_places import (
    ACROSS,
    COUNT,
    WITH_OTHERS,
    Mixed,
    Numbers,
    Rows,
    Unknown,
    Value,
    common_rows,
    rows_of_shape,
)
from engines.exported.row_rules import facts_of_returned

_DIMENSIONS = "there are several row dimensions, and nothing says which items belong to which row"


@dataclass(frozen=True)
class Dependence:
    """Why a row's result may depend on other rows or on their number.

    `text` names the operator and the model's line. `known`: the operator is known to do this; else
    it is unknown to the rules, and rows may be independent.
    """

    text: str
    known: bool


def find_dependence(program: ExportedProgram, rules: Mapping[str, Rule]) -> Dependence | None:
    """Find out why a row's result may depend on other rows or on their number; None if it does not.

    `rules` maps an operator's name to its rule (row_rules.py). An operator without a rule is taken
    apart into the operators by which torch defines it.

    `program` is in the calling convention and takes any number of rows. With jagged inputs (items
    and offsets), a row may read only the items from its begin to its end.
    """
    return _Analysis(program, rules).find_dependence()


class _Analysis:
    """Visits the nodes of the graph in order and keeps the facts of each value in `values`."""

    def __init__(self, program: ExportedProgram, rules: Mapping[str, Rule]) -> None:
        self.program, self.rules = program, rules
        self.specs = {
            getattr(spec.arg, "name", ""): spec for spec in program.graph_signature.input_specs
        }
        self.table = _decompositions_without_rule(frozenset(rules))
        self.values: dict[Node, Facts] = {}
        self.counts: set[Any] = set()
        """The symbols of the numbers of rows."""
        self.reads: set[tuple[Any, Any]] = set()
        """Pairs of symbols: a number of rows, and the number of items that these rows read."""

    def find_dependence(self) -> Dependence | None:
        """Return what the first node does in which a row may see others; None if there is none."""
        for node in self.program.graph.nodes:
            try:
                self.note_facts(node)
            except Mixed as why:
                known = not isinstance(why, Unknown)
                if node.op != "call_function":
                    return Dependence(str(why), known)
                trace = node.meta.get("stack_trace") or ""
                return Dependence(with_model_lines(f"{node.target} {why}", [trace]), known)
        return None

    def note_facts(self, node: Node) -> None:
        """Find the facts of a node's value and keep them in `values`.

        Raises Mixed if rows may depend on each other in this node.
        """
        if node.op == "placeholder":
            self.values[node] = self.facts_of_input(node)
        elif node.op == "output":
            self.require_outputs(node)
        elif node.target is operator.getitem:
            source, number = node.args
            self.values[node] = self.values[source][number]  # type: ignore[index]
        elif node.target is torch.ops.higher_order.map_impl:
            self.values[node] = self.facts_of_map(node)
        elif node.op == "get_attr":
            constant = getattr(node.graph.owning_module, str(node.target))
            self.values[node] = Value(numbers=_range_of(constant))
        elif shapes_of(node):
            values = self.facts_of_call(node)
            self.require_shapes(node, values)
            self.values[node] = values if len(values) > 1 or _returns_several(node) else values[0]

    def facts_of_call(self, node: Node) -> tuple[Value, ...]:
        """Find the facts of each tensor that an operator returns.

        They follow from the operator's rule, or else from the rules of its parts. Raises Mixed if
        rows may depend on each other, and Unknown if there are no such rules.
        """
        call = Call(node, self.values, self.reads)
        try:
            return facts_of_returned(call, self.rules)
        except Unknown as why:
            parts = decompose_call(node, self.table)
            if parts is not None:
                return self.facts_of_parts(node, parts)
            if call.random:
                raise Mixed(str(why)) from None
            if call.counted and not call.tensors:
                raise Mixed(COUNT) from None
            raise

    def facts_of_parts(self, node: Node, parts: GraphModule) -> tuple[Value, ...]:
        """Find the facts of each tensor that an operator returns.

        `parts` is the graph into which `decompose_call` has taken the operator apart.
        """
        placeholders = parts.graph.find_nodes(op="placeholder")
        for placeholder, source in zip(placeholders, node.all_input_nodes, strict=True):
            if source in self.values:
                self.values[placeholder] = self.values[source]
        for part in parts.graph.nodes:
            if part.op not in ("placeholder", "output"):
                self.note_facts(part)
        returned: Any = parts.graph.output_node().args[0]
        results = returned if _returns_several(node) else [returned]
        return tuple(self.facts_of_tensor(result) for result in results)

    def facts_of_input(self, node: Node) -> Value:
        """Find the facts of a placeholder: an argument of the program, a weight or a constant.

        A row carrier, `(n, 0)`, adds its n to `counts`. Raises Mixed if its n is a fixed number.
        """
        spec = self.specs[node.name]
        if spec.kind is not InputKind.USER_INPUT:
            return Value(numbers=_range_of(self.weight_or_constant(str(spec.target))))
        shape = sizes(node)
        if len(shape) == 2 and shape[1] == 0:  # a row carrier
            if isinstance(shape[0], int):
                raise Mixed(f"the program takes {shape[0]} rows and no other number")
            self.counts.add(shape[0])
        elif len(shape) == 2 and isinstance(shape[0], int) and not isinstance(shape[1], int):
            return Value(padded=True)
        column_of_integers = shape and not isinstance(shape[0], int) and _has_integers(node)
        return Value(rows_of_shape(shape), Numbers(0, 0, base=node) if column_of_integers else None)

    def facts_of_map(self, node: Node) -> tuple[Value, ...]:
        """Find the facts of each tensor that `map_impl` returns.

        This operator runs a graph for each row of some tensors. All rows share the other tensors.
        Raises Mixed if the rows of the tensors differ, or a shared tensor depends on rows.
        """
        tensors: Any = node.args[1:]
        of_rows, shared = ([self.facts_of_tensor(tensor) for tensor in group] for group in tensors)
        rows = common_rows(value.rows for value in of_rows)
        numbered = any(value.numbered or value.padded for value in (*of_rows, *shared))
        if rows is None or numbered or any(value.rows for value in shared):
            raise Mixed(WITH_OTHERS)
        if any(value.rows != Rows(rows.n, 0) for value in of_rows):
            raise Mixed(ACROSS)
        return (Value(rows),) * len(shapes_of(node))

    def facts_of_tensor(self, node: Node) -> Value:
        """The facts of a node that returns one tensor and was visited."""
        value = self.values[node]
        assert isinstance(value, Value)
        return value

    def weight_or_constant(self, name: str) -> Any:
        """A weight or a constant of the program; None if there is none of this name."""
        return self.program.state_dict.get(name, self.program.constants.get(name))

    def require_shapes(self, node: Node, values: tuple[Value, ...]) -> None:
        """Raise Mixed unless the rows that a rule found fit the shape of each value."""
        for value, shape in zip(values, shapes_of(node), strict=True):
            if value.padded:
                continue
            if value.rows is None:
                fits = all(isinstance(size, int) for size in shape)
            else:
                fits = value.rows.n in self.counts and value.rows.fits_shape(shape)
            if not fits:
                raise Mixed("gives a shape in which rows are not found")

    def require_outputs(self, node: Node) -> None:
        """Raise Mixed unless each output has one result for each row.

        All outputs, and the rows that read items, must be of one row dimension.
        """
        row_counts: set[Any] = set()  # the symbols of the numbers of rows of the outputs
        outputs: Any = node.args[0]
        for spec, output in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            facts = self.values[output]
            if spec.kind is not OutputKind.USER_INPUT_MUTATION or not isinstance(facts, Value):
                raise Mixed("the program is not in the calling convention")
            if facts.numbered:
                raise Mixed("an answer is the number of its row")
            rows = facts.rows
            if rows is not None and rows != Rows(rows.n, 1 if facts.padded else 0):
                raise Mixed("an output does not have one answer for each row")
            if rows is not None:
                row_counts.add(rows.n)
        if len(row_counts) > 1 or any(reader not in row_counts for reader, _ in self.reads):
            raise Mixed(_DIMENSIONS)


@cache
def _decompositions_without_rule(rules: frozenset[str]) -> Decompositions:
    """Return torch's decompositions of the operators that have no rule.

    Pointwise operators are left out, since they need no rule. So are those that write in place:
    torch replaces the write first, and the operator that is left is then taken apart.
    """
    return {
        overload: function
        for overload, function in decompositions(rules).items()
        if torch.Tag.pointwise not in getattr(overload, "tags", ())
        if not (isinstance(overload, OpOverload) and overload._schema.is_mutable)
    }


def _returns_several(node: Node) -> bool:
    """Return whether a node returns a tuple or a list of tensors, even one of a single tensor."""
    return isinstance(node.meta["val"], tuple | list)


def _has_integers(node: Node) -> bool:
    """Return whether the elements of a node's tensor are integers; bools are not."""
    dtype: torch.dtype = node.meta["val"].dtype
    return not dtype.is_floating_point and dtype is not torch.bool


def _range_of(constant: Any) -> Numbers | None:
    """Return the range of a constant's values; None unless they are integers."""
    if type(constant) not in (torch.Tensor, torch.nn.Parameter) or not constant.numel():
        return None
    if constant.is_floating_point() or constant.is_complex() or constant.dtype is torch.bool:
        return None
    return Numbers(int(constant.min()), int(constant.max()))
