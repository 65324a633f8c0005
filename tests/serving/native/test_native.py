"""The files for Triton's own backends give the reference's answers to a server's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engines import Portable, Target, engine
from registry.bundle.bundle import Bundle
from runtime.checked import default_tolerance
from runtime.session.session import Session
from serving.errors import ServingError
from serving.native.artifact import Backend, ProgramExecutable, make_native
from serving.wire import FORMS, Array, Form, Wire
from soa import Signature
from stages.capture import convention_arguments, example_case
from stages.capture.torchscript import write_torchscript
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs, row_major_inputs
from stages.reports import ValidationReport
from tests.models import served


@pytest.fixture(scope="module")
def event(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A version with several row dimensions, and scalars."""
    return served.shared(tmp_path_factory, "event", served.Event(), served.EVENT)


@pytest.fixture(scope="module")
def event_onnx(tmp_path_factory: pytest.TempPathFactory, event: Bundle) -> Path:
    """The ONNX file of `event`."""
    folder = tmp_path_factory.mktemp("onnx")
    source = Portable(event.file(event.manifest.program), None)
    engine("onnxruntime").compile(source, Target.parse("cpu"), {}, folder)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A version with every dtype and kind of column."""
    return served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED)


@pytest.fixture(scope="module")
def event_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TorchScript file of `event`."""
    folder, signature = tmp_path_factory.mktemp("script"), served.EVENT
    inputs, case = random_inputs(signature, 5, {}), example_case(signature)
    rows = row_major_inputs(signature, inputs, case)
    columns = convention_arguments(signature, inputs, case)
    write_torchscript(served.Event(), signature, rows, columns, "script", folder)
    return folder / "model.ts"


def validated(bundle: Bundle, form: Form, program: object) -> ValidationReport:
    """The validation of a program that takes a server's arrays."""
    signature = Signature.from_dict(bundle.manifest.signature)
    wire = Wire.of(signature, form)
    session = Session(signature, ProgramExecutable(signature, wire, program))  # type: ignore[arg-type]
    tolerances = {
        bound.name: default_tolerance(bound.plan.dtypes[0]) for bound in signature.outputs
    }
    reference = Reference.load(bundle.file(bundle.manifest.reference))
    return validate_session(session, form, reference, tolerances)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch"])
def test_a_native_file_gives_the_references_answers(
    event: Bundle, event_onnx: Path, event_script: Path, backend: Backend, form: Form,
    tmp_path: Path,
) -> None:  # fmt: skip
    artifact = event_script if backend == "pytorch" else event_onnx
    native = make_native(artifact, backend, served.EVENT, Wire.of(served.EVENT, form), tmp_path)
    report = validated(event, form, native.program)
    assert report.valid, report.reason
    assert list(tmp_path.iterdir()) == [native.file]  # it includes its weights


def test_every_dtype_and_kind_of_column_is_answered(mixed: Bundle, tmp_path: Path) -> None:
    source = Portable(mixed.file(mixed.manifest.program), None)
    engine("onnxruntime").compile(source, Target.parse("cpu"), {}, tmp_path)
    (tmp_path / "out").mkdir()
    artifact, wire = tmp_path / "model.onnx", Wire.of(served.MIXED)
    native = make_native(artifact, "onnxruntime", served.MIXED, wire, tmp_path / "out")
    report = validated(mixed, "columns", native.program)
    assert report.valid, report.reason


def test_a_wrong_answer_is_not_valid(event: Bundle, event_onnx: Path, tmp_path: Path) -> None:
    wire = Wire.of(served.EVENT, "rows")
    native = make_native(event_onnx, "onnxruntime", served.EVENT, wire, tmp_path)

    def off(arrays: Sequence[Array]) -> Sequence[Array]:
        score, total = native.program(arrays)
        return [score + np.float32(0.1), total]

    assert not validated(event, "rows", off).valid


def test_a_dtype_that_pytorchs_backend_does_not_carry_is_refused(
    event_script: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServingError, match=r"parts\.hits is uint16, which it does not support"):
        make_native(event_script, "pytorch", served.MIXED, Wire.of(served.MIXED), tmp_path)
    assert not list(tmp_path.iterdir())
