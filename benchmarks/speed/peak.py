"""Which share of a core's float32 peak `lanes` reaches.

    python -m benchmarks.speed.peak [NAME ...]

The peak is measured: a loop of independent fma on whole registers, compiled for this host. Only
matrix products and convolutions count as work, as torch's FlopCounterMode counts them (an fma is
two operations); all else that a network computes takes time and counts nothing. The networks are
those of benchmarks/speed/unseen.py. Network and loop are timed in turns.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.unseen import SHAPES, network
from benchmarks.subject import Subject, subject
from benchmarks.table import print_machine
from pipeline.report.tables import new_table, show
from stages.timing import race

_ROWS = 1000
_SECONDS = 2.0
_STEPS = 100_000
_LOOP = """\
#if defined(__AVX512F__)
constexpr int kBytes = 64, kSums = 20;
#else
constexpr int kBytes = 32, kSums = 12;
#endif
typedef float V __attribute__((vector_size(kBytes)));
static V sums[kSums];
extern "C" int lanes() { return kSums * kBytes / 4; }
extern "C" void steps(int count) {
  V own[kSums], x = sums[0] + 0.999f, y = sums[0] + 1e-9f;
  for (int k = 0; k < kSums; ++k) own[k] = sums[k];
  for (int i = 0; i < count; ++i) {
#pragma GCC unroll 32
    for (int k = 0; k < kSums; ++k) own[k] = own[k] * x + y;
    asm volatile("" : "+x"(x), "+x"(y));
  }
  for (int k = 0; k < kSums; ++k) sums[k] = own[k];
}
"""


def main(names: Sequence[str]) -> None:
    print_machine()
    torch.set_num_threads(1)
    table = new_table(
        "Shares of the peak", "network", f"GFLOP/s at {_ROWS:,} rows", "peak", "share"
    )
    with tempfile.TemporaryDirectory() as folder:
        loop, operations = fma_loop(Path(folder))
        for name in names:
            captured = unseen(name)
            inputs, outputs = captured.collections(_ROWS)
            call = captured.session().bind({"inputs": inputs}, {"outputs": outputs})
            with FlopCounterMode(display=False) as counter:
                captured.model(torch.zeros(_ROWS, len(inputs.layout.columns)))
            timed = race({"own": call, "peak": loop}, _SECONDS)
            # Operations per µs are a thousandth of GFLOP/s.
            own = counter.get_total_flops() / timed["own"].median_us / 1e3
            peak = operations / timed["peak"].median_us / 1e3
            table.add_row(name, f"{own:.0f}", f"{peak:.0f}", f"{own / peak:.0%}")
    show([table])


def unseen(name: str) -> Subject:
    """A network of benchmarks/speed/unseen.py, captured for up to `_ROWS` rows."""
    features, outputs, _ = SHAPES[name]
    return subject(features, _ROWS, network(name), outputs)


def fma_loop(folder: Path) -> tuple[Callable[[], object], int]:
    """A call of a loop of fma, and the number of its floating-point operations: two for each."""
    (folder / "peak.cpp").write_text(_LOOP)
    command = "g++ -O3 -march=native -ffp-contract=fast -shared -fPIC -o peak.so peak.cpp"
    subprocess.run(command.split(), cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "peak.so"))
    return lambda: library.steps(_STEPS), 2 * _STEPS * library.lanes()


if __name__ == "__main__":
    main(sys.argv[1:] or [*SHAPES])
