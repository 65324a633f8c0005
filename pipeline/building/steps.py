"""The steps that make and judge candidates. The result of each step is kept in the work folder, and
read from there if nothing that it depends on has changed (`Work.read_or_make`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engines.base import engine
from engines.lanes import compiler_identity
from engines.processes import run_in_fork
from engines.target import Target, torch_runs
from pipeline.building.provenance import code_digest, host, tools
from pipeline.building.work import Work
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from stages.capture import Capture
from stages.compile import Compiled, artifact_file, compile_candidate
from stages.judging import Special, Trial, emulate_candidate, validate_candidate
from stages.model import tf32_switches
from stages.package import Candidate
from stages.reference import Arrays, Reference
from stages.reports import BenchmarkReport, ValidationReport
from stages.timing import benchmark_targets, bind_call, fastest_tile, ladder, tiled, time_warm_s

HEAVY_S = 1e-3  # a model is heavy if a call with the fewest rows takes longer


@dataclass(frozen=True)
class Recipe:
    """How the candidates of a target are made and judged."""

    engines: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    """Compile options by engine."""
    timeout_s: float
    """The time limit of a compilation, and of a validation."""
    tolerances: Mapping[str, Tolerance]
    classifiers: frozenset[str]
    baseline: Callable[[], torch.nn.Module] | None
    """Makes the eager model to race against; None if its source code is not on this host."""
    benchmark_s: float = 10.0
    """Approximate seconds for the race of all candidates at all sizes."""
    by_default: bool = False
    """True if `engines` are the defaults, because the config names none."""
    special_values: Special = "report"


Pair = tuple[Target, str]
"""A target, and the engine of a candidate for it."""


@dataclass(frozen=True)
class Steps:
    """The steps of building the candidates of one capture by one recipe. Each takes a target and an
    engine, or an artifact of them."""

    work: Work
    captured: Capture
    recipe: Recipe

    @cached_property
    def _inputs(self) -> Arrays:
        """The inputs of the stored reference."""
        return Reference.load(self.captured.reference).inputs

    @cached_property
    def _common_dependencies(self) -> dict[str, Any]:
        """What every result depends on: the content of the capture, soa-pipeline's code and the
        tools. The recipe is left out: each step adds the parts of it that it uses."""
        return {"capture": self.captured.digest(), "code": code_digest(), "tools": tools()}

    def compile(self, target: Target, name: str) -> Compiled:
        """Compile the model for a target with the engine `name`, in a child process. A failure is
        not raised: it is part of the result."""
        recipe, work, dependencies = self.recipe, self.work, self._dependencies_of(target, name)

        def make(folder: Path) -> Compiled:
            options = recipe.options.get(name, {})
            with work.step(f"compile {name} for {target}"):
                compiled = compile_candidate(
                    name, self.captured, target, options, folder, recipe.timeout_s
                )
            outcome = compiled.outcome
            work.try_again |= outcome.killed
            if outcome.not_applicable:
                work.say(f"  {name} for {target} is not applicable: {outcome.error}")
            elif not outcome.ok:
                reason = f"{outcome.error} [{outcome.code}] ({outcome.trace})"
                work.say(f"  {name} for {target} failed: {reason}")
            return compiled

        compiled = work.read_or_make(
            "compile", dependencies, Compiled, make, keep=lambda made: made.outcome.ok
        )
        # The record has the folder where it was made; the work folder may have been moved since.
        return replace(compiled, folder=work.folder("compile", dependencies) / compiled.folder.name)

    def judge(self, target: Target, compiled: Compiled, tile: int) -> ValidationReport:
        """Compare an artifact's answers with the reference, and return the report.

        The artifact runs in a child process on a device of this host, or else in an emulator of the
        target. `tile`: the number of rows that it computes at a time; 0 for all rows at once.
        """
        runs_here = torch_runs(target)
        stage = "validate" if runs_here else "emulate"
        candidate = f"{compiled.engine} on {target}"
        if tile:
            candidate += f" in tiles of {tile} rows"

        def make(folder: Path) -> ValidationReport:
            trial, limit_s = self._make_trial(compiled, tile), self.recipe.timeout_s
            child = folder / "child"
            with self.work.step(f"{stage} {candidate}"):
                if runs_here:
                    report = validate_candidate(trial, child, limit_s, target.torch_device)
                else:
                    report = emulate_candidate(trial, child, limit_s, target)
            self.work.try_again |= report.ended_early
            for ending in _verdict_endings(report):
                self.work.say(f"  {candidate}{ending}")
            return report

        dependencies = {
            **self._dependencies_of(target, compiled.engine),
            "tolerances": {name: asdict(limit) for name, limit in self.recipe.tolerances.items()},
            "classifiers": sorted(self.recipe.classifiers),
            "special_values": self.recipe.special_values,
            "tile": tile,
        }
        return self.work.read_or_make(stage, dependencies, ValidationReport, make, keep=_is_usable)

    def is_heavy(self, target: Target, compiled: Compiled) -> bool:
        """Measure a call with the fewest rows. Returns True if it takes longer than `HEAVY_S`.

        Then an engine that computes single rows may be faster: an engine that fills vector lanes
        with rows takes as long for a lane without a row as for any other.
        """

        def measure(_: Path) -> bool:
            session = open_session(self.captured, target, compiled)
            fewest = ladder(self.captured.signature)[0]
            call = bind_call(session, self._inputs, fewest)
            return time_warm_s(call) > HEAVY_S

        dependencies = {**self._dependencies_of(target, compiled.engine), "host": host()}
        return self.work.read_or_make("heavy", dependencies, bool, measure)

    def fastest_tile(self, target: Target, compiled: Compiled) -> int:
        """Measure with how many rows per tile a candidate is fastest. Returns that number, or 0 for
        all rows at once."""

        def measure(_: Path) -> int:
            with self.work.step(f"tiles for {compiled.engine} on {target}"):
                session = open_session(self.captured, target, compiled)
                return fastest_tile(session, self._inputs) or 0

        dependencies = {**self._dependencies_of(target, compiled.engine), "host": host()}
        return self.work.read_or_make("tile", dependencies, int, measure)

    def race(self, racing: Mapping[Pair, Candidate]) -> dict[str, BenchmarkReport]:
        """Race valid candidates, whose targets are all of one kind of device. Returns a report for
        each target, by its name."""
        (device,) = {torch.device(target.torch_device) for target, _ in racing}

        def run_race(say: Callable[[str], None]) -> dict[str, BenchmarkReport]:
            return benchmark_targets(
                self.captured.signature,
                self._open_sessions(racing),
                inputs=self._inputs,
                model=self.recipe.baseline() if self.recipe.baseline else None,
                seconds=self.recipe.benchmark_s / len(ladder(self.captured.signature)),
            )

        def make(_: Path) -> dict[str, BenchmarkReport]:
            with self.work.step(f"benchmark on {device}"), tf32_switches(self.captured.precision):
                if device.type == "cpu":
                    reports = run_in_fork("the race with the eager model", run_race)
                else:  # a GPU that this process uses does not work in its child
                    reports = run_race(self.work.say)
            for target, report in reports.items():
                for line in report.lines():
                    self.work.say(f"  {target}: {line}")
            return reports

        dependencies = {
            **self._common_dependencies,
            "racing": [
                [str(target), name, candidate.tile] for (target, name), candidate in racing.items()
            ],
            "options": self.recipe.options,
            "seconds": self.recipe.benchmark_s,
            "host": host(),
        }
        return self.work.read_or_make("benchmark", dependencies, dict[str, BenchmarkReport], make)

    def _open_sessions(self, racing: Mapping[Pair, Candidate]) -> dict[str, dict[str, Session]]:
        """Open the sessions of a race. Returns them by target and engine. An artifact that serves
        several targets is opened once."""
        opened: dict[Path, Session] = {}
        sessions: dict[str, dict[str, Session]] = {}
        for (target, name), candidate in racing.items():
            folder = candidate.compiled.folder
            if folder not in opened:
                opened[folder] = open_session_in_tiles(self.captured, target, candidate)
            sessions.setdefault(str(target), {})[name] = opened[folder]
        return sessions

    def _dependencies_of(self, target: Target, name: str) -> dict[str, Any]:
        """Return what identifies the artifact of the engine `name` for a target. An engine whose
        artifact runs on any CPU has the same one for all CPU targets: these are one target here."""
        return {
            **self._common_dependencies,
            "engine": name,
            "target": target.device if engine(name).anywhere else str(target),
            "options": self.recipe.options.get(name, {}),
            "compiler": compiler_identity(target),
        }

    def _make_trial(self, compiled: Compiled, tile: int) -> Trial:
        """Make the record with all that the validation of a candidate needs. `tile`: as in
        `judge`."""
        captured = self.captured
        return Trial(
            compiled.engine,
            file=artifact_file(compiled.engine, compiled.files, compiled.folder, captured),
            signature=captured.signature,
            reference=captured.reference,
            tolerances=self.recipe.tolerances,
            classifiers=self.recipe.classifiers,
            precision=captured.precision,
            tile=tile,
            program=captured.program,
            special_values=self.recipe.special_values,
            more=captured.more,
            many=captured.many,
        )


def _is_usable(report: ValidationReport) -> bool:
    """Whether the verdict allows the candidate to be used. A report with another verdict is not
    kept: the next run judges the candidate again."""
    return report.verdict in ("valid", "emulated")


def _verdict_endings(report: ValidationReport) -> Iterator[str]:
    """Yields the texts about a verdict, to be written after the candidate's name: for example
    " is only compiled: no device here runs it". Yields none for a verdict without remarks."""
    if report.unverified and not _is_usable(report):
        yield f" is only compiled: {report.why}"
    elif not _is_usable(report):
        verdict = "failed" if report.verdict == "failed" else f"is {report.verdict}"
        yield f" {verdict}: {report.why}"
    elif report.edges:
        yield f" {report.at_edges}"
    if report.many_rows:
        yield f": {report.many_rows.text}"


def open_session(captured: Capture, target: Target, compiled: Compiled) -> Session:
    """Open a session of a compiled candidate, on a device of this host, which must run `target`."""
    device = torch.device(target.torch_device)
    file = artifact_file(compiled.engine, compiled.files, compiled.folder, captured)
    return Session(captured.signature, open_candidate(compiled.engine, file, device), device)


def open_session_in_tiles(captured: Capture, target: Target, candidate: Candidate) -> Session:
    """Open a session of a candidate that computes its tile of rows at a time, as in production."""
    return tiled(open_session(captured, target, candidate.compiled), candidate.tile)
