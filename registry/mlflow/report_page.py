"""The report of a version as one HTML page, for MLflow's artifact viewer: tables, and a plot.

Everything is in the page, without scripts: the viewer runs none. Numbers are the manifest's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from registry.bundle import BenchmarkStats, Manifest, TargetRecord
from soa.text import in_html

_STYLE = """body { font: 14px/1.5 sans-serif; margin: 2em; max-width: 60em }
table { border-collapse: collapse; margin: 0.5em 0 1.5em }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
svg text { font: 12px sans-serif }"""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 620, 320, 70, 45, 15, 150

Points = list[tuple[int, float]]


def page(title: str, manifest: Manifest, targets: Mapping[str, TargetRecord], digest: str) -> str:
    """`targets`: of the manifest, or one that was built later; `digest`: of the folder with it."""
    provenance = manifest.provenance
    facts = {
        "description": manifest.description,
        "digest": digest,
        "created": provenance.created,
        "git commit": (provenance.git_commit or "")
        + (" with uncommitted changes" if provenance.git_dirty else ""),
        "config": provenance.config_sha256,
        "tools": ", ".join(f"{tool} {version}" for tool, version in provenance.tools.items()),
        "host": ", ".join(f"{key} {value}" for key, value in provenance.host.items()),
    }
    parts = [f"<h1>{in_html(title)}</h1>", _table((), ([k, v] for k, v in facts.items() if v))]
    for target, record in targets.items():
        parts += _target(target, record)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{in_html(title)}'
        f"</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def rows_of(case: str) -> int:
    """The largest row count of a benchmark's case: `1000`, or `nodes=5,edges=20`."""
    return max(int(part.rpartition("=")[2]) for part in case.split(","))


def _target(target: str, record: TargetRecord) -> Iterable[str]:
    yield f"<h2>{in_html(target)}: {record.status}, {in_html(record.choice())}</h2>"
    yield _table(
        ("engine", "status", "output", "max abs", "max rel", "outside"),
        (
            [name, candidate.status, output, *_numbers(w.max_abs, w.max_rel, w.outside)]
            for name, candidate in record.candidates.items()
            for output, w in candidate.worst.items()
        ),
        numbers=3,
    )
    reasons = [[name, c.reason] for name, c in record.candidates.items() if c.reason]
    if reasons:
        yield _table(("engine", "reason"), reasons)
    timed = {name: c.benchmark for name, c in record.candidates.items() if c.benchmark}
    if timed:
        yield _table(
            ("engine", "rows", "median µs", "p05 µs", "p95 µs"),
            (
                [name, case, *_numbers(stats.median_us, stats.p05_us, stats.p95_us)]
                for name, cases in timed.items()
                for case, stats in cases.items()
            ),
            numbers=3,
        )
        yield plot({name: _points(cases) for name, cases in timed.items()})


def _points(cases: Mapping[str, BenchmarkStats]) -> Points:
    return sorted((rows_of(case), stats.median_us) for case, stats in cases.items())


def _numbers(*values: float) -> list[str]:
    return [f"{value:.3g}" for value in values]


def _table(head: Sequence[str], rows: Iterable[Sequence[str | None]], numbers: int = 0) -> str:
    """`numbers`: how many of the last columns are numbers."""
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{in_html(name)}</th>' for name in head)}</tr>")
    for row in rows:
        cells = [
            f"<td{' class=number' if i >= len(row) - numbers else ''}>{in_html(cell or '')}</td>"
            for i, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def plot(lines: Mapping[str, Points]) -> str:
    """Median time against rows as SVG, both axes logarithmic; points that have no place there, such
    as n = 0, are left out."""
    shown = {
        name: [(n, t) for n, t in points if n > 0 and t > 0 and math.isfinite(t)]
        for name, points in lines.items()
    }
    every = [point for points in shown.values() for point in points]
    if not every:
        return ""
    xs, ys = _decades([n for n, _ in every]), _decades([t for _, t in every])

    def x(n: float) -> float:
        return _LEFT + (math.log10(n) - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def y(t: float) -> float:
        return (
            _HEIGHT
            - _BOTTOM
            - (math.log10(t) - ys[0]) / (ys[-1] - ys[0]) * (_HEIGHT - _BOTTOM - _TOP)
        )

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    marks = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">']
    for power in xs:
        at = f"{x(10**power):.1f}"
        marks.append(f'<path d="M{at} {_TOP}V{bottom}" stroke="#ddd"/>')
        marks.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{10**power:g}</text>')
    for power in ys:
        at = f"{y(10**power):.1f}"
        marks.append(f'<path d="M{_LEFT} {at}H{right}" stroke="#ddd"/>')
        marks.append(
            f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{10**power:g}</text>'
        )
    for i, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = [f"{x(n):.1f},{y(t):.1f}" for n, t in points]
        marks.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}"/>')
        for place in places:
            cx, cy = place.split(",")
            marks.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        at_y = _TOP + 12 + 18 * i
        marks.append(f'<circle cx="{right + 14}" cy="{at_y - 4}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{right + 24}" y="{at_y}">{in_html(name)}</text>')
    middle = (_LEFT + right) / 2
    marks.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">rows</text>')
    marks.append(
        f'<text x="{_LEFT}" y="{_TOP - 4}" text-anchor="middle">median of a call, µs</text>'
    )
    return "\n".join([*marks, "</svg>"])


def _decades(values: Sequence[float]) -> list[int]:
    """The powers of ten around some numbers, at least two."""
    low = math.floor(math.log10(min(values)))
    return list(range(low, max(math.ceil(math.log10(max(values))), low + 1) + 1))
