"""What is known of a bundle as tables of plain text, and their printers: Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from registry.bundle import Manifest, TargetRecord
from soa.text import in_html, in_markdown

_STYLE = """body { font: 14px/1.5 sans-serif; margin: 2em; max-width: 60em }
table { border-collapse: collapse; margin: 0.5em 0 1.5em }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: left }"""

Targets = Mapping[str, TargetRecord]


@dataclass(frozen=True)
class Listing:
    """Cells are text of anybody: printers escape it."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def facts(manifest: Manifest, digest: str) -> Listing:
    provenance = manifest.provenance
    dirty = " with uncommitted changes" if provenance.git_dirty else ""
    found = {
        "description": manifest.description,
        "digest": digest,
        "created": provenance.created,
        "git commit": (provenance.git_commit or "") + dirty,
        "config": provenance.config_sha256,
        "tools": ", ".join(f"{tool} {version}" for tool, version in provenance.tools.items()),
        "host": ", ".join(f"{key} {value}" for key, value in provenance.host.items()),
    }
    return Listing("version", ("", ""), [(key, value) for key, value in found.items() if value])


def candidates(targets: Targets) -> Listing:
    """A row for each candidate; for a target without one, a row for the target."""
    rows = []
    for target, record in sorted(targets.items()):
        if not record.candidates:
            rows.append((target, record.status, "", "", "", ""))
        for engine, candidate in record.candidates.items():
            timed = sorted(candidate.benchmark.items(), key=lambda item: (len(item[0]), item[0]))
            rows.append(
                (
                    target,
                    record.status,
                    f"{engine} (chosen)" if engine == record.chosen else engine,
                    candidate.status + (f": {candidate.reason}" if candidate.reason else ""),
                    ", ".join(f"{name} {w.max_abs:.2g}" for name, w in candidate.worst.items()),
                    ", ".join(f"{t.median_us:.3g} us at n={case}" for case, t in timed),
                )
            )
    head = ("target", "status", "engine", "candidate", "largest deviation", "median of a call")
    return Listing("candidates", head, rows)


def deviations(targets: Targets) -> Listing:
    rows = [
        (target, engine, output, f"{w.max_abs:.3g}", f"{w.max_rel:.3g}", f"{w.outside:.3g}")
        for target, record in targets.items()
        for engine, candidate in record.candidates.items()
        for output, w in candidate.worst.items()
    ]
    head = ("target", "engine", "output", "max abs", "max rel", "outside")
    return Listing("largest deviations from the reference", head, rows)


def times(targets: Targets) -> Listing:
    rows = [
        (target, engine, case, f"{t.median_us:.3g}", f"{t.p05_us:.3g}", f"{t.p95_us:.3g}")
        for target, record in targets.items()
        for engine, candidate in record.candidates.items()
        for case, t in candidate.benchmark.items()
    ]
    head = ("target", "engine", "rows", "median µs", "p05 µs", "p95 µs")
    return Listing("times of a call", head, rows)


def markdown_rows(rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(map(markdown_cell, row))} |" for row in rows]


def markdown_cell(text: str) -> str:
    """At most 200 characters, on one line."""
    flat = " ".join(text.split())
    return in_markdown(flat if len(flat) <= 200 else f"{flat[:199]}…")


def html_page(title: str, tables: Iterable[Listing]) -> str:
    """A page without scripts and without other files: MLflow's viewer loads none."""
    shown = in_html(title)
    lines = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{shown}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{shown}</h1>"
    ]
    for table in tables:
        lines.append(f"<h2>{in_html(table.title)}</h2>\n<table>")
        for tag, rows in (("th", [table.head]), ("td", table.rows)):
            for row in rows:
                cells = "".join(f"<{tag}>{in_html(cell)}</{tag}>" for cell in row)
                lines.append(f"<tr>{cells}</tr>")
        lines.append("</table>")
    return "\n".join([*lines, "</body></html>\n"])
