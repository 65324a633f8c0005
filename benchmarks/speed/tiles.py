"""One call on many rows, in tiles: `python -m benchmarks.speed.tiles`.

The first network of benchmarks/speed/unseen.py is built for 16,384 rows with `unbounded: true`, and
runs on up to 10,000,000 of them in one call. It prints the time for a row, compares two threads
with one, checks that 1, 2 and 3 threads give the same bits, and prints the memory that the process
takes beside the columns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.plot import save_plot
from benchmarks.speed.unseen import write_configs
from benchmarks.speed.zoo import built, chosen_target, new_registry
from benchmarks.table import SPREAD, Cell, Panel, print_machine, print_panels
from registry.bundle.bundle import Bundle
from runtime.opening import Opening, open_artifact, open_version
from runtime.session import Session
from soa.memory import Collection
from stages.timing import race

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
_SECONDS = 3.0
_BUILT_FOR = 16_384


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (config,) = (c for c in write_configs(folder) if c.stem == "pointwise_first")
        config.write_text(
            config.read_text().replace("max: 1000000,", f"max: {_BUILT_FOR}, unbounded: true,")
        )
        bundle, _ = built(config, new_registry(folder), folder / "work")
        memory = {n: _grown(bundle, n) for n in SIZES}  # first: later runs reuse freed memory
        panels = [_times(bundle)]
    caption = f"A call on n rows in tiles. x: to one thread; {SPREAD}."
    print_panels(caption, panels)
    for n, grown in memory.items():
        print(f"n = {n:,}: {grown / 1e6:.1f} MB taken by the first run beside its columns")
    save_plot("tiles", caption, panels)


def _times(bundle: Bundle) -> Panel:
    sessions = {k: _session(bundle, k) for k in (1, 2, 3)}
    rows: dict[str, list[Cell | None]] = {"1 thread": [], "2 threads": []}
    for n in SIZES:
        bound = {k: _bound(session, n) for k, session in sessions.items()}
        for k, (session, given, written) in bound.items():
            session.run(given, written)
            first = bound[1][2]
            same = all(torch.equal(written.tensor(c), first.tensor(c)) for c in ("y0", "y1", "y2"))
            if not same:
                raise SystemExit(f"n = {n:,}: {k} threads give other bits than one")
        calls = {k: s.bind(given, written) for k, (s, given, written) in bound.items() if k < 3}
        times = race(calls, _SECONDS)
        for k, name in enumerate(rows, start=1):
            t = times[k]
            ratio = times[1].median_us / t.median_us
            rows[name].append(Cell(t.median_us, t.p05_us, t.p95_us, ratio))
        print(f"n = {n:,}: {times[1].median_us / n * 1e3:.1f} ns a row; the same bits from 1, 2, 3")
    cells = {name: tuple(found) for name, found in rows.items()}
    return Panel(bundle.manifest.name, "rows", "time of a call", "µs", "log lines", SIZES, cells)


def _session(bundle: Bundle, threads: int = 1) -> Session:
    opened = open_version(Opening(bundle.path, mode="test"))
    device = torch.device("cpu")
    artifact = open_artifact(opened, chosen_target(opened), None, device, threads)
    return Session(opened.signature, artifact)


def _bound(session: Session, n: int) -> tuple[Session, Collection, Collection]:
    given, written = session.collection("given", n), session.collection("found", n)
    generator = torch.Generator().manual_seed(1)
    for column in given.layout.columns:
        given.tensor(column.name).copy_(torch.randn(n, generator=generator))
    return session, given, written


def _grown(bundle: Bundle, n: int) -> int:
    """The bytes by which the first run on n rows raises the peak memory of the process."""
    session, given, written = _bound(_session(bundle), n)
    for column in written.layout.columns:
        written.tensor(column.name).fill_(1.0)  # so that every page exists
    binding = session.bind(given, written)
    Path("/proc/self/clear_refs").write_text("5")
    before = _most()
    binding()
    return _most() - before


def _most() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM"))


if __name__ == "__main__":
    main()
