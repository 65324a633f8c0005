"""An engine in an installed package of somebody else's: found, built, validated, opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from engines.errors import EngineError
from tests.models.cplusplus import ROOT, execute
from tests.models.project import Built

PACKAGE = Path(__file__).parent / "engine_package"
BUILD = """
import json, sys
import pipeline
from stages.timing import tile_choice
tile_choice._SECONDS = 0.1
config, work, registry = sys.argv[1:]
bundle = pipeline.run(config, pipeline.Registry(registry), work).bundle
session = pipeline.load(bundle.path, mode="test")
session.bind(session.collection("jets", 3), session.collection("tags", 3))()
print(json.dumps([session.origin.engine, str(bundle.path), bundle.manifest.provenance.tools]))
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
    installed: Path, jets: Built, empty_database: Path, tmp_path: Path
) -> None:
    engines = ("engines: [aoti, torchscript, exported]", "engines: [mirror]")
    config = jets.project.variant("mirror.yaml", engines)
    shutil.copy(empty_database, tmp_path)
    registry = f"sqlite:///{tmp_path / empty_database.name}"
    done = python(installed, "-c", BUILD, config, jets.project.work, registry)
    assert done.returncode == 0, done.stderr
    engine, bundle, tools = json.loads(done.stdout.splitlines()[-1])
    assert (engine, tools["mirror-engine"]) == ("mirror", "0.3")
    with pytest.raises(EngineError, match="unknown engine 'mirror'"):  # it is not installed here
        pipeline.load(bundle, mode="test")


def test_a_package_without_the_class_is_named(installed: Path) -> None:
    text = "from engines import engine; engine('broken')"
    done = python(installed, "-c", text)
    last = done.stderr.splitlines()[-1]
    assert "EngineError" in last and "mirror-engine 0.3" in last and "mirror_engine:missing" in last
