"""Faults that the user's file hides: right code goes to production, and `run` refuses each fault.

Columns x4 and x5 are 0 in every row of the file, as in padded jets.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline
from engines.lanes.operators import pooling
from engines.lanes.operators.registry import LOWERINGS
from engines.processes.isolation import Outcome
from registry import Registry
from soa.errors import SoaPipelineError
from stages import compile as compiling
from stages.model import load_callable
from tests.models.project import TARGETS

MODEL = """
import torch
from torch.nn import functional as F

class Network(torch.nn.Module):
    def forward(self, x):
        pooled = F.avg_pool1d(x[:, None], 3, 2, ceil_mode=True)[:, 0]  # the last has two elements
        here = torch.zeros_like(x[:, 5:], dtype=torch.long)
        added = x[:, 4:5].scatter_reduce(1, here, x[:, 5:], "sum", include_self=False)
        numbers = pooled.sum(1) + added[:, 0] + torch.mul(x[:, 5], 3.0)
        classes = torch.bucketize(x[:, 0].contiguous(), torch.tensor([-0.7, 0.3, 0.9]))
        angles = torch.atan2(x[:, :2], torch.tensor([0.0, -0.0]))
        return numbers, classes.to(torch.int32), angles
"""
CONFIG = f"""
name: blind
model: {{factory: model.py:Network}}
collections:
  rows: {{storage: columns, columns: [{{name: x0 .. x5, dtype: float32}}]}}
  answers:
    storage: columns
    columns: [{{name: number, dtype: float32}}, {{name: class, dtype: int32}},
              {{name: u, dtype: float32}}, {{name: v, dtype: float32}}]
inputs: [{{name: x, collection: rows, columns: [x0 .. x5]}}]
outputs:
  - {{name: numbers, collection: answers, columns: [number]}}
  - {{name: classes, collection: answers, columns: [class]}}
  - {{name: angles, collection: answers, columns: [u, v]}}
rows: {{n: {{max: 100, typical: [100]}}}}
reference: {{file: rows.npz, many_rows: 0}}
{TARGETS}
engines: [lanes]
compile: {{benchmark_s: 0.02}}
"""
NAMES = [f"x{i}" for i in range(6)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A folder with the config, the registry and the work of a run whose version is promoted."""
    folder = tmp_path_factory.mktemp("blind")
    shutil.copy(empty_database, folder / "registry.db")
    (folder / "model.py").write_text(MODEL)
    (folder / "config.yaml").write_text(CONFIG)
    draw = np.random.default_rng(1)
    columns: dict[str, Any] = {
        f"rows/{name}": draw.normal(size=200).astype("float32") for name in NAMES
    }
    columns |= {f"rows/{name}": np.zeros(200, "float32") for name in NAMES[4:]}
    np.savez(folder / "rows.npz", **columns)
    run(folder, "work")
    pipeline.promote(registry(folder), "blind/1", "production")
    return folder


def registry(folder: Path) -> Registry:
    """The registry in the project's folder."""
    return Registry(f"sqlite:///{folder}/registry.db")


def run(folder: Path, work: str) -> None:
    """Runs the config in a work folder of this name."""
    pipeline.run(folder / "config.yaml", registry(folder), folder / work)


def test_what_is_promoted_answers_as_the_model(project: Path) -> None:
    """Also where the file is 0, at NaN, at infinity, and at both zeros."""
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(90, 6)).astype("float32"))
    x[0, 0], x[1, 0], x[2, :2], x[3, :2], x[4, :2] = torch.nan, torch.inf, 0.0, -0.0, torch.nan
    session = pipeline.load("blind@production", registry=registry(project))
    answers = session.collection("answers", 90)
    rows = {name: x[:, i].contiguous() for i, name in enumerate(NAMES)}
    session.run(pipeline.as_collection(rows, session.layout("rows")), answers)
    model = load_callable(f"{project}/model.py:Network")()
    numbers, classes, angles = (tensor.numpy() for tensor in model(x))
    np.testing.assert_allclose(answers["number"], numbers, 1e-5, 1e-5)
    np.testing.assert_array_equal(answers["class"], classes)
    for i, name in enumerate("uv"):
        np.testing.assert_allclose(answers[name], angles[:, i], 1e-6)
    # The rows of zeros and NaN are what they are meant to be: atan2(0, 0) and atan2(0, -0), and
    # NaN above all borders.
    assert angles[2].tolist() == pytest.approx([0, torch.pi]) and classes[0] == 3


def compile_in_this_process(
    function: str, payload: Mapping[str, Any], folder: Path, *_: object, **__: object
) -> Outcome:
    """Stands in for `run_isolated`, whose child process would not have the planted fault."""
    folder.mkdir(parents=True, exist_ok=True)
    assert function == "stages.compile:compile_here"
    return Outcome(compiling.compile_here(**payload), None, folder, folder)


def always_with_self(
    function: Any, build: Any, step: Any, x: Any, dim: int, index: Any, source: Any, /,
    reduce: str, include_self: bool = True,
) -> Any:  # fmt: skip
    """The lowering `function` of scatter_reduce, but without its argument `include_self`."""
    return function(build, step, x, dim, index, source, reduce)


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, Plant] = {
    "a constant column": lambda patch: patch.setitem(
        LOWERINGS, "mul", lambda build, step, x, factor, /: x
    ),
    "the divisor of a pool": lambda patch: patch.setattr(
        pooling, "_clip_to_input", lambda windows, x, room=None: windows
    ),
    "a swallowed argument": lambda patch: patch.setitem(
        LOWERINGS, "scatter_reduce", partial(always_with_self, LOWERINGS["scatter_reduce"])
    ),
}


FIRST, *OTHERS = PLANTED


@pytest.mark.parametrize(
    "fault", [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_run_refuses_a_planted_fault(
    project: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = fault.replace(" ", "-")
    shutil.copytree(project / "work" / "capture", project / work / "capture")
    monkeypatch.setattr(compiling, "run_isolated", compile_in_this_process)
    PLANTED[fault](monkeypatch)
    with pytest.raises(SoaPipelineError, match="candidate-edge"):
        run(project, work)
