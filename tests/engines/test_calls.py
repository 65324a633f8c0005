"""Prepared calls of every engine that has them: other rows, many threads, a closed session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines.errors import RunError
from engines.tensors import TensorCall
from runtime.session.session import Session
from tests.models.building import TAGS, Built, bound, values

# torch with one thread and with two: MKL's last bits depend on it, those of `aoti` must not.
CALLS = [("aoti", 1), ("aoti", 2), ("onnxruntime", 2)]


@pytest.fixture(params=CALLS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def session(request: pytest.FixtureRequest, mlp: Built) -> Iterator[Session]:
    name, threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield mlp.session(name)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_another_n_of_the_same_binding(mlp: Built, session: Session) -> None:
    binding, tags = bound(mlp, session, 1000)
    assert not isinstance(binding.prepared, TensorCall)
    for n in (1000, 1, 0, 33, 999):
        for column in TAGS.columns:
            tags.tensor(column.name).fill_(-1.0)
        binding(n)
        once, expected = bound(mlp, session, n)
        once()
        assert torch.equal(values(tags)[:, :n], values(expected))
        assert torch.all(values(tags)[:, n:] == -1.0)


@pytest.mark.parametrize("threads", [1, 5])
def test_run_many_gives_what_single_runs_give(mlp: Built, session: Session, threads: int) -> None:
    sizes = [(7 * i) % 50 for i in range(100)]
    many = [bound(mlp, session, n) for n in sizes]
    session.run_many([binding for binding, _ in many], threads)
    for n, (binding, tags) in zip(sizes, many, strict=True):
        found = values(tags).clone()
        binding()
        assert torch.equal(found, values(tags))
        assert n == 0 or found.sum() > 0
    session.run_many([])


def test_run_many_falls_back_to_a_loop_for_other_engines(mlp: Built) -> None:
    session = mlp.session("exported")
    many = [bound(mlp, session, n) for n in (1, 5)]
    assert isinstance(many[0][0].prepared, TensorCall)
    session.run_many([binding for binding, _ in many], threads=2)
    assert all(values(tags).sum() > 0 for _, tags in many)


def test_eight_threads_share_a_session_bit_equal_to_serial(mlp: Built, session: Session) -> None:
    serial: dict[int, torch.Tensor] = {}
    for n in range(20):
        binding, tags = bound(mlp, session, n)
        binding()
        serial[n] = values(tags)
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        binding, tags = bound(mlp, session, 19)
        start.wait()
        wrong = 0
        for event in range(250):
            n = (event * 7 + seed) % 20
            binding(n)
            wrong += not torch.equal(values(tags)[:, :n], serial[n])
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


def test_closed_sessions_refuse(mlp: Built, session: Session) -> None:
    binding, _ = bound(mlp, session, 3)
    binding()
    session.close()
    for attempt in (binding, lambda: binding(2), lambda: bound(mlp, session, 3)):
        with pytest.raises(RunError, match="the session is closed"):
            attempt()
