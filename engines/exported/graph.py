"""Steps of an exported program's graph."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


def insert(graph: Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """A new step, with the shape and dtype of its value, which torch's exporters ask for."""
    node = graph.call_function(function, args, kwargs)
    node.meta["val"] = function(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


def as_node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument


def sizes(node: Any) -> tuple[Any, ...]:
    """A tensor's sizes: ints, and expressions that can be compared without adding a guard."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape)


def bounds(size: Any) -> tuple[int, int | None]:
    """The least and the largest value of a size that the program is for; None: no bound."""
    if isinstance(size, int):
        return size, size
    from torch.utils._sympy.numbers import int_oo  # loads sympy, which opening needs not

    found = size.node.shape_env.bound_sympy(size.node.expr)
    return int(found.lower), None if found.upper is int_oo else int(found.upper)


def placed(name: str, traces: Iterable[str]) -> str:
    """A name with the innermost line of each trace that is not torch's own."""
    found = [[p for p in _PLACE.findall(each) if not p[0].startswith(_TORCH)] for each in traces]
    places = dict.fromkeys(":".join(lines[-1]) for lines in found if lines)
    return f"{name} ({', '.join(places)})" if places else name
