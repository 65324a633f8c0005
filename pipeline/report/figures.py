"""Draws the plots of a report as SVG inside a page, with real text and the colours of the page."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from runtime.checked import Deviation
from runtime.watch import Share
from soa.text import in_html, microseconds, number, plain
from stages.histogram import Histogram
from stages.reports import COPIES, EAGER, BenchmarkReport, Curve, NotDrawn, Roc, ValidationReport

if TYPE_CHECKING:
    from stages.timing import OperatorTime

# Placeholders: `_prepare_svg` replaces each of these colours by one of the page's style sheet.
_TEXT, _GRID = "#010203", "#010204"
_SERIES = tuple(f"#0102{i:02x}" for i in range(16, 23))
_MARKERS = "os^DvPX"
_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "soa-pipeline", "text.parse_math": False,
    "font.size": 10, "axes.edgecolor": _TEXT, "axes.labelcolor": _TEXT, "text.color": _TEXT,
    "xtick.color": _TEXT, "ytick.color": _TEXT, "grid.color": _GRID, "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "lines.markersize": 5, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
_MOST_BINS = 66  # the number of bins for float64, by powers of two of ULP
_WIDE = 100
"""If the largest count is more than this times the smallest, the axis is logarithmic."""
_FEW = 30
"""A size with fewer values gets no histogram, unless all sizes have fewer."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """A plot. The SVG includes a description for screen readers."""

    svg: Any
    """Markup that goes into the page without escaping."""
    caption: str


@dataclass(frozen=True)
class Line:
    """A line through points; `low` and `high` are the limits of a band around it.

    `ours` is False for a reference such as the eager model, whose line is dashed. `marked`: each
    point has a marker.
    """

    name: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    ours: bool = True
    marked: bool = True


@dataclass(frozen=True)
class Steps:
    """A histogram, with one value for each bin. `ours` is False for a reference: a dashed line."""

    name: str
    values: Sequence[float]
    ours: bool = True


@dataclass(frozen=True)
class Deviations:
    """Deviations that make one histogram, in which their bins are added up.

    `ours` is False for a reference: a dashed line.
    """

    name: str
    deviations: Sequence[Deviation]
    ours: bool = True

    def sum_bins(self, bins_of: Callable[[Deviation], Sequence[int]]) -> list[int]:
        """Add up the bins that `bins_of` takes from each deviation. Bins that one lacks are 0."""
        return list(map(sum, zip_longest(*map(bins_of, self.deviations), fillvalue=0)))


def _rows_text(value: float) -> str:
    """Write a number of rows as text, such as `1,000`."""
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Axis:
    """The labels of both axes, and the functions that write their numbers as text.

    `unit` writes those of the y axis.
    """

    x: str
    y: str
    unit: Callable[[float], str]
    x_unit: Callable[[float], str] = _rows_text


def speed_figure(caption: str, report: BenchmarkReport) -> Figure | None:
    """Draw the time of a call over the number of rows, with a line for each engine.

    Times of 0 are left out. Returns None if fewer than two numbers of rows were timed.
    """
    names = dict.fromkeys(name for times in report.timings.values() for name in times)
    lines = []
    for name in names:
        by_case = [(case, times[name]) for case, times in report.timings.items() if name in times]
        timed = [(row_count(case), timing) for case, timing in by_case if timing.median_us > 0]
        if timed:
            points = [(rows, timing.median_us) for rows, timing in timed]
            low = [timing.p05_us for _, timing in timed]
            high = [timing.p95_us for _, timing in timed]
            lines.append(Line(name, points, low, high, ours=name not in (COPIES, EAGER)))
    return _line_figure(caption, lines, Axis("rows", "time of a call", microseconds))


def deviation_figure(
    caption: str, output: str, reports: Iterable[ValidationReport], allowed: float
) -> Figure | None:
    """Draw the largest deviation of an output over the number of rows, with a line for each engine.

    Deviations of 0 or infinity are left out. `allowed`: the absolute tolerance, drawn as a line if
    it is above 0. Returns None if fewer than two numbers of rows are left.
    """
    lines = []
    for report in reports:
        cases = ((row_count(case.rows), case.outputs.get(output)) for case in report.cases)
        points = [
            (rows, deviation.max_abs)
            for rows, deviation in cases
            if deviation and 0 < deviation.max_abs < math.inf
        ]
        if points:
            lines.append(Line(report.engine, sorted(points)))
    limits = (allowed,) if allowed > 0 else ()
    return _line_figure(caption, lines, Axis("rows", "largest deviation", number), limits)


def ulp_figure(caption: str, series: Iterable[Deviations]) -> Figure | None:
    """Draw histograms of deviations in units in the last place.

    The bins are powers of two: bin 0 counts equal values, bin i those from 2^(i-1) on. Returns None
    if all values are equal.
    """
    bins = [Steps(part.name, part.sum_bins(lambda d: d.ulp_bins), part.ours) for part in series]
    return _deviation_histogram(caption, "ULP, from", bins, lambda i: f"{2 ** (i - 1):,}")


def error_figure(caption: str, series: Iterable[Deviations]) -> Figure | None:
    """Draw histograms of absolute deviations by powers of ten.

    Returns None if all values are equal.
    """
    bins = [Steps(part.name, part.sum_bins(lambda d: d.error_bins), part.ours) for part in series]
    first_decade = Deviation.FIRST_DECADE

    def edge_text(i: int) -> str:
        """Write the smallest error of bin `i`; bin 1 has all that are below the first decade."""
        return f"1e{first_decade + i - 2}" if i > 1 else f"<1e{first_decade}"

    return _deviation_histogram(caption, "absolute error, from", bins, edge_text)


def deviations_to_draw(
    output: str, reports: Sequence[ValidationReport], chosen: str | None
) -> list[Deviations]:
    """Return the deviations of an output that its histograms show.

    For the artifact of the `chosen` engine: those at up to three sizes, the largest first. For each
    other artifact: those over all sizes. If no size of the chosen one has values, it counts among
    the others.
    """
    by_rows: dict[int, list[Deviation]] = {}
    for case in (case for report in reports if report.engine == chosen for case in report.cases):
        deviation = case.outputs.get(output)
        if deviation is not None and deviation.elements:
            by_rows.setdefault(row_count(case.rows), []).append(deviation)
    sizes = sorted(by_rows, reverse=True)
    sizes = [n for n in sizes if by_rows[n][0].elements >= _FEW] or sizes[:1]
    last = len(sizes) - 1  # the largest, the middle and the smallest size are drawn
    drawn = [sizes[i] for i in sorted({0, last // 2, last})] if sizes else []
    of_sizes = [
        Deviations(f"{chosen}, {n:,} {'row' if n == 1 else 'rows'}", by_rows[n]) for n in drawn
    ]
    of_engines = [
        Deviations(report.engine, [report.worst[output]], ours=report.engine == chosen)
        for report in reports
        if output in report.worst and not (report.engine == chosen and drawn)
    ]
    return of_sizes + of_engines


def histogram_figure(caption: str, label: str, histogram: Histogram) -> Figure | None:
    """Draw a histogram of values, whose axis is called `label`.

    Returns None if it cannot be drawn.
    """
    if not _has_bins(histogram):
        return None
    edges = histogram.edges()
    series = [Steps(label, histogram.counts)]
    return _step_figure(caption, Axis(label, "values", number), series, edges)


def _has_bins(histogram: Histogram) -> bool:
    """Return whether a histogram can be drawn: it counts values, and its width is finite."""
    return any(histogram.counts) and 0 < histogram.high - histogram.low < math.inf


def why_not_drawn(curve: Curve) -> str:
    """Return the reason why a curve cannot be drawn; an empty text if it can be drawn."""
    if isinstance(curve, NotDrawn):
        return curve.why
    if isinstance(curve, Roc):
        single = len({signal for signal, _ in _drawable_points(curve) if signal > 0}) < 2
        return "no background passes before all of the signal does" if single else ""
    return "" if _has_bins(curve.found) else "no difference to the label is a finite number"


def roc_figure(caption: str, curves: Mapping[str, Roc]) -> Figure | None:
    """Draw background efficiency over signal efficiency, with a line for each named curve.

    From this plot a working point is chosen. Returns None if fewer than two different signal
    efficiencies can be drawn.
    """
    lines = []
    for name, roc in curves.items():
        if points := _drawable_points(roc):
            lines.append(Line(name, points, marked=False))
    axis = Axis("signal efficiency", "background efficiency", _percent_text, _percent_text)
    return _line_figure(caption, lines, axis)


def _drawable_points(roc: Roc) -> Points:
    """Return the points whose background is above zero: only these fit on a logarithmic axis."""
    pairs = zip(roc.signal, roc.background, strict=False)
    return [(signal, background) for signal, background in pairs if background > 0]


def _deviation_histogram(
    caption: str, label: str, bins: Sequence[Steps], edge_text: Callable[[int], str]
) -> Figure | None:
    """Draw the shares of values over their deviation. Returns None if all values are equal.

    The first bin has the equal values. Empty bins between it and the others, and at the end, are
    left out. `edge_text(i)` writes the smallest deviation of bin `i`.
    """
    cut = (replace(steps, values=steps.values[:_MOST_BINS]) for steps in bins)
    series = [steps for steps in cut if any(steps.values)][: len(_SERIES)]
    used = {i for steps in series for i, count in enumerate(steps.values) if count} - {0}
    if not used:
        return None
    low, high = min(used), max(used)
    shares = []
    for steps in series:
        total = sum(steps.values)
        padded = [*steps.values, *[0] * (high + 1 - len(steps.values))]
        values = [count / total for count in (padded[0], *padded[low : high + 1])]
        shares.append(replace(steps, values=values))
    names = ["0", *(edge_text(i) for i in range(low, high + 1))]
    return _step_figure(caption, Axis(label, "share of values", _percent_text), shares, names)


def drift_figure(caption: str, shares: Sequence[Share]) -> Figure:
    """Draw how a column's values are distributed in the reference and in what was counted.

    `shares`: for each bin, its share of the values in both.
    """
    series = [
        Steps("reference", [share.reference for share in shares], ours=False),
        Steps("counted", [share.counted for share in shares]),
    ]
    axis = Axis("value", "share of values", _percent_text)
    edges = [share.name.partition(" to ")[0] for share in shares]  # names are `LOW to HIGH`
    return _step_figure(caption, axis, series, edges)


def operators_figure(caption: str, times: Sequence[OperatorTime]) -> Figure:
    """Draw the share of a call's time that each operator takes, with one histogram for each size.

    `times` must not be empty.
    """
    sizes = [*times[0].shares][: len(_SERIES)]
    series = [Steps(size, [time.shares[size] for time in times]) for size in sizes]
    axis = Axis("operator", "share of a call", _percent_text)
    return _step_figure(caption, axis, series, [time.operator for time in times])


def _percent_text(value: float) -> str:
    """Write a share in percent: 0.25 gives `25%`."""
    return f"{number(100 * value)}%"


def row_count(case: str | Mapping[str, int]) -> int:
    """Return the number of rows of a case; if it has several row dimensions, the largest number.

    A case is given as numbers by dimension, or as text: `nodes=5,edges=20` gives 20.
    """
    counts = case.values() if not isinstance(case, str) else map(int, re.findall(r"=(\d+)", case))
    return max(counts, default=1)


def _line_figure(
    caption: str, lines: Sequence[Line], axis: Axis, limits: Sequence[float] = ()
) -> Figure | None:
    """Draw lines, and a dotted horizontal one at each of the `limits`; the y axis is logarithmic.

    Returns None if the points have fewer than two different x above zero.
    """
    if len({x for line in lines for x, _ in line.points if x > 0}) < 2:
        return None

    def draw(axes: Any) -> None:
        """Draw all lines and limits into the axes of matplotlib, and scale them."""
        for i, line in enumerate(lines):
            _draw_line(axes, line, _SERIES[i % len(_SERIES)], _MARKERS[i % len(_MARKERS)])
        for limit in limits:
            axes.axhline(limit, color=_TEXT, linestyle=":", linewidth=1, label="allowed (atol)")
        axes.set(yscale="log", xscale="log" if axis.x_unit is _rows_text else "linear")
        axes.xaxis.set_major_formatter(lambda value, _: axis.x_unit(value))

    def in_words(line: Line) -> str:
        """Return the points of a line as text."""
        points = ", ".join(f"{axis.unit(y)} at {axis.x_unit(x)}" for x, y in line.points)
        return f"{line.name}: {points}"

    return _figure(caption, axis, draw, list(map(in_words, lines)))


def _step_figure(
    caption: str, axis: Axis, series: Sequence[Steps], edges: Sequence[str] | Sequence[float]
) -> Figure:
    """Draw histograms over the same bins.

    `edges`: the numbers at which bins begin and end; or for bins of equal width, a text for the
    lower edge of each.
    """
    named = isinstance(edges[0], str)
    edge_texts = [edge if isinstance(edge, str) else number(edge) for edge in edges]

    def draw(axes: Any) -> None:
        """Draw all histograms into the axes of matplotlib, and scale them."""
        # A bin with a text has width 1 and its text in the middle, at the bin's index.
        places = [i - 0.5 for i in range(len(edges) + 1)] if named else edges
        for i, steps in enumerate(series):
            style = {"color": _SERIES[i], "label": plain(steps.name)}
            line = "-" if steps.ours else "--"
            axes.stairs(steps.values, places, baseline=None, linestyle=line, linewidth=1.5, **style)
            if i == 0:
                axes.stairs(steps.values, places, fill=True, alpha=0.15, color=_SERIES[i])
        counts = [value for steps in series for value in steps.values if value]
        if max(counts) > _WIDE * min(counts):
            axes.set_yscale("log")
            axes.set_ylim(bottom=min(counts) / 2)
        else:
            axes.set_ylim(bottom=0)
        if named:
            step = math.ceil(len(edge_texts) / 8)  # at most eight texts have room
            axes.set_xticks(range(0, len(edge_texts), step), edge_texts[::step])
        else:
            axes.xaxis.set_major_formatter(lambda value, _: number(value))

    def in_words(steps: Steps) -> str:
        """Return the bins of a histogram as text, without empty ones."""
        pairs = zip(steps.values, edge_texts, strict=False)
        bins = ", ".join(f"{axis.unit(value)} from {begin}" for value, begin in pairs if value)
        return f"{steps.name}: {bins}"

    return _figure(caption, axis, draw, list(map(in_words, series)))


def _figure(caption: str, axis: Axis, draw: Callable[[Any], None], words: Sequence[str]) -> Figure:
    """Make a figure by `draw`, which draws into the axes of matplotlib that it is given.

    `words`: a text for each line or histogram, which screen readers speak.
    """
    import matplotlib
    from markupsafe import Markup
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    with matplotlib.rc_context(_SETTINGS):
        drawing = Drawing(figsize=(5.2, 3.5), layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.add_subplot()
        axes.set(xlabel=axis.x, ylabel=axis.y)
        draw(axes)
        axes.yaxis.set_major_formatter(lambda value, _: axis.unit(value))
        axes.minorticks_off()
        if axes.get_legend_handles_labels()[1] != [axis.x]:
            drawing.legend(loc="outside lower center", ncols=2)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return Figure(Markup(_prepare_svg(out.getvalue(), "; ".join([caption, *words]))), caption)


def _draw_line(axes: Any, line: Line, color: str, marker: str) -> None:
    """Draw a line into the axes of matplotlib, and the band around it if it has one."""
    places, values = zip(*line.points, strict=True)
    style = "-" if line.ours else "--"
    marker = marker if line.marked else ""
    axes.plot(places, values, color=color, marker=marker, linestyle=style, label=plain(line.name))
    if line.low:
        axes.fill_between(places, line.low, line.high, color=color, alpha=0.15, linewidth=0)


def _prepare_svg(svg: str, label: str) -> str:
    """Prepare an SVG for a page that may have several; `label` is its text for screen readers.

    Its ids become unique on the page, its colours those of the page's style sheet, and its size
    that of the place where it stands.
    """
    prefix = f"f{zlib.crc32((label + svg).encode()):x}-"
    markup = svg[svg.index("<svg") :]
    markup = re.sub(r'\bid="', f'id="{prefix}', markup)
    markup = re.sub(r"url\(#", f"url(#{prefix}", markup)
    markup = re.sub(r'(xlink:href)="#', rf'\1="#{prefix}', markup)
    markup = markup.replace(_TEXT, "currentColor").replace(_GRID, "var(--line)")
    for i, color in enumerate(_SERIES):
        markup = markup.replace(color, f"var(--s{i})")
    markup = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", markup, count=1)
    markup = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", markup, count=1)
    return markup.replace("<svg", f'<svg role="img" aria-label="{in_html(label)}"', 1)
