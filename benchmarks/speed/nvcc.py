"""CUDA headers of networks, compiled by nvcc and run on a GPU.

    python -m benchmarks.speed.nvcc [NAME ...] [--arch sm_90]

The networks are those of benchmarks/speed/unseen.py. Each header computes its self-test, the
answers to 4,099 rows, whose bits are compared with those of the library for this host's processor,
and a million rows in one launch. Without a GPU the programs are compiled only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.speed.headers import written_header_of
from benchmarks.speed.unseen import SHAPES, network
from benchmarks.subject import subject
from engines.errors import RunError
from engines.native import gpus

_ROWS = 4099
_PROGRAM = Path(__file__).with_suffix(".cu")


def nvcc() -> str:
    """The compiler of a CUDA toolkit, or of the wheel nvidia-cuda-nvcc; RuntimeError if none is
    here."""
    wheels = (str(path) for each in sys.path for path in Path(each).glob("nvidia/cu*/bin/nvcc"))
    compiler = shutil.which("nvcc") or next(wheels, None)
    if compiler is None:
        raise RuntimeError("no nvcc is here: pip install nvidia-cuda-nvcc nvidia-cuda-cccl")
    return compiler


def main(names: list[str], arch: str) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {compile_and_run(name, arch, Path(folder))}", flush=True)


def compile_and_run(name: str, arch: str, folder: Path) -> str:
    """What a network's program says, or that it was compiled."""
    write_sources(name, folder)
    begun = time.monotonic()
    subprocess.run(
        [nvcc(), "-std=c++17", "-O2", f"-arch={arch}", "-I.", "-o", "net", _PROGRAM],
        cwd=folder, check=True,
    )  # fmt: skip
    seconds = f"nvcc took {time.monotonic() - begun:.1f} s"
    try:
        gpus()
    except RunError:
        return f"{seconds}; no GPU is here"
    process = subprocess.run(["./net"], cwd=folder, capture_output=True, text=True, check=False)
    return f"{seconds}; {process.stdout.strip()}"


def write_sources(name: str, folder: Path) -> None:
    """Write a network's header, and the files that nvcc.cu reads: settings, random inputs, and the
    answers of the library to them."""
    features, outputs, _ = SHAPES[name]
    captured = subject(features, _ROWS, network(name), outputs)
    written_header_of(captured, "cuda", folder)
    inputs, answers = captured.collections(_ROWS)
    draw = np.random.default_rng(0)
    for member in inputs.layout.columns:
        inputs.fill(member.name, draw.normal(size=_ROWS).astype(np.float32))
    captured.session().run(inputs, answers)
    for file, collection in (("inputs", inputs), ("wanted", answers)):
        columns = [collection[member.name] for member in collection.layout.columns]
        np.stack(columns).tofile(folder / file)
    pointers = ", ".join(f"(base) + {k}L * (n)" for k in range(features + outputs))
    (folder / "settings.h").write_text(
        f"#define ROWS {_ROWS}\n#define INPUTS {features}\n#define OUTPUTS {outputs}\n"
        f"#define COLUMNS_AT(base, n) net::Columns{{{pointers}}}\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SHAPES):
        parser.error(f"no network {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    try:
        main(options.names, options.arch)
    except RuntimeError as error:
        parser.error(str(error))
