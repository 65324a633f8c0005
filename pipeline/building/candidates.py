"""Compiles and validates the candidates of targets, and races those that are valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.base import engine
from engines.processes import side_by_side
from engines.target import Target, only_engines, torch_runs
from pipeline.building.run_state import Work
from pipeline.building.steps import Candidate, Recipe, Steps, session_of
from runtime.session import Session
from stages.capture import SEE_EACH_OTHER, Capture
from stages.compile import Compiled
from stages.package import TargetResult
from stages.reports import BenchmarkReport, ValidationReport
from stages.timing import tiled, tiles_of

Made = dict[tuple[Target, str], Candidate]
"""Candidates by target and engine."""


def build_targets(
    work: Work, captured: Capture, targets: Sequence[Target], recipe: Recipe, key: str
) -> dict[str, TargetResult]:
    """Compile and validate every candidate of each target, and race the valid ones.

    Candidates are compiled and validated in parallel. Some engines only replace another engine. If
    the config names no engines, these are built last, and only if the other engine gave no valid
    artifact or they may be faster than it. The targets of one kind are raced together. `key`
    identifies everything that a result depends on, except the recipe.
    """
    steps = Steps(work, captured, recipe, key)
    made = _with_tiles(steps, _candidates(steps, targets))
    results: dict[str, TargetResult] = {}
    for kind in dict.fromkeys(target.device for target in targets):
        here = [target for target in targets if target.device == kind]
        racing = [each for (target, _), each in made.items() if target in here]
        racing = [each for each in racing if each.report.valid]
        timed = steps.race(racing) if racing else {}
        for target in here:
            mine = {name: made[target, name] for name in recipe.engines if (target, name) in made}
            results[str(target)] = _result(target, recipe, mine, timed)
    return {str(target): results[str(target)] for target in targets}


def first_engines(engines: Sequence[str], by_default: bool) -> list[str]:
    """The engines that are built in any case, not only if another engine fails or is slow."""
    return [name for name in engines if not (by_default and engine(name).in_place_of)]


def chosen_session(captured: Capture, result: TargetResult) -> Session:
    """A session of the candidate that was chosen for a target. This host must run the target."""
    name = str(result.chosen)
    whole = session_of(captured, result.compiled[name], Target.parse(result.target))
    return tiled(whole, result.tiles.get(name, 0))


def _candidates(steps: Steps, targets: Sequence[Target]) -> Made:
    """The candidates of all targets, in the order of the recipe's engines."""
    recipe = steps.recipe
    pairs = [
        (target, name)
        for target in targets
        for name in recipe.engines
        if name in (only_engines(target) or recipe.engines)
    ]
    found: Made = {}
    first = first_engines(recipe.engines, recipe.by_default)
    rest = [name for name in recipe.engines if name not in first]
    for several in (first, rest):
        wanted = [pair for pair in pairs if pair[1] in several and _is_wanted(steps, found, *pair)]
        with side_by_side() as pool:
            at_work = {pair: pool.submit(_candidate, steps, *pair) for pair in wanted}
            if several is first:
                pool.submit(steps.work.beside)
            found |= {pair: future.result() for pair, future in at_work.items()}
    return {pair: found[pair] for pair in pairs if pair in found}


def _is_wanted(steps: Steps, found: Made, target: Target, name: str) -> bool:
    """Whether a candidate is built, given those that were built before."""
    other = found.get((target, engine(name).in_place_of))
    if other is None or not other.report.valid:
        return other is None or not other.report.unverified
    return engine(name).for_heavy_rows and steps.is_heavy(other)


def _candidate(steps: Steps, target: Target, name: str) -> Candidate:
    """Compile a candidate. If this host can run it, validate it; else emulate it if possible."""
    captured = steps.captured
    compiled = steps.compile(name, target)
    unbounded = any(rows.unbounded for rows in captured.signature.ranges.values())
    tile = max(tiles_of(captured.signature)) if unbounded else 0
    if compiled.error:
        report = _not_compiled(compiled)
    elif unbounded and target.torch_device != "cpu":
        report = ValidationReport.not_applicable(name, "its rows are unbounded: that needs a CPU")
    elif unbounded and captured.why_dependent:
        why = f"{SEE_EACH_OTHER}: {captured.why_dependent}"
        report = ValidationReport.refused(name, why, "candidate-rows")
    elif torch_runs(target):
        report = steps.validate(compiled, target, tile)
    elif engine(name).crosses:
        report = steps.emulate(compiled, target, tile)
    else:
        report = ValidationReport.not_run(name, str(target))
    return Candidate(target, compiled, report, tile)


def _not_compiled(compiled: Compiled) -> ValidationReport:
    error = str(compiled.error)
    if compiled.not_applicable:
        return ValidationReport.not_applicable(compiled.engine, error)
    trace = f"log: {compiled.log}, repeat with: {compiled.script}"
    return ValidationReport.failed(compiled.engine, error, trace, compiled.code)


def _with_tiles(steps: Steps, made: Made) -> Made:
    """Give each candidate its fastest tile, if it is valid with that tile. The tile of an engine is
    measured on its first target, and used for its other targets."""
    if not tiles_of(steps.captured.signature):
        return made
    tiles: dict[str, int] = {}
    found = dict(made)
    for pair, each in made.items():
        if not _may_have_tiles(steps.captured, each):
            continue
        if each.engine not in tiles:
            tiles[each.engine] = steps.fastest_tile(each.compiled, each.target)
        rows = tiles[each.engine]
        if rows in (0, each.tile):
            continue
        again = steps.validate(each.compiled, each.target, rows)
        if again.valid:
            report = replace(each.report, window=again.window, bits=again.bits)
            found[pair] = replace(each, tile=rows, report=report)
    return found


def _may_have_tiles(captured: Capture, made: Candidate) -> bool:
    if not made.report.valid or made.target.device != "cpu":
        return False
    return not (captured.why_dependent or engine(made.engine).cuts_rows)


def _result(
    target: Target,
    recipe: Recipe,
    made: dict[str, Candidate],
    timed: dict[str, BenchmarkReport],
) -> TargetResult:
    return TargetResult(
        str(target),
        recipe.options,
        {name: each.compiled for name, each in made.items()},
        {name: each.report for name, each in made.items()},
        timed.get(str(target)),
        {name: each.tile for name, each in made.items() if each.tile},
        [name for name in timed if name != str(target)],
    )
