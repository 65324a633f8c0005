"""Hand-written executables, each of which breaks one rule for artifacts.

They take the arguments of `building.mlp_signature()`: carrier (n, 0), features (6, S), answers (3,
S). The right answers are three times the first three features.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from engines import Executable
from soa import Signature
from stages.model import SoaProgram
from stages.reference.answers import Reference, compute_reference, make_cases, random_inputs
from tests.models.building import mlp_signature, signature_of
from tests.models.mlps import CLASSES, FEATURES


class Triple(nn.Module):
    """The eager model with which the executables are compared."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * 3


def reference(signature: Signature | None = None, model: nn.Module | None = None) -> Reference:
    """The reference of a model, of `Triple` by default."""
    signature = signature or mlp_signature()
    return compute_reference(
        model or Triple(), signature, random_inputs(signature, 1, {}), make_cases(signature)
    )


class Split(nn.Module):
    """The same model with two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1] * 3, x[:, 1:3] * 3


def split_signature() -> Signature:
    """That of `Split`: the outputs `first` and `others`."""
    outputs = {"first": CLASSES[0], "others": " ".join(CLASSES[1:])}
    return signature_of({"features": " ".join(FEATURES)}, outputs, names=("jets", "tags"))


def split_off_by(amount: float, output: int) -> Executable:
    """An executable that is wrong in the last row of one of the two outputs."""

    def run(arguments: Sequence[Tensor]) -> None:
        rows, x, *answers = arguments
        n = rows.shape[0]
        for answer, features in zip(answers, (x[:1, :n], x[1:3, :n]), strict=True):
            answer[:, :n] = features * 3
        if n:
            answers[output][:, n - 1] += amount

    return Calls(run)


class Calls(Executable):
    """An artifact that calls a function with its arguments."""

    def __init__(self, run: Callable[[Sequence[Tensor]], object]) -> None:
        self.run = run

    def __call__(self, arguments: Sequence[Tensor]) -> None:
        self.run(arguments)


def uncompiled(model: nn.Module, signature: Signature, device: str = "cpu") -> Executable:
    """The model itself behind the calling convention: right answers, without an export."""
    program = SoaProgram(model.eval(), signature).to(device)

    def run(arguments: Sequence[Tensor]) -> None:
        with torch.no_grad():
            program(*arguments)

    return Calls(run)


class Rogue(Executable):
    """Writes the right answers, then calls `then` with n, the features and the answers."""

    def __init__(
        self, then: Callable[[int, Tensor, Tensor], object] = lambda n, x, y: None
    ) -> None:
        self.then = then

    def __call__(self, arguments: Sequence[Tensor]) -> None:
        rows, x, y = arguments
        n = rows.shape[0]
        y[:, :n] = x[:3, :n] * 3
        self.then(n, x, y)


def honest() -> Executable:
    """An executable that breaks no rule."""
    return Rogue()


def off_by(amount: float) -> Executable:
    """An executable that is wrong in the last row only."""
    return Rogue(lambda n, x, y: y[:, n - 1 : n].add_(amount) if n else None)


def writes_padding() -> Executable:
    """Writes the element of an output behind the last row."""
    return Rogue(lambda n, x, y: y[1, n : n + 1].fill_(1.0))


def changes_inputs() -> Executable:
    """Writes into the rows of its inputs."""
    return Rogue(lambda n, x, y: x[5, :n].mul_(2.0))


def changes_input_padding() -> Executable:
    """Writes behind the last row of its inputs."""
    return Rogue(lambda n, x, y: x[5, n:].fill_(0.0))


class LeavesGaps(Executable):
    """Leaves the second answer of the third row unwritten."""

    def __call__(self, arguments: Sequence[Tensor]) -> None:
        rows, x, y = arguments
        n = rows.shape[0]
        for k in range(3):
            written = torch.arange(n) != (2 if k == 1 else -1)
            y[k, :n][written] = (x[k, :n] * 3)[written]


class ReadsPadding(Rogue):
    """Adds one if the value behind the last row of the first feature is NaN."""

    def __init__(self) -> None:
        super().__init__(
            lambda n, x, y: y[0, :n].add_(float(x[0, n].isnan())) if n < x.shape[1] else None
        )


def nondeterministic() -> Executable:
    """Gives slightly larger answers in each call."""
    calls = itertools.count()
    return Rogue(lambda n, x, y: y[:, :n].add_(1e-7 * next(calls)))


def returns(value: float) -> Executable:
    """Writes `value`, NaN or infinity, at one place of the last row."""
    return Rogue(lambda n, x, y: y[2, n - 1 : n].fill_(value) if n else None)


class Fails(Executable):
    """Raises an error of two lines."""

    def __call__(self, arguments: Sequence[Tensor]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand a second line")


class Waits(Rogue):
    """Gives the right answers, and waits some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda n, x, y: time.sleep(seconds))


def broken_library(folder: Path, initial: str = "*(volatile int*)0") -> Path:
    """A shared library that crashes when it is opened, as it computes its `initial` value."""
    import subprocess

    source, library = folder / "broken.cpp", folder / "broken.so"
    source.write_text(f"#include <csignal>\nstatic int x = {initial};\nint f() {{ return x; }}\n")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library
