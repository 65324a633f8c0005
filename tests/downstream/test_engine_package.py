"""An engine in an installed package of somebody else's: found, built, validated, opened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline
from engines.errors import EngineError
from tests.models.cplusplus import ROOT, execute
from tests.models.project import Built

PACKAGE = Path(__file__).parent / "engine_package"
# Builds a version with the engine of the package, opens it, and asks for an engine without a class.
BUILD = """
import json, sys
import pipeline
from engines import engine
from stages.timing import tile_choice
tile_choice._SECONDS = 0.1
config, work, registry = sys.argv[1:]
bundle = pipeline.run(config, pipeline.Registry(registry), work).bundle
session = pipeline.load(bundle.path, mode="test")
session.bind(session.collection("jets", 3), session.collection("tags", 3))()
try:
    engine("broken")
except pipeline.EngineError as error:
    refused = str(error)
said = {"bundle": str(bundle.path), "tools": bundle.manifest.provenance.tools, "refused": refused}
print(json.dumps({"engine": session.origin.engine, **said}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, folder / "source")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation")
    execute(*pip, "--no-index", "--quiet", "--target", folder / "site", source)
    return folder / "site"


@pytest.fixture(scope="module")
def outcome(
    installed: Path, jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What BUILD prints in a Python with the package installed."""
    engines = ("engines: [aoti, torchscript, exported]", "engines: [mirror]")
    config = jets.project.variant("mirror.yaml", engines)
    database = shutil.copy(empty_database, tmp_path_factory.mktemp("registry"))
    words = (sys.executable, "-c", BUILD, config, jets.project.work, f"sqlite:///{database}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def test_a_version_is_built_and_opened_with_an_engine_of_another_package(
    outcome: dict[str, Any],
) -> None:
    assert (outcome["engine"], outcome["tools"]["mirror-engine"]) == ("mirror", "0.3")


def test_a_version_is_refused_where_its_engine_is_not_installed(outcome: dict[str, Any]) -> None:
    """As in this process."""
    with pytest.raises(EngineError, match="unknown engine 'mirror'"):
        pipeline.load(outcome["bundle"], mode="test")


def test_a_package_without_the_class_is_named(outcome: dict[str, Any]) -> None:
    assert "mirror-engine 0.3" in outcome["refused"]
    assert "mirror_engine:missing" in outcome["refused"]
