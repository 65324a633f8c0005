"""Compiles, validates and races the candidates of targets; each step is cached by its content."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engines.base import engine
from engines.processes import side_by_side
from engines.target import Target, torch_runs
from pipeline.building.cache import StageCache, content_key
from pipeline.building.provenance import host
from runtime.checked import Tolerance
from runtime.opening import open_candidate
from runtime.session import Session
from soa.files import read_plain, write_whole
from soa.records import as_record, parse_json
from stages.benchmark import benchmark_targets, bound_call, ladder, seconds_of
from stages.capture import Capture
from stages.compile import Compiled, artifact_file, compile_candidate
from stages.emulate import emulate_candidate
from stages.independence import SEE_EACH_OTHER
from stages.model import tf32_switches
from stages.package import TargetResult
from stages.reference import Reference
from stages.reports import BenchmarkReport, ValidationReport
from stages.tiles import fastest_tile, tiled, tiles_of
from stages.validate import validate_candidate

Say = Callable[[str], None]
_HEAVY_S = 1e-3  # a model is heavy if a call with the fewest rows takes longer

Show = Callable[[str, float | None], AbstractContextManager[object]]
"""Shows a running step. Gets its name, and its seconds in the previous run, if known."""


def show_nothing(name: str, before: float | None) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Work:
    """The state of a run. `worked`: the steps that were not in the cache, with their seconds."""

    cache: StageCache
    say: Say
    worked: dict[str, float] = field(default_factory=dict)
    try_again: bool = False
    """True if a candidate failed for lack of time or memory: the next run tries it again."""
    show: Show = show_nothing
    beside: Callable[[], object] = lambda: None
    """Called in this process while compilers run in others."""
    model: str = ""
    """The name of the model. The seconds of its steps are kept for its next run."""
    before: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError):  # only needed for estimates of the time
            self.before = as_record(dict[str, float], parse_json(read_plain(self._kept)))

    @property
    def _kept(self) -> Path:
        return self.cache.root / "seconds" / f"{self.model}.json"

    def keep_seconds(self) -> None:
        """Keep the seconds of the steps, for the estimates of the next run. Does nothing if `model`
        is empty, as for a build at first use."""
        if not self.model:
            return
        with suppress(OSError):
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._kept, json.dumps(self.before | self.worked))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step when it begins; add it to `worked`, with its time, when it ends."""
        self.say(f"{name} …")
        begun = time.monotonic()
        with self.show(name, self.before.get(name)):
            yield
        self.worked[name] = round(time.monotonic() - begun, 1)
        self.say(f"{name}: {self.worked[name]} s")


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


@dataclass(frozen=True)
class _Made:
    """One candidate. `parts` identifies it in content keys. `tile`: rows per tile; 0: all rows."""

    target: Target
    parts: Mapping[str, Any]
    compiled: Compiled
    report: ValidationReport
    tile: int = 0


def build_targets(
    work: Work, captured: Capture, targets: Sequence[Target], recipe: Recipe, key: str
) -> dict[str, TargetResult]:
    """Compile and validate every candidate of each target, and race the valid ones.

    Candidates are compiled and validated in parallel. Some engines only replace another engine. If
    the config names no engines, these are built last, and only if the other engine gave no valid
    artifact or they may be faster than it. The targets of one device are raced together. `key`
    identifies everything that a result depends on, except the recipe.
    """

    def make(target: Target, name: str) -> _Made:
        options = recipe.options.get(name, {})
        # An artifact that runs on any CPU is built once for all CPU targets.
        kind = target.device if engine(name).anywhere else str(target)
        parts = {"capture": key, "engine": name, "target": kind, "options": options}
        return _make(work, captured, target, recipe, parts)

    pairs = [(target, name) for target in targets for name in recipe.engines]
    found: dict[tuple[Target, str], _Made] = {}

    def wanted(target: Target, name: str) -> bool:
        other = found.get((target, engine(name).in_place_of))
        if other is None or not other.report.valid:
            return other is None or not other.report.unverified
        return engine(name).for_heavy_rows and _is_heavy(work, captured, other)

    first = first_engines(recipe.engines, recipe.by_default)
    rest = [name for name in recipe.engines if name not in first]
    for several in (first, rest):
        some = [pair for pair in pairs if pair[1] in several and wanted(*pair)]
        with side_by_side() as pool:
            at_work = {pair: pool.submit(make, *pair) for pair in some}
            if several is first:
                pool.submit(work.beside)
            found |= {pair: future.result() for pair, future in at_work.items()}
    tiles: dict[str, int] = {}
    made = {
        pair: _with_tile(work, captured, recipe, found[pair], tiles)
        for pair in pairs
        if pair in found
    }
    results: dict[str, TargetResult] = {}
    for device in dict.fromkeys(target.torch_device for target in targets):
        here = [target for target in targets if target.torch_device == device]
        racing = [
            each for (target, _), each in made.items() if target in here and each.report.valid
        ]
        timed = _benchmark(work, captured, recipe, racing, key) if racing else {}
        for target in here:
            mine = {name: made[target, name] for name in recipe.engines if (target, name) in made}
            results[str(target)] = TargetResult(
                str(target),
                recipe.options,
                {name: each.compiled for name, each in mine.items()},
                {name: each.report for name, each in mine.items()},
                timed.get(str(target)),
                {name: each.tile for name, each in mine.items() if each.tile},
                [name for name in timed if name != str(target)],
            )
    return {str(target): results[str(target)] for target in targets}


def first_engines(engines: Sequence[str], by_default: bool) -> list[str]:
    """The engines that are built in any case, not only if another engine fails or is slow."""
    return [name for name in engines if not (by_default and engine(name).in_place_of)]


def _make(
    work: Work, captured: Capture, target: Target, recipe: Recipe, parts: Mapping[str, Any]
) -> _Made:
    """Compile a candidate. If this host can run it, validate it; else emulate it if possible."""
    name: str = parts["engine"]
    compiled = _compile(work, captured, target, recipe, parts)
    unbounded = any(rows.unbounded for rows in captured.signature.ranges.values())
    tile = max(tiles_of(captured.signature)) if unbounded else 0
    if compiled.error:
        report = _not_compiled(compiled)
    elif unbounded and target.device != "cpu":
        report = ValidationReport.not_applicable(name, "its rows are unbounded: that needs a CPU")
    elif unbounded and captured.why_dependent:
        why = f"{SEE_EACH_OTHER}: {captured.why_dependent}"
        report = ValidationReport.refused(name, why, "candidate-rows")
    elif torch_runs(target):
        report = _validate(work, captured, target, recipe, compiled, parts, tile)
    elif engine(name).crosses:
        report = _emulate(work, captured, target, recipe, compiled, parts, tile)
    else:
        report = ValidationReport.not_run(name, str(target))
    return _Made(target, parts, compiled, report, tile)


def _not_compiled(compiled: Compiled) -> ValidationReport:
    error = str(compiled.error)
    if compiled.not_applicable:
        return ValidationReport.not_applicable(compiled.engine, error)
    trace = f"log: {compiled.log}, repeat with: {compiled.script}"
    return ValidationReport.failed(compiled.engine, error, trace, compiled.code)


def _with_tile(
    work: Work, captured: Capture, recipe: Recipe, made: _Made, tiles: dict[str, int]
) -> _Made:
    """The candidate with its fastest tile, if it is valid with that tile; else as it was.

    `tiles` holds the tile of each engine: it is measured on the first target of an engine and used
    for its other targets.
    """
    if not made.report.valid or made.target.device != "cpu" or not tiles_of(captured.signature):
        return made
    if captured.why_dependent or engine(made.compiled.engine).cuts_rows:
        return made
    name = made.compiled.engine
    if name not in tiles:
        tiles[name] = _tile(work, captured, made.target, made.compiled, made.parts)
    rows = tiles[name]
    if rows in (0, made.tile):
        return made
    again = _validate(work, captured, made.target, recipe, made.compiled, made.parts, rows)
    if not again.valid:
        return made
    return replace(
        made, tile=rows, report=replace(made.report, window=again.window, bits=again.bits)
    )


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
        if found.not_applicable:
            work.say(f"  {name} for {target} is not applicable: {found.error}")
        elif found.error:
            work.say(
                f"  {name} for {target} failed: {found.error} [{found.code}] "
                f"(log: {found.log}, repeat with: {found.script})"
            )
        return found

    def load(folder: Path) -> Compiled:
        data: dict[str, Any] = json.loads((folder / "compiled.json").read_text())
        artifact = folder / Path(data["folder"]).name  # valid even if the work folder was moved
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

    def judge(folder: Path) -> ValidationReport:
        with work.step(f"validate {what}"):
            report = validate_candidate(
                compiled.engine,
                _artifact_of(compiled, captured),
                captured.signature,
                captured.reference,
                recipe.tolerances,
                recipe.classifiers,
                folder,
                recipe.timeout_s,
                target.torch_device,
                captured.precision,
                tile=tile,
                more=captured.more,
            )
        if not report.valid:
            verdict = "failed" if report.verdict == "failed" else f"is {report.verdict}"
            work.say(f"  {what} {verdict}: {report.why}")
        elif report.edges:
            work.say(f"  {what} {report.at_edges}")
        return report

    judged_by = {
        **parts,
        "tolerances": {output: asdict(t) for output, t in recipe.tolerances.items()},
        "classifiers": sorted(recipe.classifiers),
        "tile": tile,
    }
    return _judged(work, "validate", judged_by, judge, keep="valid")


def _emulate(
    work: Work,
    captured: Capture,
    target: Target,
    recipe: Recipe,
    compiled: Compiled,
    parts: Mapping[str, Any],
    tile: int,
) -> ValidationReport:
    """Run a candidate in an emulator of a target that this host does not have."""

    def judge(folder: Path) -> ValidationReport:
        with work.step(f"emulate {compiled.engine} on {target}"):
            report = emulate_candidate(
                compiled.engine,
                _artifact_of(compiled, captured),
                captured.signature,
                captured.reference,
                recipe.tolerances,
                folder,
                recipe.timeout_s,
                target,
                tile,
            )
        if report.verdict != "emulated":
            said = "is only compiled" if report.unverified else report.verdict
            work.say(f"  {compiled.engine} on {target} {said}: {report.why}")
        return report

    tolerances = {output: asdict(t) for output, t in recipe.tolerances.items()}
    judged_by = {**parts, "tolerances": tolerances, "tile": tile}
    return _judged(work, "emulate", judged_by, judge, keep="emulated")


def _judged(
    work: Work,
    step: str,
    parts: Mapping[str, Any],
    judge: Callable[[Path], ValidationReport],
    keep: str,
) -> ValidationReport:
    """The report of `judge`, which gets a folder for scratch files. It is cached for later runs if
    its verdict is `keep`."""

    def build(folder: Path) -> ValidationReport:
        report = judge(folder / "child")
        (folder / "report.json").write_text(json.dumps(report.to_dict()))
        return report

    def load(folder: Path) -> ValidationReport:
        return ValidationReport.from_dict(json.loads((folder / "report.json").read_text()))

    key = content_key(parts)
    return work.cache.result(step, key, build, load, keep=lambda report: report.verdict == keep)


def _is_heavy(work: Work, captured: Capture, made: _Made) -> bool:
    """True if a call with the fewest rows takes more than `_HEAVY_S`. Vector lanes without a row
    cost as much as the others, so an engine that computes single rows may be faster."""

    def build(folder: Path) -> bool:
        session = _session(captured, made.compiled, made.target)
        call = bound_call(
            session, Reference.load(captured.reference).inputs, ladder(captured.signature)[0]
        )
        heavy = min(seconds_of(call) for _ in range(5)) > _HEAVY_S
        (folder / "heavy.json").write_text(json.dumps(heavy))
        return heavy

    def load(folder: Path) -> bool:
        heavy: bool = json.loads((folder / "heavy.json").read_text())
        return heavy

    return work.cache.result("heavy", content_key({**made.parts, "host": host()}), build, load)


def _session(captured: Capture, compiled: Compiled, target: Target) -> Session:
    device = torch.device(target.torch_device)
    file = _artifact_of(compiled, captured)
    return Session(captured.signature, open_candidate(compiled.engine, file, device), device)


def _tile(
    work: Work, captured: Capture, target: Target, compiled: Compiled, parts: Mapping[str, Any]
) -> int:
    """The number of rows per tile with which a candidate is fastest; 0: all rows at once."""

    def build(folder: Path) -> int:
        with work.step(f"tiles for {compiled.engine} on {target}"):
            session = _session(captured, compiled, target)
            rows = fastest_tile(session, Reference.load(captured.reference).inputs) or 0
        (folder / "tile.json").write_text(json.dumps(rows))
        return rows

    def load(folder: Path) -> int:
        rows: int = json.loads((folder / "tile.json").read_text())
        return rows

    return work.cache.result("tile", content_key({**parts, "host": host()}), build, load)


def _benchmark(
    work: Work, captured: Capture, recipe: Recipe, racing: Sequence[_Made], capture_key: str
) -> dict[str, BenchmarkReport]:
    """Race all valid candidates on one device. Returns the reports by target."""
    device = torch.device(racing[0].target.torch_device)
    parts = {
        "capture": capture_key,
        "racing": [[str(each.target), each.compiled.engine, each.tile] for each in racing],
        "options": recipe.options,
        "seconds": recipe.benchmark_s,
        "host": host(),
    }

    def build(folder: Path) -> dict[str, BenchmarkReport]:
        with work.step(f"benchmark on {device}"), tf32_switches(captured.precision):
            opened: dict[str, Session] = {}
            sessions: dict[str, dict[str, Session]] = {}
            for each in racing:
                same = content_key(each.parts)
                if same not in opened:
                    opened[same] = tiled(_session(captured, each.compiled, each.target), each.tile)
                sessions.setdefault(str(each.target), {})[each.compiled.engine] = opened[same]
            reports = benchmark_targets(
                captured.signature,
                sessions,
                Reference.load(captured.reference).inputs,
                recipe.baseline() if recipe.baseline else None,
                recipe.benchmark_s / len(ladder(captured.signature)),
            )
        for target, report in reports.items():
            for line in report.lines():
                work.say(f"  {target}: {line}")
        data = {target: report.to_dict() for target, report in reports.items()}
        (folder / "report.json").write_text(json.dumps(data))
        return reports

    def load(folder: Path) -> dict[str, BenchmarkReport]:
        data = json.loads((folder / "report.json").read_text())
        return {target: BenchmarkReport.from_dict(each) for target, each in data.items()}

    return work.cache.result("benchmark", content_key(parts), build, load)


def _artifact_of(compiled: Compiled, captured: Capture) -> Path:
    return artifact_file(compiled.engine, compiled.files, compiled.folder, captured)


def chosen_session(captured: Capture, result: TargetResult) -> Session:
    """A session of the candidate that was chosen for a target. This host must run the target."""
    name = str(result.chosen)
    whole = _session(captured, result.compiled[name], Target.parse(result.target))
    return tiled(whole, result.tiles.get(name, 0))
