"""An engine in an installed package of somebody else's: found, built, validated, opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.cplusplus import ROOT, execute
from tests.models.project import Built

PACKAGE = Path(__file__).parent / "engine_package"
_LOAD = """
import sys
import pipeline
session = pipeline.load(sys.argv[1], mode="test")
given = session.collection("jets", 3)
session.bind(given, session.collection("tags", 3))()
print(session.origin.engine)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, folder / "source")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation")
    execute(*pip, "--no-index", "--quiet", "--target", folder / "site", source)
    return folder / "site"


def python(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python with the package installed."""
    paths = os.pathsep.join([str(installed), str(ROOT)])
    command = [sys.executable, *(str(word) for word in words)]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_a_version_is_built_and_opened_with_an_engine_of_another_package(
    installed: Path, jets: Built, tmp_path: Path
) -> None:
    project = jets.project
    config = project.variant(
        "mirror.yaml", ("engines: [aoti, torchscript, exported]", "engines: [mirror]")
    )
    where = ("--work", project.work, "--registry", f"sqlite:///{tmp_path}/registry.db", "--json")
    done = python(installed, "-m", "pipeline", "run", config, *where)
    assert done.returncode == 0, done.stderr
    bundle = json.loads(done.stdout)["bundle"]
    manifest = json.loads((Path(bundle) / "manifest.json").read_text())
    assert manifest["provenance"]["tools"]["mirror-engine"] == "0.3"
    loaded = python(installed, "-c", _LOAD, bundle)
    assert loaded.stdout.split() == ["mirror"], loaded.stderr

    absent = subprocess.run(
        [sys.executable, "-c", _LOAD, bundle], capture_output=True, text=True, check=False
    )
    assert "unknown engine 'mirror'" in absent.stderr


def test_a_package_without_the_class_is_named(installed: Path) -> None:
    text = "from engines import engine; engine('broken')"
    done = python(installed, "-c", text)
    last = done.stderr.splitlines()[-1]
    assert "EngineError" in last and "mirror-engine 0.3" in last and "mirror_engine:missing" in last
