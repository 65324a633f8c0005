"""Measures, on this host, the numbers for which a config sets bounds."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.processes import run_isolated
from engines.target import Target, torch_runs
from pipeline.applying import Labelled, Measurement
from pipeline.config import BuiltFrom, LimitConfig, MetricsConfig
from registry.bundle import TargetRecord
from registry.promotion import Measured
from registry.shadow_record import ShadowRecord
from registry.version import Version
from runtime.loader import open_measured_session
from runtime.opening import Opened, copy_files, hold_files
from soa.errors import SoaPipelineError
from stages.errors import NotMeasuredError
from stages.reference import Reference, label
from stages.timing import bind_call, measure_p99_us, one_thread

Say = Callable[[str], None]
_MEMORY_LIMIT_S = 600.0


@dataclass(frozen=True)
class InPlace:
    """The other version that has the alias now, which a promotion would replace.

    `opened` is None if it cannot be opened: then gates that compare with it refuse.
    """

    ref: str
    opened: Opened | None


def measure_bounds(
    opened: Opened, in_place: InPlace | None, targets: Sequence[str], say: Say
) -> Iterator[Measured]:
    """Measure the artifact size, latency, memory and metrics for which the config sets bounds.

    `targets`: those that this host runs. If it runs none, each bound gets a NaN, which no gate
    lets pass.
    """
    manifest = opened.bundle.manifest
    gates = BuiltFrom(manifest).gates
    if not targets:
        bounds = {"latency": gates.latency_p99_us, "memory": gates.memory_mb,
                  "size": gates.max_artifact_mb, "metrics": gates.metrics,
                  "outside share": gates.outside_share}  # fmt: skip
        why = "no target that is asked for runs here"
        for gate, bound in bounds.items():
            if bound:
                yield Measured(gate, gate, math.nan, why=why)
    for target in targets:
        if gates.outside_share is not None:
            yield from _read_outside_share(manifest.targets[target], target, gates.outside_share)
        if gates.max_artifact_mb is not None:
            yield _measure_size(opened, target, gates.max_artifact_mb)
        for limit in gates.latency_p99_us or ():
            say(f"timing single calls on {target} at {label(limit.rows)}")
            yield _measure_latency(opened, target, limit)
        for limit in gates.memory_mb or ():
            say(f"measuring memory on {target} at {label(limit.rows)}")
            yield _measure_memory(opened, target, limit)
    if gates.metrics is not None and targets:
        yield from _measure_metrics(opened, in_place, targets, gates.metrics, say)


def _measure_size(opened: Opened, target: str, limit_mb: float) -> Measured:
    """Measure the size of all files of a target's engines together, in MB."""
    record = opened.bundle.manifest.targets[target]
    files = {name for engine in record.engines() for name in record.candidates[engine].files}
    size_mb = sum(opened.bundle.file(name).stat().st_size for name in files) / 1e6
    return Measured("size", f"MB of the artifact for {target}", size_mb, max=limit_mb)


def _read_outside_share(record: TargetRecord, target: str, limit: float) -> Iterator[Measured]:
    """Yield the share of rows outside the tolerance that the build recorded, for each engine.

    It is the number below which the share is with a confidence of 95 %; NaN if none was recorded.
    """
    for engine in record.engines():
        tried = record.candidates[engine].many_rows
        quantity = f"share of rows of {engine} on {target} outside the tolerance, with 95 %,"
        share = math.nan if tried is None else tried.below
        why = "many rows were not tried" if tried is None else tried.text
        yield Measured("outside share", quantity, share, max=limit, why=why)


def _measure_latency(opened: Opened, target: str, limit: LimitConfig) -> Measured:
    """Measure the 99th percentile of the time of a call with `limit.rows` rows, on one thread."""
    inputs = Reference.load(opened.bundle.file(opened.bundle.manifest.reference)).inputs
    with one_thread():
        p99 = measure_p99_us(bind_call(open_measured_session(opened, target), inputs, limit.rows))
    quantity = f"p99 of a call on {target} at {label(limit.rows)} in us"
    return Measured("latency", quantity, p99, max=limit.max)


def _measure_memory(opened: Opened, target: str, limit: LimitConfig) -> Measured:
    """Measure the memory that the artifact takes at `limit.rows` rows, in a new process.

    It is NaN for a target that is no CPU. Raises NotMeasuredError if the process was killed.
    """
    quantity = f"MB that the artifact for {target} takes at {label(limit.rows)}"
    if Target.parse(target).torch_device != "cpu":
        return Measured("memory", quantity, math.nan, max=limit.max, why="measured on CPUs alone")
    manifest = opened.bundle.manifest
    engine = manifest.targets[target].engine_at(str(max(limit.rows.values())))
    candidate = manifest.targets[target].candidates[engine]
    with (
        tempfile.TemporaryDirectory(prefix="soa-memory-") as folder,
        hold_files(opened, target, engine) as held,
    ):
        payload = {
            "name": engine,
            "file": str(held.file(candidate.files[0])),
            "signature": opened.signature.to_dict(),
            "reference": str(held.file(manifest.reference)),
            "rows": limit.rows,
            "tile": candidate.tile or 0,
        }
        outcome = run_isolated(
            "stages.timing.racing:memory_here", payload, Path(folder), _MEMORY_LIMIT_S
        )
    if outcome.killed:
        raise NotMeasuredError(f"{opened.label}: {quantity}: {outcome.error}")
    megabytes = outcome.value if outcome.ok else math.nan
    return Measured("memory", quantity, megabytes, max=limit.max, why=outcome.error or "")


def _measure_metrics(
    opened: Opened,
    in_place: InPlace | None,
    targets: Sequence[str],
    config: MetricsConfig,
    say: Say,
) -> Iterator[Measured]:
    """Compute the metrics of both versions on the labelled rows in the new version's bundle."""
    stored = opened.bundle.manifest.labelled
    if stored is None:
        yield Measured("metrics", "metrics", math.nan, why="the version has no labelled rows")
        return
    with tempfile.TemporaryDirectory(prefix="soa-metrics-") as folder:
        copy_files(opened.bundle, [stored.file, *stored.code.values()], Path(folder))
        labelled = Labelled.from_bundle(stored, config, Path(folder))
        for target in targets:
            say(f"metrics on {target}, {stored.rows:,} rows of {stored.source}")
            new = _compute_metrics(labelled, opened, target)
            old = _compute_metrics_in_place(labelled, in_place, target)
            for name, bound in config.functions.items():
                ref = in_place.ref if in_place else ""
                why = new[name].why
                if not why and ref and old[name].why:
                    why = f"{ref}: {old[name].why}"
                yield Measured(
                    "metrics", f"{name} on {target}", new[name].value, min=bound.min, max=bound.max,
                    beside=ref, old=old[name].value, max_drop=bound.max_drop,
                    max_rise=bound.max_rise, why=why,
                )  # fmt: skip


def _compute_metrics_in_place(
    labelled: Labelled, in_place: InPlace | None, target: str
) -> dict[str, Measurement]:
    """Compute each metric of the version in place.

    It runs on `target` if it can, else on another of its targets that this host runs. Without such
    a target or such a version, each value is NaN.
    """
    other = in_place.opened if in_place else None
    if other is not None:
        targets = other.bundle.manifest.targets
        for name in (target, *targets):
            if name in targets and targets[name].chosen and torch_runs(Target.parse(name)):
                return _compute_metrics(labelled, other, name)
    return dict.fromkeys(labelled.asked.functions, Measurement(math.nan, "it cannot be run here"))


def _compute_metrics(labelled: Labelled, opened: Opened, target: str) -> dict[str, Measurement]:
    """Compute each metric of a version on a target; NaN and the reason if that is not possible."""
    try:
        built = BuiltFrom(opened.bundle.manifest)
        session = open_measured_session(opened, target)
        return labelled.measure(session, built.apply.columns, built.missing)
    except SoaPipelineError as error:
        return dict.fromkeys(labelled.asked.functions, Measurement(math.nan, str(error)))


def measure_shadow(
    opened: Opened, version: Version, replaced: Version | None, records: Sequence[ShadowRecord]
) -> Iterator[Measured]:
    """Yield what was counted while the version ran as a shadow or canary beside production.

    `replaced`: the version in production. The counts in the registry and those in `records` are
    added up. Nothing is yielded if the config sets no bounds for them, or no other version is in
    production.
    """
    gate = BuiltFrom(opened.bundle.manifest).gates.shadow
    if gate is None or replaced is None or replaced.number == version.number:
        return
    total = ShadowRecord(
        version=version.ref,
        digest=version.digest,
        production=replaced.ref,
        production_digest=replaced.digest,
    ).plus([*records, *version.shadows.values()])
    beside = f"beside {replaced.ref}"
    dropped = f"{total.dropped:,} more were sampled and dropped" if total.dropped else ""
    yield Measured(
        "shadow", f"events compared {beside}", total.events, min=gate.min_events, why=dropped
    )
    yield Measured("shadow", f"errors {beside}", total.errors, max=gate.max_errors, why=total.error)
    if total.canary_calls or total.withdrawals:
        quantity = f"withdrawals as a canary {beside}"
        why = total.withdrawn or f"it answered {total.canary_calls:,} calls"
        yield Measured("shadow", quantity, total.withdrawals, max=0, why=why)
    for kind, bound, by_output in (
        ("absolute", gate.max_abs, total.max_abs),
        ("relative", gate.max_rel, total.max_rel),
    ):
        if bound is None or not total.events:
            continue
        for output in opened.signature.outputs:
            quantity = f"largest {kind} difference of {output.name} {beside}"
            value = by_output.get(output.name, math.nan)
            why = "" if output.name in by_output else "no record has it"
            yield Measured("shadow", quantity, value, max=bound, why=why)
