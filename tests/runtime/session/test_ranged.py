"""A session of several artifacts: which one runs at which n."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engines.base import Executable
from engines.errors import RunError
from runtime.session import RangedExecutable
from runtime.session.session import Session
from soa import Collection
from tests.models.building import TAGS, Built, mlp_signature
from tests.models.mlps import CLASSES


class Named(Executable):
    """An executable that logs its name and n."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name = name
        self.log = log
        self.closed = False

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        assert arguments[0].shape[0] <= arguments[1].shape[1]
        self.log.append((self.name, arguments[0].shape[0]))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def log() -> list[tuple[str, int]]:
    """The name and n of each artifact that `session` has run."""
    return []


@pytest.fixture
def artifacts(log: list[tuple[str, int]]) -> list[Named]:
    return [Named(name, log) for name in ("tiny", "small", "large")]


@pytest.fixture
def session(artifacts: list[Named]) -> Session:
    """A session of `tiny` below 10 rows, `small` below 50 rows and else `large`."""
    tiny, small, large = artifacts
    return Session(mlp_signature(), RangedExecutable([(10, tiny), (50, small)], large))


RUNS = [("tiny", 1), ("tiny", 9), ("small", 10), ("small", 49), ("large", 50), ("large", 100)]


def test_the_first_limit_above_n_decides(session: Session, log: list[tuple[str, int]]) -> None:
    for _, n in RUNS:
        session.run(session.collection("jets", n), session.collection("tags", n))
    assert log == RUNS


def test_the_rows_of_each_call_decide(session: Session, log: list[tuple[str, int]]) -> None:
    binding = session.bind(session.collection("jets", 100), session.collection("tags", 100))
    for _, n in RUNS:
        binding(n)
    binding(0)  # nothing to write
    assert log == RUNS


def test_closing_a_session_closes_all_its_artifacts(
    session: Session, artifacts: list[Named]
) -> None:
    session.close()
    assert all(artifact.closed for artifact in artifacts)


class Stuck(Named):
    """An executable that cannot be closed."""

    def close(self) -> None:
        raise RunError("stuck")


def test_an_artifact_that_cannot_be_closed_leaves_no_other_one_open(
    log: list[tuple[str, int]],
) -> None:
    others = [Named("tiny", log), Named("large", log)]
    ranged = RangedExecutable([(10, others[0]), (50, Stuck("small", log))], others[1])
    with pytest.raises(RunError):
        ranged.close()
    assert [other.closed for other in others] == [True, True]


def test_every_n_gives_the_bits_of_its_own_artifact(mlp: Built) -> None:
    """One binding with n above and below the limit, with other memory, and through run_many."""
    native: Executable = mlp.executable("aoti")
    plain: Executable = mlp.executable("exported")
    mixed = Session(mlp.signature, RangedExecutable([(33, native)], plain))
    alone = {"native": Session(mlp.signature, native), "plain": Session(mlp.signature, plain)}
    inputs, outputs = mlp.collections({"n": 100})
    binding = mixed.bind(inputs, outputs)
    for turn, n in enumerate((100, 32, 33, 1, 57, 31)):
        if turn == 3:
            _, outputs = mlp.collections({"n": 100}, spare=40)
            binding.rebind(inputs, outputs)
        answers = {name: outputs["tags"].span(name).tensor() for name in CLASSES}
        for answer in answers.values():
            answer.fill_(float("nan"))
        if turn % 2:
            binding(n)
        else:
            binding.resize(n)
            mixed.run_many([binding])
        expected = Collection(TAGS, n, capacity=outputs["tags"].capacity)
        own = alone["native" if n < 33 else "plain"]
        own.run(inputs["jets"].rows(n), expected)
        for name, answer in answers.items():
            assert torch.equal(answer[:n], expected.tensor(name)), n
            assert answer[n:].isnan().all()
