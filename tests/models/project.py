"""A user's project on disk: model, weights, config; and the `pipeline` command run on it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from engines.target import Target
from pipeline.building import run, run_config
from pipeline.cli.main import main
from pipeline.errors import ReportError
from registry.bundle.bundle import Bundle
from registry.bundle.card import CARD
from registry.bundle.digests import seal
from registry.promotion import Decision
from registry.store.registry import Registry
from runtime.session.session import Session
from soa import Signature
from soa.signature_lines import describe
from stages.timing import tile_choice
from tests.models import mlps

TARGET = str(Target.parse("cpu"))
TARGETS = f"targets: [{TARGET}]"  # `cpu` may stand for two levels
FACTORY = '''

def talkative(hidden: int = 48) -> nn.Module:
    """People print in their factories; standard output still belongs to the command."""
    print("building the model")
    return PointwiseFirst(0, hidden)
'''

CONFIG = """\
name: jets
description: a small tagger
model:
  factory: model.py:talkative
  kwargs: {hidden: 48}
  weights: weights.safetensors
collections:
  jets:
    columns:
      - {name: a, dtype: float32}
      - {name: b, dtype: float32}
      - {name: c, dtype: float32}
      - {name: d, dtype: float32}
      - {name: e, dtype: float32}
      - {name: f, dtype: float32}
  tags:
    columns:
      - {name: x, dtype: float32}
      - {name: y, dtype: float32}
      - {name: z, dtype: float32}
inputs:
  - {name: features, collection: jets, columns: [a, b, c, d, e, f]}
outputs:
  - {name: probabilities, collection: tags, columns: [x, y, z], classifier: true}
rows:
  n: {max: 1000, typical: [1000]}
reference: {many_rows: 2000}
targets: [cpu]
engines: [aoti, torchscript, exported]
compile: {benchmark_s: 0.1}
""".replace("targets: [cpu]", TARGETS)


@dataclass(frozen=True)
class Project:
    """`folder` holds model.py, weights.safetensors and config.yaml."""

    folder: Path
    work: Path
    registry: str

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    def variant(self, name: str, *changes: tuple[str, str]) -> Path:
        """A second config, with pieces of the first one's text replaced."""
        text = self.config.read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = self.folder / name
        path.write_text(text)
        return path

    def run(
        self, config: Path | None = None, registry: str | None = None, page: bool = False
    ) -> dict[str, Any]:
        """The parsed answer of `pipeline run --json`."""
        where = ("--work", self.work, "--registry", registry or self.registry)
        answer: dict[str, Any] = json.loads(
            cli("run", config or self.config, *where, "--json", page=page).stdout
        )
        return answer


@dataclass(frozen=True)
class Built:
    """A project that was run once, and the answer of that run.

    If test processes share it, `project` is this process's own copy, which may run again, but
    `bundle` is shared and must not be changed.
    """

    project: Project
    answer: dict[str, Any]
    bundle: Bundle


class _Stopped(Exception):
    """A step began; `first_step` stops here."""


def first_step(config: Path, work: Path, registry: str) -> str | None:
    """The first step that `pipeline run` would do, without doing it; None if all are done."""

    def stop(name: str, before: float | None) -> NoReturn:
        raise _Stopped(name)

    try:
        run(config, Registry(registry), work, show=stop)
    except _Stopped as stopped:
        return str(stopped)
    return None


def write_project(folder: Path, hidden: int = 48, seed: int = 1, config: str = CONFIG) -> Project:
    """Writes the model, its weights and the config into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(Path(mlps.__file__).read_text() + FACTORY)
    save_file(mlps.PointwiseFirst(seed, hidden).state_dict(), folder / "weights.safetensors")
    text = config.replace("hidden: 48", f"hidden: {hidden}")
    (folder / "config.yaml").write_text(text)
    return project_in(folder)


def project_in(folder: Path) -> Project:
    """The project in a folder, which has its work and its registry there."""
    return Project(folder, folder / "work", f"sqlite:///{folder}/store/registry.db")


def build(project: Project, page: bool = False) -> Built:
    """Runs a project that many tests share.

    Which tile is fastest differs from run to run. Tests edit tiles and what cards say about them,
    so these versions have none, unless they are unbounded.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_choice, "_WORTH", 1e-9)
        answer = project.run(page=page)
    (project.folder / "answer.json").write_text(json.dumps(answer))
    return Built(project, answer, Bundle.open(answer["bundle"]))


def copied(folder: Path, into: Path) -> Built:
    """A copy of the project that `build` made in `folder`, perhaps in another process."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    answer = json.loads((folder / "answer.json").read_text())
    return Built(project_in(into), answer, Bundle.open(answer["bundle"]))


def cli(*arguments: object, code: int = 0, page: bool = False) -> Result:
    """Runs the command in this process; an unexpected exception is raised again.

    Unless `page` is set, `run` skips the version's page, which takes half a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not page:
            patch.setattr(run_config, "publish", _no_page)
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    if "--json" in arguments and code == 0:
        words = [str(argument) for argument in arguments if argument != "registry"]
        checked(words[0], json.loads(result.stdout))
    return result


def _no_page(*_: object) -> NoReturn:
    raise ReportError("this test does not look at it")


def checked(command: str, answer: Any) -> None:
    """Requires the form that docs/answers.schema.json gives for the command's answer."""
    answers_schema().validate({command: answer})


@cache
def answers_schema() -> Any:
    """A validator of docs/answers.schema.json, which has a form for each command."""
    import jsonschema

    schema = json.loads((Path(__file__).parents[2] / "docs" / "answers.schema.json").read_text())
    assert set(schema["properties"]) == main.commands.keys() - {"registry"}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def answer(*arguments: object, registry: Registry, code: int = 0) -> Any:
    """The JSON answer; standard output holds nothing else."""
    return json.loads(cli(*arguments, "--registry", registry.uri, "--json", code=code).stdout)


def refusal(*arguments: object) -> str:
    """The line with which the command refuses, without its code; standard output stays empty."""
    result = cli(*arguments, code=1)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    refusals = [line for line in lines if line.startswith("pipeline: ")]
    assert lines[-1:] == refusals, result.stderr
    text, bracket, code = refusals[0].removeprefix("pipeline: ").rpartition(" [")
    assert bracket and re.fullmatch(r"[a-z-]+\]", code), refusals
    return text


def resealed(bundle: Bundle, folder: Path, edit: Callable[[Path, dict[str, Any]], None]) -> Bundle:
    """A copy of a bundle with other contents, sealed again, as an attacker might forge one.

    `edit` gets the folder and the manifest as JSON data, and may change both.
    """
    shutil.copytree(bundle.path, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(folder, manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    seal(folder)
    return Bundle.open(folder)


def in_tiles(bundle: Bundle, folder: Path, rows: int) -> Bundle:
    """A copy of a bundle whose artifact of aoti runs so many rows at a time."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        candidate = manifest["targets"][TARGET]["candidates"]["aoti"]
        candidate["tile"] = rows
        lines = describe(Signature.from_dict(manifest["signature"]), rows, candidate["windows"])
        (folder / "targets" / TARGET / "aoti" / CARD).write_text(lines)

    return resealed(bundle, folder, edit)


def described(bundle: Bundle, folder: Path, text: str) -> Bundle:
    """A bundle with the same artifacts and another description."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["description"] = text

    return resealed(bundle, folder, edit)


PASSED = (Decision("digests", True, "all match", "all match", "every file has its digest"),)


def require_right(session: Session, engine: str | None = None, n: int = 33) -> None:
    """Requires the answers of `write_project`'s model, computed by an artifact of `engine`."""
    jets, tags = session.collection("jets", n), session.collection("tags", n)
    features = torch.randn(n, 6)
    for i, name in enumerate("abcdef"):
        jets.tensor(name).copy_(features[:, i])
    session.run(jets, tags)
    answers = torch.stack([tags.tensor(name) for name in "xyz"], dim=1)
    expected = mlps.PointwiseFirst(1)(features).detach()
    torch.testing.assert_close(answers, expected, atol=1e-5, rtol=1e-4)
    if engine is not None:
        assert session.origin is not None
        assert (session.origin.target, session.origin.engine) == (TARGET, engine)
