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
from stages.tiles import fastest_tile, run_in_tiles, tiles_of
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
    about = {
        name: {
            "capture": key,
            "engine": name,
            "target": str(target),
            "options": recipe.options.get(name, {}),
        }
        for name in recipe.engines
    }
    for name, parts in about.items():
        done = compiled[name] = _compile(work, captured, target, recipe, parts)
        if done.error:
            why = f"{done.error} (repeat with: {done.script})"
            reports[name] = ValidationReport.failed(name, why)
        elif host_runs(target):
            reports[name] = _validate(work, captured, target, recipe, done, parts)
        else:
            reports[name] = ValidationReport.not_run(name, str(target))
    valid = {name: done for name, done in compiled.items() if reports[name].valid}
    tiles: dict[str, int] = {}
    for name, done in valid.items():
        rows = _tile(work, captured, target, done, about[name])
        if rows and _validate(work, captured, target, recipe, done, about[name], rows).valid:
            tiles[name] = rows
    timed = _benchmark(work, captured, target, recipe, valid, tiles, key) if valid else None
    return TargetResult(str(target), recipe.options, compiled, reports, timed, tiles)


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
    tile: int = 0,
) -> ValidationReport:
    what = f"{compiled.engine} on {target}" + (f" in tiles of {tile} rows" if tile else "")

    def build(folder: Path) -> ValidationReport:
        with work.step(f"validate {what}"):
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
                tile=tile,
            )
        (folder / "report.json").write_text(json.dumps(report.to_dict()))
        if not report.valid:
            work.say(f"  {what} is refused: {report.reason}")
        return report

    def load(folder: Path) -> ValidationReport:
        return ValidationReport.from_dict(json.loads((folder / "report.json").read_text()))

    judged_by = {
        **parts,
        "tolerances": {output: asdict(t) for output, t in recipe.tolerances.items()},
        "classifiers": sorted(recipe.classifiers),
        "tile": tile,
    }
    key = content_key(judged_by)
    return work.cache.result("validate", key, build, load, keep=lambda report: report.valid)


def _tile(
    work: Work, captured: Capture, target: Target, compiled: Compiled, parts: Mapping[str, Any]
) -> int:
    """The rows at a time with which a candidate is fastest; 0: all of them."""
    if target.device != "cpu" or not tiles_of(captured.signature):
        return 0

    def build(folder: Path) -> int:
        with work.step(f"tiles for {compiled.engine} on {target}"):
            executable = open_candidate(
                compiled.engine, _artifact_of(compiled, captured), torch.device("cpu")
            )
            session = Session(captured.signature, executable)
            rows = fastest_tile(session, Reference.load(captured.reference).inputs) or 0
        (folder / "tile.json").write_text(json.dumps(rows))
        return rows

    def load(folder: Path) -> int:
        rows: int = json.loads((folder / "tile.json").read_text())
        return rows

    return work.cache.result("tile", content_key({**parts, "host": host()}), build, load)


def _benchmark(
    work: Work,
    captured: Capture,
    target: Target,
    recipe: Recipe,
    valid: Mapping[str, Compiled],
    tiles: Mapping[str, int],
    capture_key: str,
) -> BenchmarkReport:
    parts = {
        "capture": capture_key,
        "target": str(target),
        "engines": list(valid),
        "tiles": tiles,
        "options": recipe.options,
        "host": host(),
    }

    def build(folder: Path) -> BenchmarkReport:
        with work.step(f"benchmark on {target}"), tf32_switches(captured.precision):
            device = torch.device(target.torch_device)
            sessions = {
                name: Session(
                    captured.signature,
                    open_candidate(name, _artifact_of(compiled, captured), device),
                    device,
                )
                for name, compiled in valid.items()
            }
            for name, rows in tiles.items():
                run_in_tiles(sessions[name], rows)
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
