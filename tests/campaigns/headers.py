"""Headers of networks for every compiler that is here: C++, ROOT's interpreter, NVIDIA and AMD.

    python -m tests.campaigns.headers [--root PYTHON] [NAME ...]

Each network goes the way of a user: its config is run, and `pipeline source` writes its headers
(as cpp, cuda and hip), which also compares their answers with the version's artifact, bit by bit.
Then every compiler takes them. A line: the size of the header and the seconds of each compiler.
What is built for this processor runs its self-test; for a GPU, the self-test is only compiled.
`--root`: a Python with ROOT and ziglang (`pip install root ziglang` in a venv of its own); without
it, neither takes part.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.trees import trained
from benchmarks.speed.unseen import write_configs
from engines.lanes.compiling.devices import compile_cuda, compile_hip, find_clang
from pipeline.building.header import write_header
from pipeline.building.run_config import run
from pipeline.report.tables import new_table, show
from registry.store.registry import Registry

_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ["-std=c++17", "-O2"]
_V3, _ZIGS_V3 = "-march=x86-64-v3", "-march=x86_64_v3"
_PROGRAM = '#include "NAME.h"\nint main() { return NAME::self_test(); }\n'
_KERNEL = (
    '#include "NAME.h"\n'
    'extern "C" __attribute__((global)) void k(int *wrong) { *wrong = NAME::self_test(); }\n'
)
_IN_ROOT = """\
import sys, ROOT
assert ROOT.gInterpreter.Declare('#include "NAME.h"')
sys.exit(ROOT.NAME.self_test())
"""
_NVIDIA = ("sm_75", "sm_80", "sm_90", "sm_100")
_AMD = ("gfx90a", "gfx942", "gfx1100")
_TREES = """\
name: {name}
model: {{trees: {file}}}
collections:
  given: {{columns: [{{name: x0 .. x13, dtype: float32}}]}}
  found: {{columns: [{{name: score, dtype: float32}}]}}
inputs: [{{name: x, collection: given, columns: [x0 .. x13]}}]
outputs: [{{name: y, collection: found, columns: [score]}}]
rows: {{n: {{min: 0, max: 4096, typical: [1, 1000]}}}}
"""


@dataclass(frozen=True)
class Written:
    """A network's headers, each in a folder of its language."""

    name: str
    folders: Mapping[str, Path]

    def beside(self, program: str, file: str, language: str) -> Path:
        """The folder of a header, with a program that includes the header."""
        folder = self.folders[language]
        (folder / file).write_text(program.replace("NAME", self.name))
        return folder


Compiler = Callable[[Written], object]
"""Takes a header and, on this processor, runs its self-test; raises an error if that fails."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a config")
    parser.add_argument("--root", metavar="PYTHON", help="a Python with ROOT and ziglang")
    given = parser.parse_args()
    compilers = _compilers(given.root)
    table = new_table("Headers", "network", "kB", *compilers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        configs = {config.stem: config for config in _configs(folder)}
        if unknown := {*given.names} - {*configs}:
            parser.error(f"{unknown.pop()}: one of {', '.join(configs)}")
        for name in given.names or configs:
            made = _written(configs[name], folder / name)
            size = (made.folders["cpp"] / f"{made.name}.h").stat().st_size >> 10
            seconds = [_seconds(take, made) for take in compilers.values()]
            table.add_row(name, str(size), *seconds)
    show([table])
    print(f"C++: {' '.join(_FLAGS)} {_V3}. Seconds; self-tests passed where they run.")


def _configs(folder: Path) -> list[Path]:
    """Configs whose only engine is lanes."""
    found = []
    for name, trees, leaves in (("trees", 120, 63), ("deep_trees", 10, 512)):
        forest = trained(folder / f"{name}.txt", trees, leaves)
        found.append(folder / f"{name}.yaml")
        found[-1].write_text(_TREES.format(name=name, file=forest))
    found += write_configs(folder)
    for name in ("demo", "hzz"):
        text = (_ROOT / f"configs/{name}.yaml").read_text()
        found.append(folder / f"{name}.yaml")
        found[-1].write_text(text.replace("../examples", f"{_ROOT}/examples"))
    for config in found:
        with config.open("a") as file:
            file.write("engines: [lanes]\n")
    return found


def _written(config: Path, folder: Path) -> Written:
    folder.mkdir()
    registry = Registry(f"sqlite:///{folder}/registry.db")
    work = folder / "work"
    version = run(config, registry, work=work).version
    folders = {}
    for language in ("cpp", "cuda", "hip"):
        folders[language] = folder / language
        folders[language].mkdir()
        out = folders[language] / "net.h"
        made = write_header(registry, f"{version.name}/{version.number}", language, out, work)
        out.rename(folders[language] / f"{made.namespace}.h")
    return Written(made.namespace, folders)


def _compilers(python: str | None) -> dict[str, Compiler]:
    found = {"g++": _cpp("g++", _V3), "clang": _cpp(find_clang(), _V3)}
    if python is not None:
        found["zig"] = _cpp(python, "-m", "ziglang", "c++", _ZIGS_V3)
        found["ROOT"] = _root(python)
    return found | {a: _nvidia(a) for a in _NVIDIA} | {a: _amd(a) for a in _AMD}


def _seconds(take: Compiler, made: Written) -> str:
    begun = time.monotonic()
    take(made)
    return f"{time.monotonic() - begun:.1f}"


def _cpp(*command: str) -> Compiler:
    def take(made: Written) -> None:
        folder = made.beside(_PROGRAM, "main.cpp", "cpp")
        whole = [*command, *_FLAGS, "-o", "main", "main.cpp"]
        subprocess.run(whole, cwd=folder, check=True)
        subprocess.run([folder / "main"], check=True)

    return take


def _root(python: str) -> Compiler:
    def take(made: Written) -> None:
        folder = made.beside(_IN_ROOT, "in_root.py", "cpp")
        command = [python, "-W", "ignore", "in_root.py"]
        subprocess.run(command, cwd=folder, check=True)

    return take


def _nvidia(arch: str) -> Compiler:
    def take(made: Written) -> None:
        compile_cuda(_KERNEL.replace("NAME", made.name).encode(), arch, made.folders["cuda"])

    return take


def _amd(arch: str) -> Compiler:
    def take(made: Written) -> None:
        folder = made.beside(_KERNEL, "kernel.hip", "hip")
        compile_hip("kernel.hip", arch, folder, folder)

    return take


if __name__ == "__main__":
    main()
