"""Compiles and validates the candidates of targets, and races those that are valid.

A candidate is the artifact of one engine for one target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.base import engine
from engines.processes import open_job_pool
from engines.target import Target, only_engines, torch_runs
from pipeline.building.steps import Pair, Recipe, Steps
from pipeline.building.work import Work
from stages.capture import SEE_EACH_OTHER, Capture
from stages.compile import Compiled
from stages.package import Candidate, TargetResult
from stages.reports import ValidationReport
from stages.timing import tiles_of

Candidates = dict[Pair, Candidate]


def build_targets(
    work: Work, captured: Capture, targets: Sequence[Target], recipe: Recipe
) -> dict[str, TargetResult]:
    """Compile and validate every candidate of each target, race the valid ones, and return the
    results by target.

    Candidates are compiled and validated in parallel. Some engines only stand in for another one.
    Unless the config names engines, these are built last, and only if the other engine gave no
    valid artifact or was slow. Targets of the same kind, such as CPUs, are raced together.
    """
    steps = Steps(work, captured, recipe)
    candidates = _choose_tiles(steps, _build_candidates(steps, targets))
    results: dict[str, TargetResult] = {}
    for kind in dict.fromkeys(target.device for target in targets):
        same_kind = [target for target in targets if target.device == kind]
        valid = {
            (target, name): candidate
            for (target, name), candidate in candidates.items()
            if target in same_kind and candidate.report.valid
        }
        reports = steps.race(valid) if valid else {}
        for target in same_kind:
            results[str(target)] = TargetResult(
                str(target),
                recipe.options,
                candidates={
                    name: candidate
                    for (other, name), candidate in candidates.items()
                    if other == target
                },
                benchmark=reports.get(str(target)),
                raced_with=[other for other in reports if other != str(target)],
            )
    return {str(target): results[str(target)] for target in targets}


def first_engines(engines: Sequence[str], by_default: bool) -> list[str]:
    """Return the engines that are built in any case. Left out are those that stand in for another
    engine, if `engines` are the defaults (`by_default`) and the user did not name them."""
    return [name for name in engines if not (by_default and engine(name).in_place_of)]


def _build_candidates(steps: Steps, targets: Sequence[Target]) -> Candidates:
    """Build the candidates of all targets, and return them in the order of the recipe's engines.
    Engines that stand in for another one come after all others, since their results decide."""
    recipe = steps.recipe
    pairs = [
        (target, name)
        for target in targets
        for name in recipe.engines
        if name in (only_engines(target) or recipe.engines)  # no only ones: all of them
    ]
    built: Candidates = {}
    first = first_engines(recipe.engines, recipe.by_default)
    stand_ins = [name for name in recipe.engines if name not in first]
    for engines in (first, stand_ins):
        wanted = [pair for pair in pairs if pair[1] in engines and _is_wanted(steps, built, *pair)]
        with open_job_pool() as pool:
            futures = {pair: pool.submit(_build_candidate, steps, *pair) for pair in wanted}
            if engines is first:
                pool.submit(steps.work.meanwhile)
            built |= {pair: future.result() for pair, future in futures.items()}
    return {pair: built[pair] for pair in pairs if pair in built}


def _is_wanted(steps: Steps, built: Candidates, target: Target, name: str) -> bool:
    """Whether the engine `name` is built for a target, given the candidates that were built before.

    An engine that stands in for another one is built if that one gave no valid artifact, or if the
    model is heavy (`Steps.is_heavy`) and the engine is made for heavy models. All others are built.
    """
    preferred = built.get((target, engine(name).in_place_of))
    if preferred is None:
        return True
    if not preferred.report.valid:
        return not preferred.report.unverified  # no device here: this one would not run either
    return engine(name).for_heavy_rows and steps.is_heavy(target, preferred.compiled)


def _build_candidate(steps: Steps, target: Target, name: str) -> Candidate:
    """Compile a candidate, and validate it: on a device of this host, or in an emulator if the
    engine allows it. Without either, it is returned as unverified; a failure is in its report."""
    captured = steps.captured
    compiled = steps.compile(target, name)
    # Any number of rows is computed in tiles: that needs a CPU, and rows that do not depend on each
    # other.
    unbounded = any(rows.unbounded for rows in captured.signature.ranges.values())
    tile = max(tiles_of(captured.signature)) if unbounded else 0
    if not compiled.outcome.ok:
        report = _report_not_compiled(compiled)
    elif unbounded and target.torch_device != "cpu":
        report = ValidationReport.not_applicable(name, "its rows are unbounded: that needs a CPU")
    elif unbounded and captured.why_dependent:
        reason = f"{SEE_EACH_OTHER}: {captured.why_dependent}"
        report = ValidationReport.refused(name, reason, "candidate-rows")
    elif torch_runs(target) or engine(name).crosses:
        report = steps.judge(target, compiled, tile)
    else:
        reason = f"no device here runs {target}: it was not validated"
        report = ValidationReport.without_device(name, "unverified", reason)
    return Candidate(compiled, report, tile)


def _report_not_compiled(compiled: Compiled) -> ValidationReport:
    """Return the report on a candidate that did not compile: it failed, or the engine is not
    applicable to the model or the target."""
    outcome = compiled.outcome
    error = str(outcome.error)
    if outcome.not_applicable:
        return ValidationReport.not_applicable(compiled.engine, error)
    return ValidationReport.failed(compiled.engine, error, outcome.trace, outcome.code)


def _choose_tiles(steps: Steps, candidates: Candidates) -> Candidates:
    """Return the candidates with the tile, a number of rows computed at a time, that is fastest.

    An engine's tile is measured on its first target, and used for its other targets too. Candidates
    on GPUs, and of engines that cut the rows themselves, keep their tile; so does a candidate that
    is not valid with the faster tile.
    """
    if not tiles_of(steps.captured.signature) or steps.captured.why_dependent:
        return candidates
    tiles: dict[str, int] = {}
    chosen = dict(candidates)
    for (target, name), candidate in candidates.items():
        if not candidate.report.valid or target.device != "cpu" or engine(name).cuts_rows:
            continue
        if name not in tiles:
            tiles[name] = steps.fastest_tile(target, candidate.compiled)
        tile = tiles[name]
        if tile in (0, candidate.tile):
            continue
        tiled = steps.judge(target, candidate.compiled, tile)
        if tiled.valid:
            report = replace(candidate.report, window=tiled.window, bits=tiled.bits)
            chosen[target, name] = replace(candidate, tile=tile, report=report)
    return chosen
