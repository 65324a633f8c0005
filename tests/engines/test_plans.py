"""Every kind of block, as input and as output, all in one compiled signature, in every engine."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.fixture(scope="module")
def every_plan(tmp_path_factory: pytest.TempPathFactory) -> Built:
    signature = detector.signature()
    inputs = {
        name: values_of(signature.layouts[name], signature.ranges[signature.rows_of[name]].max, 3)
        for name in signature.input_collections
    }
    folder = tmp_path_factory.mktemp("every_plan")
    return build(detector.Detector(), signature, folder, SEVERAL, inputs)


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Built:
    signature = all_dtypes.signature()
    inputs = {"every": values_of(all_dtypes.EVERY, 100, 3)}
    folder = tmp_path_factory.mktemp("every_dtype")
    return build(all_dtypes.AllDtypes(), signature, folder, NAMES, inputs)


def test_the_signature_holds_every_plan() -> None:
    signature = detector.signature()
    for blocks in (signature.inputs, signature.outputs):
        assert {block.plan.kind for block in blocks} == {"matrix", "columns", "scalars"}
    assert signature.dims == ("n", "m")


@pytest.mark.parametrize("name", SEVERAL)
def test_every_plan_gives_the_models_own_bits(every_plan: Built, name: str) -> None:
    reference = Reference.load(every_plan.capture.reference)
    exact = {b.name: EXACT for b in every_plan.signature.outputs}
    rows_only = replace(reference, edges=())  # means of other values may be summed otherwise
    report = validate_session(every_plan.session(name), name, rows_only, exact)
    assert report.reason is None
    assert report.valid
    assert {case.rows["n"] for case in report.cases} >= {0, 1, 2, 31, 32, 33, 100}
    assert {case.rows["m"] for case in report.cases} >= {0, 1, 2, 31, 32, 33, 70}


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_in_and_out(every_dtype: Built, name: str) -> None:
    reference = Reference.load(every_dtype.capture.reference)
    reference = replace(reference, edges=())  # its sums are rounded
    exact = {b.name: EXACT for b in every_dtype.signature.outputs}
    report = validate_session(every_dtype.session(name), name, reference, exact)
    assert report.reason is None
    assert report.valid

    # Once more, without the code with which validation reads blocks.
    given, written = every_dtype.collections({"n": 33})
    every_dtype.session(name).run(given, written)
    every = given["every"]
    blocks = [torch.stack([every.tensor(d).float() for d in DTYPES], dim=1)]
    blocks += [every.tensor(f"two_{d}").float() for d in DTYPES]
    expected = dict(
        zip(
            [b.name for b in every_dtype.signature.outputs],
            every_dtype.model(*blocks),
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
