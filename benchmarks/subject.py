"""The small models that the benchmarks share, and their artifacts."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines import Executable, Portable, Target, engine
from engines.kinds import host_cpu_levels
from engines.target import gpu_target
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from stages.capture import Capture, capture
from stages.compile import artifact_file
from stages.reference.answers import Arrays, random_inputs

if TYPE_CHECKING:
    from registry.store import Registry

CPU = torch.device("cpu")
CONFIG = """
name: {name}
model: {{factory: {file}:Mlp, kwargs: {{features: 8}}}}
collections:
  rows: {{columns: [{{name: x0 .. x7, dtype: float32}}]}}
  answers: {{columns: [{{name: p, dtype: float32}}, {{name: q, dtype: float32}},
                      {{name: r, dtype: float32}}]}}
inputs: [{{name: x, collection: rows, columns: [x0 .. x7]}}]
outputs: [{{name: p, collection: answers, columns: [p, q, r]}}]
rows: {{n: {{max: 65536, typical: [1000, 65536], unbounded: true}}}}
engines: [{engines}]
"""
"""A config of `Mlp` on eight columns."""
_NODE_FEATURES = tuple(f"x{i}" for i in range(6))
_EDGE_FEATURES = tuple(f"e{i}" for i in range(3))
_ONE_CORE = 1.05  # processor time over time: more is another core
_LEAST_NODES = 100  # the reference draws node numbers below this, so they exist at every size


class Mlp(nn.Module):
    """F → 48 → 3; its first operation is pointwise, its last a softmax."""

    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(features, 48)
        self.last = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.relu(self.first(torch.log1p(x.abs())))), dim=-1)


class Wide(nn.Module):
    """F → hidden → hidden → 3; with `hidden` 5000 it has 25 million weights, 100 MB."""

    def __init__(self, features: int, hidden: int = 5000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(features, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(torch.log1p(x.abs())))
        return torch.softmax(self.last(torch.relu(self.middle(hidden))), dim=-1)


class Gnn(nn.Module):
    """Nodes (N, 6), edges (E, 3) and their ends (E, 2) → two probabilities of every node.

    In each of two steps, every edge computes a message from the nodes at its ends and from its
    features, and every node sums the messages of the edges of which it is the target.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Linear(len(_NODE_FEATURES), width)
        self.message = nn.Linear(2 * width + len(_EDGE_FEATURES), width)
        self.update = nn.Linear(2 * width, width)
        self.classify = nn.Linear(width, 2)

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
        source, target = ends[:, 0].long(), ends[:, 1].long()
        hidden = torch.relu(self.encode(nodes))
        for _ in range(2):
            both = torch.cat([hidden[source], hidden[target], edges], dim=1)
            message = torch.relu(self.message(both))
            gathered = torch.zeros_like(hidden).index_add(0, target, message)
            hidden = torch.relu(self.update(torch.cat([hidden, gathered], dim=1)))
        return torch.softmax(self.classify(hidden), dim=-1)


@contextmanager
def one_core() -> Iterator[None]:
    """This process on one core. Raises RuntimeError if it used more: a library can start threads
    elsewhere, or let the calling thread use all cores again."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    wall_begun, processor_begun = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
    share = (time.process_time() - processor_begun) / (time.perf_counter() - wall_begun)
    if share > _ONE_CORE:
        raise RuntimeError(f"{share:.2f} cores were in use, and one was meant")


@dataclass(frozen=True)
class Subject:
    """A captured model in a folder that is removed when the process ends."""

    model: nn.Module
    signature: Signature
    inputs: Arrays
    capture: Capture
    folder: Path

    def executable(self, name: str, device: torch.device = CPU, **options: Any) -> Executable:
        """Compile the model with one engine for `device`, and open the artifact."""
        return engine(name).open(self.compiled(name, device, **options), device)

    def compiled(self, name: str, device: torch.device = CPU, **options: Any) -> Path:
        """Compile the model with one engine for `device`; returns the artifact's first file. On a
        CPU it is for the best level of this host, as peers are."""
        out = self.folder / "-".join([name, device.type, *options])
        out.mkdir(exist_ok=True)
        source = Portable(self.capture.program, self.capture.script)
        best = Target("cpu", host_cpu_levels()[0])
        target = best if device.type == "cpu" else gpu_target(device.index or 0)
        files = engine(name).compile(source, target, options, out)
        return artifact_file(name, tuple(files), out, self.capture)

    def session(self, name: str = "lanes", device: torch.device = CPU, **options: Any) -> Session:
        """A session of the artifact of one engine, built for `device`."""
        executable = self.executable(name, device, **options)
        return Session(self.signature, executable, device, any_start=True)

    def collections(self, n: int) -> tuple[Collection, Collection]:
        """The input collection with n rows of the reference, and the output collection.

        The model must have one of each.
        """
        inputs = Collection(self.signature.layouts["inputs"], n)
        for member in inputs.layout.columns:
            inputs.fill(member.name, self.inputs["inputs"][member.name])
        return inputs, Collection(self.signature.layouts["outputs"], n)


def subject(
    features: int, highest: int, model: nn.Module | None = None, outputs: int = 3
) -> Subject:
    """A model with one input and one output collection, of up to `highest` rows. By default an
    `Mlp`; `outputs` is the number of columns that `model` returns."""
    inputs = tuple(f"x{i}" for i in range(features))
    answers = ("p", "q", "r") if outputs == 3 else tuple(f"y{i}" for i in range(outputs))
    signature = Signature.build(
        {"inputs": _floats(inputs), "outputs": _floats(answers)},
        [Block("features", "inputs", inputs)],
        [Block("probabilities", "outputs", answers)],
        {"n": RowRange(0, highest, (10,))},
    )
    return captured(model or Mlp(features), signature)


def graph_subject(highest: int, edges_per_node: int) -> Subject:
    """`Gnn` on two collections of different length, nodes and edges; an edge's ends are ints."""
    edges = [column(name, "float32") for name in _EDGE_FEATURES]
    edges += [column(name, "int32") for name in ("source", "target")]
    signature = Signature.build(
        {
            "nodes": _floats(_NODE_FEATURES),
            "edges": Layout(edges),
            "scores": _floats(("signal", "background")),
        },
        [
            Block("node_features", "nodes", _NODE_FEATURES),
            Block("edge_features", "edges", _EDGE_FEATURES),
            Block("ends", "edges", ("source", "target")),
        ],
        [Block("classes", "scores", ("signal", "background"))],
        {
            "nodes": RowRange(_LEAST_NODES, highest),
            "edges": RowRange(0, highest * edges_per_node),
        },
        {"nodes": "nodes", "edges": "edges", "scores": "nodes"},
    )
    return captured(Gnn(), signature)


def in_production(folder: Path, name: str, *engines: str) -> Registry:
    """A registry in a folder, with a version of `CONFIG` in production."""
    from pipeline.building import run  # here: processes whose memory is measured import this file
    from registry.promotion import Decision
    from registry.store import Registry

    registry = Registry(f"sqlite:///{folder}/registry.db")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(name=name, file=__file__, engines=", ".join(engines)))
    version = run(config, registry, work=folder / "work").version
    registry.promote(version, "production", [Decision("none", True, "", "", "for a benchmark")])
    return registry


def _floats(names: tuple[str, ...]) -> Layout:
    """The layout of float32 columns with these names."""
    return Layout([column(name, "float32") for name in names])


def captured(model: nn.Module, signature: Signature) -> Subject:
    """The model, captured with random inputs."""
    model = model.eval().requires_grad_(False)
    inputs = random_inputs(signature, 1, {"source": (0, _LEAST_NODES), "target": (0, _LEAST_NODES)})
    folder = Path(tempfile.mkdtemp(prefix="soa-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Subject(model, signature, inputs, capture(model, signature, inputs, folder), folder)
