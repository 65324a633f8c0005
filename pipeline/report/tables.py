"""Tables for people. Every number comes from a report or a manifest."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from registry.bundle import Bundle, Manifest, TargetRecord
from registry.errors import BundleError
from registry.history import Event
from registry.mlflow import Version
from registry.promotion import Decision
from soa.files import as_record
from soa.signature import Signature
from soa.text import plain
from stages.benchmark import BenchmarkReport
from stages.reference import proof_of
from stages.validation import ValidationReport

T = TypeVar("T")


def microseconds(value: float) -> str:
    """Three significant digits, in µs, ms or s."""
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if value < limit:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


class _Console(Console):
    """Prints text as text (soa/text.py), and a line as a line, however long."""

    def print(self, *objects: Any, **how: Any) -> None:
        lines = all(isinstance(each, str) for each in objects)
        super().print(*map(_as_text, objects), soft_wrap=lines, **how)


class _Table(Table):
    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*map(_as_text, cells), **how)


def _as_text(shown: Any) -> Any:
    return Text(plain(shown)) if isinstance(shown, str) else shown


def console() -> Console:
    """The terminal's width; 140 columns where the output goes to a file or a pipe."""
    return _Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def new_table(title: str, *columns: str) -> Table:
    """Cells that are `str` are text of anybody."""
    table = _Table(
        title=Text(plain(title, "\n"), "table.title"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for i, column in enumerate(columns):
        table.add_column(_as_text(column), justify="left" if i == 0 else "right", overflow="fold")
    return table


def print_reports(bundle: Bundle) -> None:
    """What a build found out: every candidate against the reference, and their times."""
    out = console()
    print_reference(out, bundle)
    for print_one, reported in (
        (_print_verdicts, bundle.validation()),
        (_print_times, bundle.benchmark()),
    ):
        for target in bundle.manifest.targets:
            if target in (reported or {}):
                print_one(out, bundle, target)


def print_target(bundle: Bundle, target: str) -> None:
    """The same, of one target."""
    out = console()
    _print_verdicts(out, bundle, target)
    _print_times(out, bundle, target)
    _print_annex(out, bundle, target)


def _print_verdicts(out: Console, bundle: Bundle, target: str) -> None:
    found = _recorded(dict[str, ValidationReport], bundle, bundle.validation(), target)
    print_validation(out, f"validation on {target}", list(found.values()))
    _print_facts(out, bundle.manifest.targets[target])


def _print_times(out: Console, bundle: Bundle, target: str) -> None:
    title = f"one call from SoA to SoA on {target}: median [p05 … p95], one thread"
    print_benchmark(out, title, _recorded(BenchmarkReport, bundle, bundle.benchmark(), target))


def _recorded(kind: type[T], bundle: Bundle, reports: Mapping[str, Any] | None, target: str) -> T:
    try:
        return as_record(kind, (reports or {}).get(target))
    except ValueError as error:
        raise BundleError(f"{bundle.path}: its report on {target}: {error}") from error


def _print_annex(out: Console, bundle: Bundle, target: str) -> None:
    """Where a target that was built later comes from."""
    annex = bundle.annexes.get(target)
    if annex is None:
        return
    record = annex.record
    where = record.host.get("cpu", "an unknown host")
    out.print(f"  built later: {record.created} by {record.by} on {where}, annex {annex.digest}")
    for note in record.notes:
        out.print(f"  {note}")


def print_reference(out: Console, bundle: Bundle) -> None:
    """What the reference proves: its values that are NaN or infinite, and what it does not show."""
    counts, notes = proof_of(bundle)
    table = new_table("reference", "output", "sizes", "values", "NaN or infinite", "where")
    for found in counts:
        where = ", ".join(f"{bad} at {size}" for size, (bad, _) in found.by_size.items() if bad)
        table.add_row(
            found.output, str(len(found.by_size)), f"{found.values:,}",
            f"{found.count:,} ({found.share:.2%})", where,
        )  # fmt: skip
    out.print(table)
    for note in notes:
        out.print(f"  {note}")


def print_validation(out: Console, title: str, reports: Sequence[ValidationReport]) -> None:
    table = new_table(
        title, "engine", "output", "max abs", "max rel", "ULP p50/p99/max", "outside", "arg-max",
        "verdict",
    )  # fmt: skip
    for report in reports:
        verdict = "valid" if report.valid else "unverified" if report.unverified else "refused"
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
    out.print(table)
    for report in reports:
        if report.reason:
            out.print(f"{report.engine}: {report.reason}")


def print_benchmark(out: Console, title: str, report: BenchmarkReport) -> None:
    names = list(dict.fromkeys(name for rows in report.timings.values() for name in rows))
    table = new_table(title, "", *report.timings)
    for name in names:
        shown = name
        if name == report.fastest:
            shown = f"{name} (chosen)"
        elif limits := [rows for rows, small in report.below if small == name]:
            shown = f"{name} (chosen below {limits[-1]} rows)"
        cells = []
        for rows in report.timings.values():
            t = rows.get(name)
            cells.append(
                ""
                if t is None
                else f"{microseconds(t.median_us)} "
                f"[{microseconds(t.p05_us)} … {microseconds(t.p95_us)}]"
            )
        table.add_row(shown, *cells)
    out.print(table)


def print_bundle(out: Console, bundle: Bundle, version: Version | None) -> None:
    manifest = bundle.manifest
    signature = Signature.from_dict(manifest.signature)
    out.print(f"{version.ref if version else bundle.path}", style="bold")
    facts = {
        "description": manifest.description or "—",
        "digest": bundle.digest,
        "aliases": ", ".join(f"@{a}" for a in version.aliases) if version else "",
        "created": manifest.provenance.created,
        "source": _source(manifest),
        "origin": _origin(version),
        "precision": manifest.capture.precision,
        "torchscript": manifest.capture.torchscript or manifest.capture.torchscript_note or "none",
        "rows": ", ".join(f"{dim}: {r.min} … {r.max}" for dim, r in signature.ranges.items()),
        "tools": ", ".join(f"{k} {v}" for k, v in manifest.provenance.tools.items()),
    }
    for key, value in facts.items():
        if value:
            out.print(f"  {key:12} {value}")
    _print_blocks(out, signature, manifest)
    print_reference(out, bundle)
    for target, record in manifest.targets.items():
        table = new_table(
            f"{target}: {record.status}", "engine", "status", "worst max abs", "median"
        )
        for engine, candidate in record.candidates.items():
            shown = engine
            if engine == record.chosen:
                shown = f"{engine} (chosen)"
            elif limits := [b.rows for b in record.below if b.engine == engine]:
                shown = f"{engine} (chosen below {limits[-1]} rows)"
            worst = max((w.max_abs for w in candidate.worst.values()), default=None)
            medians = ", ".join(
                f"n={n}: {microseconds(t.median_us)}" for n, t in candidate.benchmark.items()
            )
            table.add_row(shown, candidate.status, "" if worst is None else f"{worst:.2e}", medians)
        out.print(table)
        for engine, candidate in record.candidates.items():
            if candidate.reason:
                out.print(f"  {engine}: {candidate.reason}")
        _print_facts(out, record)
        _print_annex(out, bundle, target)


def _print_facts(out: Console, record: TargetRecord) -> None:
    """What engines record of their artifacts, as `name value` pairs; empty lists are left out."""
    for engine, candidate in record.candidates.items():
        shown = [
            f"{name.replace('_', ' ')} "
            f"{', '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in candidate.facts.items()
            if value != []
        ]
        if shown:
            out.print(f"  {engine}: {'; '.join(shown)}")


def _source(manifest: Manifest) -> str:
    commit = manifest.provenance.git_commit
    if commit is None:
        return "not in a git repository"
    return f"git {commit[:12]}{' with changes' if manifest.provenance.git_dirty else ''}"


def _origin(version: Version | None) -> str:
    """Where a version was before it came into this registry."""
    found = version.origin if version else {}
    if not found:
        return ""
    was = f", was {found['version']}" if "version" in found else ""
    source = f" in {found['registry']}" if "registry" in found else ""
    return f"pushed by {found.get('pushed_by')} at {found.get('pushed_at')}{was}{source}"


def _print_blocks(out: Console, signature: Signature, manifest: Manifest) -> None:
    table = new_table("blocks", "block", "collection", "columns", "plan", "tolerance")
    for arrow, blocks in (("→", signature.inputs), ("←", signature.outputs)):
        for bound in blocks:
            names, plan = bound.block.columns, bound.plan
            t = manifest.tolerances.get(bound.name)
            table.add_row(
                f"{arrow} {bound.name}",
                bound.block.collection,
                ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else ""),
                f"{plan.kind} {plan.dtype} {' by '.join(map(str, plan.feature_shape))}",
                "" if t is None else f"{t.atol:g} + {t.rtol:g}·|ref|",
            )
    out.print(table)


def print_decisions(out: Console, title: str, decisions: Iterable[Decision]) -> None:
    table = new_table(title, "gate", "answer", "found", "limit")
    kept = list(decisions)
    for decision in kept:
        table.add_row(decision.gate, decision.answer, decision.found, decision.limit)
    out.print(table)
    for decision in kept:
        if not decision.passed:
            why = f" (overridden: {decision.override})" if decision.override else ""
            out.print(f"{decision.gate}: {decision.detail}{why}")


def print_history(out: Console, name: str, events: Iterable[Event]) -> None:
    table = new_table(
        f"history of {name}, times in UTC", "", "time", "what", "version", "alias", "from", "by", ""
    )
    for event in events:
        kind = event.kind if event.state == "done" else f"{event.kind} (void)"
        moved = event.kind not in ("approval", "found", "build", "removal", "import")
        replaced = f"{name}/{event.replaced}" if moved and event.replaced else ""
        table.add_row(
            str(event.number),
            event.time.strftime("%Y-%m-%d %H:%M:%S"),
            kind,
            "" if event.version is None else f"{name}/{event.version}",
            "" if event.alias is None else f"@{event.alias}",
            replaced,
            event.approver or event.by,
            _why(event),
        )
    out.print(table)


def _why(event: Event) -> str:
    """What speaks for or against it, in a few words."""
    if event.kind == "found":
        return "aliases moved by other means: " + (
            ", ".join(f"@{alias} {number}" for alias, number in event.after.items()) or "none left"
        )
    parts = [event.reason] if event.reason else []
    if event.kind == "build":
        parts += [
            f"{target} ({event.engine}), annex {d[:12]}" for target, d in event.annexes.items()
        ]
    if event.kind == "removal":
        parts += [f"bundle {digest[:12]}" for digest in event.digests.values()]
    refused = [d.gate for d in event.decisions if not d.lets_pass]
    overridden = {d.gate: d.override for d in event.decisions if d.answer == "overridden"}
    said = {"", event.reason}  # an older version kept the reason with the gate alone
    if refused:
        parts.append(f"refused by {', '.join(dict.fromkeys(refused))}")
    parts += [
        f"{gate} overridden" + ("" if why in said else f": {why}")
        for gate, why in overridden.items()
    ]
    return "; ".join(parts)


def print_versions(out: Console, models: Mapping[str, Sequence[Version]]) -> None:
    table = new_table("", "version", "aliases", "targets", "created", "digest")
    for versions in models.values():
        for v in versions:
            table.add_row(
                v.ref,
                " ".join(f"@{a}" for a in v.aliases),
                ", ".join(
                    f"{t} {status}" + (f" ({v.chosen[t]})" if t in v.chosen else "")
                    for t, status in v.targets.items()
                ),
                v.created.strftime("%Y-%m-%d %H:%M"),
                v.digest[:12],
            )
    out.print(table)
