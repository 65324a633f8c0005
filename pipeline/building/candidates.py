"""One target: its candidates compiled, validated and raced, each step kept by its content."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.target import Target, host_runs
from pipeline.building.cache import StageCache, content_key
from pipeline.building.provenance import host
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from stages.benchmark import BenchmarkReport, benchmark
from stages.capture import Capture
from stages.compile import Compiled, artifact_file, compile_candidate
from stages.model import tf32_switches
from stages.package import TargetResult
from stages.reference import Reference
from stages.validate import ValidationReport, validate_candidate

Say = Callable[[str], None]


@dataclass
class Work:
    """Work in progress. `worked` names the steps that did any; empty if all was there."""

    cache: StageCache
    say: Say
    worked: list[str] = field(default_factory=list)
    try_again: bool = False
    """Whether a candidate failed for lack of time or memory: the next run tries it again."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step when it begins; note it as work, with its time, when it ends."""
        self.say(f"{name} …")
        begun = time.monotonic()
        yield
        self.worked.append(name)
        self.say(f"{name}: {time.monotonic() - begun:.1f} s")


@dataclass(frozen=True)
class Recipe:
    """How the candidates of a target are made and judged."""

    engines: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    """By engine."""
    timeout_s: float
    tolerances: Mapping[str, Tolerance]
    classifiers: frozenset[str]
    baseline: Callable[[], torch.nn.Module] | None
    """The eager model to race against; None where its source is not here."""


def build_target(
    work: Work, captured: Capture, target: Target, recipe: Recipe, key: str
) -> TargetResult:
    """Every candidate with its verdict, and the race of the valid ones.

    `key` stands for all that a result depends on besides the recipe.
    """
    compiled: dict[str, Compiled] = {}
    reports: dict[str, ValidationReport] = {}
    for name in recipe.engines:
        parts = {
            "capture": key,
            "engine": name,
            "target": str(target),
            "options": recipe.options.get(name, {}),
        }
        done = compiled[name] = _compile(work, captured, target, recipe, parts)
        if done.error:
            why = f"{done.error} (repeat with: {done.script})"
            reports[name] = ValidationReport.failed(name, why)
        elif host_runs(target):
            reports[name] = _validate(work, captured, target, recipe, done, parts)
        else:
            reports[name] = ValidationReport.not_run(name, str(target))
    valid = [name for name, report in reports.items() if report.valid]
    timed = _benchmark(work, captured, target, recipe, compiled, valid, key) if valid else None
    return TargetResult(str(target), recipe.options, compiled, reports, timed)


def _compile(
    work: Work, captured: Capture, target: Target, recipe: Recipe, parts: Mapping[str, Any]
) -> Compiled:
    def build(folder: Path) -> Compiled:
        name, options = parts["engine"], parts["options"]
        with work.step(f"compile {name} for {target}"):
            found = compile_candidate(name, captured, target, options, folder, recipe.timeout_s)
        record = {**asdict(found), "folder": str(found.folder)}
        (folder / "compiled.json").write_text(json.dumps(record))
        work.try_again = work.try_again or found.passing
        if found.error:
            work.say(f"  {name} for {target} failed: {found.error}; log: {found.log}")
        return found

    def load(folder: Path) -> Compiled:
        data: dict[str, Any] = json.loads((folder / "compiled.json").read_text())
        artifact = folder / Path(data["folder"]).name  # here, also where the work folder has moved
        return Compiled(**{**data, "folder": artifact, "files": tuple(data["files"])})

    key = content_key(parts)
    return work.cache.result("compile", key, build, load, keep=lambda found: found.error is None)


def _validate(
    work: Work,
    captured: Capture,
    target: Target,
    recipe: Recipe,
    compiled: Compiled,
    parts: Mapping[str, Any],
) -> ValidationReport:
    def build(folder: Path) -> ValidationReport:
        with work.step(f"validate {compiled.engine} on {target}"):
            report = validate_candidate(
                compiled.engine,
                _artifact_of(compiled, captured),
                captured.signature,
                captured.reference,
                recipe.tolerances,
                recipe.classifiers,
                folder / "child",
                recipe.timeout_s,
                target.torch_device,
                captured.precision,
            )
        (folder / "report.json").write_text(json.dumps(report.to_dict()))
        if not report.valid:
            work.say(f"  {compiled.engine} on {target} is refused: {report.reason}")
        return report

    def load(folder: Path) -> ValidationReport:
        return ValidationReport.from_dict(json.loads((folder / "report.json").read_text()))

    judged_by = {
        **parts,
        "tolerances": {output: asdict(t) for output, t in recipe.tolerances.items()},
        "classifiers": sorted(recipe.classifiers),
    }
    key = content_key(judged_by)
    return work.cache.result("validate", key, build, load, keep=lambda report: report.valid)


def _benchmark(
    work: Work,
    captured: Capture,
    target: Target,
    recipe: Recipe,
    compiled: dict[str, Compiled],
    valid: list[str],
    capture_key: str,
) -> BenchmarkReport:
    parts = {
        "capture": capture_key,
        "target": str(target),
        "engines": valid,
        "options": recipe.options,
        "host": host(),
    }

    def build(folder: Path) -> BenchmarkReport:
        with work.step(f"benchmark on {target}"), tf32_switches(captured.precision):
            device = torch.device(target.torch_device)
            sessions = {
                name: Session(
                    captured.signature,
                    open_candidate(name, _artifact_of(compiled[name], captured), device),
                    device,
                )
                for name in valid
            }
            report = benchmark(
                captured.signature,
                sessions,
                Reference.load(captured.reference).inputs,
                recipe.baseline() if recipe.baseline else None,
            )
        (folder / "report.json").write_text(json.dumps(report.to_dict()))
        return report

    def load(folder: Path) -> BenchmarkReport:
        return BenchmarkReport.from_dict(json.loads((folder / "report.json").read_text()))

    return work.cache.result("benchmark", content_key(parts), build, load)


def _artifact_of(compiled: Compiled, captured: Capture) -> Path:
    return artifact_file(compiled.engine, compiled.files, compiled.folder, captured)
