"""The cases of CMSSW's tests, by Python and C++; table.py prints them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import pipeline
from engines import engine
from registry.errors import BundleError
from runtime.session.session import Session
from soa import Collection
from stages.errors import ReferenceDataError
from tests.conformance.cases import cases
from tests.conformance.running import Ran, made, program, ran
from tests.models import cplusplus
from tests.models.building import build
from tests.models.shared import made_once

CASES = cases()


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = cplusplus.installed(tmp_path_factory)
    folder = made_once(tmp_path_factory, "conformance", lambda folder: program(prefix, folder))
    return folder / "score"


LONG = {"images"}
"""g++ takes seconds for its many layers. tests/engines/lanes has a convolution of each kind."""


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The artifacts of three cases, which differ in the number of rows alone."""
    return made(CASES["interface"], tmp_path_factory.mktemp("interface"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES],
)
def answers(
    request: pytest.FixtureRequest,
    score: Path,
    interface: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Ran:
    case = CASES[request.param]
    files = interface if case.source == CASES["interface"].source else None
    return ran(case, score, tmp_path_factory.mktemp("case"), files)


def test_the_answers_are_those_that_cmssw_asserts(answers: Ran) -> None:
    assert answers.python and answers.cpp
    for columns in (*answers.python.values(), answers.cpp):
        assert answers.case.right(columns)


def test_cpp_has_the_bits_of_python(answers: Ran) -> None:
    """Of the first engine, which C++ calls ten times in a row."""
    by_python = answers.python[answers.case.engines[0]]
    for name, columns in by_python.items():
        for column, values in columns.items():
            np.testing.assert_array_equal(answers.cpp[name][column], values)


def test_eight_threads_of_one_model_get_its_answers(tmp_path: Path) -> None:
    """testTorchExecutionControlGuard.cc: ten calls each, exactly 0.5."""
    case = CASES["portable, 32"]
    lanes = engine("lanes").open(made(case, tmp_path)["lanes"], torch.device("cpu"))
    session = Session(case.signature, lanes)

    def work(seed: int) -> bool:
        inputs, answers = session.collection("given", 32), session.collection("found0", 32)
        for k in range(3):
            inputs[f"x{k}"][...] = seed
        binding = session.bind(inputs, answers)
        for _ in range(10):
            binding()
        return bool((answers["y0"] == 0.5).all() and (answers["y1"] == 0.5).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_python_refuses_a_bad_path(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        pipeline.load(tmp_path / "none", mode="test")


def test_cpp_refuses_a_bad_path(tmp_path: Path, score: Path) -> None:
    done = cplusplus.run(score, tmp_path / "none", tmp_path / "file")
    assert done.returncode == 1 and str(tmp_path / "none") in done.stderr


def test_a_model_whose_answers_never_change_is_refused(tmp_path: Path) -> None:
    """CMSSW proves such models with exact numbers; from these, no wrong memory could be seen."""
    case = CASES["classifier"]
    with pytest.raises(ReferenceDataError):
        build(case.model(), case.signature, tmp_path, ("lanes",))


@pytest.mark.parametrize("at", [-5, 4])
def test_a_row_that_is_not_there_is_an_error(at: int) -> None:
    """SoAUnitTests: out of range, in a view of four rows."""
    case = CASES["SoA to torch"]
    event = Collection(case.signature.layouts["given"], 4)
    with pytest.raises(IndexError):
        event["x0"][at]
