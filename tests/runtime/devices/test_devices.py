"""Sessions on several devices; the CPU stands for each of them, as torch has no other here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engines.errors import RunError
from runtime.devices.everywhere import MultiDeviceSession
from runtime.errors import BindError
from runtime.session.binding_checks import common_device
from runtime.session.session import Session
from soa import Collection
from tests.models import rogues
from tests.models.building import JETS, mlp_signature

SIGNATURE = mlp_signature()


def noting_session(opened: list[torch.device], seconds: float = 0.0) -> MultiDeviceSession:
    """A session that appends each device to `opened` when it opens there, after some seconds."""

    def open_on(device: torch.device) -> Session:
        time.sleep(seconds)
        opened.append(device)
        return Session(SIGNATURE, rogues.honest(), device)

    return MultiDeviceSession(SIGNATURE, open_on)


def test_a_device_is_deployed_once_at_its_first_event() -> None:
    opened: list[torch.device] = []
    session = noting_session(opened, 0.05)
    outputs = [session.collection("tags", 4) for _ in range(8)]
    jets = session.collection("jets", 4)
    for column in JETS.columns:
        jets.tensor(column.name).fill_(2)
    assert opened == []
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda tags: session.run(jets, tags), outputs))
    assert opened == [torch.device("cpu")]
    assert all(tags.tensor("x").eq(3 * 2).all() for tags in outputs)


def test_other_devices_go_on_while_one_is_deployed() -> None:
    """Nothing runs on `meta` here; only its deployment hangs."""
    inside, leave = threading.Event(), threading.Event()

    def open_on(device: torch.device) -> Session:
        if device.type != "cpu":
            inside.set()
            assert leave.wait(60)
        return Session(SIGNATURE, rogues.honest(), device)

    session = MultiDeviceSession(SIGNATURE, open_on)
    slow = threading.Thread(target=session.on, args=(torch.device("meta", 0),))
    slow.start()
    assert inside.wait(60)
    session.run(session.collection("jets", 3), session.collection("tags", 3))
    assert session.devices == [torch.device("cpu")]
    leave.set()
    slow.join()
    assert session.devices == [torch.device("meta", 0), torch.device("cpu")]


def test_a_failed_deployment_is_an_error_of_its_event_and_the_next_one_tries_again() -> None:
    attempts: list[torch.device] = []

    def open_on(device: torch.device) -> Session:
        attempts.append(device)
        if len(attempts) == 1:
            raise RunError("out of memory")
        return Session(SIGNATURE, rogues.honest(), device)

    session = MultiDeviceSession(SIGNATURE, open_on)
    jets, tags = session.collection("jets", 3), session.collection("tags", 3)
    with pytest.raises(RunError, match="out of memory"):
        session.run(jets, tags)
    session.run(jets, tags)
    session.run_many([session.bind(jets, tags)])
    assert len(attempts) == 2


def test_the_device_of_an_event_is_that_of_its_collections() -> None:
    jets = Collection(JETS, 3)
    assert common_device(jets, {"tags": jets}) == torch.device("cpu")


def test_collections_on_several_devices_are_refused() -> None:
    jets = Collection(JETS, 3)
    with pytest.raises(BindError, match="the collections lie on cpu, meta: they must all lie on"):
        common_device(jets, {"tags": jets.to("meta")})


def test_no_collections_have_no_device() -> None:
    with pytest.raises(BindError, match="no device"):
        common_device({}, {})


def test_a_device_asked_for_before_a_close_is_not_deployed_after_it() -> None:
    """The first thread's deployment fails; the second one waits for it until after the close."""
    inside, leave = threading.Event(), threading.Event()
    opened: list[torch.device] = []

    def open_on(device: torch.device) -> Session:
        opened.append(device)
        inside.set()
        assert leave.wait(60)
        raise RunError("no memory there")

    session = MultiDeviceSession(SIGNATURE, open_on)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(session.on, "cpu")
        assert inside.wait(60)
        second = pool.submit(session.on, "cpu")
        time.sleep(0.1)  # so that it comes to wait for the first one
        closing = pool.submit(session.close)
        while not session.closed:
            time.sleep(0.01)
        leave.set()
        for deployment in (first, second):
            with pytest.raises(RunError):
                deployment.result(60)
        closing.result(60)
    assert len(opened) == 1


@pytest.mark.cuda
def test_one_session_runs_on_cpu_and_gpu() -> None:
    opened: list[torch.device] = []
    session = noting_session(opened)
    for device in ("cpu", "cuda", "cpu", "cuda:0"):
        jets = session.collection("jets", 40, device=device)
        tags = session.collection("tags", 40, device=device)
        jets.tensor("a").fill_(5)
        session.run(jets, tags)
        assert tags.tensor("x").eq(15).all()
    assert [device.type for device in opened] == ["cpu", "cuda"]
