"""Reports on versions: bundles, validation, times, gates, history. Each yields lines and tables.

Every number comes from a report or a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.report.tables import microseconds, new_table
from registry.bundle import Bundle, TargetRecord, spans_of
from registry.errors import BundleError
from registry.history import Event
from registry.mlflow import Version
from registry.promotion import Decision
from soa.files import as_record
from soa.signature import Signature
from stages.reports import BenchmarkReport, ValidationReport

if TYPE_CHECKING:
    from pipeline.report.tables import Part

T = TypeVar("T")


def describe_build(bundle: Bundle, only: str | None = None) -> Iterator[Part]:
    """What a build found out: every candidate against the reference, and their times.

    `only`: of this target, and where it comes from if it was built later.
    """
    validated, timed = bundle.validation() or {}, bundle.benchmark() or {}
    if only is None:
        yield from describe_reference(bundle)
        yield from _metrics(bundle)
    for target in bundle.manifest.targets if only is None else [only]:
        if only or target in validated:
            found = _recorded(dict[str, ValidationReport], bundle, validated, target)
            yield from describe_validation(f"validation on {target}", list(found.values()))
            yield from _facts(bundle.manifest.targets[target])
    for target in bundle.manifest.targets if only is None else [only]:
        if only or target in timed:
            title = f"one call from SoA to SoA on {target}: median [p05 … p95], one thread"
            yield describe_benchmark(title, _recorded(BenchmarkReport, bundle, timed, target))
    if only is not None:
        yield from _annex(bundle, only)


def _recorded(kind: type[T], bundle: Bundle, reports: Mapping[str, Any], target: str) -> T:
    try:
        return as_record(kind, reports.get(target))
    except ValueError as error:
        raise BundleError(f"{bundle.path}: its report on {target}: {error}") from error


def describe_reference(bundle: Bundle) -> Iterator[Part]:
    """What the reference proves: its values that are NaN or infinite, and what it does not show."""
    from stages.reference import proof_of  # it needs NumPy, and a list of versions does not

    counts, notes = proof_of(bundle)
    rows = (
        (
            found.output, str(len(found.by_size)), f"{found.values:,}",
            f"{found.count:,} ({found.share:.2%})",
            ", ".join(f"{bad} at {size}" for size, (bad, _) in found.by_size.items() if bad),
        )
        for found in counts
    )  # fmt: skip
    yield new_table("reference", "output", "sizes", "values", "NaN or infinite", "where", rows=rows)
    yield from (f"  {note}" for note in notes)


def _metrics(bundle: Bundle) -> Iterator[Part]:
    """What the labelled rows came to, where the config has such."""
    stored, targets = bundle.manifest.labelled, bundle.manifest.targets
    if stored is not None:
        rows = [
            (k, t, f"{v:.6g}") for t, record in targets.items() for k, v in record.metrics.items()
        ]
        yield new_table("metrics", "metric", "target", "value", rows=rows)
        yield f"  on {stored.rows:,} rows of {stored.source}, sha256 {stored.sha256[:12]}"


def describe_validation(title: str, reports: Sequence[ValidationReport]) -> Iterator[Part]:
    table = new_table(
        title, "engine", "output", "max abs", "max rel", "ULP p50/p99/max", "outside", "arg-max",
        "verdict",
    )  # fmt: skip
    for report in reports:
        verdict = report.verdict
        if not report.worst:
            table.add_row(report.engine, "", "", "", "", "", "", verdict)
        for output, d in report.worst.items():
            ulp = "exact" if d.ulp_max is None and d.max_abs == 0 else "—"
            if d.ulp_max is not None:
                ulp = f"{d.ulp_p50:.0f} / {d.ulp_p99:.0f} / {d.ulp_max:.0f}"
            agreement = "" if d.argmax is None else f"{d.argmax:.2%}"
            table.add_row(
                report.engine, output, f"{d.max_abs:.2e}", f"{d.max_rel:.2e}", ulp,
                f"{d.outside:.2%}", agreement, verdict,
            )  # fmt: skip
    yield table
    yield from (f"{report.engine}: {report.reason}" for report in reports if report.reason)
    yield from (f"{report.engine} {report.at_edges}" for report in reports if report.edges)


def describe_benchmark(title: str, report: BenchmarkReport) -> Part:
    table = new_table(title, "", *report.timings)
    spans = spans_of(report.below, report.fastest)
    for name in dict.fromkeys(name for rows in report.timings.values() for name in rows):
        times = [rows.get(name) for rows in report.timings.values()]
        table.add_row(
            _choice(name, spans),
            *(
                ""
                if t is None
                else f"{microseconds(t.median_us)} "
                f"[{microseconds(t.p05_us)} … {microseconds(t.p95_us)}]"
                for t in times
            ),
        )
    return table


def _choice(engine: str, spans: Mapping[str, str]) -> str:
    return f"{engine} ({f'chosen {spans[engine]}'.rstrip()})" if engine in spans else engine


def describe_bundle(bundle: Bundle, version: Version | None) -> Iterator[Part]:
    manifest, provenance = bundle.manifest, bundle.manifest.provenance
    signature = Signature.from_dict(manifest.signature)
    yield version.ref if version else str(bundle.path)
    dependence = manifest.capture.dependence
    source = "not in a git repository"
    if provenance.git_commit is not None:
        changed = " with changes" if provenance.git_dirty else ""
        source = f"git {provenance.git_commit[:12]}{changed}"
    facts = {
        "description": manifest.description or "—",
        "digest": bundle.digest,
        "aliases": ", ".join(f"@{a}" for a in version.aliases) if version else "",
        "created": provenance.created,
        "source": source,
        "origin": _origin(version.origin if version else {}),
        "precision": manifest.capture.precision,
        "torchscript": manifest.capture.torchscript or manifest.capture.torchscript_note or "none",
        "rows": ", ".join(f"{dim}: {r.min} … {r.max}" for dim, r in signature.ranges.items()),
        "dependence": "none: a row's answer is its own" if dependence == "" else dependence,
        "jagged": ", ".join(f"{k}: the first {v} of a row" for k, v in signature.jagged.items()),
        "tools": ", ".join(f"{k} {v}" for k, v in provenance.tools.items()),
        "took": ", ".join(f"{k} {v:.1f} s" for k, v in provenance.seconds.items()),
    }
    yield from (f"  {key:12} {value}" for key, value in facts.items() if value)
    for seen in version.shadows.values() if version else ():
        yield (
            f"  shadow       {seen.events:,} events beside {seen.production}, "
            f"{seen.errors} errors, {seen.dropped:,} dropped; largest differences "
            f"{', '.join(f'{name} {value:.3g}' for name, value in seen.max_abs.items()) or 'none'}"
        )
    blocks = new_table("blocks", "block", "collection", "columns", "plan", "tolerance")
    for arrow, bound_blocks in (("→", signature.inputs), ("←", signature.outputs)):
        for bound in bound_blocks:
            names, plan = bound.block.columns, bound.plan
            t = manifest.tolerances.get(bound.name)
            blocks.add_row(
                f"{arrow} {bound.name}",
                bound.block.collection,
                _first(names),
                f"{plan.kind} {plan.dtype} {' by '.join(map(str, plan.feature_shape))}",
                "" if t is None else f"{t.atol:g} + {t.rtol:g}·|ref|",
            )
    yield blocks
    yield from describe_reference(bundle)
    yield from _metrics(bundle)
    for target, record in manifest.targets.items():
        table = new_table(
            f"{target}: {record.status}", "engine", "status", "worst max abs", "median"
        )
        for engine, candidate in record.candidates.items():
            worst = max((w.max_abs for w in candidate.worst.values()), default=None)
            table.add_row(
                _choice(engine, record.spans()),
                candidate.status,
                "" if worst is None else f"{worst:.2e}",
                ", ".join(
                    f"{'' if '=' in n else 'n='}{n}: {microseconds(t.median_us)}"
                    for n, t in candidate.benchmark.items()
                ),
            )
        yield table
        yield from (f"  {name}: {c.reason}" for name, c in record.candidates.items() if c.reason)
        yield from _facts(record)
        yield from _annex(bundle, target)


def _first(names: Sequence[str]) -> str:
    """The first six, and how many there are."""
    return ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else "")


def _origin(found: Mapping[str, Any]) -> str:
    """Where a version was before it came into this registry."""
    if not found:
        return ""
    was = f", was {found['version']}" if "version" in found else ""
    source = f" in {found['registry']}" if "registry" in found else ""
    return f"pushed by {found.get('pushed_by')} at {found.get('pushed_at')}{was}{source}"


def _facts(record: TargetRecord) -> Iterator[str]:
    """What engines record of their artifacts, as `name value` pairs; empty lists are left out."""
    for engine, candidate in record.candidates.items():
        shown = [
            f"{name.replace('_', ' ')} "
            f"{', '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in candidate.facts.items()
            if value != []
        ]
        if shown:
            yield f"  {engine}: {'; '.join(shown)}"


def _annex(bundle: Bundle, target: str) -> Iterator[str]:
    """Where a target that was built later comes from."""
    annex = bundle.annexes.get(target)
    if annex is not None:
        record = annex.record
        where = record.host.get("cpu", "an unknown host")
        yield f"  built later: {record.created} by {record.by} on {where}, annex {annex.digest}"
        yield from (f"  {note}" for note in record.notes)


def describe_decisions(title: str, decisions: Sequence[Decision]) -> Iterator[Part]:
    rows = ((_question(d), d.answer, d.found, d.limit) for d in decisions)
    yield new_table(title, "gate", "answer", "found", "limit", rows=rows)
    for decision in decisions:
        if not decision.passed:
            why = f" (overridden: {decision.override})" if decision.override else ""
            yield f"{decision.gate}: {decision.detail}{why}"


def _question(decision: Decision) -> str:
    """The gate, and of one that asks for several numbers which of them."""
    what, said, _ = decision.detail.partition(f" is {decision.found}, limit ")
    return f"{decision.gate}: {what}" if said else decision.gate


def describe_history(name: str, events: Iterable[Event]) -> Part:
    table = new_table(
        f"history of {name}, times in UTC", "", "time", "what", "version", "alias", "from", "by", ""
    )
    for event in events:
        moved = event.kind not in ("approval", "found", "build", "removal", "import")
        table.add_row(
            str(event.number),
            event.time.strftime("%Y-%m-%d %H:%M:%S"),
            event.kind if event.state == "done" else f"{event.kind} (void)",
            "" if event.version is None else f"{name}/{event.version}",
            "" if event.alias is None else f"@{event.alias}",
            f"{name}/{event.replaced}" if moved and event.replaced else "",
            event.approver or event.by,
            _why(event),
        )
    return table


def _why(event: Event) -> str:
    """The reasons for or against it, in a few words."""
    if event.kind == "found":
        aliases = ", ".join(f"@{alias} {number}" for alias, number in event.after.items())
        return f"aliases moved by other means: {aliases or 'none left'}"
    parts = [event.reason] if event.reason else []
    if event.kind == "build":
        parts += [f"{t} ({event.engine}), annex {d[:12]}" for t, d in event.annexes.items()]
    if event.kind == "removal":
        parts += [f"bundle {digest[:12]}" for digest in event.digests.values()]
    refused = dict.fromkeys(d.gate for d in event.decisions if not d.lets_pass)
    if refused:
        parts.append(f"refused by {', '.join(refused)}")
    # Events of older versions have the reason in the decision alone.
    said = {"", event.reason}
    overridden = {d.gate: d.override for d in event.decisions if d.answer == "overridden"}
    parts += [f"{g} overridden" + ("" if w in said else f": {w}") for g, w in overridden.items()]
    return "; ".join(parts)


def describe_versions(versions: Iterable[Version]) -> Part:
    rows = (
        (
            v.ref,
            " ".join(f"@{a}" for a in v.aliases),
            ", ".join(
                f"{target} {status}" + (f" ({v.chosen[target]})" if target in v.chosen else "")
                for target, status in v.targets.items()
            ),
            v.created.strftime("%Y-%m-%d %H:%M"),
            v.digest[:12],
        )
        for v in versions
    )
    return new_table("", "version", "aliases", "targets", "created", "digest", rows=rows)
