"""The documentation works: every snippet runs, and every name in it exists.

Each fence names its language. `sh` and `python` snippets run beside a registry that holds the
demo's model. A comment in front of a fence may say more:

- `<!-- needs: gpu -->`: it runs only where that is available; with `minutes`, nowhere;
- `<!-- tried: FILE::TEST -->`: that test does the same;
- `<!-- file: NAME -->`: it is a file in the folder in which the page's other snippets run;
- `<!-- from: FILE -->`: it is a part of that file of the repository, which is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from pydantic import BaseModel
from torch import Tensor, nn

import pipeline
import soa
import soa.memory
from benchmarks.__main__ import SECTIONS
from pipeline.cli.main import main
from pipeline.config import Config, load_config
from pipeline.config.schema import RowsConfig
from pipeline.deployment.repository import deploy
from registry.bundle import Bundle
from registry.mlflow.mlmodel import fields
from registry.store.registry import Registry
from serving.local.fleet import find_envoy
from serving.local.triton import TritonServer, find_triton
from soa import Collection
from soa.errors import SoaPipelineError
from soa.memory import to_arrow
from soa_pipeline import PACKAGES
from tests.models import served
from tests.models.authorities import certify
from tests.models.project import PASSED, resealed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/README.md"]
RESULTS = ROOT / "benchmarks/RESULTS.md"
API = ROOT / "docs/reference/api.md"
NO_EXAMPLE = {"pipeline.building.run_config.RunResult", "soa.memory.jagged.from_jagged"}
"""The public names without an example of their own."""
SOURCES = "\n".join(
    path.read_text() for name in (*PACKAGES, "tests") for path in ROOT.glob(f"{name}/**/*.py")
)
VARIABLE_OR_ERROR = r"\bPIPELINE_[A-Z_]+\b|\b[A-Z]\w+Error\b"
VARIABLES_AND_ERRORS = set(re.findall(VARIABLE_OR_ERROR, SOURCES))
LANGUAGES = {"sh", "python", "yaml", "dockerfile", "text", "toml", "cpp", "fortran"}
NAME = "jet-tagger"


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str
    marker: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> list[str]:
        return self.value.split(", ") if self.marker == "needs" else []

    @property
    def commands(self) -> list[list[str]]:
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    fence = r"(?:^<!-- (needs|tried|file|from): (.+?) -->\n)?^```(\w*)\n(.*?)^```$"
    for match in re.finditer(fence, text, re.DOTALL | re.MULTILINE):
        marker, value, language, inside = match.groups("")
        line = text.count("\n", 0, match.start(4))
        yield Snippet(page, line, language, inside, marker, value)


SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]


def installed(find: Callable[[], object]) -> bool:
    """Whether `find` finds its program on this host."""
    try:
        find()
    except SoaPipelineError:
        return False
    return True


NEEDS: dict[str, Callable[[], bool]] = {
    "gpu": torch.cuda.is_available,
    "triton": lambda: installed(find_triton),
    "envoy": lambda: installed(find_envoy),
}
"""What a snippet may need, and whether this host has it."""


# -- names and commands in the text --------------------------------------------------------------


def test_each_fence_is_read_as_a_snippet() -> None:
    for page in PAGES:
        assert 2 * len(list(snippets(page))) == page.read_text().count("```"), page


def test_each_fence_names_a_language_that_we_know() -> None:
    assert {snippet.language for snippet in SNIPPETS} == LANGUAGES


def test_each_need_of_a_snippet_is_one_that_we_know() -> None:
    assert {need for snippet in SNIPPETS for need in snippet.needs} == {*NEEDS, "minutes"}


def test_each_test_that_tries_a_snippet_exists() -> None:
    for snippet in (s for s in SNIPPETS if s.marker == "tried"):
        file, _, test = snippet.value.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), snippet


def test_each_snippet_from_a_file_is_in_that_file() -> None:
    for snippet in (s for s in SNIPPETS if s.marker == "from"):
        assert snippet.text in (ROOT / snippet.value).read_text(), snippet


def complaint(words: list[str]) -> str | None:
    """Why a command of ours is wrong, as far as one can say without running it."""
    if words[0] == "make" and f"\n{words[1]}:" not in (ROOT / "Makefile").read_text():
        return "no such target"
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if words[:2] == ["python", "-m"]:
        module = importlib.util.find_spec(words[2])
        if module is None or module.origin is None:
            return "no such module"
        files = Path(module.origin).parent.glob("*.py")
        known = set(re.findall(r'"(--[\w-]+)"', "\n".join(file.read_text() for file in files)))
    elif words[0] == "pipeline":
        command = main.commands.get(words[1])
        if isinstance(command, click.Group) and len(words) > 2:
            command = command.commands.get(words[2])
        if command is None or command.hidden:
            return "no such command"
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    else:
        return None
    return f"no option {min(options - known)}" if options - known else None


every_page = pytest.mark.parametrize(
    "page", [*PAGES, RESULTS], ids=lambda page: str(page.relative_to(ROOT))
)


def inline(page: Path) -> list[str]:
    """The inline code of a page, outside of its snippets."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


@every_page
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
        assert (page.parent / target).exists(), target


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    ours = ("pipeline ", "python -m ", "make ")
    commands = [shlex.split(code) for code in inline(page) if code.startswith(ours)]
    for snippet in snippets(page):
        if snippet.language == "sh":
            commands += snippet.commands
    for words in commands:
        assert complaint(words) is None, (words, complaint(words))


@every_page
def test_files_that_inline_code_names_exist(page: Path) -> None:
    for code in inline(page):
        if re.fullmatch(r"(\w+/)+[\w.-]+\.(py|hpp|json|yaml)", code):
            assert (ROOT / code).exists() or list(ROOT.glob(f"*/{code}")), code


@every_page
def test_variables_and_errors_that_inline_code_names_exist(page: Path) -> None:
    assert set(re.findall(VARIABLE_OR_ERROR, "\n".join(inline(page)))) <= VARIABLES_AND_ERRORS


def test_the_drawing_of_the_layers_is_true() -> None:
    page = ROOT / "docs/concepts/architecture.md"
    (drawing,) = (s.text for s in SNIPPETS if s.page == page)
    for line in drawing.splitlines():
        layer, subpackages = re.split("  +", line)[:2]
        drawn = set(subpackages.split(" · "))
        assert {face.parent.name for face in (ROOT / layer).glob("*/__init__.py")} <= drawn, layer
        for name in drawn:
            assert (ROOT / layer / name).exists(), f"{layer}/{name}"


def test_the_folders_that_the_page_of_the_layers_names_exist() -> None:
    page = ROOT / "docs/concepts/architecture.md"
    for path in re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def configs() -> tuple[str, str]:
    """The two configs on their page: a whole one, and collections that are jagged."""
    whole, jagged = (s.text for s in SNIPPETS if (s.page.name, s.language) == ("config.md", "yaml"))
    return whole, jagged


def load_text(text: str, folder: Path) -> Config:
    for name in ("model.py", "weights.safetensors"):
        (folder / name).touch()
    (folder / "config.yaml").write_text(text)
    return load_config(folder / "config.yaml")


def test_the_config_page_loads_and_names_every_key(tmp_path: Path) -> None:
    text, _ = configs()
    config = load_text(text, tmp_path)
    assert [block.plan.kind for block in config.signature().inputs] == [
        "matrix",
        "matrix",
        "matrix",
        "scalars",
    ]

    def keys(part: Any) -> Iterator[str]:
        if isinstance(part, BaseModel):
            yield from type(part).model_fields
            part = {name: getattr(part, name) for name in type(part).model_fields}
        values = part.values() if isinstance(part, dict) else part
        for value in values if isinstance(part, dict | tuple) else ():
            yield from keys(value)

    for key in {*keys(config), *Config.model_fields}:
        assert re.search(rf"\b{key}:", text), key


def test_the_jagged_collections_of_the_config_page_load(tmp_path: Path) -> None:
    _, jagged = configs()
    other_keys = "name: t\nmodel: {factory: model.py:build}\n"
    other_keys += "outputs: [{name: o, collection: t, columns: [y]}]\n"
    output = "collections:\n  t: {columns: [{name: y, dtype: float32}]}\n"
    config = load_text(other_keys + jagged.replace("collections:\n", output), tmp_path)
    assert config.signature().jagged == {"jets": 16}


def test_the_results_have_the_sections_that_the_benchmarks_write() -> None:
    text = RESULTS.read_text()
    titles = [section.title for section in SECTIONS.values()]
    assert re.findall(r"^## (.+)$", text, re.M) == titles
    assert all(f"`{section.command}`" in text for section in SECTIONS.values())


def test_the_results_are_short() -> None:
    assert len(RESULTS.read_text().split()) <= 3000


def test_the_page_on_installing_names_every_extra() -> None:
    page = (ROOT / "docs/install.md").read_text()
    listed = re.search(r"^Extras: (.*?)\n\n", page, re.DOTALL | re.M)
    project = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"\[project.optional-dependencies\]\n(.*?)\n\[", project, re.DOTALL)
    assert listed is not None
    names = set(re.findall(r"`([\w-]+)`(?: \(| ?,|\.)", listed[1]))
    assert names == set(re.findall(r"^([\w-]+) = \[", table, re.M))


# -- snippets that run ---------------------------------------------------------------------------


class Small(nn.Module):
    """Takes the inputs of the demo and gives its outputs, with almost no work."""

    def forward(self, particles: Tensor, jet: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(jet + particles.sum((1, 2)).unsqueeze(1), dim=1)
        return probabilities, probabilities.argmax(1).to(torch.int32)


class Desk:
    """Versions of jet-tagger in a registry, and a folder for each page.

    jet-tagger/1 is in production, 3 was before it, 4 is in staging. Columns and blocks are the
    demo's; the model is smaller, for one engine and few rows.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        self.done: set[tuple[str, ...]] = set()
        """Commands that take long; each runs only once."""
        demo = load_config(ROOT / "configs/demo.yaml")
        few = {"n": RowsConfig(max=64, typical=(10,))}
        self.signature = demo.model_copy(update={"rows": few}).signature()
        self.layout = self.signature.layouts["jets"]
        bundle = served.make_bundle(folder / "built", NAME, Small(), self.signature)
        shutil.copy(database, folder / "registry.db")
        self.registry = Registry(f"sqlite:///{folder}/registry.db")
        self._register_versions(bundle)
        for number in (3, 1):
            self.registry.promote(self.registry.find(f"{NAME}/{number}"), "production", PASSED)
        self.registry.promote(self.registry.find(f"{NAME}/4"), "staging", PASSED)
        shutil.copy(folder / "registry.db", folder / "first.db")

    def _register_versions(self, bundle: Bundle) -> None:
        for number in range(1, 5):

            def describe(_: Path, manifest: dict[str, Any], number: int = number) -> None:
                manifest["description"] = f"version {number}"
                manifest["provenance"]["config"] = {"engines": ["exported"]}

            self.registry.register(resealed(bundle, self.folder / f"v{number}", describe))

    def page(self, page: Path) -> Path:
        """The page's working folder; its snippets run there one after another."""
        folder = self.folder / page.relative_to(ROOT).with_suffix("")
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        for name in ("configs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        for snippet in SNIPPETS:
            if snippet.page == page and snippet.marker == "file":
                (folder / snippet.value).write_text(snippet.text)
        jets = pa.Table.from_batches([to_arrow(Collection(self.layout, 40))])
        pq.write_table(jets, folder / "jets.parquet")
        (folder / "policy.yaml").write_text("max_slowdown: 1000\n")
        (folder / "site.yaml").write_text("local: {devices: [cpu]}\n")
        certify(folder, "release")
        root = certify(folder, "root", authority=True)
        office = certify(folder, "office", root, authority=True)
        certify(folder, "ada", office)
        for name in ("root", "office", "ada"):
            (folder / f"{name}.crt.pem").rename(folder / f"{name}.pem")
        return folder

    def names(self, text: str) -> dict[str, Any]:
        """The names that the pages use without defining them.

        A session is loaded only if `text` uses one: that takes as long as everything else in most
        snippets.
        """
        names: dict[str, Any] = {"pipeline": pipeline, "Path": Path}
        if re.search(r"\b(n|memory|(session|binding|event)s?|(jets|tags)2?)\b", text):
            names |= self._names_of_a_session()
        return names

    def _names_of_a_session(self) -> dict[str, Any]:
        session = pipeline.load(f"{NAME}@production")
        layout, n = session.layout("jets"), 40
        memory = torch.zeros(layout.nbytes(n) + 128, dtype=torch.uint8)
        start = -memory.data_ptr() % 128
        jets, jets2 = session.collection("jets", n), session.collection("jets", n)
        tags, tags2 = session.collection("tags", n), session.collection("tags", n)
        return {
            "session": session,
            "sessions": [session],
            "n": n,
            "memory": memory[start : start + layout.nbytes(n)],
            "jets": jets,
            "tags": tags,
            "jets2": jets2,
            "tags2": tags2,
            "binding": session.bind(jets, tags),
            "bindings": [session.bind(jets, tags), session.bind(jets2, tags2)],
            "events": [(jets, tags), (jets2, tags2)],
        }


@pytest.fixture(scope="module")
def desk(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("docs"), empty_database)


@pytest.fixture(scope="module")
def triton(desk: Desk) -> Iterator[str]:
    """The address of a server of jet-tagger/1."""
    deploy(desk.registry, f"{NAME}/1", desk.folder / "served")
    with TritonServer(desk.folder / "served") as server:
        yield server.url


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIPELINE_ARTIFACTS", "PIPELINE_TRUSTED_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIPELINE_SITE", "site.yaml")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    scripts = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")


def runnable(snippet: Snippet) -> bool:
    covered = snippet.marker in ("tried", "file", "from")
    quick = "minutes" not in snippet.needs
    return snippet.language in ("sh", "python") and quick and not covered


@pytest.mark.parametrize("snippet", [*filter(runnable, SNIPPETS)], ids=str)
def test_a_snippet_runs(
    desk: Desk,
    snippet: Snippet,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if missing := [need for need in snippet.needs if not NEEDS[need]()]:
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.chdir(desk.page(snippet.page))
    monkeypatch.setenv("PIPELINE_REGISTRY", desk.registry.uri)
    if snippet.language == "sh":
        run_shell(desk, snippet)
    else:
        run_python(desk, snippet, request)


def run_shell(desk: Desk, snippet: Snippet) -> None:
    if "--key" in snippet.text:
        pytest.importorskip("model_signing", reason="signatures take the extra `sign`")
    for words in snippet.commands:
        run_command(desk, words)


def run_python(desk: Desk, snippet: Snippet, request: pytest.FixtureRequest) -> None:
    text = snippet.text
    names = desk.names(text)
    if "triton://" in text:
        text = text.replace("triton://host:8001", request.getfixturevalue("triton"))
        desk.registry.promote(desk.registry.find(f"{NAME}/1"), "production", PASSED)
    if "mlflow" in text:
        pytest.importorskip("pandas", reason="mlflow.pyfunc comes with the extra `mlflow`")
        text = re.sub(r"http://mlflow[\w.:]+", desk.registry.uri, text)
        inputs = fields(desk.signature, "input")
        names["jets"] = {field.name: np.zeros(field.shape(5), np.float32) for field in inputs}
    with warnings.catch_warnings():
        if "mlflow" in text:
            warnings.simplefilter("ignore")  # MLflow 3.17 warns about its own type hints
        try:
            exec(compile(text, str(snippet), "exec"), names)
        finally:
            if "mlflow" in names:
                names["mlflow"].set_tracking_uri(None)


def public_names() -> Iterator[tuple[str, object]]:
    """The names on the API page, of classes, functions and one module, with their objects."""
    for name in re.findall(r"^::: ([\w.]+)$", API.read_text(), re.M):
        module, _, last = name.rpartition(".")
        member = getattr(importlib.import_module(module), last, None)
        yield name, member or importlib.import_module(name)


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name, member in public_names():
        yield from (test for test in finder.find(member, name, globs={}) if test.examples)


EXAMPLES = list(examples())


def test_the_names_that_users_touch_have_an_example() -> None:
    for name, _ in public_names():
        own = [test for test in EXAMPLES if f"{test.name}.".startswith(f"{name}.")]
        assert own or name in NO_EXAMPLE, name
    assert len(EXAMPLES) >= 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_it_says(
    desk: Desk,
    example: doctest.DocTest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Each example has a registry of its own, as it was before any page changed it."""
    shutil.copytree(desk.page(API), tmp_path, symlinks=True, dirs_exist_ok=True)
    shutil.copy(desk.folder / "first.db", tmp_path / "registry.db")
    rows: dict[str, Any] = {
        column.name: np.ones((40, *column.shape), np.float32) for column in desk.layout.columns
    }
    np.savez(tmp_path / "jets.npz", **rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_REGISTRY", f"sqlite:///{tmp_path}/registry.db")
    for step in example.examples:
        if "triton://" in step.source:
            if not NEEDS["triton"]():
                pytest.skip("needs triton")
            url = request.getfixturevalue("triton")
            step.source = step.source.replace("triton://host:8001", url)
    names = {name: getattr(module, name) for module in (soa, soa.memory) for name in module.__all__}
    source = "".join(step.source for step in example.examples)
    example.globs = {**names, **desk.names(source), "np": np, "registry": Registry()}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failures = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):
        result = runner.run(example, out=failures.write)
    assert result.failed == 0, failures.getvalue()


def run_command(desk: Desk, words: list[str]) -> None:
    """Run our commands and scripts in this process, which is quick; others in a new one."""
    words = [word.replace("URI", f"sqlite:///{desk.folder}/other.db") for word in words]
    if words[0] == "python" and words[1].endswith(".py"):
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        return
    if words[0] != "pipeline":
        subprocess.run(words, check=True, timeout=60, capture_output=True)
        return
    if words[1] == "serve" and "--check" not in words:  # without it, serve runs until it is stopped
        words.append("--check")
    if words[1] == "run" and "--quick" not in words:  # test_real_models.py runs it, in a minute
        load_config(words[2])
        return
    if words[1] in ("build", "serve"):
        if tuple(words) in desk.done:
            return
        desk.done.add(tuple(words))
    result = CliRunner().invoke(main, words[1:], input="y\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, (words, result.output)
