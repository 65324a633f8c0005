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
from engines.lanes.compiling.devices import amd_image, clang, number_in, nvrtc_image
from pipeline.building.header import with_self_test
from pipeline.report.tables import new_table, show
from runtime.opening import answer_bits
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
    print(f"g++ and clang: {_CPU}; clang is {_version()}. µs: median, in turns.")


def measured(name: str) -> list[str]:
    """A row of the table."""
    features, outputs, _ = SHAPES[name]
    made = subject(features, _ROWS, network(name), outputs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        session, header = written_header_of(made, "cpp", folder)
        library = made.session()
        same = answer_bits(session, made.capture.reference, every=True) == answer_bits(
            library, made.capture.reference, every=True
        )
        (folder / "main.cpp").write_text(
            '#include "net.h"\nint main() { return net::self_test(); }\n'
        )
        times = [_compiled(f"{compiler} {_CPU}", folder) for compiler in ("g++", clang())]
        passed = subprocess.run([str(folder / "main")], check=False).returncode == 0 and same
        size = len(header) >> 10
        timed = race({"own": _call(session, made), "library": _call(library, made)}, _SECONDS)
    return [name, str(size), *times, *_on_gpus(made), "passed" if passed else "FAILED",
            *(f"{t.median_us:.0f}" for t in timed.values())]  # fmt: skip


def written_header_of(
    made: Subject, language: str, folder: Path, name: str = "net"
) -> tuple[Session, str]:
    """The header with its self-test as NAME.h in a folder, and a session of its library."""
    source = Portable(made.capture.program, None, made.signature)
    first, *_ = engine("lanes").compile(source, Target("source", language), {}, folder)
    session = Session(made.signature, engine("lanes").open(folder / first, CPU), CPU)
    text = (folder / "network.h").read_text()
    whole = with_self_test(text, name, session, made.capture.reference).text
    (folder / f"{name}.h").write_text(whole)
    return session, whole


def _compiled(command: str, folder: Path) -> str:
    begun = time.monotonic()
    subprocess.run([*command.split(), "-o", "main", "main.cpp"], cwd=folder, check=True)
    return f"{time.monotonic() - begun:.1f}"


def _on_gpus(made: Subject) -> list[str]:
    """Seconds and registers of NVRTC for sm_80, and of clang for gfx90a."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        written_header_of(made, "cuda", folder)
        begun = time.monotonic()
        image = nvrtc_image(_KERNEL.encode(), "sm_80", folder, fmad=True)
        nvidia = time.monotonic() - begun
        (folder / "kernel.hip").write_text(_KERNEL)
        begun = time.monotonic()
        said = amd_image("kernel.hip", "gfx90a", folder, folder)
        amd = time.monotonic() - begun
    registers = number_in(image.log, r"Used (\d+) registers"), number_in(said, r"VGPRs: (\d+)")
    return [f"{nvidia:.1f}", str(registers[0]), f"{amd:.1f}", str(registers[1])]


def _call(session: Session, made: Subject) -> Callable[[], None]:
    given, written = made.collections(_ROWS)
    return session.bind({"inputs": given}, {"outputs": written})


def _version() -> str:
    said = subprocess.run([clang(), "-dumpversion"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
