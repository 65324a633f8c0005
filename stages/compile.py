"""Compile: one candidate per engine, each in a separate process."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from engines.base import FACTS, Portable, engine
from engines.errors import EngineError
from engines.processes import Outcome, run_isolated
from engines.target import Target, check_torch_runs
from soa.declared import find_declared
from soa.signature import Signature
from stages.capture import Capture
from stages.model import Precision, check_precision, tf32_switches

TO_READ_PROGRAMS = ("torch._export.serde.serialize", "torch._inductor.sizevars", "networkx")
"""Modules that take long to import, which torch needs to read an exported program."""


@dataclass(frozen=True)
class Compiled:
    """A compiled candidate: its files relative to `folder`, and how the compilation ended.

    If the engine wrote no files, the candidate runs the portable program or TorchScript file.
    """

    engine: str
    folder: Path
    files: tuple[str, ...]
    seconds: float
    outcome: Outcome
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that the engine records about its artifact."""


class Step(ABC):
    """Computes facts about every candidate that compiled; they are recorded in the manifest.

    A subclass in a file of `stages/` declares itself by literal keywords: `step` is its name,
    `order` its place. No other file has to name it.
    """

    def __init_subclass__(cls, step: str, order: int = 0) -> None:
        cls.name = step

    name: ClassVar[str]

    @abstractmethod
    def facts(self, engine_name: str, target: Target, files: list[Path]) -> Mapping[str, Any]:
        """Names and plain values for the candidate's facts in the manifest.

        `files` are the candidate's files, first the one to open; empty if the portable file runs.
        The method is called in the process that compiled. If it raises, the candidate has failed.
        """


def compile_candidate(
    name: str,
    capture: Capture,
    target: Target,
    options: Mapping[str, Any],
    folder: Path,
    timeout_s: float,
) -> Compiled:
    """Compile the captured model with the engine `name`, in a child process with a time limit.

    Nothing is raised if the compiler fails, crashes or takes too long: the `outcome` of what is
    returned says so. Its artifact is written to `folder`/artifact, its log to `folder`/compile.
    """
    artifact = folder / "artifact"
    artifact.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    outcome = run_isolated(
        "stages.compile:compile_here",
        {
            "name": name,
            "program": str(capture.program.resolve()),
            "torchscript": str(capture.script.resolve()) if capture.script else None,
            "target": str(target),
            "options": dict(options),
            "out": str(artifact.resolve()),
            "precision": capture.precision,
            "signature": capture.signature.to_dict(),
        },
        folder / "compile",
        timeout_s,
        (*TO_READ_PROGRAMS, *engine(name).imports, __name__),
    )
    files = tuple(outcome.value or ())
    facts_file = artifact / FACTS
    facts = json.loads(facts_file.read_text()) if facts_file.is_file() else {}  # trusted
    return Compiled(name, artifact, files, time.monotonic() - begun, outcome, facts)


def compile_here(
    name: str,
    program: str,
    torchscript: str | None,
    target: str,
    options: dict[str, Any],
    out: str,
    precision: Precision = "fp32",
    signature: dict[str, Any] | None = None,
) -> list[str]:
    """Run the engine's own `compile`, then every `Step`. This runs in the child process.

    The arguments are plain data, since they come from another process; `program`, `torchscript` and
    `out` are paths. Returns the names of the files in the folder `out`; the first one is the one to
    open. The facts of the steps are added to those in the engine's facts file. Raises EngineError
    if the engine lists a file that it did not write, TargetError if this host cannot compile for
    the target, or what the engine raises.
    """
    parsed_target = Target.parse(target)
    check_precision(precision, parsed_target)
    compiler = engine(name)
    if not (compiler.anywhere or compiler.crosses):
        check_torch_runs(parsed_target)
    source = Portable(
        Path(program),
        Path(torchscript) if torchscript else None,
        None if signature is None else Signature.from_dict(signature),
    )
    folder = Path(out)
    with tf32_switches(precision):
        files = compiler.compile(source, parsed_target, options, folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise EngineError(f"{name} reports files that it did not write: {', '.join(missing)}")
    facts: dict[str, Any] = {}
    for step in find_declared("stages", "step").values():
        facts |= step.load()().facts(name, parsed_target, [folder / file for file in files])
    return _add_facts(files, folder, facts) if facts else files


def _add_facts(files: list[str], folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Write `facts` into the facts file, beside those of the engine.

    Returns `files` with the facts file added at the end. An empty list stays empty: the facts file
    would become the first file, which is the one to open.
    """
    of_engine = json.loads((folder / FACTS).read_text()) if FACTS in files else {}  # trusted
    (folder / FACTS).write_text(json.dumps({**of_engine, **facts}))
    return [*files, FACTS] if files and FACTS not in files else files


def artifact_file(name: str, files: tuple[str, ...], folder: Path, capture: Capture) -> Path:
    """The path of the file that the engine `name` opens: the first of its own `files` in `folder`,
    else the captured program or TorchScript file. Raises EngineError if there is none of them."""
    if files:
        return folder / files[0]
    portable = engine(name).portable_file(Portable(capture.program, capture.script))
    if portable is None:
        raise EngineError(f"{name} has no file to open")
    return portable
