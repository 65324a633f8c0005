"""C++ headers of networks: their size, what compilers take, and their speed beside the library.

    python -m benchmarks.speed.headers [NAME ...]

The networks are those of benchmarks/speed/unseen.py. Each header's self-test is run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.speed.unseen import SHAPES, network
from benchmarks.subject import CPU, Subject, subject
from benchmarks.table import print_machine
from engines import Portable, Target, engine
from engines.lanes.compiling.devices import compile_cuda, compile_hip, find_clang, number_in
from pipeline.building.header import add_self_test
from pipeline.report.tables import new_table, show
from runtime.opening import digest_answers
from runtime.session.session import Session
from stages.timing import race

_CPU = "-std=c++17 -O2 -march=x86-64-v3"
_KERNEL = """\
#include "net.h"
extern "C" __attribute__((global)) void k(net::Columns of, long n) { net::thread_rows(of, n); }
"""
_ROWS = 1000
_SECONDS = 0.3


def main(names: Sequence[str]) -> None:
    print_machine()
    columns = ("network", "kB", "g++ s", "clang s", "sm_80 s", "registers", "gfx90a s", "VGPRs",
               "self-test", f"µs at {_ROWS:,}", "library")  # fmt: skip
    table = new_table("Headers", *columns)
    for name in names or SHAPES:
        table.add_row(*map(str, measured(name)))
    show([table])
    print(f"g++ and clang: {_CPU}; clang is {_clang_version()}. µs: median, in turns.")


def measured(name: str) -> list[str]:
    """A row of the table. The self-test passes only with the bits of the library."""
    features, outputs, _ = SHAPES[name]
    captured = subject(features, _ROWS, network(name), outputs)
    reference = captured.capture.reference
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        session, header = written_header_of(captured, "cpp", folder)
        library = captured.session()
        bits = [digest_answers(each, reference, every=True) for each in (session, library)]
        (folder / "main.cpp").write_text(
            '#include "net.h"\nint main() { return net::self_test(); }\n'
        )
        times = [
            _compile_seconds(f"{compiler} {_CPU}", folder) for compiler in ("g++", find_clang())
        ]
        passed = subprocess.run([str(folder / "main")], check=False).returncode == 0
        calls = {"own": _call(session, captured), "library": _call(library, captured)}
        timed = race(calls, _SECONDS)
    verdict = "passed" if passed and bits[0] == bits[1] else "FAILED"
    return [name, str(len(header) >> 10), *times, *_on_gpus(captured), verdict,
            *(f"{timing.median_us:.0f}" for timing in timed.values())]  # fmt: skip


def written_header_of(
    captured: Subject, language: str, folder: Path, name: str = "net"
) -> tuple[Session, str]:
    """The header with its self-test as NAME.h in a folder, and a session of its library."""
    source = Portable(captured.capture.program, None, captured.signature)
    first, *_ = engine("lanes").compile(source, Target("source", language), {}, folder)
    session = Session(captured.signature, engine("lanes").open(folder / first, CPU), CPU)
    text = (folder / "network.h").read_text()
    header = add_self_test(text, name, session, captured.capture.reference).text
    (folder / f"{name}.h").write_text(header)
    return session, header


def _compile_seconds(command: str, folder: Path) -> str:
    """How long a compiler takes for main.cpp."""
    begun = time.monotonic()
    subprocess.run([*command.split(), "-o", "main", "main.cpp"], cwd=folder, check=True)
    return f"{time.monotonic() - begun:.1f}"


def _on_gpus(captured: Subject) -> list[str]:
    """Seconds and registers of NVRTC for sm_80, and of clang for gfx90a."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written_header_of(captured, "cuda", folder)
        begun = time.monotonic()
        image = compile_cuda(_KERNEL.encode(), "sm_80", folder, fmad=True)
        nvidia_s = time.monotonic() - begun
        (folder / "kernel.hip").write_text(_KERNEL)
        begun = time.monotonic()
        log = compile_hip("kernel.hip", "gfx90a", folder, folder)
        amd_s = time.monotonic() - begun
    registers = number_in(image.log, r"Used (\d+) registers")
    vector_registers = number_in(log, r"VGPRs: (\d+)")
    return [f"{nvidia_s:.1f}", str(registers), f"{amd_s:.1f}", str(vector_registers)]


def _call(session: Session, captured: Subject) -> Callable[[], None]:
    """A call of a session, bound to columns of `_ROWS` rows."""
    inputs, outputs = captured.collections(_ROWS)
    return session.bind({"inputs": inputs}, {"outputs": outputs})


def _clang_version() -> str:
    process = subprocess.run(
        [find_clang(), "-dumpversion"], capture_output=True, text=True, check=True
    )
    return process.stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
