"""Plots of a report as SVG that stands in a page: its text is text, its colours are the page's."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soa.text import in_html, microseconds, number, plain
from stages.reports import COPIES, EAGER, BenchmarkReport, ValidationReport

_TEXT, _GRID = "#010203", "#010204"
_SERIES = tuple(f"#0102{i:02x}" for i in range(16, 23))
_MARKERS = "os^DvPX"
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "soa-pipeline", "text.parse_math": False,
    "font.size": 10, "axes.edgecolor": _TEXT, "axes.labelcolor": _TEXT, "text.color": _TEXT,
    "xtick.color": _TEXT, "ytick.color": _TEXT, "grid.color": _GRID, "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "lines.markersize": 5, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Figure:
    """`svg` has its description inside, for those who hear it."""

    svg: Any
    """Markup of ours."""
    caption: str


@dataclass(frozen=True)
class Line:
    """Points by rows; `low` and `high` are the ends of a band around them."""

    name: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    ours: bool = True


def speed_figure(caption: str, report: BenchmarkReport) -> Figure | None:
    names = dict.fromkeys(name for times in report.timings.values() for name in times)
    lines = []
    for name in names:
        found = [(rows_of(case), t[name]) for case, t in report.timings.items() if name in t]
        found = [(rows, t) for rows, t in found if t.median_us > 0]
        if found:
            lines.append(
                Line(
                    name,
                    [(rows, t.median_us) for rows, t in found],
                    [t.p05_us for _, t in found],
                    [t.p95_us for _, t in found],
                    name not in (COPIES, EAGER),
                )
            )
    return _drawn(caption, lines, "time of a call", microseconds, ())


def deviation_figure(
    caption: str, output: str, reports: Iterable[ValidationReport], allowed: float
) -> Figure | None:
    """The largest deviation of an output over the rows; exact answers have no place on it."""
    lines = []
    for report in reports:
        cases = ((rows_of(c.rows), c.outputs.get(output)) for c in report.cases)
        points = [(rows, d.max_abs) for rows, d in cases if d and 0 < d.max_abs < float("inf")]
        if points:
            lines.append(Line(report.engine, sorted(points)))
    return _drawn(caption, lines, "largest deviation", number, (allowed,) if allowed > 0 else ())


def ulp_figure(caption: str, output: str, reports: Iterable[ValidationReport]) -> Figure | None:
    """How many values are how far off, in units in the last place."""
    lines = []
    for report in reports:
        bins = report.worst[output].ulp_bins if output in report.worst else ()
        points = [(i, float(count)) for i, count in enumerate(bins) if count]
        if points:
            lines.append(Line(report.engine, points))
    last = max((i for line in lines for i, _ in line.points), default=0)
    names = ["0", "1", *(f"{2 ** (i - 1):,}" for i in range(2, last + 1))]
    return _drawn(caption, lines, "values", number, (), names)


def rows_of(case: str | Mapping[str, int]) -> int:
    """Of several row dimensions the largest."""
    counts = case.values() if not isinstance(case, str) else map(int, re.findall(r"=(\d+)", case))
    return max(counts, default=1)


def _drawn(
    caption: str,
    lines: Sequence[Line],
    y: str,
    unit: Callable[[float], str],
    limits: Sequence[float],
    bins: Sequence[str] = (),
) -> Figure | None:
    """Lines over rows, both logarithmic; None where there are no two sizes to compare.

    `bins`: where each of the ranges of ULPs begins over which the lines go instead.
    """
    if len({x for line in lines for x, _ in line.points if x > 0 or bins}) < 2:
        return None
    import matplotlib
    from markupsafe import Markup
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    with matplotlib.rc_context(_SETTINGS):
        drawing = Drawing(figsize=(5.2, 3.5), layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.add_subplot()
        for i, line in enumerate(lines):
            _draw(axes, line, _SERIES[i % len(_SERIES)], _MARKERS[i % len(_MARKERS)])
        for limit in limits:
            axes.axhline(limit, color=_TEXT, linestyle=":", linewidth=1, label="allowed (atol)")
        axes.set(yscale="log", xlabel="ULP, from" if bins else "rows", ylabel=y)
        if bins:
            step = -(-len(bins) // 8)
            axes.set_xticks(range(0, len(bins), step), bins[::step])
        else:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: unit(value))
        axes.minorticks_off()
        drawing.legend(loc="outside lower center", ncols=2)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    label = "; ".join([caption, *(_words(line, unit, bins) for line in lines)])
    return Figure(Markup(_inline(out.getvalue(), label)), caption)


def _draw(axes: Any, line: Line, color: str, marker: str) -> None:
    rows, values = zip(*line.points, strict=True)
    style = "-" if line.ours else "--"
    axes.plot(rows, values, color=color, marker=marker, linestyle=style, label=plain(line.name))
    if line.low:
        axes.fill_between(rows, line.low, line.high, color=color, alpha=0.15, linewidth=0)


def _words(line: Line, unit: Callable[[float], str], bins: Sequence[str]) -> str:
    """A line of a plot for those who hear it."""
    values = (f"{unit(v)} at {bins[x] if bins else format(x, ',')}" for x, v in line.points)
    return f"{line.name}: {', '.join(values)}"


def _inline(svg: str, label: str) -> str:
    """For a page: ids of its own, the page's colours, and what it shows in words."""
    own = f"f{zlib.crc32((label + svg).encode()):x}-"
    text = svg[svg.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{own}', text)
    text = re.sub(r"url\(#", f"url(#{own}", text)
    text = re.sub(r'(xlink:href)="#', rf'\1="#{own}', text)
    text = text.replace(_TEXT, "currentColor").replace(_GRID, "var(--line)")
    for i, color in enumerate(_SERIES):
        text = text.replace(color, f"var(--s{i})")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{in_html(label)}"', 1)
