"""A GNN on nodes and edges at growing event sizes: `python -m benchmarks.speed.gnn [NODES ...]`.

The inputs are two collections of different length; the ends of the edges are int columns. All ways
go from SoA columns to SoA columns. If torch finds a GPU, a second part has the columns in the GPU's
memory: it times ours, bound, against a round trip through the host, and counts the copies between
host and device with torch.profiler.
"""

from __future__ import annotations

import copy
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
    made = graph_subject(max(sizes), EDGES_PER_NODE)
    panels = [measure(made, sizes, seconds=3.0)]
    if torch.cuda.is_available():
        panels.append(measure_gpu(made, sizes, seconds=3.0))
    print_panels(CAPTION, panels)


def measure(made: Subject, sizes: Sequence[int], seconds: float) -> Panel:
    """Time on the CPU: ours, and other engines with packing into row-major tensors."""
    session = made.session("aoti")  # lanes has no rows of several dimensions
    engines = row_major_engines(made)
    races = {}
    for nodes in sizes:
        given, written = event(made, nodes, CPU)
        runs: dict[str, Callable[[], object]] = {_OURS: session.bind(given, written)}
        for name, model in engines.items():
            runs[f"pack, {name}, unpack"] = copying_way(made.signature, model, given, written)
        races[nodes] = race(runs, seconds)
    return race_panel("on the CPU", "nodes", races, _OURS)


def row_major_engines(made: Subject) -> dict[str, Model]:
    parts = (made.model, made.signature, made.inputs, made.folder)
    engines = {"AOTI": aoti(aoti_package(*parts)), "eager": eager(made.model)}
    session = onnx_session(*parts)
    return engines if session is None else {**engines, "ONNX Runtime": onnx(session)}


def measure_gpu(made: Subject, sizes: Sequence[int], seconds: float) -> Panel:
    """Time with the columns on the GPU; every call waits for its answer."""
    device = torch.device("cuda", torch.cuda.current_device())
    session = made.session("aoti", device)
    on_gpu = copy.deepcopy(made.model).to(device)
    on_host = aoti(aoti_package(made.model, made.signature, made.inputs, made.folder))
    races = {}
    for nodes in sizes:
        given, written = event(made, nodes, device)
        ways: dict[str, Callable[[], object]] = {
            _OURS: session.bind(given, written),
            "pack on the GPU, eager, unpack": copying_way(
                made.signature, eager(on_gpu), given, written
            ),
            "through the host, eager on the GPU": host_round_trip(
                made, there_and_back(eager(on_gpu), device), given, written
            ),
            "through the host, AOTI there": host_round_trip(made, on_host, given, written),
        }
        for name, way in ways.items():
            print(f"{nodes} nodes, {name}: {count_host_copies(way)} copies between host and GPU")
        races[nodes] = race({name: _awaited(way, device) for name, way in ways.items()}, seconds)
    return race_panel(f"on {torch.cuda.get_device_name(device)}", "nodes", races, _OURS)


def event(made: Subject, nodes: int, device: torch.device) -> tuple[Collections, Collections]:
    """Input collections with edges between random nodes, and output collections."""
    case = {"nodes": nodes, "edges": nodes * EDGES_PER_NODE}
    generator = torch.Generator().manual_seed(nodes)
    ends = {
        name: torch.randint(0, nodes, (case["edges"],), generator=generator, dtype=torch.int32)
        for name in ("source", "target")
    }
    inputs: Arrays = {**made.inputs, "edges": {**made.inputs["edges"], **ends}}
    return filled_collections(made.signature, inputs, case, device)


def host_round_trip(
    made: Subject, model: Model, given: Collections, written: Collections
) -> Callable[[], None]:
    """A call that copies columns to the host, packs, runs, unpacks, and copies the answers back."""
    host_given = {name: collection.to(CPU) for name, collection in given.items()}
    host_written = {name: collection.to(CPU) for name, collection in written.items()}
    on_host = copying_way(made.signature, model, host_given, host_written)
    down = [pair for name in given for pair in _pieces(host_given[name], given[name])]
    up = [pair for name in written for pair in _pieces(written[name], host_written[name])]

    def run() -> None:
        for to, source in down:
            to.copy_(source)
        on_host()
        for to, source in up:
            to.copy_(source)

    return run


def there_and_back(model: Model, device: torch.device) -> Model:
    """The model on tensors of the host: it copies them to the device, and the answers back."""
    return lambda rows: [answer.to(CPU) for answer in model([row.to(device) for row in rows])]


def count_host_copies(run: Callable[[], object]) -> int:
    """Copies between host and device in one call, as torch.profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = [activity.name for activity in profiler.events() or ()]
    return sum(name.startswith(("Memcpy HtoD", "Memcpy DtoH")) for name in names)


def _pieces(to: Collection, source: Collection) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(to.memory(), source.memory(), strict=True))


def _awaited(run: Callable[[], object], device: torch.device) -> Callable[[], None]:
    def awaited() -> None:
        run()
        torch.cuda.synchronize(device)

    return awaited


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [100, 1_000, 10_000])
