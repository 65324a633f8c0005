"""Takes one network the way of its owner: init, run, promote, load, and compares the answers."""

from __future__ import annotations

import inspect
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pipeline
from registry.bundle.bundle import Bundle
from runtime.session import Session
from soa.errors import SoaPipelineError
from soa.memory import as_collection, to_numpy
from tests.campaigns.networks.cases import Array, Case, Columns

ROOT = Path(__file__).resolve().parents[3]
_PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
_OURS = os.environ | {"PYTHONPATH": os.pathsep.join(_PATHS)}
Given = dict[str, Any]
"""The memory that a session is bound to, by collection."""
_BATCHES = 5
_ATOL, _RTOL = 1e-4, 1e-3
"""What a difference may be. `run` asks for less on its own reference; this looks at every row."""


@dataclass(frozen=True)
class Walked:
    """What became of one network; `stopped`: the step that refused, and its last line."""

    name: str
    stopped: str = ""
    questions: int = 0
    engine: str = ""
    independence: str = ""
    init_s: float = 0.0
    run_s: float = 0.0
    far: float = 0.0
    largest: float = 0.0
    outside: float = 0.0
    near_ties: float = 0.0

    @property
    def right(self) -> bool:
        return not self.stopped and self.outside <= self.near_ties

    def line(self) -> str:
        if self.stopped:
            return f"{self.name}: NOT: {self.stopped}"
        verdict = "in" if self.right else f"WRONG in {self.outside:.2g} of its values"
        return (
            f"{self.name}: {verdict}, {self.questions} questions, {self.engine}, "
            f"{self.independence}, {self.init_s:.0f} + {self.run_s:.0f} s, "
            f"{self.far:.1e} of {self.largest:.2g}"
        )


def table(walked: Sequence[Walked], made: Mapping[str, Callable[..., Any]]) -> str:
    """A table in Markdown. `init` and `run` in seconds. `made` have the descriptions."""
    lines = [
        "| network | what it is | engine | rows are independent: | questions | init, s | run, s | "
        "largest deviation | largest answer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in walked:
        what, *_ = (inspect.getdoc(made[each.name]) or "").splitlines() or [""]
        found = (
            each.engine, each.independence, each.questions, f"{each.init_s:.0f}",
            f"{each.run_s:.0f}", f"{each.far:.1e}", f"{each.largest:.2g}",
        )  # fmt: skip
        said = [each.stopped or "WRONG", *[""] * 6] if not each.right else map(str, found)
        lines.append(f"| {each.name} | {what.rstrip('.')} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Owned:
    """What the owner has: a model and a file, and the model's own answers to all rows of the file.

    `words` follow `pipeline init`; `given` makes the collections to bind from some of the rows.
    """

    words: list[str]
    expected: Array
    given: Callable[[Session, slice], Given]
    told: tuple[str, list[str]] | None = None
    """A hint, and other words with which `run` is tried first: it must refuse them so."""
    near_ties: float = 0.0
    """The share of values that may be others, since the model chooses between nearly equal rows."""


def given_columns(columns: Columns) -> Callable[[Session, slice], Given]:
    """Some rows of these columns, in the memory of their owner."""

    def given(session: Session, rows: slice) -> Given:
        return {
            name: as_collection(
                {c.name: columns[c.name][rows] for c in session.layout(name).columns},
                session.layout(name),
            )
            for name in session.signature.input_collections
        }

    return given


def owned(case: Case, folder: Path) -> Owned:
    """Write `data.npz` and `weights.pt`, and compute the network's own answers."""
    net, columns, expected = trained(case)
    np.savez(folder / "data.npz", allow_pickle=False, **columns)
    torch.save(net.state_dict(), folder / "weights.pt")
    model = f"{inspect.getsourcefile(case.made)}:{case.made.__name__}"
    words = [model, "data.npz", "--weights", "weights.pt", *case.words]
    return Owned(words, expected, given_columns(columns))


def trained(case: Case) -> tuple[nn.Module, Columns, Array]:
    """The network, which has seen the data, the columns, and its answers to all rows."""
    columns = case.columns(np.random.default_rng(1))
    torch.manual_seed(1)
    net: nn.Module = case.made()
    inputs = [torch.from_numpy(np.ascontiguousarray(each)) for each in case.inputs(columns)]
    rows = next(iter(columns.values())).shape[0]
    with torch.no_grad():
        net.train()  # so that batch norms have seen the data
        for _ in range(_BATCHES):
            net(*inputs)
        found = net.eval()(*inputs)
    outputs: list[Tensor] = [found]
    if isinstance(found, dict | tuple):
        outputs = [*(found.values() if isinstance(found, dict) else found)]
    return net, columns, np.concatenate([e.numpy().reshape(rows, -1) for e in outputs], axis=1)


def typed(folder: Path, *words: str) -> tuple[str, int]:
    """The output of `pipeline` where Enter answers each question, and the number of questions.

    Raises SystemExit where it fails, or asks a question that Enter does not answer.
    """
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "soa_pipeline", *words]
    process = subprocess.Popen(command, cwd=folder, env=_OURS, stdin=its, stdout=its, stderr=its)
    os.close(its)
    text, questions = "", 0
    while True:
        if not select.select([ours], [], [], 0.3)[0]:
            if text.endswith(": "):
                os.write(ours, b"\n")
                text, questions = f"{text}\n", questions + 1
            if questions > 9:
                process.kill()
            continue
        try:
            text += os.read(ours, 4096).decode(errors="replace")
        except OSError:  # how Linux reports that the other end is closed
            break
    os.close(ours)
    if process.wait():
        raise SystemExit(f"pipeline {' '.join(words)}:\n{text}")
    return text, questions


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soa_pipeline", *words]
    return subprocess.run(command, cwd=folder, env=_OURS, capture_output=True, text=True)


def refused(folder: Path, words: Sequence[str], hint: str, where: Sequence[str]) -> str:
    """Why `run` does not refuse what `init` made of these words with this hint; "" if it does."""
    typed(folder, "init", *words)
    done = ran(folder, "run", "config.yaml", *where)
    return "" if done.returncode and hint in _last(done.stderr) else _last(done.stderr)


def walk(name: str, has: Owned, folder: Path) -> Walked:
    """All steps; a refusal ends them. Nothing is edited on the way."""
    where = ["--registry", f"sqlite:///{folder}/registry/registry.db"]
    again: list[str] = []
    if has.told:
        hint, words = has.told
        if said := refused(folder, words, hint, where):
            return Walked(name, f"run was to say {hint}, and said: {said}")
        again = ["--force"]
    begun = time.perf_counter()
    try:
        _, questions = typed(folder, "init", *has.words, *again)
    except SystemExit as error:
        return Walked(name, f"init: {_last(str(error))}")
    middle = time.perf_counter()
    done = ran(folder, "run", "config.yaml", *where, "--json")
    ended = time.perf_counter()
    if done.returncode:
        return Walked(name, f"run: {_last(done.stderr)}", questions)
    answer = json.loads(done.stdout)
    version, capture = answer["version"], Bundle.open(answer["bundle"]).manifest.capture
    known = "shown" if capture.shown else "tried" if capture.tried else "mixed"
    promoted = ran(folder, "promote", version, "--to", "production", *where)
    if promoted.returncode:
        return Walked(name, f"promote: {_last(promoted.stderr)}", questions)
    return _compared(
        Walked(name, "", questions, "", known, middle - begun, ended - middle),
        version.partition("/")[0], where[1], has,
    )  # fmt: skip


def compiled(case: Case) -> Walked:
    """The same by `pipeline.compile`, with the network and its columns in memory."""
    net, columns, expected = trained(case)
    pairs = [each.partition("=") for each in case.words[1::2]]
    before = Walked(case.made.__name__)
    begun = time.perf_counter()
    try:
        fast = pipeline.compile(net, columns, inputs={k: v for k, _, v in pairs}, say=_quiet)
    except SoaPipelineError as refused:
        return replace(before, stopped=f"compile: {_last(str(refused))}")
    taken = time.perf_counter() - begun
    with fast:
        given = fast(columns)
    answers = np.concatenate([each.reshape(len(expected), -1) for each in given.values()], axis=1)
    return replace(_beside(before, answers, expected), engine="in memory", run_s=taken)


def _quiet(_: str) -> None:
    pass


def _compared(before: Walked, model: str, registry: str, has: Owned) -> Walked:
    with closing(pipeline.load(f"{model}@production", registry=registry)) as session:
        answers, origin = answers_of(session, has), session.origin
    engine = origin.engine if origin else ""
    return replace(_beside(before, answers, has.expected), engine=engine, near_ties=has.near_ties)


def _beside(before: Walked, answers: Array, expected: Array) -> Walked:
    return replace(
        before,
        far=float(np.abs(answers - expected).max()),
        largest=float(np.abs(expected).max()),
        outside=outside(answers, expected),
    )


def outside(answers: Array, expected: Array) -> float:
    """The share of values that are further from the network's own than allowed."""
    return float((np.abs(answers - expected) > _ATOL + _RTOL * np.abs(expected)).mean())


def answers_of(session: Session, has: Owned) -> Array:
    """The session's answers to all rows of the file, (rows, values)."""
    n, rows = len(has.expected), session.signature.ranges["n"]
    most = n if rows.unbounded else rows.max
    cuts = [slice(start, min(start + most, n)) for start in range(0, n, most)]
    return np.concatenate([_answers(session, has, cut) for cut in cuts])


def _answers(session: Session, has: Owned, cut: slice) -> Array:
    count = cut.stop - cut.start
    made = {name: session.collection(name, count) for name in session.signature.output_collections}
    session.run(has.given(session, cut), made)
    parts = [
        to_numpy(made[bound.block.collection])[column].reshape(count, -1)
        for bound in session.signature.outputs
        for column in bound.block.columns
    ]
    return np.concatenate(parts, axis=1)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing said"
