"""The files for Triton's own backends: fed as such a server would, they answer as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.checked import default_tolerance
from runtime.session.session import Session
from serving.errors import ServingError
from serving.native.artifact import Backend, Native, ProgramExecutable, make_native
from serving.wire import FORMS, Array, Form, Wire
from soa import Signature
from stages.reference.answers import Reference
from stages.reports import ValidationReport
from stages.validate import validate_session
from tests.models import served
from tests.models.building import Built, build

ENGINES: dict[Backend, str] = {
    "onnxruntime": "onnxruntime/model.onnx",
    "pytorch": "torchscript/model.ts",
}


@pytest.fixture(scope="module")
def event(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built]:
    """Several row dimensions, and scalars."""
    folder = tmp_path_factory.mktemp("event")
    engines = ("onnxruntime", "torchscript")
    return folder, build(served.Event(), served.EVENT, folder, engines)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Built]:
    """Every dtype and kind of column."""
    folder = tmp_path_factory.mktemp("mixed")
    return folder, build(served.Mixed(), served.MIXED, folder, ("onnxruntime", "torchscript"))


def native(folder: Path, signature: Signature, backend: Backend, form: Form, out: Path) -> Native:
    (artifact,) = folder.rglob(ENGINES[backend])
    return make_native(artifact, backend, signature, Wire.of(signature, form), out)


def validated(made: Built, signature: Signature, form: Form, program: object) -> ValidationReport:
    wire = Wire.of(signature, form)
    session = Session(signature, ProgramExecutable(signature, wire, program))  # type: ignore[arg-type]
    tolerances = {b.name: default_tolerance(b.plan.dtypes[0]) for b in signature.outputs}
    return validate_session(session, form, Reference.load(made.capture.reference), tolerances)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ENGINES)
def test_it_answers_the_reference(
    event: tuple[Path, Built], backend: Backend, form: Form, tmp_path: Path
) -> None:
    folder, made = event
    found = native(folder, served.EVENT, backend, form, tmp_path)
    report = validated(made, served.EVENT, form, found.program)
    assert report.valid, report.reason
    assert list(tmp_path.iterdir()) == [found.file]  # with its weights inside


def test_every_dtype_and_kind_of_column(mixed: tuple[Path, Built], tmp_path: Path) -> None:
    folder, made = mixed
    found = native(folder, served.MIXED, "onnxruntime", "columns", tmp_path)
    report = validated(made, served.MIXED, "columns", found.program)
    assert report.valid, report.reason


def test_a_wrong_answer_is_seen(event: tuple[Path, Built], tmp_path: Path) -> None:
    folder, made = event
    found = native(folder, served.EVENT, "onnxruntime", "rows", tmp_path)

    def off(given: Sequence[Array]) -> Sequence[Array]:
        score, total = found.program(given)
        return [score + np.float32(0.1), total]

    report = validated(made, served.EVENT, "rows", off)
    assert not report.valid


def test_a_dtype_that_pytorchs_backend_does_not_carry(
    mixed: tuple[Path, Built], tmp_path: Path
) -> None:
    with pytest.raises(ServingError, match=r"parts\.hits is uint16, which it does not carry"):
        native(mixed[0], served.MIXED, "pytorch", "columns", tmp_path)
    assert not list(tmp_path.iterdir())
