"""A session of several artifacts: which one runs at which n."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.base import Executable
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


def test_the_first_limit_above_n_decides() -> None:
    log: list[tuple[str, int]] = []
    parts = [Named(name, log) for name in ("tiny", "small", "large")]
    executable = RangedExecutable([(10, parts[0]), (50, parts[1])], parts[2])
    session = Session(mlp_signature(), executable)
    sizes = (1, 9, 10, 49, 50, 100)
    for n in sizes:
        session.run(session.collection("jets", n), session.collection("tags", n))
    expected = [
        ("tiny", 1), ("tiny", 9), ("small", 10), ("small", 49), ("large", 50), ("large", 100),
    ]  # fmt: skip
    assert log == expected
    log.clear()
    binding = session.bind(session.collection("jets", 100), session.collection("tags", 100))
    for n in sizes:
        binding(n)
    binding(0)  # nothing to write
    assert log == expected
    session.close()
    assert all(part.closed for part in parts)


def test_every_n_gives_the_bits_of_its_own_artifact(mlp: Built) -> None:
    """One binding with n above and below the limit, with other memory, and through run_many."""
    native: Executable = mlp.executable("aoti")
    plain: Executable = mlp.executable("exported")
    mixed = Session(mlp.signature, RangedExecutable([(33, native)], plain))
    alone = {"native": Session(mlp.signature, native), "plain": Session(mlp.signature, plain)}
    given, written = mlp.collections({"n": 100})
    binding = mixed.bind(given, written)
    for turn, n in enumerate((100, 32, 33, 1, 57, 31)):
        if turn == 3:
            _, written = mlp.collections({"n": 100}, spare=40)
            binding.rebind(given, written)
        for c in CLASSES:
            written["tags"].span(c).tensor().fill_(float("nan"))
        if turn % 2:
            binding(n)
        else:
            binding.resize(n)
            mixed.run_many([binding])
        expected = Collection(TAGS, n, capacity=written["tags"].capacity)
        own = alone["native" if n < 33 else "plain"]
        own.run(given["jets"].rows(n), expected)
        for c in CLASSES:
            assert torch.equal(written["tags"].span(c).tensor()[:n], expected.tensor(c)), n
            assert written["tags"].span(c).tensor()[n:].isnan().all()
