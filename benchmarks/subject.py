"""The small model that the benchmarks of overhead share, and its artifact."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines import Executable, Portable, Target, engine
from runtime.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.transfer import fill_column
from stages.capture import Capture, capture
from stages.compile import artifact_file
from stages.reference import Arrays, random_inputs


class Mlp(nn.Module):
    """F → 48 → 3, its first operation pointwise, softmax at the end."""

    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(features, 48)
        self.last = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.relu(self.first(torch.log1p(x.abs())))), dim=-1)


@dataclass(frozen=True)
class Subject:
    """A captured model on disk, for as long as `folder` lives."""

    model: nn.Module
    signature: Signature
    inputs: Arrays
    capture: Capture
    folder: Path
    names: tuple[str, ...]

    def executable(self, name: str, **options: Any) -> Executable:
        """Compile with one engine, here, and open it."""
        out = self.folder / "-".join([name, *options])
        out.mkdir(exist_ok=True)
        source = Portable(self.capture.program, self.capture.script)
        files = engine(name).compile(source, Target.parse("cpu"), options, out)
        file = artifact_file(name, tuple(files), out, self.capture)
        return engine(name).open(file, torch.device("cpu"))

    def session(self, name: str = "aoti", **options: Any) -> Session:
        return Session(self.signature, self.executable(name, **options))

    def collections(self, n: int) -> tuple[Collection, Collection]:
        """Input columns filled with the first n reference rows, and output columns."""
        given = Collection(self.signature.layouts["inputs"], n)
        for member in given.layout.columns:
            fill_column(given, member, self.inputs["inputs"][member.name])
        return given, Collection(self.signature.layouts["outputs"], n)


def subject(features: int, highest: int, model: nn.Module | None = None) -> Subject:
    names = tuple(f"x{i}" for i in range(features))
    layouts = {
        "inputs": Layout([column(name, "float32") for name in names]),
        "outputs": Layout([column(name, "float32") for name in ("p", "q", "r")]),
    }
    signature = Signature.build(
        layouts,
        [Block("features", "inputs", names)],
        [Block("probabilities", "outputs", ("p", "q", "r"))],
        {"n": RowRange(0, highest, (10,))},
    )
    model = (model or Mlp(features)).eval().requires_grad_(False)
    inputs = random_inputs(signature, 1, {})
    folder = Path(tempfile.mkdtemp(prefix="soa-bench-"))
    return Subject(
        model, signature, inputs, capture(model, signature, inputs, folder), folder, names
    )
