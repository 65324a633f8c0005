"""CUDA shared memory: the copies on CPU tensors, every refusal, and the rest on a GPU.

The copies and the request are the same on any device, so they are tested here on CPU tensors in
system shared memory, with a real Triton. Tests marked `cuda` need a GPU; the last one also a Triton
that was built for GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline
from runtime.errors import BindError
from runtime.loader import load as load_here
from runtime.opening import Opening, open_version
from serving.arrays import Arrays, Tensors
from serving.client.calls import Client
from serving.client.cuda_memory import HANDLE_BYTES, CudaMemory, cuda_runtime, require_cuda
from serving.client.options import RemoteOptions
from serving.client.regions import CudaRegions, Regions
from serving.errors import AnswerError, RefusedError, ServingError, VersionMismatchError
from serving.local.triton import TritonServer
from serving.remote.remote_model import RemoteModel
from serving.remote.remote_session import RemoteSession
from serving.wire import FORMS, Form, Wire, locations
from soa import Collection, Signature
from soa.memory import argument_tensors
from tests.models import served
from tests.models.tagged import SIGNATURE, Event, Tags
from tests.serving.conftest import Shop
from tests.serving.grpc_server import Server, nan

CUDA = RemoteOptions(shared_memory="cuda")
CPU = Tensors(torch.device("cpu"))


# -- the copies -----------------------------------------------------------------------------------


def filled(signature: Signature, rows: dict[str, int], seed: int) -> dict[str, Collection]:
    draw = np.random.default_rng(seed)
    made = {
        name: Collection(layout, rows[signature.rows_of[name]], capacity=100)
        for name, layout in signature.layouts.items()
    }
    for collection in made.values():
        for memory in collection.memory():
            memory.copy_(torch.from_numpy(draw.integers(0, 2, memory.shape).astype(np.uint8)))
    return made


@settings(max_examples=30)
@given(
    st.sampled_from([(served.MIXED, "columns"), (served.EVENT, "columns")]
                    + [(s, f) for s in (SIGNATURE, served.EVENT) for f in FORMS]),
    st.integers(1, 90), st.integers(1, 90), st.integers(0, 9),
)  # fmt: skip
def test_the_copies_are_what_numpy_gathers_and_scatters(
    which: tuple[Signature, Form], n: int, m: int, seed: int
) -> None:
    signature, form = which
    rows = dict(zip(signature.dims, (n, m), strict=False))
    wire = Wire.of(signature, form)
    here, there = filled(signature, rows, seed), filled(signature, rows, seed + 1)
    sources = argument_tensors(signature, here, rows)
    targets, same = argument_tensors(signature, there, rows), filled(signature, rows, seed + 1)
    wanted, arrays = argument_tensors(signature, same, rows), Arrays()
    for role, tensors in (("input", wire.inputs), ("output", wire.outputs)):
        places = locations(signature, tensors, role)
        for t in tensors:
            count, at = rows[t.rows], 0 if t.scalar else rows[t.rows] // 3
            found = t.gather(places[t.name].parts(sources), at, count - at)
            values = t.gather(places[t.name].parts(arrays.of(sources)), at, count - at)
            assert (tuple(found.shape), CPU.to_bytes(found)) == (values.shape, values.tobytes())
            t.scatter(places[t.name].parts(targets), at, found)
            t.scatter(places[t.name].parts(arrays.of(wanted)), at, values)
    for one, other in zip(there.values(), same.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.memory(), other.memory(), strict=True))


class TensorRegions(Regions):
    """System shared memory as tensors, like the regions of a GPU."""

    @contextmanager
    def taken(self, size: int) -> Iterator[Any]:
        with super().taken(size) as region:
            memory = torch.from_numpy(region.memory)
            yield SimpleNamespace(name=region.name, memory=memory, doubt=region.doubt)


def connected(
    url: str, registry: Any, ref: str, options: RemoteOptions, *, shared: bool = True
) -> RemoteSession:
    client = Client(url.removeprefix("triton://"), options)
    opened = open_version(Opening(ref, registry=registry))
    model = RemoteModel(opened, client, TensorRegions(client) if shared else None, CPU)
    model.look()
    return RemoteSession(opened.signature, model, options.in_flight)


@pytest.mark.parametrize("name", ["mixed", "event"])
def test_through_a_real_triton_on_cpu_tensors(triton: TritonServer, shop: Shop, name: str) -> None:
    options = RemoteOptions(allow_nan=True)  # the reference has huge numbers
    session = connected(triton.url, shop.registry, f"{name}@production", options)
    shop.require_valid(name, session)
    session.close()


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_nan_is_found_where_it_lies(tags: Tags, form: Form) -> None:
    """With messages instead of shared memory; their arrays are tensors here too."""
    local = load_here("tagged/1", registry=tags.registry)
    server = Server(local, replace(tags.deployed.service, requests=form, merge=False))
    with server.listening() as url:
        session = connected(url, tags.registry, "tagged/1", RemoteOptions(), shared=False)
        event = Event.make(local, 3, 20)
        session.run(event.given, event.found)
        server.fault = nan(1, [7])
        event.spoil()
        with pytest.raises(AnswerError, match=r"score is NaN at row 7, and no input is"):
            session.run(event.given, event.found)
        assert event.untouched
        session.close()
    local.close()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda(tags: Tags) -> None:
    local = load_here("tagged/1", registry=tags.registry)
    with (
        Server(local, tags.deployed.service).listening() as url,
        pytest.raises(ServingError, match=r"^CUDA shared memory on cuda: this torch was built"),
    ):
        pipeline.load("tagged/1", device=url, registry=tags.registry, remote=CUDA)
    local.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ServingError, match=r"on cuda:1: torch finds no GPU here"):
        require_cuda(torch.device("cuda:1"))
    cuda_runtime.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "7.9")
    with pytest.raises(ServingError, match=r"^CUDA shared memory needs libcudart\.so\.7: "):
        cuda_runtime()


def test_a_server_that_cannot_open_the_memory(
    triton: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This Triton has no GPU; one on another host could not use the handle either."""
    client = Client(triton.url.removeprefix("triton://"), RemoteOptions())
    freed: list[int] = []
    memory = SimpleNamespace(tensor=None, handle=bytes(HANDLE_BYTES), free=lambda: freed.append(1))
    monkeypatch.setattr("serving.client.cuda_memory.CudaMemory", lambda size, device: memory)
    with (
        pytest.raises(RefusedError, match=r"failed to register .*: CUDA shared memory needs a"),
        CudaRegions(client, torch.device("cuda:0")).taken(1),
    ):
        pass
    assert freed
    client.unshare_cuda("soa_test").result(10)
    with pytest.raises(VersionMismatchError, match="Unable to find cuda shared memory region"):
        client.cuda_status("soa_test", 10.0)
    client.close()


def test_memory_of_a_gpu_is_freed_once_the_server_has_forgotten_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[int] = []
    memory = SimpleNamespace(tensor=None, handle=bytes(HANDLE_BYTES), free=lambda: freed.append(1))
    monkeypatch.setattr("serving.client.cuda_memory.CudaMemory", lambda size, device: memory)
    asked = SimpleNamespace(done=lambda: True, code=lambda: grpc.StatusCode.OK)
    client: Any = SimpleNamespace(
        share_cuda=lambda *_: None, unshare_cuda=lambda _: asked, cuda_status=lambda *_: "in use"
    )
    regions = CudaRegions(client, torch.device("cuda:0"))
    with regions.taken(1):
        pass
    regions.forget()
    regions._look_after(0.0)
    assert not freed

    def unknown(name: str, within_s: float) -> None:
        raise VersionMismatchError("Unable to find cuda shared memory region")

    client.cuda_status = unknown
    regions._look_after(0.0)
    assert freed == [1]


def test_collections_on_the_cpu(tags: Tags) -> None:
    local = load_here("tagged/1", registry=tags.registry)
    client, gpu = Client("127.0.0.1:1", CUDA), torch.device("cuda:0")
    model = RemoteModel(
        open_version(Opening(tags.bundle.path, mode="test")), client, None, Tensors(gpu)
    )
    session = RemoteSession(local.signature, model, 1, device=gpu)
    event = Event.make(local, 1, 5)
    for run in (session.run, session.run_async):
        with pytest.raises(BindError, match=r"'given' lies on cpu, the session runs on cuda:0"):
            run(event.given, event.found)
    assert event.untouched
    client.close()
    local.close()


@pytest.mark.parametrize("spelt", [True, "system"])
def test_both_spellings_of_system_memory(triton: TritonServer, shop: Shop, spelt: Any) -> None:
    options = RemoteOptions(shared_memory=spelt)
    assert options.cuda is None
    session = pipeline.load("event/1", device=triton.url, registry=shop.registry, remote=options)
    given = {name: session.collection(name, 4) for name in ("nodes", "edges")}
    session.run(given, session.collection("out", 4))
    assert list(Path("/dev/shm").glob(f"soa_{os.getpid()}_*"))
    session.close()


# -- on a GPU; these tests have not run yet -------------------------------------------------------


READER = f"""
import ctypes, sys
import torch
from serving.client.cuda_memory import _Handle, cuda_runtime
torch.zeros(1, device="cuda")
runtime = cuda_runtime()
handle, address = _Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), ctypes.c_void_p()
assert ctypes.sizeof(_Handle) == {HANDLE_BYTES}
assert runtime.cudaIpcOpenMemHandle(ctypes.byref(address), handle, ctypes.c_uint(1)) == 0
host = (ctypes.c_ubyte * 8)()
assert runtime.cudaMemcpy(host, address, ctypes.c_size_t(8), 2) == 0
print(list(host))
assert runtime.cudaIpcCloseMemHandle(address) == 0
"""


WRITER = """
import subprocess, sys
import torch
from serving.client.cuda_memory import CudaMemory
column = torch.arange(8, dtype=torch.uint8, device="cuda:0")  # in torch's own memory
memory = CudaMemory(1 << 16, torch.device("cuda:0"))
memory.tensor[:8] = column
torch.cuda.synchronize()
subprocess.run([sys.executable, "-c", sys.argv[1], memory.handle.hex()], check=True, timeout=60)
memory.free()
"""


@pytest.mark.cuda
@pytest.mark.parametrize("segments", ["False", "True"])
def test_another_process_sees_the_memory(segments: str) -> None:
    """It does so with either setting of torch's own allocator."""
    found = subprocess.run(
        [sys.executable, "-c", WRITER, READER], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"},
    )  # fmt: skip
    assert found.stdout.strip() == str(list(range(8))), found.stderr


@pytest.mark.cuda
def test_memory_that_the_gpu_does_not_have() -> None:
    with pytest.raises(ServingError, match=r"^no \d+ bytes on cuda:0: out of memory"):
        CudaMemory(1 << 50, torch.device("cuda:0"))
    assert torch.ones(3, device="cuda:0").sum() == 3  # the error is not left for torch
    with pytest.raises(ServingError, match=r"on cuda:99: there are \d+ GPUs here"):
        require_cuda(torch.device("cuda:99"))


@pytest.mark.cuda
def test_gpu_collections_through_a_triton(real_triton: None, tags: Tags) -> None:
    """With a Triton that was built for GPUs; its model may be on the CPU."""
    local = load_here("tagged/1", registry=tags.registry)
    with TritonServer(tags.repository) as server:
        session = pipeline.load("tagged/1", device=server.url, registry=tags.registry, remote=CUDA)
        assert session.device.type == "cuda"
        side = torch.cuda.Stream()
        pairs = []
        for n in (1, 31, 32, 33, 200, 0):
            event = Event.make(local, n, n)
            given, found = event.given.to("cuda:0"), event.found.to("cuda:0")
            with torch.cuda.stream(side):
                pairs.append((event, found, session.run_async(given, found)))
        for event, found, future in pairs:
            future.result()
            Event(event.number, event.given, found.to("cpu")).require_right(local, exact=False)
        session.close()
    local.close()
