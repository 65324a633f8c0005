"""Streams that `stream=` accepts and refuses. The handles here are never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.errors import BindError
from runtime.session.binding import Binding
from runtime.session.session import Session
from runtime.session.streams import raw_stream
from tests.models import rogues
from tests.models.building import mlp_signature

GPU = torch.device("cuda", 1)


class Protocol:
    """Exports a stream as cuda-python and newer CuPy do."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x5EED)


class OlderCuPy:
    """A stream as older CuPy makes it; device -1: none was named."""

    def __init__(self, device_id: int) -> None:
        self.ptr = 0xC0DE
        self.device_id = device_id


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (0x7F00, 0x7F00),
        (Protocol(), 0x5EED),
        (OlderCuPy(1), 0xC0DE),
        (OlderCuPy(-1), 0xC0DE),
    ],
)
def test_a_stream_of_any_library_has_a_handle(stream: Any, handle: int) -> None:
    assert raw_stream(stream, GPU) == handle


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("7", "stream is a str: give a torch or CuPy stream, or a raw handle"),
        (True, "stream is a bool: give a torch or CuPy stream, or a raw handle"),
        (-1, "stream -1 is no raw handle: give the address as it is"),
        (OlderCuPy(0), "the stream is of cuda:0, the model runs on cuda:1"),
    ],
)
def test_an_object_that_is_no_stream_of_the_device_is_refused(stream: Any, message: str) -> None:
    with pytest.raises(BindError) as caught:
        raw_stream(stream, GPU)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "use",
    [
        lambda session, binding: binding(stream=0),
        lambda session, binding: session.run(binding.inputs, binding.outputs, stream=1),
        lambda session, binding: session.run_many([binding], stream=1),
    ],
    ids=["call", "run", "run_many"],
)
def test_the_cpu_has_no_streams(use: Callable[[Session, Binding], None]) -> None:
    session = Session(mlp_signature(), rogues.honest())
    binding = session.bind(session.collection("jets", 3), session.collection("tags", 3))
    message = "stream= was given, but the model runs on the CPU, which has no streams"
    with pytest.raises(BindError, match=message):
        use(session, binding)


@pytest.mark.cuda
def test_outputs_are_ready_in_stream_order() -> None:
    """A run on a side stream sees earlier writes on it, and later work there sees the answers."""
    device = torch.device("cuda", torch.cuda.current_device())
    session = Session(mlp_signature(4096), rogues.honest(), device)
    jets, tags = session.collection("jets", 4096), session.collection("tags", 4096)
    binding = session.bind(jets, tags)
    side = torch.cuda.Stream(device)
    for i, stream in enumerate((side, side.cuda_stream), start=1):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # ticks: a run on another stream would come too early
            jets.tensor("a").fill_(i)
            binding(stream=stream)
            answer = tags.tensor("x").clone()
        side.synchronize()
        assert answer.eq(3 * i).all()


@pytest.mark.cuda
def test_a_stream_of_another_gpu_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    session = Session(mlp_signature(), rogues.honest(), torch.device("cuda", 0))
    with pytest.raises(BindError, match="the stream is of"):
        session.run(
            session.collection("jets", 3),
            session.collection("tags", 3),
            stream=torch.cuda.Stream(torch.device("cuda", 1)),
        )
