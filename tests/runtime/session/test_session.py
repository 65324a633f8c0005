"""Sessions: one artifact, any number of bindings and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from engines.errors import RunError
from runtime.session.binding import Binding
from runtime.session.origin import Origin
from runtime.session.session import Session
from soa import Collection
from tests.models import rogues
from tests.models.building import ENGINES, TAGS, Built, mlp_signature
from tests.models.mlps import FEATURES


def test_a_session_makes_collections_of_its_layouts() -> None:
    tags = Session(mlp_signature(), rogues.honest()).collection("tags", 3, 9)
    assert (tags.layout, tags.n, tags.capacity, tags.device) == (TAGS, 3, 9, "cpu")


@pytest.mark.parametrize("by_name", [False, True])
def test_collections_are_given_alone_or_by_name(by_name: bool) -> None:
    session = Session(mlp_signature(), rogues.honest())
    jets, tags = session.collection("jets", 3), session.collection("tags", 3)
    for i, name in enumerate(FEATURES):
        jets.tensor(name).fill_(i + 1)
    if by_name:
        session.run({"jets": jets}, {"tags": tags})
    else:
        session.run(jets, tags)
    assert tags.tensor("x").tolist() == [3.0] * 3
    assert tags.tensor("z").tolist() == [9.0] * 3


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (Origin("jets", "3", "ab12", "cpu/arm", "aoti"), "jets/3 (aoti, cpu/arm)"),
        (Origin("jets", None, None, "cpu/arm", "aoti"), "jets (aoti, cpu/arm)"),
    ],
    ids=["of a registry", "of a folder"],
)
def test_an_origin_says_what_runs(origin: Origin, text: str) -> None:
    assert str(origin) == text


@dataclass(frozen=True)
class Call:
    """A binding and the outputs that it writes."""

    binding: Binding
    tags: Collection

    def answers(self) -> bytes:
        """The bytes of the outputs after a run."""
        self.tags.memory()[0].zero_()
        self.binding()
        return self.tags.memory()[0].numpy().tobytes()


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("name", ENGINES)
def test_threads_give_the_bits_of_a_serial_run(mlp: Built, name: str) -> None:
    """Four threads, each with its own bindings of one session and its own order of row counts."""
    session = mlp.session(name)
    sizes = [1, 33, 100, 1000]
    threads = len(sizes)
    together = threading.Barrier(threads)

    def bound(thread: int) -> list[Call]:
        calls = []
        for n in sizes[thread:] + sizes[:thread]:
            inputs, outputs = mlp.collections({"n": n}, spare=thread)
            calls.append(Call(session.bind(inputs, outputs), outputs["tags"]))
        return calls

    def answers_in_turn(calls: list[Call], turns: int = 40) -> list[list[bytes]]:
        return [[call.answers() for call in calls] for _ in range(turns)]

    def in_a_thread(thread: int) -> list[list[bytes]]:
        together.wait()
        return answers_in_turn(bound(thread))  # threads bind at once, too

    expected = [answers_in_turn(bound(thread)) for thread in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        assert [*pool.map(in_a_thread, range(threads))] == expected


def is_refused(use: Callable[[], object]) -> bool:
    """Whether the use of a binding is refused as another thread is in it."""
    try:
        use()
    except RunError as error:
        assert "another thread" in str(error)
        return True
    return False


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("name", ENGINES)
def test_threads_on_one_binding_are_refused_or_right(mlp: Built, name: str) -> None:
    inputs, outputs = mlp.collections({"n": 4099})
    binding = mlp.session(name).bind(inputs, outputs)
    binding()
    answers = outputs["tags"].memory()[0]
    expected = answers.clone()
    answers.zero_()
    start, refused = threading.Barrier(4), set[str]()

    def work(_: int) -> int:
        """Uses the binding until two threads are in it at once, and one is refused each use.
        Returns how many calls were answered."""
        answered = 0
        start.wait()
        for _ in range(100_000):
            if is_refused(binding):
                refused.add("call")
            else:
                answered += 1
            if is_refused(binding.require_idle):
                refused.add("change")
            if refused == {"call", "change"}:
                break
        return answered

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4)))
    assert refused == {"call", "change"}
    assert torch.equal(answers, expected)
    answers.zero_()
    binding()
    assert torch.equal(answers, expected)
