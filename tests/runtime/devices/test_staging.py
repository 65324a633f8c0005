"""Staging gives a session's answers by way of memory of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.checked.poison import poisoned, same_bytes, wrote_outside
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
    session: Session, given: dict[str, Collection], outputs: dict[str, Collection]
) -> dict[str, Collection]:
    """The outputs of a direct run, on the session's device."""
    if session.device == "cpu":
        session.run(given, outputs)
        return outputs
    there = {name: each.to(session.device) for name, each in {**given, **outputs}.items()}
    found = {name: there[name] for name in outputs}
    session.run({name: there[name] for name in given}, found)
    return found


def check(session: Session, staging: Staging, inputs: Arrays, device: str) -> None:
    for n, m in ((5, 3), (1, 1), (33, 40), (2, 7)):
        case = dict(zip(SIGNATURE.dims, (n, m), strict=True))
        given, expected = reference_collections(SIGNATURE, inputs, case)
        expected = run_on_its_device(session, given, expected)
        theirs: dict[str, Collection] = {}
        for name in SIGNATURE.output_collections:
            rows = case[SIGNATURE.rows_of[name]]
            theirs[name] = given.get(name) or poisoned(
                SIGNATURE.layouts[name], rows, rows + 3, 0xFF, torch.device(device)
            )
        before = {name: c.to(c.device) for name, c in {**given, **theirs}.items()}
        staging.run({k: c.to(device) for k, c in given.items()}, theirs)
        for name, collection in theirs.items():
            assert not wrote_outside(SIGNATURE, name, before[name], collection), (name, n, m)
        for bound in SIGNATURE.outputs:
            name = bound.block.collection
            for column, k in bound.plan.components:
                rows = 1 if bound.plan.kind == "scalars" else case[bound.rows]
                assert torch.equal(
                    theirs[name].span(column, k).tensor()[:rows].cpu(),
                    expected[name].span(column, k).tensor()[:rows].cpu(),
                ), (column, n, m)
        for name, collection in given.items():
            assert name in theirs or same_bytes(before[name], collection)


def test_the_answers_of_a_session_of_every_plan(inputs: Arrays) -> None:
    session = opened("cpu")
    check(session, Staging(session), inputs, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize(("data", "model"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_between_host_and_gpu(inputs: Arrays, data: str, model: str) -> None:
    session = opened(model)
    check(session, Staging(session), inputs, data)


def test_memory_that_does_not_fit_is_refused_before_any_copy() -> None:
    session = Session(mlp_signature(10), rogues.honest())
    staging = Staging(session)
    with pytest.raises(BindError, match="n = 11 is outside the compiled range"):
        staging.run(session.collection("jets", 11), session.collection("tags", 11))
    with pytest.raises(BindError, match="both are rows of 'n'"):
        staging.run(session.collection("jets", 3), session.collection("tags", 4))


def test_memory_is_reused_and_grows(inputs: Arrays) -> None:
    addresses: list[int] = []

    class Watched(Session):
        def run(self, inputs: Any, outputs: Any, *, stream: Any = None) -> None:
            addresses.append(inputs["jets"].data_ptr)
            super().run(inputs, outputs, stream=stream)

    session = Watched(mlp_signature(), rogues.honest())
    staging = Staging(session)
    values = random_inputs(session.signature, 1, {})["jets"]

    def watch(rows: int) -> None:
        jets, tags = session.collection("jets", rows), session.collection("tags", rows)
        for c in jets.layout.columns:
            jets.fill(c.name, values[c.name])
        staging.run(jets, tags)
        assert torch.equal(tags.tensor("x"), jets.tensor("a") * 3)

    for rows in (50, 7, 50, 100, 50):
        watch(rows)
    assert addresses[0] == addresses[1] == addresses[2]
    assert addresses[3] == addresses[4]
