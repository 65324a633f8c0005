"""The scheduler: where events run, what happens at full queues, and that none is lost."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait

import pytest
import torch

from engines import Executable
from engines.errors import RunError
from runtime.devices.scheduler import Scheduler
from runtime.errors import BindError, QueueFullError
from runtime.session.binding import Binding
from runtime.session.binding_checks import Collections
from runtime.session.session import Session
from soa import Collection
from soa.memory import Device
from tests.models import rogues
from tests.models.building import JETS, TAGS, Built, mlp_signature

SIGNATURE = mlp_signature()
CPU = torch.device("cpu")


class Gate(Executable):
    """An executable that waits for `open`, and counts its events."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.events = 0
        self._run = rogues.honest()

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.entered.release()
        assert self.open.wait(60)
        self.events += 1
        self._run(arguments)


class Elsewhere(Session):
    """A session that claims to run on another device, but uses the CPU's memory."""

    def __init__(self, executable: Gate) -> None:
        super().__init__(SIGNATURE, executable, "cpu")
        self.device = Device("cpu:1")

    def bind(self, inputs: Collections, outputs: Collections, *, graph: bool = False) -> Binding:
        """Binds as a session on the CPU does, where the memory really is."""
        return Session(SIGNATURE, self._executable).bind(inputs, outputs, graph=graph)


def event(value: float, n: int = 5) -> tuple[Collection, Collection]:
    """Jets with a value in all columns, and tags, in which the answer is three times the value."""
    jets = Collection(JETS, n)
    for column in JETS.columns:
        jets.tensor(column.name).fill_(value)
    return jets, Collection(TAGS, n)


def test_every_event_is_answered_once_with_its_own_answer(mlp: Built) -> None:
    session = mlp.session("aoti")
    events = [mlp.collections({"n": 1 + i % 60}, spare=i % 7) for i in range(400)]
    # Makes the values of all events differ, not only their row counts.
    for i, (inputs, _) in enumerate(events):
        for column in JETS.columns:
            inputs["jets"].tensor(column.name).add_(i / 400)
    with Scheduler([session, mlp.session("aoti")], queue=3, workers=2) as scheduler:
        futures = [scheduler.submit(inputs, outputs) for inputs, outputs in events]
    assert all(future.done() and future.exception() is None for future in futures)
    for inputs, outputs in events:
        expected = Collection(TAGS, inputs["jets"].n)
        session.run(inputs, expected)
        for column in TAGS.columns:
            assert torch.equal(outputs["tags"].tensor(column.name), expected.tensor(column.name))


def test_events_are_shared_equally_by_equal_sessions() -> None:
    gates = [Gate(), Gate(), Gate()]
    scheduler = Scheduler([Session(SIGNATURE, gate) for gate in gates], queue=10)
    futures = [scheduler.submit(*event(i)) for i in range(9)]
    for gate in gates:
        assert gate.entered.acquire(timeout=60)
    assert scheduler.waiting == [2, 2, 2]
    for gate in gates:
        gate.open.set()
    wait(futures)
    scheduler.close()
    assert [gate.events for gate in gates] == [3, 3, 3]


def fill_queue(scheduler: Scheduler, gate: Gate) -> list[Future[None]]:
    """Submits two events: one runs, and one fills the queue of one."""
    first = scheduler.submit(*event(1))
    assert gate.entered.acquire(timeout=60)
    return [first, scheduler.submit(*event(2))]


def test_a_full_scheduler_raises_if_told_to() -> None:
    gate = Gate()
    with Scheduler([Session(SIGNATURE, gate)], queue=1, when_full="raise") as scheduler:
        futures = fill_queue(scheduler, gate)
        with pytest.raises(QueueFullError, match="1 events wait already for each session on cpu"):
            scheduler.submit(*event(3))
        gate.open.set()
    assert [future.result() for future in futures] == [None, None]
    assert gate.events == 2


def test_a_full_scheduler_lets_its_caller_wait() -> None:
    gate = Gate()
    scheduler = Scheduler([Session(SIGNATURE, gate)], queue=1)
    futures = fill_queue(scheduler, gate)
    jets, tags = event(3)
    caller = threading.Thread(target=lambda: futures.append(scheduler.submit(jets, tags)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()  # it waits for room
    gate.open.set()
    caller.join(60)
    scheduler.close()
    assert len(futures) == 3
    assert tags.tensor("x").eq(9).all()


def test_a_full_scheduler_uses_another_device_if_told_to() -> None:
    """An event goes to its data's device; if that is full, to another one, by way of copies."""
    near, far = Gate(), Gate()
    far.open.set()
    scheduler = Scheduler([Elsewhere(far), Session(SIGNATURE, near)], queue=1, when_full="spill")
    futures = fill_queue(scheduler, near)
    assert far.events == 0
    jets, tags = event(3)
    spilled = scheduler.submit(jets, tags)
    spilled.result(60)
    assert (near.events, far.events) == (0, 1)
    assert tags.tensor("z").eq(9).all()
    near.open.set()
    wait(futures)
    scheduler.close()


def test_data_that_lies_on_no_sessions_device_goes_to_the_least_busy() -> None:
    gates = [Gate(), Gate()]
    for gate in gates:
        gate.open.set()
    with Scheduler([Elsewhere(gate) for gate in gates]) as scheduler:
        events = [event(i) for i in range(6)]
        wait([scheduler.submit(jets, tags) for jets, tags in events])
    assert sum(gate.events for gate in gates) == 6
    assert [float(tags.tensor("y")[0]) for _, tags in events] == [0, 3, 6, 9, 12, 15]


def test_memory_that_does_not_fit_is_refused_at_once() -> None:
    with Scheduler([Session(SIGNATURE, rogues.honest())]) as scheduler:
        jets, _ = event(1, 5)
        with pytest.raises(BindError, match="both are rows of 'n'"):
            scheduler.submit(jets, Collection(TAGS, 6))


def test_a_failure_is_its_events_own() -> None:
    fails = Session(SIGNATURE, rogues.Fails())
    with Scheduler([fails]) as scheduler:
        futures = [scheduler.submit(*event(i)) for i in range(3)]
    for future in futures:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            future.result()


def test_a_cancelled_event_is_not_run() -> None:
    gate = Gate()
    with Scheduler([Session(SIGNATURE, gate)], queue=5) as scheduler:
        _, waiting = fill_queue(scheduler, gate)
        assert waiting.cancel()
        gate.open.set()
    assert gate.events == 1


def test_an_idle_scheduler_keeps_no_collection_alive() -> None:
    gate = Gate()
    gate.open.set()
    with Scheduler([Session(SIGNATURE, gate)]) as scheduler:
        jets, tags = event(1)
        reference = weakref.ref(jets)
        scheduler.submit(jets, tags).result(60)
        del jets
        deadline = time.monotonic() + 60  # its thread may still be about to drop it
        while reference() is not None and time.monotonic() < deadline:
            gc.collect(1)  # only young objects: visiting all takes a second
            time.sleep(0.1)
        assert reference() is None


def test_a_closed_scheduler_takes_no_event() -> None:
    scheduler = Scheduler([Session(SIGNATURE, rogues.honest())])
    scheduler.close()
    scheduler.close()  # again, without an effect
    with pytest.raises(RunError, match="the scheduler is closed"):
        scheduler.submit(*event(1))


def test_a_scheduler_needs_a_session() -> None:
    with pytest.raises(ValueError, match="at least one session"):
        Scheduler([])


def test_an_unknown_way_of_being_full_is_refused() -> None:
    with pytest.raises(ValueError, match="when_full='drop': use 'wait', 'spill' or 'raise'"):
        Scheduler([Session(SIGNATURE, rogues.honest())], when_full="drop")  # type: ignore[arg-type]


def test_sessions_of_different_signatures_are_refused() -> None:
    signatures = (SIGNATURE, mlp_signature(7))
    with pytest.raises(ValueError, match="different signatures"):
        Scheduler([Session(signature, rogues.honest()) for signature in signatures])
