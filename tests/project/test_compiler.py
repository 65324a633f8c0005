"""The compiler of the tests (models/compiler/g++) reuses an object only for equal input."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

COMPILER = Path(__file__).parents[1] / "models" / "compiler" / "g++"
# Notes each call, and writes the content of all its inputs as the output.
REAL_COMPILER = """#!/bin/sh
[ "$*" = --version ] && { cat "$0.version"; exit; }
echo called >> "$0.log"
case "$*" in *-broken*) exit 3 ;; esac
while [ "$1" != -o ]; do inputs="$inputs $(cat "$1" 2>/dev/null || echo "$1")"; shift; done
echo "$inputs" > "$2"
"""

Compile = Callable[..., tuple[int, str]]


@pytest.fixture
def compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compile a text to a file; returns the calls of the real compiler so far, and the output."""
    real = tmp_path / "real"
    real.write_text(REAL_COMPILER)
    real.chmod(0o755)
    (tmp_path / "real.version").write_text("12")
    (tmp_path / "torch" / "include").mkdir(parents=True)
    (tmp_path / "torch" / "version.py").write_text("")
    (tmp_path / "kept").mkdir()
    monkeypatch.setenv("TESTS_CXX", str(real))
    monkeypatch.setenv("TESTS_COMPILED", str(tmp_path / "kept"))

    def run(
        text: str, *flags: str, source: str = "x.wrapper.cpp", output: str = "x.wrapper.o"
    ) -> tuple[int, str]:
        (tmp_path / source).write_text(text)
        (tmp_path / output).unlink(missing_ok=True)
        file, include = str(tmp_path / source), f"-I{tmp_path}/torch/include"
        # As Inductor and lanes call it.
        inputs = [source] if source == "network.cpp" else [file, include]
        out = output if output.startswith("part") else str(tmp_path / output)
        command = [str(COMPILER), *inputs, *flags, "-o", out]
        status = subprocess.run(command, check=False, cwd=tmp_path).returncode
        assert status == (3 if "-broken" in flags else 0)
        calls = len((tmp_path / "real.log").read_text().splitlines())
        return calls, (tmp_path / output).read_text() if status == 0 else ""

    return run


@pytest.mark.parametrize("names", [{"source": "y.wrapper.cpp"}, {"output": "y.wrapper.o"}])
def test_the_same_code_is_compiled_once(compile: Compile, names: dict[str, str]) -> None:
    """Comments, blank lines and the names of the files do not matter."""
    first = compile("int a;", "-O0")
    assert first[0] == 1
    assert compile("// another day\n\nint a;\n", "-O0", **names) == first


@pytest.mark.parametrize(("text", "flags"), [("int b;", []), ("int a;", ["-O3"])])
def test_other_code_or_flags_are_compiled_anew(
    compile: Compile, text: str, flags: list[str]
) -> None:
    assert compile("int a;")[0] == 1
    assert compile(text, *flags)[0] == 2


@pytest.mark.parametrize("changed", ["real.version", "torch/version.py"])
def test_another_compiler_or_torch_compiles_anew(
    compile: Compile, tmp_path: Path, changed: str
) -> None:
    assert compile("int a;")[0] == 1
    (tmp_path / changed).write_text("another version")
    assert compile("int a;")[0] == 2
    assert compile("int a;")[0] == 2


def test_a_library_is_linked_anew_for_other_objects(compile: Compile) -> None:
    """An object has no comments: each of its bytes matters."""
    library = {"source": "x.kernel.o", "output": "x.wrapper.so"}
    assert compile("1", **library)[0] == 1
    assert compile("// 2", **library)[0] == 2
    assert compile("1", **library)[0] == 2


@pytest.mark.parametrize("output", ["network.so", "part1.o"])
def test_a_library_of_lanes_is_kept_by_all_its_inputs(
    compile: Compile, tmp_path: Path, output: str
) -> None:
    """Its source, its weights and its headers; so is each part of a large library."""
    headers = tmp_path / "lanes" / "headers"
    headers.mkdir(parents=True)

    def library(text: str, weights: str, header: str) -> tuple[int, str]:
        (headers / "lanes.h").write_text(header)
        (tmp_path / "weights.bin").write_text(weights)
        return compile(text, "-I", str(headers), source="network.cpp", output=output)

    first = library("int a;", "1", "h")
    assert first[0] == 1
    assert library("int a;", "1", "h") == first
    assert library("int b;", "1", "h")[0] == 2
    assert library("int a;", "2", "h")[0] == 3
    assert library("int a;", "1", "g")[0] == 4
    assert library("int a;", "1", "h") == (4, first[1])


def test_a_failed_compilation_is_not_kept(compile: Compile) -> None:
    assert [compile("int a;", "-broken")[0] for _ in range(2)] == [1, 2]


def test_a_file_that_is_not_of_inductor_is_not_kept(compile: Compile) -> None:
    """Inductor's files are known by their names."""
    assert [compile("int a;", output="x.o")[0] for _ in range(2)] == [1, 2]


def test_nothing_is_kept_without_a_folder(compile: Compile, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "kept")
    assert [compile("int a;")[0] for _ in range(2)] == [1, 2]


@dataclass(frozen=True)
class Objects:
    """Compiles files with models/compiler/kept, which keeps objects by the content of all files."""

    folder: Path

    @property
    def count(self) -> int:
        """How many objects are kept."""
        return len([*(self.folder / "kept").iterdir()])

    def compile(self, value: str, source: str, *flags: str) -> subprocess.CompletedProcess[bytes]:
        """Compile a function that returns `value`, which stands in a header."""
        (self.folder / "include" / "value.h").write_text(f"#define VALUE {value}\n")
        text = f'// {source}\n#include "value.h"\nint f() {{ return VALUE; }}\n'
        (self.folder / source).write_text(text)
        out, depends = self.folder / f"{source}.o", self.folder / f"{source}.d"
        out.unlink(missing_ok=True)
        depends.unlink(missing_ok=True)
        command = [COMPILER.with_name("kept"), "g++", *flags, f"-I{self.folder}/include"]
        command += ["-MD", "-MT", out, "-MF", depends, "-o", out, "-c", self.folder / source]
        return subprocess.run(list(map(str, command)), check=False, capture_output=True)

    def code(self, value: str, source: str = "a.cpp", *flags: str) -> str:
        """The machine code of the function, as assembly."""
        compiled = self.compile(value, source, *flags)
        assert compiled.returncode == 0, compiled.stderr
        assert "value.h" in (self.folder / f"{source}.d").read_text()
        listing = subprocess.run(
            ["objdump", "-d", self.folder / f"{source}.o"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return listing.stdout.partition("<_Z1fv>:")[2]


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    monkeypatch.setenv("TESTS_COMPILED", str(tmp_path / "kept"))
    (tmp_path / "include").mkdir()
    (tmp_path / "kept").mkdir()
    return Objects(tmp_path)


def test_the_same_content_under_another_name_is_one_object(objects: Objects) -> None:
    first = objects.code("17")
    assert "0x11" in first
    assert objects.code("17", "b.cpp") == first
    assert objects.count == 1


def test_another_header_or_flag_gives_another_object(objects: Objects) -> None:
    first = objects.code("17")
    assert "0x12" in objects.code("18")
    objects.code("18", "a.cpp", "-O2")
    assert objects.count == 3
    assert objects.code("17") == first
    assert objects.count == 3


def test_a_file_that_does_not_compile_is_not_kept(objects: Objects) -> None:
    assert objects.compile("nothing", "a.cpp").returncode == 1
    assert objects.count == 0
