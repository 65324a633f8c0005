"""Plots of the printed tables: benchmarks/plots/NAME.svg, readable without colour.

The same rows give the same bytes: the file has no date, its ids come from a fixed salt, and text is
stored as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Panel

FOLDER = Path(__file__).parent / "plots"
_OURS = "#000000"
# Shade of grey, marker and dashes together distinguish the rows; ours are black and solid.
_OTHERS = (
    ("#555555", "s", (0, (5, 2))),
    ("#777777", "^", (0, (1, 1.5))),
    ("#888888", "D", (0, (6, 2, 1, 2))),
    ("#666666", "v", (0, (3, 1.5))),
    ("#999999", "P", (0, (4, 1, 1, 1, 1, 1))),
    ("#777777", "X", (0, (8, 3))),
)
_OURS_MARKERS = ("o", "s", "^", "D")
_HATCHES = ("", "////", "....", "\\\\\\\\", "xx")
_FILLS = ("#222222", "#bbbbbb", "#e8e8e8", "#888888", "#ffffff")
_SETTINGS: Any = {
    "svg.hashsalt": "soa-pipeline",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "hatch.linewidth": 0.5,
}


def save_plot(name: str, caption: str, panels: Sequence[Panel], folder: Path = FOLDER) -> None:
    """Write `folder/NAME.svg` and print its path; without matplotlib, print how to install it."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install '.[bench]')")
        return
    with matplotlib.rc_context(_SETTINGS):
        heights = [_height(panel) for panel in panels]
        figure = Figure(figsize=(8, sum(heights) + 0.4), layout=None)
        FigureCanvasSVG(figure)
        top = 1 - 0.35 / (sum(heights) + 0.4)
        figure.text(0.02, top + 0.1 / sum(heights), caption.splitlines()[0], va="bottom")
        for panel, height in zip(panels, heights, strict=True):
            share = height / (sum(heights) + 0.4)
            left = 0.1 if panel.kind in ("lines", "log lines") else 0.3
            bottom = top - share + 0.5 / height * share
            axes = figure.add_axes((left, bottom, 0.68 - left + 0.02, share * (1 - 0.85 / height)))
            axes.set_title(panel.title)
            (_lines if panel.kind in ("lines", "log lines") else _bars)(axes, panel)
            top -= share
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
    print(f"plot: {path}")


def _height(panel: Panel) -> float:
    """The height of a panel in inches."""
    if panel.kind in ("lines", "log lines"):
        return 3.4
    return 1.1 + len(panel.rows) * (0.45 if panel.kind == "bars" else 0.25)


def _lines(axes: Any, panel: Panel) -> None:
    """Draw each row as a line through its medians, with their spread and its name at the end."""
    scale = {"µs": 1e-6, "MB": 1.0, "1/s": 1.0}[panel.unit]
    ends: list[tuple[str, float, float, str]] = []
    for name, style in _styles(panel).items():
        points = [
            (x, cell) for x, cell in zip(panel.columns, panel.rows[name], strict=True) if cell
        ]
        at: list[Any] = [x for x, _ in points]
        middle = [cell.value * scale for _, cell in points]
        spread = [
            [(c.value - (c.value if c.low is None else c.low)) * scale for _, c in points],
            [((c.value if c.high is None else c.high) - c.value) * scale for _, c in points],
        ]
        axes.errorbar(at, middle, yerr=spread, capsize=2, markersize=4, label=name, **style)
        ends.append((name, float(at[-1]), middle[-1], style["color"]))
    if panel.kind == "log lines":
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(panel.columns, [f"{x:,.0f}" for x in panel.columns], minor=False)
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    if panel.unit == "µs":
        from matplotlib.ticker import EngFormatter

        axes.yaxis.set_major_formatter(EngFormatter("s"))
    elif panel.kind == "log lines":
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    _name_ends(axes, ends)


def _styles(panel: Panel) -> dict[str, dict[str, Any]]:
    """Ours are black and solid, the others grey and dashed. If none is ours, all are black."""
    styles: dict[str, dict[str, Any]] = {}
    ours = [name for name in panel.rows if name.startswith("ours")] or list(panel.rows)
    others = [name for name in panel.rows if name not in ours]
    for i, name in enumerate(ours):
        styles[name] = {
            "color": _OURS,
            "marker": _OURS_MARKERS[i % len(_OURS_MARKERS)],
            "markerfacecolor": _OURS if i == 0 else "white",
            "linewidth": 1.8 if i == 0 else 1.0,
        }
    for i, name in enumerate(others):
        color, marker, dashes = _OTHERS[i % len(_OTHERS)]
        styles[name] = {
            "color": color,
            "marker": marker,
            "markerfacecolor": "white",
            "linestyle": dashes,
            "linewidth": 1.0,
        }
    return styles


def _name_ends(axes: Any, ends: list[tuple[str, float, float, str]]) -> None:
    """Write names right of the axes beside the lines' ends, moved apart if they would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[2])
    natural = [float(to_axes.transform((x, y))[1]) for _, x, y, _ in ends]
    gap = 13 / (axes.get_position().height * axes.figure.get_figheight() * 72)
    places = list(natural)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    excess = max(0.0, places[-1] - max(1.0, natural[-1]))
    places[-1] -= excess
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - gap)
    for (name, x, y, color), place in zip(ends, places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.04, place),
            textcoords=axes.transAxes,
            va="center",
            color=color if color == _OURS else "#333333",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.5,
                "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5),
            },
        )  # fmt: skip


def _bars(axes: Any, panel: Panel) -> None:
    """Draw the columns of each row as bars side by side, or as one stacked bar."""
    stacked = panel.kind == "stack"
    height = 0.7 if stacked else 0.8 / len(panel.columns)
    for k, column in enumerate(panel.columns):
        left = 0.0
        for i, cells in enumerate(panel.rows.values()):
            left = sum(c.value for c in cells[:k] if c) if stacked else 0.0
            cell = cells[k]
            if cell is None:
                continue
            at = float(i) if stacked else i - 0.4 + (k + 0.5) * height
            axes.barh(
                at, cell.value, height, left=left, color=_FILLS[k], hatch=_HATCHES[k],
                edgecolor="#222222", linewidth=0.5, label=column if i == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(panel.rows)), list(panel.rows))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(panel.y)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.03, 1.0), frameon=False)
