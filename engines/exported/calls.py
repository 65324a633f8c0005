"""One call of an operator in a graph, for the analysis of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from engines.exported.graph import sizes, sizes_of
from engines.exported.row_places import Rows, Value, common_rows

Facts = Value | tuple[Value, ...]
"""The facts of what an operator returns: of one tensor, or of each tensor of a tuple."""
Rule = Callable[["Call"], Facts]
"""Follows the rows through a call: gives the facts of what it returns, or raises Mixed."""

# Arguments that are sizes. The number of rows is allowed there, since it is not used as a value.
_SIZES = frozenset(["size", "sizes", "shape", "repeats", "split_sizes"])
_BOUNDED = frozenset(["slice", "slice_scatter", "arange"])  # `start` and `end` are sizes


class Call:
    """One call of an operator, and what is known of its arguments.

    `arguments` maps the names in the operator's schema to the arguments of this call, `values` each
    node that was visited to its facts. Rules add to `reads`: pairs of symbols, a number of rows and
    the number of items (of a jagged collection) that these rows read.
    """

    def __init__(
        self, node: Node, values: Mapping[Node, Facts], reads: set[tuple[Any, Any]]
    ) -> None:
        self.node, self.values, self.reads = node, values, reads
        schema = getattr(node.target, "_schema", None)
        parameters = schema.arguments if schema is not None else ()
        self.arguments: dict[str, Any] = {item.name: item.default_value for item in parameters}
        self.arguments |= dict(zip(self.arguments, node.args, strict=False)) | node.kwargs
        self.returns: list[str] = [item.name for item in schema.returns] if schema else []

    @property
    def name(self) -> str:
        """The operator's name: `sum` for `aten.sum.dim_IntList`; empty if ATen does not have it."""
        target: Any = self.node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return ""
        return str(target._opname)

    @property
    def random(self) -> bool:
        """True if the operator draws random numbers."""
        return torch.Tag.nondeterministic_seeded in getattr(self.node.target, "tags", ())

    @cached_property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shape of each tensor that the call returns."""
        return shapes_of(self.node)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the first tensor that the call returns."""
        return self.shapes[0]

    def number(self, name: str) -> Any:
        """The value of an argument that is a number, or its expression: see `number` below."""
        return number(self.arguments.get(name))

    def value(self, name: str = "self") -> Value:
        """The facts of a tensor argument; `Value()`, without rows, for a number or no argument."""
        argument = self.arguments.get(name)
        known = self.values.get(argument) if isinstance(argument, Node) else None
        return known if isinstance(known, Value) else Value()

    def rows(self, name: str = "self") -> Rows | None:
        """Where the rows of a tensor argument lie; None if it has none."""
        return self.value(name).rows

    def sizes(self, name: str = "self") -> tuple[Any, ...]:
        """The sizes of a tensor argument."""
        return sizes(self.arguments[name])

    def rank(self, name: str = "self") -> int:
        """The number of dimensions of a tensor argument."""
        return len(self.sizes(name))

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """The dimension that an argument names, counted from the left: of 3 dimensions, -1 is 2.

        `rank` is the number of dimensions; None stands for that of the argument `self`.
        """
        return int(self.arguments[name]) % (self.rank() if rank is None else rank)

    def dims(self, rank: int) -> list[int]:
        """The dimensions that the operator works along, of a tensor with `rank` dimensions.

        If the call names none, the operator works along all of them.
        """
        dims = self.arguments.get("dim", self.arguments.get("dims"))
        if isinstance(dims, int):
            dims = [dims]
        return [dim % rank for dim in dims] if dims else list(range(rank))

    @cached_property
    def tensors(self) -> dict[Node, Value]:
        """The facts of every tensor argument by its node, in order, also of those in lists."""
        nodes: list[Node] = []
        torch.fx.node.map_arg(list(self.arguments.values()), lambda node: nodes.append(node))
        known = ((node, self.values.get(node)) for node in nodes)
        return {node: value for node, value in known if isinstance(value, Value)}

    @cached_property
    def largest_rank(self) -> int:
        """The largest number of dimensions that a tensor argument has."""
        return max((len(sizes(node)) for node in self.tensors), default=0)

    def broadcast(self) -> Rows | None:
        """Where the rows lie once all tensor arguments are broadcast to one shape.

        None if no argument has rows. Raises Mixed if the rows of two arguments lie differently.
        """
        return common_rows(
            value.moved_rows(self.largest_rank - len(sizes(node)))
            for node, value in self.tensors.items()
        )

    @cached_property
    def counted(self) -> list[Any]:
        """The arguments that are computed from the number of rows and are not used as sizes."""
        numbers: list[Any] = []
        are_sizes = _SIZES | {"start", "end"} if self.name in _BOUNDED else _SIZES
        for name, argument in self.arguments.items():
            if name not in are_sizes:
                # `map_arg` calls the function for each node in the argument.
                torch.fx.node.map_arg(argument, lambda node: numbers.append(number(node)))
        return [value for value in numbers if not isinstance(value, Node | int | float)]


def shapes_of(node: Node) -> list[tuple[Any, ...]]:
    """The shape of each tensor that a node returns; empty if it returns no tensor."""
    value = node.meta.get("val")
    returned = value if isinstance(value, tuple | list) else [value]
    return [sizes_of(tensor) for tensor in returned if isinstance(tensor, torch.Tensor)]


def number(argument: Any) -> Any:
    """The value of an argument that is a number, or its expression if it is computed from sizes.

    `x.shape[0] + 1` is the expression `s77 + 1`. Any other argument is returned as it is.
    """
    value = argument.meta.get("val") if isinstance(argument, Node) else argument
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression = value.node.expr
        return int(expression) if getattr(expression, "is_Integer", False) else expression
    return value if isinstance(value, int | float) else argument
