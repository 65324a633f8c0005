"""Takes operators apart into the operators by which torch defines them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import mkldnn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.exported.engine import quiet_torch

Decompositions = dict[Any, Callable[..., Any]]
"""For an overload of an operator, the function that computes it by other operators."""

_NAMESPACES = ("aten", "prims", "soa_pipeline")


def name_of(target: Any) -> str:
    """An operator's name without namespace and overload: `add` for `aten.add.Tensor`.

    For any other function, such as `operator.getitem`, this is the whole name.
    """
    space, _, name_and_overload = str(target).partition(".")
    if space not in _NAMESPACES or not name_and_overload:
        return str(target)
    return name_and_overload.partition(".")[0]


def writes_in_place(node: Node) -> bool:
    """Return whether a node calls an operator that changes a tensor in place."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


@cache
def decompositions(kept: frozenset[str]) -> Decompositions:
    """torch's decompositions, except of the operators whose names are in `kept`."""
    from torch._decomp import decomposition_table

    composed = {overload: overload.decompose for overload in _composite_operators()}
    known = {**composed, **decomposition_table, **torch.export.default_decompositions()}
    return {
        overload: function for overload, function in known.items() if name_of(overload) not in kept
    }


def _composite_operators() -> Iterator[OpOverload]:
    """Yield the operators that are implemented by calls of other operators.

    These are torch's own, implemented in C++, and `soa_pipeline::leaves`.
    """
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        space, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        if space in ("aten", "soa_pipeline"):
            yield getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def trace_call(run: Callable[..., Any], fakes: Sequence[Any], table: Decompositions) -> GraphModule:
    """Run a function on fake tensors (`fakes`) and return the graph of the operators it calls.

    Operators in `table` are taken apart. Writes in place are replaced where torch can do this.
    """
    # Without oneDNN, whose LSTM could not be decomposed.
    with sdpa_kernel(SDPBackend.MATH), mkldnn.flags(enabled=False):
        graph = make_fx(run, table, pre_dispatch=True)(*fakes)
        if any(writes_in_place(node) for node in graph.graph.nodes):
            graph = make_fx(functionalize(graph), table)(*fakes)
    return graph


def decompose_call(node: Node, table: Decompositions) -> GraphModule | None:
    """Return the operators into which torch takes a call apart, as a graph.

    It has one placeholder for each of `node.all_input_nodes`. None if torch does not take this
    operator apart, or cannot do it for a number of rows that is unknown.
    """
    inputs = node.all_input_nodes
    values = [source.meta["val"] for source in inputs]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if node.target not in table or mode is None or mode.shape_env is None:
        return None
    shapes = mode.shape_env

    def run(*input_values: Any) -> Any:
        value_of = dict(zip(inputs, input_values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        with quiet_torch(), mode, shapes.suppress_guards():
            graph = trace_call(run, values, table)
    except Exception:  # torch has no exception type for failures of tracing
        return None
    graph.graph.eliminate_dead_code()
    return graph
