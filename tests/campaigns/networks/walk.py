"""Takes one network the way of its owner: init, run, promote, load, and compares the answers."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import pipeline
from registry.bundle.bundle import Bundle
from runtime.session import Session
from soa.errors import SoaPipelineError
from soa.memory import as_collection, to_numpy
from tests.campaigns.first_model import ran, typed
from tests.campaigns.networks.cases import Array, Case, Columns

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

    @property
    def right(self) -> bool:
        return not self.stopped and self.outside == 0

    def line(self) -> str:
        if self.stopped:
            return f"{self.name}: NOT: {self.stopped}"
        verdict = "in" if self.right else f"WRONG in {self.outside:.2g} of its values"
        return (
            f"{self.name}: {verdict}, {self.questions} questions, {self.engine}, "
            f"{self.independence}, {self.init_s:.0f} + {self.run_s:.0f} s, "
            f"{self.far:.1e} of {self.largest:.2g}"
        )


def table(walked: Sequence[Walked], cases: Mapping[str, Case]) -> str:
    """A table in Markdown. `init` and `run` in seconds."""
    lines = [
        "| network | what it is | engine | rows are independent: | questions | init, s | run, s | "
        "largest deviation | largest answer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in walked:
        what, *_ = (inspect.getdoc(cases[each.name].made) or "").splitlines() or [""]
        found = (
            each.engine, each.independence, each.questions, f"{each.init_s:.0f}",
            f"{each.run_s:.0f}", f"{each.far:.1e}", f"{each.largest:.2g}",
        )  # fmt: skip
        said = [each.stopped or "WRONG", *[""] * 6] if not each.right else map(str, found)
        lines.append(f"| {each.name} | {what.rstrip('.')} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Owned:
    """What the owner has: files, and the answers of the network to the rows of the file."""

    model: str
    columns: Columns
    expected: Array


def owned(case: Case, folder: Path) -> Owned:
    """Write `data.npz` and `weights.pt`, and compute the network's own answers."""
    folder.mkdir(parents=True)
    net, columns, expected = trained(case)
    np.savez(folder / "data.npz", allow_pickle=False, **columns)
    torch.save(net.state_dict(), folder / "weights.pt")
    return Owned(f"{inspect.getsourcefile(case.made)}:{case.made.__name__}", columns, expected)


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


def walk(case: Case, folder: Path) -> Walked:
    """All steps; a refusal ends them. Nothing is edited on the way."""
    name, has = case.made.__name__, owned(case, folder)
    where = ["--registry", f"sqlite:///{folder}/registry/registry.db"]
    begun = time.perf_counter()
    try:
        _, questions = typed(
            folder, "init", has.model, "data.npz", "--weights", "weights.pt", *case.words
        )
    except SystemExit as refused:
        return Walked(name, f"init: {_last(str(refused))}")
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
    return replace(_beside(before, answers, has.expected), engine=engine)


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
    n, (rows,) = len(has.expected), session.signature.ranges.values()
    most = n if rows.unbounded else rows.max
    cuts = [slice(start, min(start + most, n)) for start in range(0, n, most)]
    return np.concatenate([_answers(session, has.columns, cut) for cut in cuts])


def _answers(session: Session, columns: Columns, cut: slice) -> Array:
    signature, count = session.signature, cut.stop - cut.start
    given = {
        name: as_collection(
            {c.name: columns[c.name][cut] for c in signature.layouts[name].columns},
            signature.layouts[name],
        )
        for name in signature.input_collections
    }
    made = {name: session.collection(name, count) for name in signature.output_collections}
    session.run(given, made)
    parts = [
        to_numpy(made[bound.block.collection])[column].reshape(count, -1)
        for bound in signature.outputs
        for column in bound.block.columns
    ]
    return np.concatenate(parts, axis=1)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "nothing said"
