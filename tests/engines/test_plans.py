"""Every kind of block, as input and as output, all in one compiled signature, in every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runtime.checked import Tolerance
from soa.dtypes import DTYPES
from soa.memory import read_block
from stages.judging.validate import validate_session
from stages.reference.answers import Reference
from tests.models import all_dtypes, detector
from tests.models.building import ENGINES, Built, build
from tests.models.signatures import Problem, problems
from tests.soa.strategies import ROWS, values_of

EXACT = Tolerance(0.0, 0.0)
# Engines for a model with two row dimensions.
SEVERAL = tuple(name for name in ENGINES if name != "lanes")
SLOW = "onnxruntime"
"""Its export takes as long as all other engines together; tests/engines/onnx has most of this."""
Builds = Callable[[str], Built]
"""The model as built for an engine, and for others if that takes no longer."""


def engines_of(names: tuple[str, ...]) -> list[Any]:
    """The parameters of a test for each of these engines; that of the slow one is long."""
    return [pytest.param(name, marks=pytest.mark.long) if name == SLOW else name for name in names]


@pytest.fixture(scope="module")
def every_plan(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    signature = detector.signature()
    inputs = {
        name: values_of(signature.layouts[name], signature.ranges[signature.rows_of[name]].max, 3)
        for name in signature.input_collections
    }

    @cache
    def built(engines: tuple[str, ...]) -> Built:
        folder = tmp_path_factory.mktemp("every_plan")
        return build(detector.Detector(), signature, folder, engines, inputs)

    return lambda name: built(together(name, SEVERAL))


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    signature = all_dtypes.signature()
    inputs = {"every": values_of(all_dtypes.EVERY, 100, 3)}

    @cache
    def built(engines: tuple[str, ...]) -> Built:
        folder = tmp_path_factory.mktemp("every_dtype")
        return build(all_dtypes.AllDtypes(), signature, folder, engines, inputs)

    return lambda name: built(together(name, ENGINES))


def together(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The engines among `names` for which a model is built when the engine `name` needs it."""
    return (SLOW,) if name == SLOW else tuple(other for other in names if other != SLOW)


def test_the_signature_holds_every_plan() -> None:
    signature = detector.signature()
    for blocks in (signature.inputs, signature.outputs):
        assert {block.plan.kind for block in blocks} == {"matrix", "columns", "scalars"}
    assert signature.dims == ("n", "m")


@pytest.mark.parametrize("name", engines_of(SEVERAL))
def test_every_plan_gives_the_models_own_bits(every_plan: Builds, name: str) -> None:
    built = every_plan(name)
    reference = Reference.load(built.capture.reference)
    exact = {b.name: EXACT for b in built.signature.outputs}
    rows_only = replace(reference, edges=())  # means of other values may be summed otherwise
    report = validate_session(built.session(name), name, rows_only, exact)
    assert report.reason is None
    assert report.valid
    assert {case.rows["n"] for case in report.cases} >= {0, 1, 2, 31, 32, 33, 100}
    assert {case.rows["m"] for case in report.cases} >= {0, 1, 2, 31, 32, 33, 70}


@pytest.mark.parametrize("name", engines_of(ENGINES))
def test_every_dtype_in_and_out_passes_validation(every_dtype: Builds, name: str) -> None:
    built = every_dtype(name)
    reference = Reference.load(built.capture.reference)
    reference = replace(reference, edges=())  # its sums are rounded
    exact = {b.name: EXACT for b in built.signature.outputs}
    report = validate_session(built.session(name), name, reference, exact)
    assert report.reason is None
    assert report.valid


@pytest.mark.parametrize("name", engines_of(ENGINES))
def test_every_dtype_in_and_out_read_column_by_column(every_dtype: Builds, name: str) -> None:
    """Without the code with which validation reads and writes blocks."""
    built = every_dtype(name)
    inputs, written = built.collections({"n": 33})
    built.session(name).run(inputs, written)
    every = inputs["every"]
    blocks = [torch.stack([every.tensor(dtype).float() for dtype in DTYPES], dim=1)]
    blocks += [every.tensor(f"two_{dtype}").float() for dtype in DTYPES]
    outputs = [bound.name for bound in built.signature.outputs]
    expected = dict(zip(outputs, built.model(*blocks), strict=True))
    answers = written["written"]
    for dtype in DTYPES:
        matrix = answers.tensor(f"mat_{dtype}")
        assert torch.equal(matrix, expected[f"out_{dtype}"].to(matrix.dtype)), dtype
    for k, dtype in enumerate(all_dtypes.FLOATS):
        assert torch.equal(answers.tensor(dtype).float(), expected["floats"][:, k]), dtype
    for dtype in ("bool", *all_dtypes.INTEGERS):
        for k in range(2):
            wanted = expected[f"loose_{dtype}"][:, k].long()
            assert torch.equal(written["loose"].span(dtype, k).tensor().long(), wanted), dtype


@settings(
    max_examples=settings().max_examples // 10,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(problem=problems(), data=st.data())
def test_random_signatures_give_the_models_own_bits(
    tmp_path_factory: pytest.TempPathFactory, problem: Problem, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("random")
    built = build(
        problem.model, problem.signature, folder, ("exported",), problem.inputs, route="none"
    )
    sizes = sorted({problem.n, data.draw(ROWS, label="rows")})
    inputs, written = built.collections({"n": sizes[-1]}, problem.spare)
    binding = built.session("exported").bind(inputs, written)
    for n in sizes:
        binding(n)
        expected = replace(problem, n=n).expected()
        for bound, wanted in zip(problem.signature.outputs, expected, strict=True):
            answer = read_block(bound, written["out"].rows(n))
            assert torch.equal(answer, wanted.to(answer.dtype)), bound.block
