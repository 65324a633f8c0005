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
NAMES = ENGINES
# Engines for a model with two row dimensions.
SEVERAL = tuple(name for name in ENGINES if name != "lanes")


SLOW = "onnxruntime"
"""Its export takes as long as all other engines together; tests/engines/onnx has most of this."""
Builds = Callable[[str], Built]
"""The model as built for an engine, and for others if that takes no longer."""


def engines_of(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name == SLOW)) for name in names]


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

    return lambda name: built(together(name, NAMES))


def together(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return (SLOW,) if name == SLOW else tuple(each for each in names if each != SLOW)


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


@pytest.mark.parametrize("name", engines_of(NAMES))
def test_every_dtype_in_and_out(every_dtype: Builds, name: str) -> None:
    built = every_dtype(name)
    reference = Reference.load(built.capture.reference)
    reference = replace(reference, edges=())  # its sums are rounded
    exact = {b.name: EXACT for b in built.signature.outputs}
    report = validate_session(built.session(name), name, reference, exact)
    assert report.reason is None
    assert report.valid

    # Once more, without the code with which validation reads blocks.
    given, written = built.collections({"n": 33})
    built.session(name).run(given, written)
    every = given["every"]
    blocks = [torch.stack([every.tensor(d).float() for d in DTYPES], dim=1)]
    blocks += [every.tensor(f"two_{d}").float() for d in DTYPES]
    expected = dict(
        zip(
            [b.name for b in built.signature.outputs],
            built.model(*blocks),
            strict=True,
        )
    )
    found = written["written"]
    for d in DTYPES:
        assert torch.equal(
            found.tensor(f"mat_{d}"), expected[f"out_{d}"].to(found.tensor(f"mat_{d}").dtype)
        ), d
    for k, d in enumerate(all_dtypes.FLOATS):
        assert torch.equal(found.tensor(d).float(), expected["floats"][:, k]), d
    for d in ("bool", *all_dtypes.INTEGERS):
        for k in range(2):
            value = expected[f"loose_{d}"][:, k].long()
            assert torch.equal(written["loose"].span(d, k).tensor().long(), value), d


@settings(
    max_examples=settings().max_examples // 10,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(problem=problems(), data=st.data())
def test_random_signatures_as_exported_programs(
    tmp_path_factory: pytest.TempPathFactory, problem: Problem, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("random")
    built = build(
        problem.model, problem.signature, folder, ("exported",), problem.inputs, route="none"
    )
    binding_rows = sorted({problem.n, data.draw(ROWS, label="rows")})
    session = built.session("exported")
    given_, written = built.collections({"n": binding_rows[-1]}, problem.spare)
    binding = session.bind(given_, written)
    for n in binding_rows:
        binding(n)
        expected = replace(problem, n=n).expected()
        for bound, value in zip(problem.signature.outputs, expected, strict=True):
            found = read_block(bound, written["out"].rows(n))
            assert torch.equal(found, value.to(found.dtype)), bound.block
