"""Reports on versions: bundles, validation, times, gates, history, as lines and tables.

All numbers come from stored reports or from a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pipeline.report.tables import Cell, Part, Table, new_table
from registry.bundle import (
    BENCHMARK,
    CURVES,
    VALIDATION,
    Bundle,
    Capture,
    Manifest,
    TargetRecord,
    spans_of,
)
from registry.errors import BundleError
from registry.history import Event
from registry.promotion import Decision
from registry.ref import TARGET_PATTERN
from registry.shadow_record import ShadowRecord
from registry.version import Version
from runtime.checked import Deviation, Tolerance
from soa.records import as_record
from soa.signature import Signature
from soa.text import microseconds, number, time_unit
from stages.reports import BenchmarkReport, Curve, Timing, ValidationReport

T = TypeVar("T")
_MOST_NAMES = 6
SPREAD = "one thread; below each median its 5th … 95th percentile"


def describe_build(bundle: Bundle, only: str | None = None) -> Iterator[Part]:
    """Describe the results of a build: each candidate's deviations from the reference, and times.

    `only`: the one target to report, without the reference and the metrics; None: all targets.
    """
    if only is None:
        yield from describe_reference(bundle)
        yield from describe_metrics(bundle)
    for target in bundle.manifest.targets if only is None else [only]:
        record = bundle.manifest.targets[target]
        title = f"{target} ({record.status}): deviation from the model's own answers"
        yield from describe_validation(title, read_validation(bundle, target))
        yield from describe_artifact_facts(record)
        timed = read_benchmark(bundle, target)
        if timed.timings:
            yield describe_benchmark(f"{target}: one call from SoA to SoA, {SPREAD}", timed)
        yield from describe_annex(bundle, target)


def describe_failures(bundle: Bundle) -> Iterator[str]:
    """Yield a line for each engine that failed for a target, with the reason.

    Another line tells how fast the artifact is that was chosen instead, since the target may become
    faster once the cause is mended.
    """
    for target, record in bundle.manifest.targets.items():
        candidates = record.candidates.items()
        failed = {engine: made.reason for engine, made in candidates if made.status == "failed"}
        yield from (f"{target}: {engine} failed: {reason}" for engine, reason in failed.items())
        if failed and record.chosen is not None:
            yield from (f"{target}: {line}" for line in read_benchmark(bundle, target).lines()[:1])


def read_validation(bundle: Bundle, target: str) -> list[ValidationReport]:
    """Read the stored validation reports on a target, one for each engine; none if none exists."""
    stored = bundle.report(VALIDATION)
    if target not in stored:
        return []
    return list(_read_report(dict[str, ValidationReport], bundle, stored, target).values())


def read_benchmark(bundle: Bundle, target: str) -> BenchmarkReport:
    """Read the stored benchmark report on a target, which also has times of eager torch and copies.

    Returns an empty report for a target that no device of the building host could run.
    """
    stored = bundle.report(BENCHMARK)
    if target not in stored:
        return BenchmarkReport(timings={}, fastest=None)
    return _read_report(BenchmarkReport, bundle, stored, target)


def read_curves(bundle: Bundle) -> Iterator[tuple[str, dict[str, Curve]]]:
    """Yield each target that has stored curves, and its curves by metric."""
    recorded = bundle.report(CURVES)
    for target in bundle.manifest.targets:
        if target in recorded:
            yield target, _read_report(dict[str, Curve], bundle, recorded, target)


def _read_report(kind: type[T], bundle: Bundle, reports: Mapping[str, Any], target: str) -> T:
    """Return the report on a target as a record of `kind`. BundleError: it does not fit."""
    try:
        return as_record(kind, reports.get(target))
    except ValueError as error:
        raise BundleError(f"{bundle.path}: its report on {target}: {error}") from error


def describe_reference(bundle: Bundle) -> Iterator[Part]:
    """Describe how well the reference tests a model.

    A table counts NaN and infinite values of each output; lines below it note other limits.
    """
    from stages.reference import read_proof  # here: it needs NumPy, a list of versions does not

    counts, notes = read_proof(bundle)
    rows = (
        (
            output.output, str(len(output.by_size)), f"{output.values:,}",
            f"{output.count:,} ({percent(output.share)})" if output.count else "none",
            ", ".join(f"{bad} at {size}" for size, (bad, _) in output.by_size.items() if bad),
        )
        for output in counts
    )  # fmt: skip
    yield new_table("reference", "output", "sizes", "values", "NaN or infinite", "where", rows=rows)
    yield from (f"  {note}" for note in notes)


def describe_metrics(bundle: Bundle) -> Iterator[Part]:
    """Describe the metrics on the labelled rows; yields nothing if the bundle has no such rows."""
    stored, targets = bundle.manifest.labelled, bundle.manifest.targets
    if stored is not None:
        rows = [
            (metric, target, number(value, digits=6))
            for target, record in targets.items()
            for metric, value in record.metrics.items()
        ]
        yield new_table("metrics", "metric", "target", "value", rows=rows)
        yield f"  on {stored.rows:,} rows of {stored.source}, sha256 {stored.sha256[:12]}"


def describe_validation(title: str, reports: Sequence[ValidationReport]) -> Iterator[Part]:
    """Describe validations: each candidate's worst deviation of each output, and the verdicts."""
    table = new_table(
        title, "engine", "output", "max abs", "max rel", "ULP p50/p99/max", "outside", "arg-max"
    )
    for report in reports:
        for output, worst in report.worst.items():
            agreement = "" if worst.argmax is None else percent(worst.argmax)
            table.add_row(
                report.engine, output, number(worst.max_abs), number(worst.max_rel),
                _ulp_text(worst), percent(worst.outside), agreement,
            )  # fmt: skip
    yield table if table.rows else title
    yield from _describe_verdicts(reports)


def _ulp_text(deviation: Deviation) -> str:
    """Write the 50th and 99th percentile and the largest deviation in units in the last place.

    Integers have no such deviations: the text is `exact` if all values are equal, else a dash.
    """
    quantiles = (deviation.ulp_p50, deviation.ulp_p99, deviation.ulp_max)
    if None not in quantiles:
        return "/".join(number(ulp) for ulp in quantiles if ulp is not None)
    return "exact" if deviation.ulp_max is None and deviation.max_abs == 0 else "—"


def _describe_verdicts(reports: Iterable[ValidationReport]) -> Iterator[str]:
    """Say which engines are valid, why the others are not, and what was found beside the cases."""
    if valid := [report.engine for report in reports if report.valid]:
        yield f"valid: {', '.join(valid)}"
    for report in reports:
        if not report.valid:
            verdict = "failed" if report.verdict == "failed" else f"is {report.verdict}"
            yield f"{report.engine} {verdict}" + (f": {report.why}" if report.reason else "")
        if report.many_rows:
            yield f"{report.engine}: {report.many_rows.text}"
        if report.edges:
            yield f"{report.engine} {report.at_edges}"


def describe_benchmark(title: str, report: BenchmarkReport) -> Part:
    """Return a table of times: each median, and below it the spread in the same unit."""
    table = new_table(title, "", *report.timings)
    spans = spans_of(report.below, report.fastest)
    for name in dict.fromkeys(name for times in report.timings.values() for name in times):
        chosen = ("chosen", *filter(None, spans[name].split(" and "))) if name in spans else ()
        timings = (times.get(name) for times in report.timings.values())
        cells = ("" if timing is None else time_and_spread(timing) for timing in timings)
        table.add_row((name, *chosen), *cells)
    return table


def time_and_spread(timing: Timing) -> Cell:
    """Return a cell with the median of a call and, if they differ, its percentiles below.

    Those are the 5th and the 95th: `("12 us", "11…14")`.
    """
    scale, _ = time_unit(timing.median_us)
    low, high = number(timing.p05_us / scale), number(timing.p95_us / scale)
    median = microseconds(timing.median_us)
    return median if low == high else (median, f"{low}…{high}")


def percent(share: float) -> str:
    """Write a share in percent, as `99.87%` or `<0.01%`.

    `0%` and `100%` mean exactly that: any other share above 99.99 % is written as `99.99%`.
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.01%" if 0 < share < 1e-4 else f"{min(share, 0.9999):.2%}"


def describe_bundle(bundle: Bundle, version: Version | None) -> Iterator[Part]:
    """Describe a bundle as `pipeline show` does. `version`: None if it is not from a registry."""
    yield version.ref if version else str(bundle.path)
    yield new_table("", "", "", rows=collect_facts(bundle, version).items())
    yield blocks_table(bundle.manifest)
    yield from describe_build(bundle)


def collect_facts(bundle: Bundle, version: Version | None) -> dict[str, str]:
    """Return facts about a bundle and its origin as texts, by name; unknown ones are left out.

    `version`: the version that it is in the registry, or None.
    """
    manifest, provenance = bundle.manifest, bundle.manifest.provenance
    signature = Signature.from_dict(manifest.signature)
    source = "not in a git repository"
    if provenance.git_commit is not None:
        changed = " with changes" if provenance.git_dirty else ""
        source = f"git {provenance.git_commit[:12]}{changed}"
    facts_by_name = {
        "description": manifest.description or "—",
        "digest": bundle.digest,
        "aliases": ", ".join(f"@{a}" for a in version.aliases) if version else "",
        "created": provenance.created,
        "source": source,
        "origin": _origin_text(version.origin if version else {}),
        "precision": manifest.capture.precision,
        "torchscript": manifest.capture.torchscript or manifest.capture.torchscript_note or "none",
        "rows": ranges_text(signature),
        "dependence": _dependence_text(manifest.capture),
        "jagged": ", ".join(f"{k}: the first {v} of a row" for k, v in signature.jagged.items()),
        "tools": ", ".join(f"{k} {v}" for k, v in provenance.tools.items()),
        "took": ", ".join(f"{k} {v:.1f} s" for k, v in provenance.seconds.items()),
        "shadow": "; ".join(map(_shadow_text, version.shadows.values() if version else ())),
    }
    return {key: value for key, value in facts_by_name.items() if value}


def _shadow_text(shadow: ShadowRecord) -> str:
    """Write the record of a shadow or canary as one line."""
    largest = ", ".join(f"{name} {number(most)}" for name, most in shadow.max_abs.items())
    withdrawn = f", withdrawn at {shadow.withdrawn}" if shadow.withdrawals else ""
    return (
        f"{shadow.events:,} events beside {shadow.production}, {shadow.errors:,} errors, "
        f"{shadow.dropped:,} dropped; largest differences {largest or 'none'}; as a canary "
        f"{shadow.canary_calls:,} calls, of production {shadow.production_calls:,}{withdrawn}"
    )


def ranges_text(signature: Signature) -> str:
    """Write how many rows a call may have, such as `n: 1 … 1,000` for each row dimension."""
    return ", ".join(
        f"{dim}: {rows.min:,} {'or more' if rows.unbounded else f'… {rows.max:,}'}"
        for dim, rows in signature.ranges.items()
    )


def _dependence_text(capture: Capture) -> str:
    """Write whether a row's outputs depend on other rows, and how this is known.

    The text is empty if an older release recorded nothing.
    """
    if capture.tried:
        return f"none found, tried: {capture.tried}"
    if capture.shown:
        return "none, shown: no row depends on other rows"
    return capture.dependence or ""


def blocks_table(manifest: Manifest) -> Table:
    """Return a table of the blocks that the model reads (`→`) and writes (`←`)."""
    signature = Signature.from_dict(manifest.signature)
    blocks = new_table("blocks", "block", "collection", "columns", "plan", "tolerance")
    for arrow, bound_blocks in (("→", signature.inputs), ("←", signature.outputs)):
        for bound in bound_blocks:
            plan = bound.plan
            tolerance = manifest.tolerances.get(bound.name)
            blocks.add_row(
                f"{arrow} {bound.name}",
                bound.block.collection,
                first_names(bound.block.columns),
                f"{plan.kind} {plan.dtype} {' by '.join(map(str, plan.feature_shape))}".rstrip(),
                "" if tolerance is None else _tolerance_text(tolerance),
            )
    return blocks


def _tolerance_text(tolerance: Tolerance) -> str:
    """Write the largest deviation from a reference value `ref` that is allowed."""
    if not tolerance.atol and not tolerance.rtol:
        return "exact"
    return f"{number(tolerance.atol)} + {number(tolerance.rtol)}·|ref|"


def first_names(names: Sequence[str]) -> str:
    """Join the first `_MOST_NAMES` names; if there are more, add the number of all."""
    ellipsis = f", … ({len(names)})" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + ellipsis


def _origin_text(origin: Mapping[str, Any]) -> str:
    """Write who pushed a version, when, and from which version of which registry.

    `origin`: the version's tag; the text is empty if it has none.
    """
    if not origin:
        return ""
    was = f", was {origin['version']}" if "version" in origin else ""
    source = f" in {origin['registry']}" if "registry" in origin else ""
    return f"pushed by {origin.get('pushed_by')} at {origin.get('pushed_at')}{was}{source}"


def describe_artifact_facts(record: TargetRecord) -> Iterator[str]:
    """Yield a line for each engine that recorded facts about its artifact, without empty lists."""
    for engine, candidate in record.candidates.items():
        texts = []
        for name, value in candidate.facts.items():
            if value != []:
                text = ", ".join(map(str, value)) if isinstance(value, list) else value
                texts.append(f"{name.replace('_', ' ')} {text}")
        if texts:
            yield f"  {engine}: {'; '.join(texts)}"


def describe_annex(bundle: Bundle, target: str) -> Iterator[str]:
    """Describe where a target that was built later is from; yields nothing for other targets."""
    annex = bundle.annexes.get(target)
    if annex is not None:
        record = annex.record
        where = record.host.get("cpu", "an unknown host")
        yield f"  built later: {record.created} by {record.by} on {where}, annex {annex.digest}"
        yield from (f"  {note}" for note in record.notes)


def describe_decisions(title: str, decisions: Sequence[Decision]) -> Iterator[Part]:
    """Describe decisions of gates: a table of all, then the details of those that did not pass."""
    rows = ((_gate_text(d), d.answer, d.found, d.limit) for d in decisions)
    yield new_table(title, "gate", "answer", "found", "limit", rows=rows)
    for decision in decisions:
        if not decision.passed:
            why = f" (overridden: {decision.override})" if decision.override else ""
            yield f"{decision.gate}: {decision.detail}{why}"


def _gate_text(decision: Decision) -> str:
    """Return the name of a decision's gate, and what the decision is about if that can be read.

    A gate may decide several times, about targets or quantities. Such a detail begins with one:
    `latency: p99 of a call on cpu/x86-64-v3 at n=1 in us` or `verified: cpu/x86-64-v3`.
    """
    quantity, limit, _ = decision.detail.partition(f" is {decision.found}, limit ")
    if limit and quantity:
        return f"{decision.gate}: {quantity}"
    target = re.match(rf"{TARGET_PATTERN}(?=[ :])", decision.detail)
    return f"{decision.gate}: {target[0]}" if target and not limit else decision.gate


def describe_history(name: str, events: Iterable[Event]) -> Part:
    """Return a table of the events of the model `name`, in the order of `events`."""
    table = new_table(f"history of {name}, times in UTC", "", "time", "what", "by", "why")
    for event in events:
        time = event.time.strftime("%Y-%m-%d %H:%M:%S")
        who = event.approver or event.by
        table.add_row(str(event.number), time, _event_text(name, event), who, _reasons_text(event))
    return table


def _event_text(name: str, event: Event) -> str:
    """Say in a few words what happened to a model, such as `promotion of jets/3 to @production`."""
    text = event.kind if event.state == "done" else f"{event.kind} (void)"
    if event.version is not None:
        text += f" of {name}/{event.version}"
    if event.alias is not None:
        text += f" to @{event.alias}"
    moves_an_alias = event.kind not in ("approval", "found", "build", "removal", "import")
    if moves_an_alias and event.replaced:
        text += f", which was {name}/{event.replaced}"
    return text


def _reasons_text(event: Event) -> str:
    """Say in a few words why an event happened, which gates refused it, and what it added.

    The text may be empty.
    """
    if event.kind == "found":
        aliases = ", ".join(f"@{alias} {number}" for alias, number in event.after.items())
        return f"aliases moved by other means: {aliases or 'none left'}"
    reasons = [event.reason] if event.reason else []
    if event.kind == "build":
        reasons += [f"{t} ({event.engine}), annex {d[:12]}" for t, d in event.annexes.items()]
    if event.kind == "removal":
        reasons += [f"bundle {digest[:12]}" for digest in event.digests.values()]
    refused = dict.fromkeys(d.gate for d in event.decisions if not d.lets_pass)
    if refused:
        reasons.append(f"refused by {', '.join(refused)}")
    overridden = {d.gate: d.override for d in event.decisions if d.answer == "overridden"}
    for gate, why in overridden.items():
        # Events that older releases wrote have the reason only in the decision.
        of_its_own = f": {why}" if why not in ("", event.reason) else ""
        reasons.append(f"{gate} overridden{of_its_own}")
    return "; ".join(reasons)


def describe_versions(versions: Iterable[Version]) -> Table:
    """Return a table of versions, in their order, with aliases, targets and digests."""
    table = new_table("", "version", "aliases", "targets", "created", "digest")
    for version in versions:
        chosen = {target: f" ({engine})" for target, engine in version.chosen.items()}
        targets = (f"{t} {status}{chosen.get(t, '')}" for t, status in version.targets.items())
        table.add_row(
            version.ref,
            " ".join(f"@{alias}" for alias in version.aliases),
            ", ".join(targets),
            version.created.strftime("%Y-%m-%d %H:%M"),
            version.digest[:12],
        )
    return table
