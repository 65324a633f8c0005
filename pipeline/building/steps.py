"""The steps that make and judge candidates; each step is cached by its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from engines.base import engine
from engines.lanes import compiler_identity
from engines.processes import in_fork
from engines.target import Target
from pipeline.building.provenance import host
from pipeline.building.run_state import Work
from pipeline.building.stage_cache import content_key
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from stages.capture import Capture
from stages.compile import Compiled, artifact_file, compile_candidate
from stages.judging import Special, Trial, emulate_candidate, validate_candidate
from stages.model import tf32_switches
from stages.reference import Arrays, Reference
from stages.reports import BenchmarkReport, ValidationReport
from stages.timing import benchmark_targets, bound_call, fastest_tile, ladder, seconds_of, tiled

T = TypeVar("T")
HEAVY_S = 1e-3  # a model is heavy if a call with the fewest rows takes longer


@dataclass(frozen=True)
class Recipe:
    """How the candidates of a target are made and judged."""

    engines: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    """Compile options by engine."""
    timeout_s: float
    tolerances: Mapping[str, Tolerance]
    classifiers: frozenset[str]
    baseline: Callable[[], torch.nn.Module] | None
    """Makes the eager model to race against; None if its source code is not on this host."""
    benchmark_s: float = 10.0
    """Approximate seconds for the race of all candidates at all sizes."""
    by_default: bool = False
    """True if `engines` are the defaults, because the config names none."""
    special_values: Special = "report"


@dataclass(frozen=True)
class Candidate:
    """A compiled artifact and the verdict on it. `tile`: rows per tile; 0: all rows at once."""

    target: Target
    compiled: Compiled
    report: ValidationReport
    tile: int = 0

    @property
    def engine(self) -> str:
        return self.compiled.engine


@dataclass(frozen=True)
class Steps:
    """The steps of one capture and one recipe. `key` identifies the capture and the tools: all
    that a result depends on, except the recipe."""

    work: Work
    captured: Capture
    recipe: Recipe
    key: str

    def compile(self, name: str, target: Target) -> Compiled:
        """Compile for a target, in a child process. A failure is in the result."""
        recipe, work = self.recipe, self.work

        def make(folder: Path) -> Compiled:
            options = recipe.options.get(name, {})
            with work.step(f"compile {name} for {target}"):
                found = compile_candidate(
                    name, self.captured, target, options, folder, recipe.timeout_s
                )
            work.try_again = work.try_again or found.passing
            if found.not_applicable:
                work.say(f"  {name} for {target} is not applicable: {found.error}")
            elif found.error:
                work.say(
                    f"  {name} for {target} failed: {found.error} [{found.code}] "
                    f"(log: {found.log}, repeat with: {found.script})"
                )
            return found

        key = content_key(self._parts(name, target))
        found = work.cache.record("compile", key, Compiled, make, lambda made: made.error is None)
        return replace(found, folder=work.cache.folder("compile", key) / found.folder.name)

    def validate(self, compiled: Compiled, target: Target, tile: int) -> ValidationReport:
        """Compare an artifact with the reference, on a device of this host."""

        def judge(folder: Path) -> ValidationReport:
            what = f"{compiled.engine} on {target}" + (f" in tiles of {tile} rows" if tile else "")
            with self.work.step(f"validate {what}"):
                report = validate_candidate(
                    self._trial(compiled, tile),
                    folder,
                    self.recipe.timeout_s,
                    target.torch_device,
                    more=self.captured.more,
                    many=self.captured.many,
                )
            if not report.valid:
                verdict = "failed" if report.verdict == "failed" else f"is {report.verdict}"
                self.work.say(f"  {what} {verdict}: {report.why}")
            elif report.edges:
                self.work.say(f"  {what} {report.at_edges}")
            if report.many_rows:
                self.work.say(f"  {what}: {report.many_rows.text}")
            return report

        return self._judged("validate", compiled, target, tile, judge, keep="valid")

    def emulate(self, compiled: Compiled, target: Target, tile: int) -> ValidationReport:
        """Compare an artifact with the reference, in an emulator of a target that this host does
        not have."""

        def judge(folder: Path) -> ValidationReport:
            with self.work.step(f"emulate {compiled.engine} on {target}"):
                report = emulate_candidate(
                    self._trial(compiled, tile), folder, self.recipe.timeout_s, target
                )
            if report.verdict != "emulated":
                said = "is only compiled" if report.unverified else report.verdict
                self.work.say(f"  {compiled.engine} on {target} {said}: {report.why}")
            return report

        return self._judged("emulate", compiled, target, tile, judge, keep="emulated")

    def is_heavy(self, made: Candidate) -> bool:
        """True if a call with the fewest rows takes more than `HEAVY_S`. Vector lanes without a row
        cost as much as the others, so an engine that computes single rows may be faster."""

        def measure() -> bool:
            session = self.session(made.compiled, made.target)
            fewest = ladder(self.captured.signature)[0]
            call = bound_call(session, self._inputs(), fewest)
            return min(seconds_of(call) for _ in range(5)) > HEAVY_S

        return self._measured("heavy", made.compiled, made.target, bool, measure)

    def fastest_tile(self, compiled: Compiled, target: Target) -> int:
        """The number of rows per tile with which a candidate is fastest; 0: all rows at once."""

        def measure() -> int:
            with self.work.step(f"tiles for {compiled.engine} on {target}"):
                return fastest_tile(self.session(compiled, target), self._inputs()) or 0

        return self._measured("tile", compiled, target, int, measure)

    def race(self, racing: Sequence[Candidate]) -> dict[str, BenchmarkReport]:
        """Race valid candidates on one device. Returns the reports by target."""
        device = torch.device(racing[0].target.torch_device)
        parts = {
            "capture": self.key,
            "racing": [[str(each.target), each.engine, each.tile] for each in racing],
            "options": self.recipe.options,
            "seconds": self.recipe.benchmark_s,
            "host": host(),
        }

        def make(_: Path) -> dict[str, BenchmarkReport]:
            def timed(say: Callable[[str], None]) -> dict[str, BenchmarkReport]:
                return benchmark_targets(
                    self.captured.signature,
                    self._sessions(racing),
                    self._inputs(),
                    self.recipe.baseline() if self.recipe.baseline else None,
                    self.recipe.benchmark_s / len(ladder(self.captured.signature)),
                )

            with self.work.step(f"benchmark on {device}"), tf32_switches(self.captured.precision):
                if device.type == "cpu":
                    reports = in_fork("the race with the eager model", timed)
                else:  # a GPU that this process uses does not work in its child
                    reports = timed(self.work.say)
            for target, report in reports.items():
                for line in report.lines():
                    self.work.say(f"  {target}: {line}")
            return reports

        key = content_key(parts)
        return self.work.cache.record("benchmark", key, dict[str, BenchmarkReport], make)

    def session(self, compiled: Compiled, target: Target) -> Session:
        """A session of a candidate. This host must run the target."""
        return session_of(self.captured, compiled, target)

    def _sessions(self, racing: Sequence[Candidate]) -> dict[str, dict[str, Session]]:
        """The sessions of the race, by target and engine; an artifact is opened once."""
        opened: dict[str, Session] = {}
        sessions: dict[str, dict[str, Session]] = {}
        for each in racing:
            same = content_key(self._parts(each.engine, each.target))
            if same not in opened:
                opened[same] = tiled(self.session(each.compiled, each.target), each.tile)
            sessions.setdefault(str(each.target), {})[each.engine] = opened[same]
        return sessions

    def _inputs(self) -> Arrays:
        return Reference.load(self.captured.reference).inputs

    def _parts(self, name: str, target: Target) -> dict[str, Any]:
        """What identifies an artifact. One that runs on any CPU is the same for all CPU targets."""
        kind = target.device if engine(name).anywhere else str(target)
        options = self.recipe.options.get(name, {})
        return {
            "capture": self.key,
            "engine": name,
            "target": kind,
            "options": options,
            "compiler": compiler_identity(target),
        }

    def _trial(self, compiled: Compiled, tile: int) -> Trial:
        captured = self.captured
        return Trial(
            compiled.engine,
            artifact_of(captured, compiled),
            captured.signature,
            captured.reference,
            self.recipe.tolerances,
            self.recipe.classifiers,
            captured.precision,
            tile,
            captured.program,
            self.recipe.special_values,
        )

    def _judged(
        self,
        step: str,
        compiled: Compiled,
        target: Target,
        tile: int,
        judge: Callable[[Path], ValidationReport],
        keep: str,
    ) -> ValidationReport:
        """The report of `judge`, which gets a folder for scratch files. It is cached for later runs
        if its verdict is `keep`."""

        parts = {
            **self._parts(compiled.engine, target),
            "tolerances": {output: asdict(t) for output, t in self.recipe.tolerances.items()},
            "classifiers": sorted(self.recipe.classifiers),
            "special_values": self.recipe.special_values,
            "tile": tile,
        }
        return self.work.cache.record(
            step,
            content_key(parts),
            ValidationReport,
            lambda folder: judge(folder / "child"),
            lambda report: report.verdict == keep,
        )

    def _measured(
        self, step: str, compiled: Compiled, target: Target, kind: type[T], measure: Callable[[], T]
    ) -> T:
        """The result of `measure`, a fact about an artifact on this host; it is cached."""
        parts = {**self._parts(compiled.engine, target), "host": host()}
        return self.work.cache.record(step, content_key(parts), kind, lambda _: measure())


def session_of(captured: Capture, compiled: Compiled, target: Target) -> Session:
    device = torch.device(target.torch_device)
    file = artifact_of(captured, compiled)
    return Session(captured.signature, open_candidate(compiled.engine, file, device), device)


def artifact_of(captured: Capture, compiled: Compiled) -> Path:
    return artifact_file(compiled.engine, compiled.files, compiled.folder, captured)
