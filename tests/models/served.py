"""Models to serve: rows of every dtype that a request can carry, and models that mix rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.base import engine
from engines.processes import Outcome
from engines.target import Target
from registry.bundle.bundle import Bundle
from registry.bundle.manifest import Provenance, SessionSettings
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column, eigen, scalar
from soa.signature import offsets_layout
from stages.compile import Compiled
from stages.model import Padded, Padding
from stages.package import Candidate, TargetResult, package
from stages.reference.answers import random_inputs
from stages.timing.racing import benchmark
from tests.models.building import build, reports, signature_of, tolerances_of
from tests.models.shared import made_once

MIXED = Signature.build(
    {
        "parts": Layout(
            [
                column("pt", "float32"),
                column("unread", "int64"),
                eigen("dir", "float32", 3),
                eigen("cov", "float64", 2, 3),
                column("flag", "bool"),
                column("kind", "int8"),
                column("hits", "uint16"),
                column("run", "uint32"),
                column("half", "float16"),
                column("sum", "float32"),
            ]
        ),
        "loose": Layout(
            [
                eigen("vec", "float32", 2),
                eigen("mat", "float64", 2, 2),
                column("count", "int32"),
                column("ok", "bool"),
                column("small", "uint8"),
            ],
            storage="columns",
        ),
    },
    [
        Block("plain", "parts", ("kind", "hits", "run", "half", "pt"), "float32"),
        Block("dir", "parts", ("dir",)),
        Block("cov", "parts", ("cov",)),
        Block("flag", "parts", ("flag",)),
    ],
    [
        Block("sum", "parts", ("sum",)),
        *(Block(name, "loose", (name,)) for name in ("vec", "mat", "count", "ok", "small")),
    ],
    {"n": RowRange(0, 200, (50,))},
)

EVENT = Signature.build(
    {
        "nodes": Layout([column("x", "float32"), column("y", "float32"), scalar("z", "float32")]),
        "edges": Layout([column("weight", "float32")]),
        "out": Layout([column("score", "float32"), scalar("total", "float32")]),
    },
    [
        Block("points", "nodes", ("x", "y")),
        Block("scale", "nodes", ("z",)),
        Block("weights", "edges", ("weight",)),
    ],
    [Block("score", "out", ("score",)), Block("total", "out", ("total",))],
    {"nodes": RowRange(0, 60, (20,)), "edges": RowRange(0, 90, (30,))},
    {"nodes": "nodes", "edges": "edges", "out": "nodes"},
)

COUPLED = signature_of(
    {"points": "x y"}, {"share": "share"}, RowRange(0, 100, (20,)), names=("nodes", "out")
)

# Events with jets, of which a run takes few; a jet and an event both have a column `pt`.
JETS = Signature.build(
    {
        "jets": Layout([column("pt", "float32"), column("mass", "float32")], 1, "columns"),
        "events": Layout([column("pt", "float32")]),
        "jets_offsets": offsets_layout(),
        "out": Layout([column("ht", "float32"), column("heavy", "float32")]),
    },
    [
        Block("jets", "jets", ("pt", "mass")),
        Block("event", "events", ("pt",)),
        Block("jets_offsets", "jets_offsets", ("begin", "end")),
    ],
    [Block("sums", "out", ("ht", "heavy"))],
    {"n": RowRange(0, 50, (20,)), "jet": RowRange(0, 90, (40,))},
    {"jets": "jet"},
    jagged={"jets": 4},
)


class Mixed(nn.Module):
    """Independent rows, of every dtype that a request can carry."""

    def forward(self, plain: Tensor, dir: Tensor, cov: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        total = plain.sum(1, keepdim=True) + dir.square().sum(1, keepdim=True)
        whole = (plain[:, 0:1] + 2 * plain[:, 1:2]).to(torch.int32)
        return (
            torch.where(flag, total, -total),
            dir[:, 0:2] - dir[:, 1:3],
            cov[:, :, 0:2] * 2 + cov[:, :, 1:3],
            whole,
            flag.logical_not() & (whole > 10),
            plain[:, 1:2].to(torch.uint8),
        )


class Sums(nn.Module):
    """Sums over the first four jets of each event."""

    def forward(self, jets: Tensor, event: Tensor) -> Tensor:
        pt, mass = jets.unbind(1)
        sums = [pt.sum(1, keepdim=True) + event, (pt * mass).sum(1, keepdim=True)]
        return torch.cat(sums, dim=1)


def of_jets() -> nn.Module:
    """The model of JETS: `Sums` on padded jets."""
    return Padded(Sums(), [Padding(2, 4, 0), 1])


class Event(nn.Module):
    """Every node depends on every edge."""

    def forward(self, points: Tensor, scale: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = weights.sum().reshape(1)
        return points.sum(1, keepdim=True) * scale + total, total


class Coupled(nn.Module):
    """The rows are coupled: their shares add up to one."""

    def forward(self, points: Tensor) -> Tensor:
        return torch.softmax(points.sum(1, keepdim=True), dim=0)


class Running(nn.Module):
    """Each row depends on those before it, so only a first part of the rows can run alone."""

    def forward(self, points: Tensor) -> Tensor:
        return torch.cumsum(points.sum(1, keepdim=True), dim=0)


_PROVENANCE = Provenance(
    created="2026-01-02T03:04:05+00:00", config_sha256="00ff", config={}, python="3.11.0"
)


def shared(
    factory: pytest.TempPathFactory, name: str, model: nn.Module, of: Signature, config: Any = None
) -> Bundle:
    """The bundle of `make_bundle`, made once for all test processes."""
    folder = made_once(factory, name, lambda into: make_bundle(into, name, model, of, config))
    return Bundle.open(folder / "bundle")


def session(bundle: Bundle) -> Session:
    """A session of the bundle's program, run by the engine `exported`."""
    program = bundle.file(bundle.manifest.program)
    signature = Signature.from_dict(bundle.manifest.signature)
    return Session(signature, engine("exported").open(program, torch.device("cpu")))


def make_bundle(
    folder: Path, name: str, model: nn.Module, signature: Signature, config: Any = None
) -> Bundle:
    """Captures, validates, times and packages a model for one engine, in this process.

    `config` is the configuration that its manifest records.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    built = build(model, signature, work, ("exported",), random_inputs(signature, 5, {}), "none")
    report = reports(built)["exported"]
    assert report.valid, report.reason
    sessions = {"exported": built.session("exported")}
    timed = benchmark(signature, sessions, built.inputs, seconds=0.01)
    compiled = Compiled("exported", work / "exported", (), 0.0, Outcome(None, None, work, work))
    candidates = {"exported": Candidate(compiled, report)}
    result = TargetResult(str(Target.parse("cpu")), {}, candidates, timed)
    return package(
        folder / "bundle", name, "", built.capture, {result.target: result},
        tolerances_of(signature), frozenset(), SessionSettings(),
        replace(_PROVENANCE, config=config or {}),
    )  # fmt: skip
