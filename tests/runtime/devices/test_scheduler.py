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
        return Session(SIGNATURE, self._executable).bind(inputs, outputs, graph=graph)


def event(value: float, n: int = 5) -> tuple[Collection, Collection]:
    jets = Collection(JETS, n)
    for c in JETS.columns:
        jets.tensor(c.name).fill_(value)
    return jets, Collection(TAGS, n)


def test_every_event_is_answered_once_with_its_own_answer(mlp: Built) -> None:
    session = mlp.session("aoti")
    events = [mlp.collections({"n": 1 + k % 60}, spare=k % 7) for k in range(400)]
    # Makes the values of all events differ, not only their row counts.
    for k, (given, _) in enumerate(events):
        for c in JETS.columns:
            given["jets"].tensor(c.name).add_(k / 400)
    with Scheduler([session, mlp.session("aoti")], queue=3, workers=2) as scheduler:
        done = [scheduler.submit(given, written) for given, written in events]
    assert all(each.done() and each.exception() is None for each in done)
    for given, written in events:
        expected = Collection(TAGS, given["jets"].n)
        session.run(given, expected)
        for c in TAGS.columns:
            assert torch.equal(written["tags"].tensor(c.name), expected.tensor(c.name))


def test_the_least_busy_of_equal_sessions() -> None:
    gates = [Gate(), Gate(), Gate()]
    scheduler = Scheduler([Session(SIGNATURE, gate) for gate in gates], queue=10)
    done = [scheduler.submit(*event(k)) for k in range(9)]
    for gate in gates:
        assert gate.entered.acquire(timeout=60)
    assert scheduler.waiting == [2, 2, 2]
    for gate in gates:
        gate.open.set()
    wait(done)
    scheduler.close()
    assert [gate.events for gate in gates] == [3, 3, 3]


def full(scheduler: Scheduler, gate: Gate) -> list[Future[None]]:
    """One event runs and one waits, which fills a queue of one."""
    first = scheduler.submit(*event(1))
    assert gate.entered.acquire(timeout=60)
    return [first, scheduler.submit(*event(2))]


def test_when_full_raise() -> None:
    gate = Gate()
    with Scheduler([Session(SIGNATURE, gate)], queue=1, when_full="raise") as scheduler:
        done = full(scheduler, gate)
        with pytest.raises(QueueFullError, match="1 events wait already for each session on cpu"):
            scheduler.submit(*event(3))
        gate.open.set()
    assert [each.result() for each in done] == [None, None]
    assert gate.events == 2


def test_when_full_wait() -> None:
    gate = Gate()
    scheduler = Scheduler([Session(SIGNATURE, gate)], queue=1)
    done = full(scheduler, gate)
    jets, tags = event(3)
    later = threading.Thread(target=lambda: done.append(scheduler.submit(jets, tags)))
    later.start()
    later.join(0.2)
    assert later.is_alive()  # it waits for room
    gate.open.set()
    later.join(60)
    scheduler.close()
    assert len(done) == 3
    assert tags.tensor("x").eq(9).all()


def test_when_full_spill() -> None:
    """An event goes to its data's device; if that is full, to another one, by way of copies."""
    near, far = Gate(), Gate()
    far.open.set()
    scheduler = Scheduler([Elsewhere(far), Session(SIGNATURE, near)], queue=1, when_full="spill")
    done = full(scheduler, near)
    assert far.events == 0
    jets, tags = event(3)
    spilled = scheduler.submit(jets, tags)
    spilled.result(60)
    assert (near.events, far.events) == (0, 1)
    assert tags.tensor("z").eq(9).all()
    near.open.set()
    wait(done)
    scheduler.close()


def test_data_that_lies_on_no_sessions_device_goes_to_the_least_busy() -> None:
    gates = [Gate(), Gate()]
    for gate in gates:
        gate.open.set()
    with Scheduler([Elsewhere(gate) for gate in gates]) as scheduler:
        events = [event(k) for k in range(6)]
        wait([scheduler.submit(*each) for each in events])
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
        done = [scheduler.submit(*event(k)) for k in range(3)]
    for each in done:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            each.result()


def test_a_cancelled_event_is_not_run() -> None:
    gate = Gate()
    with Scheduler([Session(SIGNATURE, gate)], queue=5) as scheduler:
        done = full(scheduler, gate)
        assert done[1].cancel()
        gate.open.set()
    assert gate.events == 1


def test_an_idle_scheduler_keeps_no_collection_alive() -> None:
    gate = Gate()
    gate.open.set()
    with Scheduler([Session(SIGNATURE, gate)]) as scheduler:
        jets, tags = event(1)
        kept = weakref.ref(jets)
        scheduler.submit(jets, tags).result(60)
        del jets
        for _ in range(600):
            gc.collect(1)  # only young objects: visiting all takes a second
            if kept() is None:
                break
            time.sleep(0.1)
        assert kept() is None


def test_after_close() -> None:
    scheduler = Scheduler([Session(SIGNATURE, rogues.honest())])
    scheduler.close()
    scheduler.close()
    with pytest.raises(RunError, match="the scheduler is closed"):
        scheduler.submit(*event(1))


def test_arguments_that_make_no_scheduler() -> None:
    session = Session(SIGNATURE, rogues.honest())
    with pytest.raises(ValueError, match="at least one session"):
        Scheduler([])
    with pytest.raises(ValueError, match="when_full='drop': use 'wait', 'spill' or 'raise'"):
        Scheduler([session], when_full="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different signatures"):
        Scheduler([session, Session(mlp_signature(7), rogues.honest())])
