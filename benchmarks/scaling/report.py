"""Print the tables, write them into docs/results/scaling.md, and draw plots next to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plot import save_plot
from benchmarks.scaling.answers import Answers
from benchmarks.scaling.tables import tables
from benchmarks.table import WIDTH, Cell, Panel
from pipeline.report.tables import Table, show, table_lines

PAGE = Path(__file__).resolve().parents[2] / "docs/results/scaling.md"


def report(found: Answers, page: Path | None) -> None:
    """Print all tables. With a page, also write them into it, and plots into `plots` next to it."""
    shown = tables(found)
    for parts in shown.values():
        show(parts)
    if page is not None:
        texts = {name: _text(parts) for name, parts in shown.items()}
        page.write_text(replaced(page.read_text(), texts))
        print(f"tables: {page}")
        for name, (caption, panels) in _plots(found).items():
            save_plot(name, caption, panels, page.parent / "plots")


def replaced(page: str, texts: dict[str, str]) -> str:
    """The page with each text between its own two markers. Raises ValueError."""
    for name, text in texts.items():
        marker = f"<!-- {name} -->"
        parts = page.split(marker)
        if len(parts) != 3:
            raise ValueError(
                f"{marker} must stand in the page twice, it does {len(parts) - 1} times"
            )
        page = f"{parts[0]}{marker}\n\n```text\n{text}\n```\n\n{marker}{parts[2]}"
    return page


def _text(parts: Sequence[Table | str]) -> str:
    texts = (p if isinstance(p, str) else "\n".join(table_lines(p, WIDTH)) for p in parts)
    return "\n\n".join(texts)


def _plots(found: Answers) -> dict[str, tuple[str, list[Panel]]]:
    return {
        "scaling-check": ("Measured and predicted, one row a request", _check(found)),
        "scaling-servers": ("Servers for closed clients, p99 within 100 ms", _servers(found)),
        "scaling-autoscaler": ("1000 jobs at once, one server at first", _timeline(found)),
    }


def _check(found: Answers) -> list[Panel]:
    clients = tuple(sorted({each.measured.clients for each in found.checked}))
    rates: dict[str, tuple[Cell | None, ...]] = {}
    times: dict[str, tuple[Cell | None, ...]] = {}
    for batching in (True, False):
        here = {e.measured.clients: e for e in found.checked if e.measured.batching == batching}
        name = "merged" if batching else "alone"
        for kind in ("measured", "predicted"):
            label = f"{kind}, {name}"
            of = {
                count: (e.measured.rate, e.measured.p50_s)
                if kind == "measured"
                else (e.predicted.rate, e.predicted.quantile(0.5))
                for count, e in here.items()
            }
            rates[label] = tuple(Cell(of[count][0]) for count in clients)
            times[label] = tuple(Cell(of[count][1] * 1e6) for count in clients)
    return [
        Panel("throughput", "clients", "requests a second", "1/s", "lines", clients, rates),
        Panel("latency", "clients", "p50 of a request", "µs", "log lines", clients, times),
    ]


def _servers(found: Answers) -> list[Panel]:
    clients = tuple(sorted({each.clients for each in found.sizes}))
    rows: dict[str, tuple[Cell | None, ...]] = {}
    for think in sorted({each.think_s for each in found.sizes}):
        label = f"one row every {think:g} s"
        rows[label] = tuple(
            Cell(e.servers) if e.servers else None for e in found.sizes if e.think_s == think
        )
    return [Panel("one row a request", "clients", "servers", "1/s", "log lines", clients, rows)]


def _timeline(found: Answers) -> list[Panel]:
    scaled = found.scaled
    shown = [each for each in scaled.decisions if each.at <= 2 * scaled.within_s]
    columns = tuple(each.at for each in shown)
    servers: dict[str, tuple[Cell | None, ...]] = {
        "ordered": tuple(Cell(each.servers) for each in shown),
        "needed": tuple(Cell(scaled.needed) for _ in shown),
    }
    metric: dict[str, tuple[Cell | None, ...]] = {
        "the metric": tuple(Cell(each.metric_s * 1e6) for each in shown)
    }
    return [
        Panel("servers", "seconds", "servers", "1/s", "lines", columns, servers),
        Panel("queue latency", "seconds", "of an execution", "µs", "lines", columns, metric),
    ]
