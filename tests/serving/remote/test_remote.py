"""A remote session with a server that answers, and with one that does not, or wrongly."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2

import pipeline
from engines.errors import RunError
from registry.store.registry import Registry
from runtime.checked.test_mode import CheckedSession
from runtime.errors import BindError, DeviationError, LoadError
from serving.client.options import HEADERS, RemoteOptions, Tls
from serving.errors import (
    AnswerError,
    DeadlineError,
    RefusedError,
    RemoteError,
    ServerGoneError,
    ServingError,
    TooLargeError,
    VersionMismatchError,
)
from serving.remote.remote_session import RemoteSession
from serving.triton.backend import Request
from serving.wire import Form
from tests.models.forked import in_a_child
from tests.models.project import described
from tests.models.signals import disposed
from tests.serving.conftest import Shop
from tests.serving.grpc_server import NAN, Server, aborts, changed, nan, without_the_last

QUICK = RemoteOptions(deadline_s=60.0, retries=2)  # no test fails because a machine is slow


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[Server]:
    """A server of jets/1 in this process; `url` lets it listen, and takes its fault away."""
    session = shop.local("jets")
    yield Server(session, shop.deployed["jets"].service)
    session.close()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with server.listening() as address:
        yield address
    server.fault = lambda answer, context: answer


_OPENED: list[RemoteSession] = []


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    """Closes the sessions that a test has opened."""
    yield
    while _OPENED:
        _OPENED.pop().close()


def connect(shop: Shop, url: str, options: RemoteOptions = QUICK) -> RemoteSession:
    """A session of jets on a server; it is closed after the test."""
    session = shop.connect(url, "jets", options)
    _OPENED.append(session)
    return session


def hurry(session: Any, deadline_s: float) -> None:
    """Shortens the deadline of a connected session; connecting may take longer."""
    client = session.executable.client
    client.options = replace(client.options, deadline_s=deadline_s)


@pytest.fixture
def remote(shop: Shop, url: str) -> RemoteSession:
    return connect(shop, url)


def test_a_remote_session_is_valid_as_an_artifact_is(shop: Shop, remote: RemoteSession) -> None:
    shop.require_valid("jets", remote)


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_client_speaks_the_form_that_the_server_takes(
    shop: Shop, server: Server, form: Form
) -> None:
    service = replace(server.service, requests=form, merge=form == "rows")
    with Server(server.session, service).listening() as url:
        shop.require_valid("jets", connect(shop, url))


@pytest.mark.parametrize(("form", "row"), [("rows", 7 // 3), ("blocks", 7 % 5)])
def test_the_row_of_a_wrong_answer_is_named_in_each_form(
    shop: Shop, server: Server, form: Form, row: int
) -> None:
    """Element 7 of (5, 3) in rows, or of (3, 5) in blocks: three answers for five rows."""
    other = Server(server.session, replace(server.service, requests=form, merge=form == "rows"))
    with other.listening() as url:
        remote = connect(shop, url)
        other.fault = nan(0, [7])
        with pytest.raises(AnswerError, match=f"row {row}"):
            remote.run(*shop.event("jets", remote, 5))


def test_a_server_that_was_restarted_in_another_form_is_refused(shop: Shop) -> None:
    """With as many rows as columns, (n, F) of one form would be read as (F, n) of the other.

    The request names its form, so that such a server refuses it.
    """
    session = shop.local("jets")
    service = shop.deployed["jets"].service
    rows = Server(session, replace(service, requests="rows"))
    blocks = Server(session, replace(service, requests="blocks", merge=False))
    with rows.listening() as url:
        remote = connect(shop, url)
        inputs, outputs = shop.event("jets", remote, 6)
        remote.run(inputs, outputs)
        before = outputs["tags"].memory()[0].clone()
        rows.core = blocks.core
        with pytest.raises(VersionMismatchError, match="is of the form rows, this server takes bl"):
            remote.run(inputs, outputs)
        assert torch.equal(outputs["tags"].memory()[0], before)
    session.close()


def test_a_server_of_an_unknown_form_is_refused(
    shop: Shop, server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = replace(server.service, requests="tiles")  # type: ignore[arg-type]
    monkeypatch.setattr(server, "service", tiles)
    with pytest.raises(VersionMismatchError, match=r"form 'tiles', which is none of columns"):
        pipeline.load("jets@production", device=url, registry=shop.registry)


def test_the_origin_of_a_session_names_bundle_and_server(shop: Shop, remote: RemoteSession) -> None:
    assert remote.origin is not None
    assert remote.origin.digest == shop.bundles["jets"].digest
    assert (remote.origin.name, remote.origin.version) == ("jets", "1")
    assert remote.origin.engine.startswith("triton at 127.0.0.1:")


def test_a_binding_runs_again_and_on_fewer_rows(shop: Shop, remote: RemoteSession) -> None:
    inputs, outputs = shop.event("jets", remote, 40)
    binding = remote.bind(inputs, outputs)
    binding()
    whole = outputs["tags"]["x"].copy()
    outputs["tags"]["x"][:] = -1
    binding(10)
    column_memory = outputs["tags"].span("x").tensor()
    # Another engine may run fewer rows, so the bits may differ.
    torch.testing.assert_close(column_memory[:10], torch.from_numpy(whole[:10]))
    assert (column_memory[10:40] == -1).all()


@pytest.mark.parametrize(
    ("given", "written", "message"), [(1001, 1001, "outside the compiled range"), (10, 9, "rows")]
)
def test_bad_memory_is_refused_before_anything_is_sent(
    server: Server, remote: RemoteSession, given: int, written: int, message: str
) -> None:
    before = server.requests
    with pytest.raises(BindError, match=message):
        remote.run(remote.collection("jets", given), remote.collection("tags", written))
    assert server.requests == before


def test_asynchronous_answers_come_in_the_order_of_the_calls(
    shop: Shop, server: Server, remote: RemoteSession
) -> None:
    events = [shop.event("jets", remote, n) for n in range(1, 30)]
    expected = [shop.event("jets", remote, n)[1] for n in range(1, 30)]

    def later_is_quicker(answer: Any, context: Any) -> Any:
        time.sleep(0.02 / answer.outputs[0].shape[0])
        return answer

    server.fault = later_is_quicker
    futures = [remote.run_async(*event) for event in events]
    here = shop.local("jets")
    for (inputs, outputs), future, answers in zip(events, futures, expected, strict=True):
        assert future.result()["tags"] is outputs["tags"]
        here.run(inputs, answers)
        for name in "xyz":
            np.testing.assert_allclose(outputs["tags"][name], answers["tags"][name], atol=1e-6)


def test_many_bindings_run_at_once(shop: Shop, remote: RemoteSession) -> None:
    events = [shop.event("jets", remote, 5) for _ in range(20)]
    remote.run_many([remote.bind(*event) for event in events])
    first = events[0][1]["tags"]["x"]
    assert first.any()
    assert all(np.array_equal(outputs["tags"]["x"], first) for _, outputs in events)


def test_ctrl_c_gives_the_memory_back(shop: Shop, server: Server, remote: RemoteSession) -> None:
    """No request is under way any more that could write into the memory."""
    under_way: list[int] = []

    def slow(answer: Any, context: Any) -> Any:
        under_way.append(1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        under_way.pop()
        return answer

    binding = remote.bind(*shop.event("jets", remote, 5))
    server.fault = slow
    ctrl_c = disposed(signal.SIGINT, signal.default_int_handler)
    with ctrl_c, pytest.raises(KeyboardInterrupt):
        try:
            remote.run_many([binding])
        finally:
            assert not under_way


def test_test_mode_compares_with_the_reference(shop: Shop, server: Server, url: str) -> None:
    session = pipeline.load("jets@production", device=url, registry=shop.registry, mode="test")
    assert isinstance(session, CheckedSession)
    inputs, outputs = shop.event("jets", session, 20)
    session.run(inputs, outputs)
    assert session.report.events == 1

    def wrong(answer: Any, context: Any) -> Any:
        values = bytearray(answer.raw_output_contents[0])
        values[40:44] = struct.pack("<f", 2.0)  # in row 10
        answer.raw_output_contents[0] = bytes(values)
        return answer

    server.fault = wrong
    with pytest.raises(DeviationError, match="row 10"):
        session.run(inputs, outputs)
    session.close()


# -- what can go wrong ---------------------------------------------------------------------------


ANSWERS = {
    "NaN": (changed(1, raw=b"\0\0\0\0" * 4 + NAN), r"tags\.y is NaN at row 4, and no input"),
    "shape": (changed(0, shape=[4, 1]), r"tags\.x is FP32 \(4, 1\), needed is FP32 \(5, 1\)"),
    "dtype": (changed(0, datatype="INT32"), r"tags\.x is INT32 \(5, 1\), needed is FP32"),
    "name": (changed(2, name="tags.w"), r"the answer has outputs tags\.x, tags\.y, tags\.w"),
    "arrays": (without_the_last, "2 arrays in the answer"),
    "bytes": (changed(2, raw=b"\0" * 19), r"output tags\.z has 19 bytes, needed are 20"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_answer_is_refused_and_nothing_written(
    shop: Shop, server: Server, remote: RemoteSession, kind: str
) -> None:
    server.fault, message = ANSWERS[kind]
    inputs, outputs = shop.event("jets", remote, 5)
    with pytest.raises(AnswerError, match=message):
        remote.run(inputs, outputs)
    assert not outputs["tags"].memory()[0].any()


def test_nan_that_came_in_may_come_out(shop: Shop, remote: RemoteSession) -> None:
    inputs, outputs = shop.event("jets", remote, 5)
    inputs["jets"]["c"][3] = float("nan")
    remote.run(inputs, outputs)
    assert outputs["tags"].tensor("x").isnan().tolist() == [False, False, False, True, False]


def test_nan_is_accepted_on_demand(shop: Shop, server: Server, url: str) -> None:
    session = connect(shop, url, RemoteOptions(allow_nan=True))
    server.fault = changed(0, raw=NAN * 5)
    inputs, outputs = shop.event("jets", session, 5)
    session.run(inputs, outputs)
    assert outputs["tags"].tensor("x").isnan().all()


def test_a_server_that_hangs_is_given_up_at_the_deadline(
    shop: Shop, server: Server, remote: RemoteSession
) -> None:
    given_up = threading.Event()

    def hang(answer: Any, context: Any) -> Any:
        given_up.wait(60)
        return answer

    hurry(remote, 0.3)
    server.fault = hang
    with pytest.raises(DeadlineError, match=r"no answer within 0\.3 s"):
        remote.run(*shop.event("jets", remote, 5))
    given_up.set()


FULL = "Exceeds maximum queue size"


def test_a_busy_server_is_asked_again(shop: Shop, server: Server, remote: RemoteSession) -> None:
    server.fault = aborts(grpc.StatusCode.UNAVAILABLE, FULL, times=QUICK.retries)
    inputs, outputs = shop.event("jets", remote, 5)
    remote.run(inputs, outputs)
    assert outputs["tags"]["x"].any()


def test_a_server_that_stays_busy_is_given_up(
    shop: Shop, server: Server, remote: RemoteSession
) -> None:
    server.fault = aborts(grpc.StatusCode.UNAVAILABLE, FULL)
    with pytest.raises(ServerGoneError, match=f"after 3 attempts: {FULL}"):
        remote.run(*shop.event("jets", remote, 5))


def test_an_outage_that_is_reported_late_is_not_taken_for_a_slow_answer(
    shop: Shop, server: Server, remote: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it no time is left for another try."""
    broken = aborts(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def late(answer: Any, context: Any) -> Any:
        time.sleep(1.0)
        return broken(answer, context)

    monkeypatch.setattr("serving.client.calls._FIRST_PAUSE_S", QUICK.deadline_s - 0.5)
    server.fault = late
    with pytest.raises(ServerGoneError, match="after 1 attempts: Socket closed"):
        remote.run(*shop.event("jets", remote, 5))


def test_a_session_goes_on_with_a_server_that_comes_back(shop: Shop, server: Server) -> None:
    with server.listening() as url:
        session = connect(shop, url)
        event = shop.event("jets", session, 5)
        session.run(*event)
    with pytest.raises(ServerGoneError, match="no answer after 3 attempts"):
        session.run(*event)
    with server.listening(url.removeprefix("triton://")):
        deadline = time.monotonic() + 30
        while True:  # gRPC decides when it reconnects
            try:
                session.run(*event)
                break
            except ServerGoneError:
                assert time.monotonic() < deadline


def test_an_error_of_the_server_is_repeated_in_one_line(
    shop: Shop, server: Server, remote: RemoteSession
) -> None:
    server.fault = aborts(grpc.StatusCode.INTERNAL, "the kernel failed\nand more")
    with pytest.raises(RefusedError, match=r"the kernel failed \(internal\)$"):
        remote.run(*shop.event("jets", remote, 5))


def test_a_port_where_nobody_listens_is_given_up(shop: Shop) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"triton://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ServerGoneError, match="no answer after 3 attempts"):
            connect(shop, url)


@pytest.fixture(scope="module")
def elsewhere(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry in which jets/1 is another bundle, and jets/2 the one that is served as jets/1."""
    folder = tmp_path_factory.mktemp("elsewhere")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    registry.register(described(shop.bundles["jets"], folder / "other", "another"))
    registry.register(shop.bundles["jets"])
    return registry


def test_another_bundle_under_the_same_name(elsewhere: Registry, url: str) -> None:
    with pytest.raises(VersionMismatchError, match=r"its jets/1 is bundle .*, the registry's is"):
        pipeline.load("jets/1", device=url, registry=elsewhere, mode="test")


def test_another_version_is_refused(elsewhere: Registry, url: str) -> None:
    with pytest.raises(VersionMismatchError, match="no model jets/2"):
        pipeline.load("jets/2", device=url, registry=elsewhere, mode="test")


def test_another_model_is_refused(shop: Shop, url: str) -> None:
    with pytest.raises(VersionMismatchError, match="no model mixed/1"):
        pipeline.load("mixed@production", device=url, registry=shop.registry)


def test_a_server_that_was_restarted_with_another_bundle_is_refused(
    shop: Shop, server: Server, remote: RemoteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request names its bundle."""
    event = shop.event("jets", remote, 5)
    remote.run(*event)
    restarted = Server(server.session, replace(server.service, digest="f" * 64))
    monkeypatch.setattr(server, "core", restarted.core)
    with pytest.raises(RemoteError, match=r"asked for bundle .*, this server runs ffffffffffff"):
        remote.run(*event)


def test_what_was_not_promoted_runs_in_test_mode_only(
    shop: Shop, elsewhere: Registry, url: str
) -> None:
    with pytest.raises(LoadError, match="never promoted to production"):
        pipeline.load("jets/2", device=url, registry=elsewhere)
    folder = shop.bundles["jets"].path
    with pytest.raises(LoadError, match="a folder that no promotion vouches for"):
        pipeline.load(folder, device=url)
    pipeline.load(folder, device=url, mode="test").close()


SMALL = replace(QUICK, message_bytes=HEADERS + 6 * 4 * 300)
"""A message carries 300 rows of six float32 columns: 1000 rows go in four."""


def test_more_rows_than_a_message_carries_are_sent_in_several(
    shop: Shop, server: Server, url: str
) -> None:
    session = connect(shop, url, SMALL)
    inputs, outputs = shop.event("jets", session, 1000)
    before = server.requests
    session.run(inputs, outputs)
    assert server.requests - before == 4
    whole = connect(shop, url)
    inputs, expected = shop.event("jets", whole, 1000)
    whole.run(inputs, expected)
    for name in "xyz":
        answers = outputs["tags"].tensor(name)
        assert torch.allclose(answers, expected["tags"].tensor(name), atol=1e-6)


def test_rows_that_depend_on_each_other_are_not_sent_in_several_messages(
    shop: Shop, server: Server, url: str
) -> None:
    session = connect(shop, url, SMALL)
    service, server.service = server.service, replace(server.service, merge=False)
    session.executable.update_form()  # type: ignore[attr-defined]
    server.service = service
    inputs, outputs = shop.event("jets", session, 1000)
    before = server.requests
    with pytest.raises(TooLargeError, match="whose rows cannot be split, of 40384 bytes"):
        session.run(inputs, outputs)
    assert server.requests == before
    assert not outputs["tags"].memory()[0].any()


def test_a_part_that_fails_leaves_nothing_written(shop: Shop, server: Server, url: str) -> None:
    session = connect(shop, url, SMALL)
    before = server.requests

    def fails_later(answer: Any, context: Any) -> Any:
        if server.requests - before > 2:
            context.abort(grpc.StatusCode.INTERNAL, "the third of four messages")
        return answer

    server.fault = fails_later
    inputs, outputs = shop.event("jets", session, 1000)
    with pytest.raises(RefusedError, match="the third of four"):
        session.run(inputs, outputs)
    assert not outputs["tags"].memory()[0].any()


@pytest.mark.parametrize("device", ["triton://", "triton://host", "triton://host:x", "triton://:1"])
def test_text_that_is_no_address_is_refused(device: str) -> None:
    with pytest.raises(ServingError, match=r"write triton://HOST:PORT"):
        pipeline.load("jets@production", device=device)


def test_threads_of_a_server_are_not_the_clients(url: str) -> None:
    with pytest.raises(LoadError, match="threads with device 'triton://"):
        pipeline.load("jets@production", device=url, threads=2)


def test_options_of_a_server_are_none_of_this_host() -> None:
    with pytest.raises(LoadError, match="remote options with device 'cpu'"):
        pipeline.load("jets@production", device="cpu", remote=QUICK)


@pytest.mark.parametrize(
    "mistake",
    [
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"retries": -1},
        {"in_flight": 0},
        {"compression": "zip"},
        {"message_bytes": 10},
        {"message_bytes": 2**31},
        *({"shared_memory": kind} for kind in ("gpu", "cuda", "cuda:1", "SYSTEM", "", 2)),
    ],
    ids=str,
)
def test_options_out_of_their_range_are_refused(mistake: dict[str, Any]) -> None:
    with pytest.raises(ServingError, match=next(iter(mistake))):
        RemoteOptions(**mistake)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere",), r"nowhere: No such file"),
        (("text",), r"text: not PEM that TLS can use: no_certificate"),
        (("empty",), r"empty: not PEM that TLS can use: no_certificate"),
        ((None, "text"), "TLS with private_key and no certificate_chain: name both, or neither"),
        ((None, None, "text"), "TLS with certificate_chain and no private_key: name both"),
        ((None, "text", "text"), "text with .*text: not PEM that TLS can use: no key that opens"),
    ],
)
def test_files_that_are_no_certificates_are_refused(
    shop: Shop, url: str, tmp_path: Path, names: tuple[str | None, ...], message: str
) -> None:
    """gRPC aborts the process for half a pair, and with an empty file trusts the system's roots."""
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "empty").touch()
    files = [None if name is None else tmp_path / name for name in names]
    with pytest.raises(ServingError, match=message):
        connect(shop, url, RemoteOptions(tls=Tls(*files)))


def test_a_proxy_for_the_web_is_not_asked(
    shop: Shop, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's worker nodes have http_proxy in their environment."""
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    session = connect(shop, url, RemoteOptions(deadline_s=5.0, retries=0))
    session.run(*shop.event("jets", session, 5))  # an error, if it went to the proxy


class Sharing(Server):
    """A server with system shared memory. `used` lists the regions of requests, in order."""

    def __init__(self, like: Server, in_use: int = 0) -> None:
        super().__init__(like.session, like.service)
        self.used: list[str] = []
        self.forgotten: list[str] = []
        self.in_use = in_use
        """How often it still refuses to unregister a region."""

    def ModelInfer(self, request: Any, context: Any) -> Any:
        def region(descriptor: Any) -> str:
            name: str = descriptor.parameters["shared_memory_region"].string_param
            return name

        def array(descriptor: Any, tensor: Any) -> Any:
            """A view of the shared memory; events have five rows."""
            start = descriptor.parameters["shared_memory_offset"].int64_param
            size = descriptor.parameters["shared_memory_byte_size"].int64_param
            memory = np.memmap(f"/dev/shm/{region(descriptor)}", np.uint8, "r+")
            return memory[start : start + size].view(tensor.dtype).reshape(tensor.shape(5))

        wire = self.core.wire
        self.used.append(region(request.inputs[0]))
        columns = {
            tensor.name: array(descriptor, tensor).copy()
            for descriptor, tensor in zip(request.inputs, wire.inputs, strict=True)
        }
        (result,) = self.core.answer([Request(columns)])
        assert isinstance(result, dict)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for descriptor, tensor in zip(request.outputs, wire.outputs, strict=True):
            values = result[tensor.name]
            array(descriptor, tensor)[...] = values
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=values.shape)
        return self.fault(answer, context)

    def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        if self.in_use:
            self.in_use -= 1
            context.abort(grpc.StatusCode.INTERNAL, "it is currently in use")
        self.forgotten.append(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()


def test_a_region_of_a_request_that_was_tried_again_is_nobody_elses(
    shop: Shop, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt may still write to the region, until the server unregisters it."""
    monkeypatch.setattr("serving.client.regions._ASK_AGAIN_S", 0.0)
    sharing = Sharing(server, in_use=1)
    sharing.fault = aborts(grpc.StatusCode.UNAVAILABLE, "Socket closed", times=1)
    with sharing.listening() as url:
        session = connect(shop, url, replace(QUICK, shared_memory=True))
        for _ in range(3):
            inputs, outputs = shop.event("jets", session, 5)
            session.run(inputs, outputs)
            assert outputs["tags"]["x"].any()
        first, again, second, third = sharing.used
        assert first == again != second == third
        deadline = time.monotonic() + 60
        while first not in sharing.forgotten:
            assert time.monotonic() < deadline
            session.run(inputs, outputs)
        session.close()
        assert sorted(sharing.forgotten) == sorted({first, second})
    assert not list(Path("/dev/shm").glob(f"soa_{os.getpid()}_*"))


def test_an_answer_that_is_not_in_the_shared_memory_is_refused(shop: Shop, server: Server) -> None:
    """The region then still holds the answer to the request before."""
    sharing = Sharing(server)
    with sharing.listening() as url:
        session = connect(shop, url, replace(QUICK, shared_memory=True))
        session.run(*shop.event("jets", session, 5))

        def over_the_wire(answer: Any, context: Any) -> Any:
            answer.raw_output_contents.extend([b"\0" * 20] * 3)
            return answer

        sharing.fault = over_the_wire
        inputs, outputs = shop.event("jets", session, 5)
        with pytest.raises(AnswerError, match="not in the memory that it shares"):
            session.run(inputs, outputs)
        assert not outputs["tags"].memory()[0].any()


def test_several_messages_have_one_deadline(shop: Shop, server: Server, url: str) -> None:
    def slow(answer: Any, context: Any) -> Any:
        time.sleep(0.3)
        return answer

    session = connect(shop, url, SMALL)
    inputs, outputs = shop.event("jets", session, 1000)  # four messages of 0.3 s
    hurry(session, 0.7)
    server.fault = slow
    with pytest.raises(DeadlineError):
        session.run(inputs, outputs)
    assert not outputs["tags"].memory()[0].any()


# -- after a fork, and after the end ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["run", "run_async", "run_many"])
def test_a_fork_leaves_the_session_to_its_parent(
    shop: Shop, remote: RemoteSession, call: str
) -> None:
    """Both would use one region of shared memory, and the child a pool without threads."""
    inputs, outputs = shop.event("jets", remote, 5)
    remote.run_async(inputs, outputs).result()  # starts threads, which a fork loses
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: remote.run(inputs, outputs),
        "run_async": lambda: remote.run_async(inputs, outputs).result(),
        "run_many": lambda: remote.run_many([remote.bind(inputs, outputs)]),
    }
    assert in_a_child(calls[call]).startswith("RunError: this session was opened before a fork")
    assert in_a_child(remote.close) == "nothing"
    remote.run(inputs, outputs)


def test_a_closed_session_takes_nothing_more(shop: Shop, url: str) -> None:
    session = connect(shop, url)
    event = shop.event("jets", session, 5)
    binding = session.bind(*event)
    session.close()
    with pytest.raises(ServerGoneError, match="the session is closed"):
        session.run(*event)
    with pytest.raises(RunError, match="the session is closed"):
        session.run_async(*event)
    with pytest.raises(RunError, match="the session is closed"):
        session.run_many([binding])
