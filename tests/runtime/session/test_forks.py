"""The child of a fork: what works in it, what is refused, and that nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from engines import engine
from engines.onnx.engine import OnnxCall
from runtime.devices.everywhere import MultiDeviceSession
from runtime.devices.scheduler import Scheduler
from runtime.session.binding import Binding
from runtime.session.session import Session
from soa import Collection
from tests.models import building
from tests.models.building import Built, bound
from tests.models.forked import in_a_child

ENGINES = tuple(name for name in building.ENGINES if name != "lanes")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def opened(mlp: Built, name: str, threads: int = 1) -> Session:
    """A session of an engine's artifact."""
    return Session(mlp.signature, engine(name).open(mlp.files[name], CPU, threads))


@contextmanager
def running(binding: Binding) -> Iterator[None]:
    """Another thread runs the binding without a pause, and is nearly always inside the artifact."""
    end, begun = threading.Event(), threading.Event()

    def work() -> None:
        while not end.is_set():
            binding()
            begun.set()

    other = threading.Thread(target=work)
    other.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        end.set()
        other.join()


@pytest.mark.parametrize("name", ENGINES)
def test_a_session_works_in_the_child(mlp: Built, name: str) -> None:
    session = opened(mlp, name)
    binding, tags = bound(mlp, session, 33)
    binding()
    expected = tags.memory()[0].clone()

    def require_right(binding: Binding, tags: Collection) -> None:
        tags.memory()[0].zero_()
        binding()
        assert torch.equal(tags.memory()[0], expected)

    assert in_a_child(lambda: require_right(binding, tags)) == "nothing"
    assert in_a_child(lambda: require_right(*bound(mlp, session, 33))) == "nothing"
    assert in_a_child(lambda: require_right(*bound(mlp, opened(mlp, name), 33))) == "nothing"
    assert in_a_child(session.close) == "nothing"
    require_right(binding, tags)


def test_run_many_finds_threads_of_its_own_in_the_child(mlp: Built) -> None:
    session = opened(mlp, "aoti")
    bindings = [bound(mlp, session, 100)[0] for _ in range(20)]
    session.run_many(bindings, threads=2)  # starts threads, which a fork loses
    assert in_a_child(lambda: session.run_many(bindings, threads=2)) == "nothing"
    session.run_many(bindings, threads=2)


def test_a_session_that_another_thread_was_running_is_refused_in_the_child(mlp: Built) -> None:
    """The child refuses the session, unless the other thread was just between two calls."""
    session = Session(mlp.signature, engine("aoti").open(mlp.files["aoti"], CPU, instances=1))
    binding, _ = bound(mlp, session, 33)
    with running(bound(mlp, session, 4099)[0]):
        for use in (binding, lambda: bound(mlp, session, 33)[0]()):
            errors = (in_a_child(use) for _ in range(1000))
            first_error = next((error for error in errors if error != "nothing"), "nothing")
            assert first_error.startswith("RunError: this session was opened before")
        assert [in_a_child(session.close) for _ in range(5)] == ["nothing"] * 5
    binding()


def test_a_session_of_onnx_runtime_that_another_thread_was_running_is_refused_in_the_child(
    mlp: Built,
) -> None:
    pytest.importorskip("onnxscript")
    session = opened(mlp, "onnxruntime")
    binding, other = bound(mlp, session, 33)[0], bound(mlp, session, 33)[0]
    assert isinstance(other.prepared, OnnxCall)
    with other.prepared.lock:
        for use in (binding, other, lambda: bound(mlp, session, 3)):
            assert in_a_child(use).startswith("RunError: this session was opened before a fork")
        assert in_a_child(session.close) == "nothing"
    binding()


@pytest.mark.parametrize("name", ENGINES)
def test_runs_of_several_threads_are_refused_in_the_child(mlp: Built, name: str) -> None:
    torch.set_num_threads(2)
    session = opened(mlp, name, threads=2)
    binding, _ = bound(mlp, session, 4099)
    binding()
    message = "OpenMP's threads do not come through a fork"
    if name == "onnxruntime":  # it has threads of its own
        message = "this session was opened before a fork, with several threads"
    assert in_a_child(binding).startswith(f"RunError: {message}")
    assert in_a_child(session.close) == "nothing"
    binding()


def test_a_model_is_deployed_in_the_child_where_it_was_being_deployed(mlp: Built) -> None:
    begun, end = threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: session.on("cpu"))

    def open_on(device: torch.device) -> Session:
        begun.set()
        if threading.current_thread() is slow:
            assert end.wait(60)
        return opened(mlp, "aoti")

    session = MultiDeviceSession(mlp.signature, open_on)
    slow.start()
    assert begun.wait(60)
    inputs, outputs = mlp.collections({"n": 5})
    assert in_a_child(lambda: session.run(inputs, outputs)) == "nothing"
    assert in_a_child(session.close) == "nothing"
    end.set()
    slow.join()


@pytest.fixture
def scheduler(mlp: Built) -> Iterator[Scheduler]:
    with Scheduler([opened(mlp, "aoti")]) as scheduler:
        yield scheduler


def error_in_a_child(scheduler: Scheduler, use: Callable[[], object]) -> str:
    """The error in a child that was forked while another thread had the scheduler's lock."""
    with scheduler._changed:
        return in_a_child(use)


def test_a_scheduler_takes_no_event_in_the_child(mlp: Built, scheduler: Scheduler) -> None:
    inputs, outputs = mlp.collections({"n": 5})
    error = error_in_a_child(scheduler, lambda: scheduler.submit(inputs, outputs))
    assert error.startswith("RunError: this scheduler was opened before a fork")
    scheduler.submit(inputs, outputs).result(60)


def test_a_scheduler_does_not_count_events_in_the_child(mlp: Built, scheduler: Scheduler) -> None:
    error = error_in_a_child(scheduler, lambda: scheduler.waiting)
    assert error.startswith("RunError: this scheduler was opened before a fork")
    scheduler.submit(*mlp.collections({"n": 5})).result(60)


def test_a_scheduler_is_closed_in_the_child_without_an_effect_on_its_parent(
    mlp: Built, scheduler: Scheduler
) -> None:
    assert error_in_a_child(scheduler, scheduler.close) == "nothing"
    scheduler.submit(*mlp.collections({"n": 5})).result(60)
