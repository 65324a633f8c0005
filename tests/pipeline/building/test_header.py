"""`pipeline source`: a version's network as a C++ header, sealed, promoted and written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipeline
from engines import Portable, Target, engine
from pipeline.building.header import add_self_test
from registry.store.registry import Registry
from runtime.checked import Tolerance
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column, eigen, scalar
from stages.capture import Capture, capture
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs
from tests.models import project
from tests.models.cplusplus import ROOT
from tests.models.project import Built, answer, cli, refusal

TEST = '#include "{file}"\n#include <cstdio>\nint main() {{ return {name}::self_test(); }}\n'


def passes(header: Path, name: str) -> bool:
    """Compiles a program with a written header, and runs the self-test of its namespace `name`."""
    folder = header.parent
    (folder / "main.cpp").write_text(TEST.format(file=header.name, name=name))
    command = ["g++", "-std=c++17", "-O0", "-o", folder / "main", folder / "main.cpp"]
    subprocess.run([str(word) for word in command], check=True)
    return subprocess.run([str(folder / "main")], check=False).returncode == 0


@pytest.fixture(scope="module")
def registered(
    jets: Built, lists: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> Registry:
    """jets/1, and jets/2, whose columns are jagged."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(empty_database, folder / "registry.db")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    registry.register(jets.bundle)
    registry.register(lists.bundle)
    return registry


@pytest.mark.parametrize("ref", ["jets/1", "jets/2"], ids=["flat", "jagged"])
def test_a_version_becomes_a_header(ref: str, registered: Registry, tmp_path: Path) -> None:
    """It passes its own test, is an annex of the version, and is written again without a build."""
    header, again = tmp_path / "net.h", tmp_path / "again.h"
    options = ("--out", header, "--work", tmp_path / "work")
    written = answer("source", ref, *options, registry=registered)
    assert written["target"] == "source/cpp" and written["self_test_rows"] > 2
    assert passes(header, written["namespace"])
    assert "source/cpp" in answer("show", ref, registry=registered)["annexes"]
    cli("source", ref, "--out", again, "--registry", registered.uri)
    assert again.read_text() == header.read_text()


def test_the_page_compiles(registered: Registry, tmp_path: Path) -> None:
    """The page's C++, with the names of jets/1."""
    header = tmp_path / "jet_tagger.h"
    words = ("source", "jets/1", "--out", header, "--work", tmp_path / "work")
    name = answer(*words, registry=registered)["namespace"]
    page = (ROOT / "docs/howto/cpp.md").read_text()
    code = page.partition("test_the_page_compiles -->\n```cpp\n")[2].partition("```")[0]
    text = code.replace("jet_tagger::", f"{name}::").replace(".p_top", ".x")
    (tmp_path / "main.cpp").write_text(text + "int main() {}\n")
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-fsyntax-only", tmp_path / "main.cpp"]
    subprocess.run([str(word) for word in command], check=True)


def test_a_header_is_promoted_as_any_target_and_no_session_takes_it(
    registered: Registry, jets: Built, tmp_path: Path
) -> None:
    words = ("--out", tmp_path / "net.h", "--work", tmp_path / "work", "--registry", registered.uri)
    cli("source", "jets/1", *words)
    cli("promote", "jets/1", "--to", "production", "--registry", registered.uri)
    with pipeline.load("jets@production", registry=registered.uri) as session:
        assert session.origin is not None and session.origin.target.startswith("cpu/")
    cli("check", "jets/1", "--target", "source/cpp", "--registry", registered.uri)  # it succeeds


@pytest.fixture(scope="module")
def with_header(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Built:
    """A version in production, whose config names this CPU and a header as its targets."""
    written = project.write_project(tmp_path_factory.mktemp("header"))
    written.variant(
        "config.yaml",
        (project.TARGETS, f"targets: [{project.TARGET}, source/cpp]"),
        ("engines: [aoti, torchscript, exported]", "engines: [lanes]"),
    )
    built = project.build(written)
    cli("promote", "jets/1", "--to", "production", "--registry", written.registry)
    return built


def test_a_header_of_the_config_is_validated_but_not_raced(with_header: Built) -> None:
    """However fast it is."""
    targets = with_header.bundle.manifest.targets
    assert targets["source/cpp"].status == "verified"
    assert [record.raced_with for record in targets.values()] == [[], []]


def test_a_session_takes_no_header(with_header: Built) -> None:
    with pipeline.load("jets@production", registry=with_header.project.registry) as session:
        assert session.origin is not None and session.origin.target == project.TARGET


def test_a_server_takes_no_header(with_header: Built, tmp_path: Path) -> None:
    registry = Registry(with_header.project.registry)
    options = ("--out", tmp_path / "served", "--backend", "python")
    deployed = answer("deploy", "jets@production", *options, registry=registry)
    assert deployed["target"] == project.TARGET
    where = ("--target", "source/cpp", "--registry", registry.uri)
    assert "source/cpp" in refusal("deploy", "jets@production", *options, *where)


def test_a_header_of_no_version_is_refused(registered: Registry) -> None:
    assert "no such" in refusal("source", "nothing/1", "--registry", registered.uri)


def test_a_folder_that_a_header_cannot_be_written_into_is_named(
    registered: Registry, tmp_path: Path
) -> None:
    out = tmp_path / "missing" / "net.h"
    message = refusal("source", "jets/1", "--out", out, "--registry", registered.uri)
    assert str(out.parent) in message


# --- columns of every kind ---


TOLERANCES = {"made": Tolerance(1e-5, 1e-5), "above": Tolerance(0.0, 0.0)}


class Kinds(nn.Module):
    """An Eigen matrix, a number that all rows share, float64 and int16 columns."""

    def forward(self, m: Tensor, shared: Tensor, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        scaled = m * shared + x[:, None, None]
        return scaled.transpose(1, 2), m.sum((1, 2)) > count[:, 0].float()


KINDS = Signature.build(
    {
        "hits": Layout(
            [eigen("m", "float32", 2, 3), scalar("int", "float32"), column("x", "float64"),
             column("count", "int16"), column("half", "float16")],
        ),
        "out": Layout([eigen("m", "float32", 3, 2), column("x", "bool")]),
    },
    [
        Block("m", "hits", ("m",)),
        Block("shared", "hits", ("int",)),
        Block("x", "hits", ("x",), dtype="float32", shape=()),
        Block("count", "hits", ("count", "half"), dtype="float32"),
    ],
    [Block("made", "out", ("m",)), Block("above", "out", ("x",), shape=())],
    {"n": RowRange(0, 100)},
)  # fmt: skip


def _captured(model: nn.Module, signature: Signature, folder: Path) -> Capture:
    """The capture of a model on random inputs."""
    (folder / "captured").mkdir()
    model = model.eval().requires_grad_(False)
    return capture(model, signature, random_inputs(signature, 1, {}), folder / "captured")


def _compiled(
    captured: Capture, signature: Signature, language: str, folder: Path
) -> tuple[Session, Path]:
    """A session of the library that includes the header, and the folder of both."""
    out = folder / "out"
    out.mkdir()
    source = Portable(captured.program, None, signature)
    first, *_ = engine("lanes").compile(source, Target("source", language), {}, out)
    return Session(signature, engine("lanes").open(out / first, torch.device("cpu"))), out


def require_self_test(out: Path, session: Session, reference: Path, folder: Path) -> None:
    """Requires that the header in `out` with its self-test on a reference compiles and passes."""
    header = add_self_test((out / "network.h").read_text(), "net", session, reference)
    (folder / "net.h").write_text(header.text)
    assert passes(folder / "net.h", "net")


def test_no_name_of_a_column_is_one_of_the_header(tmp_path: Path) -> None:
    """Names of C++, of the header's own functions and variables, and of macros."""
    inputs = (
        "in", "i", "begin", "test", "made", "differs", "weights", "values", "row", "class",
        "LOOP", "DEVICE", "FAR", "THREAD", "INLINE", "UNROLL", "LANES", "F", "I", "SOA_FN",
    )  # fmt: skip
    outputs = ("out", "wrong", "of", "min", "self_test", "Output")
    signature = Signature.build(
        {"a": Layout([column(name, "float32") for name in inputs]),
         "b": Layout([column(name, "float32") for name in outputs])},
        [Block("x", "a", inputs)],
        [Block("y", "b", outputs)],
        {"n": RowRange(0, 100)},
    )  # fmt: skip
    captured = _captured(nn.Linear(len(inputs), len(outputs)), signature, tmp_path)
    session, out = _compiled(captured, signature, "cpp", tmp_path)
    require_self_test(out, session, captured.reference, tmp_path)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return _captured(Kinds(), KINDS, tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("language", ["cpp", "cuda"])
def test_columns_of_every_kind_are_members_in_a_header(
    language: str, kinds: Capture, tmp_path: Path
) -> None:
    """Names that are C++ keywords or stand twice, components by columns, shared values, 16 bits."""
    session, out = _compiled(kinds, KINDS, language, tmp_path)
    reference = Reference.load(kinds.reference)
    assert validate_session(session, "lanes", reference, TOLERANCES).valid
    text = (out / "network.h").read_text()
    for member in ("float hits_m[6];", "float int_;", "double hits_x;", "uint16_t half;",
                   "bool out_x;"):  # fmt: skip
        assert member in text
    require_self_test(out, session, kinds.reference, tmp_path)
