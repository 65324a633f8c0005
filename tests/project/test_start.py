"""Which modules a command or a load imports; each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.promotion import pull
from registry import Decision, Registry
from tests.models import project
from tests.models.project import Built
from tests.models.shared import made_once

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "mlflow", "onnxruntime", "pandas", "sympy", "sqlalchemy", "awkward")
COLUMNS = "abcdef"

PROCESS = """
import atexit, runpy, sys
def note_modules():
    open(sys.argv[0], "w").write(" ".join(sys.modules))
del sys.argv[0]
atexit.register(note_modules)
{run}
"""
AS_MODULE = "import runpy; runpy.run_module('pipeline', run_name='__main__')"
LOAD = """
import pipeline
session = pipeline.load("jets@production", lookup=sys.argv[1])
assert session.origin.engine == "lanes"
jets, tags = session.collection("jets", 3), session.collection("tags", 3)
session.run(jets, tags)
assert abs(float(sum(tags[c][0] for c in "xyz")) - 1) < 1e-5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Path:
    """A folder with jets/1 in production, whose one artifact is of `lanes`, and a file of rows."""

    def make(folder: Path) -> None:
        engines = ("[aoti, torchscript, exported]", "[lanes]")
        project.build(project.write_project(folder, config=project.CONFIG.replace(*engines)))

    built: Built = project.copied(
        made_once(tmp_path_factory, "lanes-jets", make), tmp_path_factory.mktemp("start")
    )
    folder = built.project.folder
    registry = Registry(built.project.registry)
    decision = Decision("none", True, "", "", "for a test")
    registry.promote(registry.find("jets/1"), "production", [decision])
    rows = np.random.default_rng(1).normal(size=(50, 6)).astype("float32")
    pq.write_table(
        pa.table(dict(zip(COLUMNS, rows.T.copy(), strict=True))), folder / "rows.parquet"
    )
    imported_modules(
        folder, AS_MODULE, "apply", "jets@production", "rows.parquet", "--out", "scored"
    )
    imported_modules(folder, LOAD, "prefer-cache")
    return folder


def imported_modules(folder: Path, run: str, *arguments: str, code: int = 0) -> set[str]:
    """The modules that were imported once the process ends."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'packages' / 'soa-runtime'}",
        "PIPELINE_REGISTRY": f"sqlite:///{folder}/store/registry.db",
        "PIPELINE_CACHE": str(folder / "cache"),
    }
    noted = folder / "modules"
    process = subprocess.run(
        [sys.executable, "-c", PROCESS.format(run=run), str(noted), *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert process.returncode == code, process.stderr
    return set(noted.read_text().split())


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        ("--help", ("numpy", "pydantic", "rich")),
        ("ls", ("numpy",)),
        ("ls jets", ("numpy",)),
        ("ls --json", ("numpy", "rich")),
        ("show jets/1", ("pyarrow",)),
        ("show jets@production --json", ("pyarrow",)),
        ("history jets", ("numpy",)),
        ("policy", ("numpy",)),
        ("cache", ("numpy",)),
        ("explain scored/rows.parquet", ()),
        ("apply jets@production rows.parquet --out again --force", ()),
    ],
)
def test_a_command_imports_no_heavy_package(
    place: Path, command: str, unneeded: tuple[str, ...]
) -> None:
    assert not imported_modules(place, AS_MODULE, *command.split()) & {*HEAVY, *unneeded}


@pytest.mark.parametrize("command", ["promote jet/1 --to staging", "bench jet/1", "validate jet/1"])
def test_a_wrong_name_is_refused_without_heavy_imports(place: Path, command: str) -> None:
    assert not imported_modules(place, AS_MODULE, *command.split(), code=1) & {*HEAVY}


@pytest.mark.parametrize("lookup", ["fresh", "prefer-cache", "offline"])
def test_a_load_imports_no_heavy_package(place: Path, lookup: str) -> None:
    assert not imported_modules(place, LOAD, lookup) & {
        *HEAVY,
        "pyarrow",
        "rich",
        "click",
        "pydantic",
    }


LOAD_FOLDER = """
import soa_runtime
session = soa_runtime.load(sys.argv[1])
jets, tags = session.collection("jets", 3), session.collection("tags", 3)
session.run(jets, tags)
"""


def test_a_worker_with_a_folder_imports_almost_nothing(place: Path) -> None:
    """Only NumPy and lazy_loader, of the packages of others."""
    pull(Registry(f"sqlite:///{place}/store/registry.db"), "jets@production", place / "pulled")
    unneeded = {*HEAVY, "pydantic", "safetensors", "cryptography", "html", "difflib", "uuid"}
    assert not imported_modules(place, LOAD_FOLDER, str(place / "pulled")) & unneeded


def test_an_imported_module_is_noticed(place: Path) -> None:
    """Else the tests above would pass whatever is imported."""
    assert "numpy" in imported_modules(place, "import pipeline, numpy")
