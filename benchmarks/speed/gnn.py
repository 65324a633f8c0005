"""A GNN on nodes and edges at growing event sizes: `python -m benchmarks.speed.gnn [NODES ...]`.

The inputs are two collections of different length; the ends of the edges are int columns. All ways
go from SoA columns to SoA columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.row_major import (
    Model,
    aoti,
    aoti_package,
    copying_way,
    eager,
    onnx,
    onnx_session,
)
from benchmarks.subject import CPU, Subject, graph_subject
from benchmarks.table import SPREAD, Panel, print_machine, print_panels, race_panel
from soa import Collection
from stages.reference.answers import Arrays, filled_collections
from stages.timing import race

EDGES_PER_NODE = 8
CAPTION = f"A GNN, {EDGES_PER_NODE} edges a node, SoA to SoA.\nx: to ours; {SPREAD}."
_OURS = "ours, no copy"

Collections = Mapping[str, Collection]


def main(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    print_machine()
    graph = graph_subject(max(sizes), EDGES_PER_NODE)
    print_panels(CAPTION, [measure(graph, sizes, seconds=3.0)])


def measure(graph: Subject, sizes: Sequence[int], seconds: float) -> Panel:
    """Time on the CPU: ours, and other engines with packing into row-major tensors."""
    session = graph.session("aoti")  # lanes has no rows of several dimensions
    engines = row_major_engines(graph)
    races = {}
    for nodes in sizes:
        inputs, outputs = event(graph, nodes, CPU)
        runs: dict[str, Callable[[], object]] = {_OURS: session.bind(inputs, outputs)}
        for name, model in engines.items():
            runs[f"pack, {name}, unpack"] = copying_way(graph.signature, model, inputs, outputs)
        races[nodes] = race(runs, seconds)
    return race_panel("on the CPU", "nodes", races, _OURS)


def row_major_engines(graph: Subject) -> dict[str, Model]:
    """The other engines, on row-major tensors; ONNX Runtime if it can run the network."""
    parts = (graph.model, graph.signature, graph.inputs, graph.folder)
    engines = {"AOTI": aoti(aoti_package(*parts)), "eager": eager(graph.model)}
    session = onnx_session(*parts)
    if session is not None:
        engines["ONNX Runtime"] = onnx(session)
    return engines


def event(graph: Subject, nodes: int, device: torch.device) -> tuple[Collections, Collections]:
    """Input collections with edges between random nodes, and output collections."""
    case = {"nodes": nodes, "edges": nodes * EDGES_PER_NODE}
    generator = torch.Generator().manual_seed(nodes)
    ends = {
        name: torch.randint(0, nodes, (case["edges"],), generator=generator, dtype=torch.int32)
        for name in ("source", "target")
    }
    inputs: Arrays = {**graph.inputs, "edges": {**graph.inputs["edges"], **ends}}
    return filled_collections(graph.signature, inputs, case, device)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [100, 1_000, 10_000])
