"""Staging gives a session's answers by way of memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.checked.poison import make_poisoned, same_bytes, wrote_outside
from runtime.devices.staging import Staging
from runtime.errors import BindError
from runtime.session.session import Session
from soa import Collection
from stages.reference.answers import Arrays, random_inputs
from tests.models import detector, rogues
from tests.models.building import mlp_signature, reference_collections

SIGNATURE = detector.signature()


@pytest.fixture(scope="module")
def inputs() -> Arrays:
    return random_inputs(SIGNATURE, 1, {})


def opened(device: str) -> Session:
    """A session with all plans, columns and storages, two row dimensions, scalar outputs."""
    executable = rogues.uncompiled(detector.Detector(), SIGNATURE, device)
    return Session(SIGNATURE, executable, device)


def run_on_its_device(
    session: Session, inputs: dict[str, Collection], outputs: dict[str, Collection]
) -> dict[str, Collection]:
    """The outputs of a direct run, on the session's device."""
    if session.device == "cpu":
        session.run(inputs, outputs)
        return outputs
    moved = {name: item.to(session.device) for name, item in {**inputs, **outputs}.items()}
    answers = {name: moved[name] for name in outputs}
    session.run({name: moved[name] for name in inputs}, answers)
    return answers


def check(session: Session, inputs: Arrays, device: str) -> None:
    """Checks that staging between `device` and the session's gives the answers of a direct run.

    One `Staging` runs cases of several sizes, larger and smaller than the ones before.
    """
    staging = Staging(session)
    for rows in ((5, 3), (1, 1), (33, 40), (2, 7)):
        case = dict(zip(SIGNATURE.dims, rows, strict=True))
        given, outputs = reference_collections(SIGNATURE, inputs, case)
        expected = run_on_its_device(session, given, outputs)
        staged = poisoned_outputs(given, case, device)
        before = {name: item.to(item.device) for name, item in {**given, **staged}.items()}
        staging.run({name: item.to(device) for name, item in given.items()}, staged)
        for name, collection in staged.items():
            assert not wrote_outside(SIGNATURE, name, before[name], collection), (name, case)
        require_equal_outputs(staged, expected, case)
        for name, collection in given.items():
            assert name in staged or same_bytes(before[name], collection), (name, case)


def poisoned_outputs(
    inputs: dict[str, Collection], case: dict[str, int], device: str
) -> dict[str, Collection]:
    """Outputs with memory for three more rows; a collection that is an input too is that one."""
    outputs: dict[str, Collection] = {}
    for name in SIGNATURE.output_collections:
        if name in inputs:
            outputs[name] = inputs[name]
        else:
            n, layout = case[SIGNATURE.rows_of[name]], SIGNATURE.layouts[name]
            outputs[name] = make_poisoned(layout, n, n + 3, 0xFF, torch.device(device))
    return outputs


def require_equal_outputs(
    outputs: dict[str, Collection], expected: dict[str, Collection], case: dict[str, int]
) -> None:
    """Compares the rows in use of all output columns."""
    for bound in SIGNATURE.outputs:
        name = bound.block.collection
        rows = 1 if bound.plan.kind == "scalars" else case[bound.rows]
        for column, component in bound.plan.components:
            assert torch.equal(
                outputs[name].span(column, component).tensor()[:rows].cpu(),
                expected[name].span(column, component).tensor()[:rows].cpu(),
            ), (column, case)


def test_staging_gives_the_answers_of_a_direct_run(inputs: Arrays) -> None:
    check(opened("cpu"), inputs, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize(("data", "model"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_staging_between_host_and_gpu_gives_the_answers_of_a_direct_run(
    inputs: Arrays, data: str, model: str
) -> None:
    check(opened(model), inputs, data)


@pytest.mark.parametrize(
    ("jets", "tags", "message"),
    [(11, 11, "n = 11 is outside the compiled range"), (3, 4, "both are rows of 'n'")],
)
def test_memory_that_does_not_fit_is_refused_before_any_copy(
    jets: int, tags: int, message: str
) -> None:
    session = Session(mlp_signature(10), rogues.Fails())
    with pytest.raises(BindError, match=message):
        Staging(session).run(session.collection("jets", jets), session.collection("tags", tags))


def test_memory_is_reused_and_grows(inputs: Arrays) -> None:
    addresses: list[int] = []

    class Watched(Session):
        def run(self, inputs: Any, outputs: Any, *, stream: Any = None) -> None:
            addresses.append(inputs["jets"].data_ptr)
            super().run(inputs, outputs, stream=stream)

    session = Watched(mlp_signature(), rogues.honest())
    staging = Staging(session)
    values = random_inputs(session.signature, 1, {})["jets"]

    for rows in (50, 7, 50, 100, 50):
        jets, tags = session.collection("jets", rows), session.collection("tags", rows)
        for column in jets.layout.columns:
            jets.fill(column.name, values[column.name])
        staging.run(jets, tags)
        assert torch.equal(tags.tensor("x"), jets.tensor("a") * 3)
    assert addresses[0] == addresses[1] == addresses[2]
    assert addresses[3] == addresses[4]
