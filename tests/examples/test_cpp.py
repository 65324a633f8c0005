"""The C++ examples: built with CMake, run without Python, equal to Python bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pipeline
from engines.target import Target
from registry.bundle.bundle import Bundle
from soa import Signature
from tests.models import cplusplus, project
from tests.models.cplusplus import ROOT, TORCH, computed, run
from tests.models.project import Built
from tests.models.shared import made_once


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cplusplus.installed(tmp_path_factory)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, prefix: Path) -> Path:
    build = tmp_path_factory.mktemp("cpp")
    return cplusplus.built(ROOT / "examples" / "cpp", build, f"-DCMAKE_PREFIX_PATH={prefix}")


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same model on separate columns, some of them Eigen vectors, one in double precision."""

    def make(folder: Path) -> None:
        made = project.write_project(folder)
        config = made.variant(
            "config.yaml",
            ("{name: c, dtype: float32}", "{name: c, dtype: float64}"),
            ("      - {name: e, dtype: float32}\n", ""),
            ("{name: f, dtype: float32}", "{name: f, dtype: float32, eigen: [2]}\n"
             "    storage: columns\n    alignment: 16"),
            ("      - {name: y, dtype: float32}\n", ""),
            ("{name: z, dtype: float32}", "{name: z, dtype: float32, eigen: [2]}\n"
             "    storage: columns\n    alignment: 1"),
            ("[a, b, c, d, e, f]}", "[a, b, c, d, f], dtype: float32}"),
            ("columns: [x, y, z]", "columns: [x, z]"),
            ("engines: [aoti, torchscript, exported]", "engines: [aoti]"),
        )  # fmt: skip
        assert config == made.config
        project.build(made)

    folder = made_once(tmp_path_factory, "loose", make)
    return project.copied(folder, tmp_path_factory.mktemp("loose")).bundle


def artifact(bundle: Bundle) -> Path:
    return bundle.path / "targets" / str(Target.parse("cpu")) / "aoti"


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
@pytest.mark.parametrize("storage", ["buffer", "columns"])
def test_cpp_prints_the_bits_that_python_computes(
    programs: Path, jets: Built, request: pytest.FixtureRequest, storage: str, n: int
) -> None:
    bundle = jets.bundle if storage == "buffer" else request.getfixturevalue("loose")
    session = pipeline.load(bundle.path, mode="test", engine_name="aoti")
    assert session.layout("jets").storage == storage
    assert printed(programs, artifact(bundle), n) == computed(session, n)


def test_cpp_runs_in_the_tiles_that_the_artifact_was_proven_with(
    programs: Path, jets: Built, tmp_path: Path
) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][project.TARGET]["candidates"]["aoti"]["tile"] = 128
        arguments = folder / "targets" / project.TARGET / "aoti" / "arguments.txt"
        kinds = Signature.from_dict(manifest["signature"]).tile_kinds
        arguments.write_text(arguments.read_text() + f"tile 128 {kinds} 5000\n")

    tiled = project.resealed(jets.bundle, tmp_path / "tiled", edit)
    session = pipeline.load(tiled.path, mode="test", engine_name="aoti")
    for n in (1, 255, 256, 999):
        assert printed(programs, artifact(tiled), n) == computed(session, n)
    beyond = set(printed(programs, artifact(tiled), 5000))  # more than it was compiled for
    assert len(beyond) == 15_000 and beyond >= set(computed(session, 896))
    refused = run(programs / "run_bundle", artifact(tiled), 5001, "jets", "tags")
    assert (refused.returncode, "5001" in refused.stderr) == (1, True)


def printed(programs: Path, folder: Path, n: int) -> list[str]:
    """What C++ computes, as `column row bits`."""
    done = run(programs / "run_bundle", folder, n, "jets", "tags")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_cpp_refuses_what_does_not_fit(programs: Path, jets: Built, tmp_path: Path) -> None:
    program, folder = programs / "run_bundle", artifact(jets.bundle)
    above = run(program, folder, 1001, "jets", "tags")
    assert above.returncode == 1
    assert "n = 1001 is outside the compiled range 0 ... 1000" in above.stderr
    nowhere = run(program, tmp_path, 1, "jets", "tags")
    assert (nowhere.returncode, "arguments.txt: cannot be read" in nowhere.stderr) == (1, True)
    (tmp_path / "arguments.txt").write_text("soa-arguments 3\n")
    later = run(program, tmp_path, 1, "jets", "tags")
    assert (later.returncode, "not a description of arguments" in later.stderr) == (1, True)
    unknown = run(program, folder, 1, "jets", "labels")
    assert (unknown.returncode, "no collection 'labels'" in unknown.stderr) == (1, True)
    assert run(program).returncode == 2


BINDS = r"""
#include <cmath>
#include <cstdio>
#include "soa_model.hpp"
alignas(128) float x[64], wide[256], other[192];
int main(int, char **argv) {
  for (int i = 0; i < 64; ++i) x[i] = wide[i] = static_cast<float>(i) / 64;
  const soa::Model model = soa::Model::open(argv[1]);
  const soa::Columns good = {{"a", {x}}, {"b", {x}}, {"c", {wide}}, {"d", {x}}, {"f", {x, x}}};
  const soa::Memory tags("tags", {{"x", {wide}}, {"z", {wide + 64, wide + 128}}}, 9, 64);
  const auto attempt = [&](const char *name, std::vector<void *> addresses) {
    soa::Columns changed = good;
    changed.erase(name);
    if (!addresses.empty()) changed[name] = addresses;
    try {
      model.bind({{"jets", changed, 9, 64}, tags})();
      std::puts("ran");
    } catch (const soa::Error &error) {
      std::puts(error.what());
    }
  };
  attempt("a", {x});
  attempt("a", {});
  attempt("f", {x});
  attempt("f", {x, nullptr});
  attempt("d", {x + 1});
  attempt("q", {x});
  // Rows 5 to 14 of all, into rows 7 to 16 of others.
  const soa::Columns whole = {{"x", {wide + 64}}, {"z", {wide + 128, wide + 192}}};
  model.bind({{"jets", good, 64}, {"tags", whole, 64}})();
  const soa::Memory rows("tags", {{"x", {other}}, {"z", {other + 64, other + 128}}}, 9, 64, 7);
  model.bind({{"jets", good, 9, 64, 5}, rows})();
  double worst = 0, around = 0;
  for (int k = 0; k < 3; ++k) {
    for (int i = 0; i < 64; ++i) {
      const bool inside = i >= 7 && i < 16;
      const double found = other[64 * k + i], wanted = wide[64 + 64 * k + i - 2];
      if (inside) worst = std::max(worst, std::fabs(found - wanted));
      if (!inside) around = std::max(around, std::fabs(found));
    }
  }
  std::printf("%d %g\n", worst < 1e-5, around);
  try {
    model.bind({{"jets", good, 9, 12, 5}, tags});
  } catch (const soa::Error &error) {
    std::puts(error.what());
  }
  try {
    model.bind({{"jets", x, 9}, tags});
  } catch (const soa::Error &error) {
    std::puts(error.what());
  }
  try {
    model.layout("jets").nbytes(9);
  } catch (const soa::Error &error) {
    std::puts(error.what());
  }
}
"""


def test_cpp_checks_each_separate_column(prefix: Path, loose: Bundle, tmp_path: Path) -> None:
    (tmp_path / "binds.cpp").write_text(BINDS)
    command = [
        *("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{prefix / 'include'}"),
        *(str(tmp_path / "binds.cpp"), "-o", str(tmp_path / "binds")),
        *(f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lsoa_model"),
        *("-Wl,--no-as-needed", f"-L{TORCH}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    folder = artifact(loose)
    assert "windows any" in (folder / "arguments.txt").read_text().splitlines()
    assert run(tmp_path / "binds", folder).stdout.splitlines() == [
        "ran",
        "'jets', column 'a': no address",
        "'jets', column 'f': 2 addresses are needed, found 1",
        "'jets', column 'f': null pointer",
        "'jets', column 'd': not aligned to 16",
        "no column 'q'",
        "1 0",
        "'jets': n above its capacity",
        "'jets' has separate columns: give the address of each",
        "separate columns have no place in a buffer",
    ]
    before = tmp_path / "before"  # as of an artifact that was not validated on windows
    shutil.copytree(folder, before)
    lines = (folder / "arguments.txt").read_text().replace("windows any\n", "")
    (before / "arguments.txt").write_text(lines)
    done = run(tmp_path / "binds", before)
    assert done.returncode != 0 and "row 5" in done.stderr and "multiple of 4" in done.stderr


def test_the_producer_wants_the_demos_columns(programs: Path, jets: Built) -> None:
    done = run(programs / "producer", jets.bundle.path, 20, "--test")
    assert done.returncode == 1
    assert "no column 'pt'" in done.stderr
