"""A real Triton: its answers, its batches, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline
from pipeline.deployment.repository import deploy
from serving.client.options import RemoteOptions, Tls
from serving.errors import (
    DeadlineError,
    RefusedError,
    ServerError,
    ServerGoneError,
    VersionMismatchError,
)
from serving.local.triton import Ports, ServerOptions, TritonServer
from serving.remote.remote_session import RemoteSession
from serving.wire import Form
from tests.models.mlps import CLASSES, FEATURES
from tests.models.project import refusal
from tests.serving.campaigns.servers import certificate
from tests.serving.conftest import Shop, until

ROOT = Path(__file__).parents[3]


def connect(shop: Shop, server: TritonServer, name: str, **options: Any) -> RemoteSession:
    """A session of a model on a server."""
    return shop.connect(server.url, name, RemoteOptions(**options))


@pytest.fixture
def jets_alone(real_triton: None, shop: Shop, tmp_path: Path) -> Path:
    """A repository of one model: each has a process of its own, which imports torch."""
    return deploy(shop.registry, "jets/1", tmp_path / "repository").folder.parent


@pytest.mark.parametrize("shared", [False, "system"], ids=["messages", "shared memory"])
@pytest.mark.parametrize("name", ["jets", "mixed", "event"])
def test_the_answers_are_the_references(
    triton: TritonServer, shop: Shop, name: str, shared: bool | str
) -> None:
    session = connect(shop, triton, name, shared_memory=shared, allow_nan=True)
    shop.require_valid(name, session)
    session.close()


def test_requests_of_rows_and_of_blocks_are_answered(
    real_triton: None, shop: Shop, tmp_path: Path
) -> None:
    """From remote sessions, which follow the server, and from a client that knows only Triton."""
    from tritonclient import grpc as triton_grpc

    forms: dict[str, Form] = {"jets": "rows", "event": "blocks"}
    for name, form in forms.items():
        deploy(shop.registry, f"{name}@production", tmp_path, requests=form)
    with TritonServer(tmp_path) as server:
        for name in forms:
            session = connect(shop, server, name, allow_nan=True)
            shop.require_valid(name, session)
            session.close()
        local = shop.local("jets")
        inputs, outputs = shop.event("jets", local, 9)
        local.run(inputs, outputs)
        rows = np.stack([inputs["jets"][name] for name in FEATURES], axis=1)
        expected = np.stack([outputs["tags"][name] for name in CLASSES], axis=1)
        client = triton_grpc.InferenceServerClient(server.url.removeprefix("triton://"))
        features = triton_grpc.InferInput("features", list(rows.shape), "FP32")
        features.set_data_from_numpy(rows)
        answer = client.infer("jets", [features]).as_numpy("probabilities")
        client.close()
        assert np.allclose(answer, expected, atol=1e-5)


def test_compression_changes_nothing(triton: TritonServer, shop: Shop) -> None:
    answers = []
    for compression in ("none", "gzip"):
        session = connect(shop, triton, "jets", compression=compression)
        inputs, outputs = shop.event("jets", session, 500)
        session.run(inputs, outputs)
        answers.append(outputs["tags"]["x"])
        session.close()
    plain, zipped = answers
    assert (plain == zipped).all()


def test_requests_in_flight_share_runs(triton: TritonServer, shop: Shop) -> None:
    """Triton counts fewer executions than requests, and each request gets its own answer."""
    session = connect(shop, triton, "jets", in_flight=32)
    local = shop.local("jets")
    events = [shop.event("jets", session, n % 7 + 1) for n in range(300)]
    before = triton.metrics("jets")
    futures = [session.run_async(*event) for event in events]
    for (inputs, outputs), future in zip(events, futures, strict=True):
        assert future.result()["tags"] is outputs["tags"]
        expected = local.collection("tags", outputs["tags"].n)
        local.run(inputs, expected)
        assert torch.allclose(outputs["tags"].tensor("x"), expected.tensor("x"), atol=1e-5)
    answered = "nv_inference_request_success"  # Triton counts after it answers
    until(lambda: triton.metrics("jets")[answered] - before[answered] >= 300)
    after = triton.metrics("jets")
    rows = sum(outputs["tags"].n for _, outputs in events)
    assert after[answered] - before[answered] == 300
    assert after["nv_inference_count"] - before["nv_inference_count"] == rows
    assert after["nv_inference_exec_count"] - before["nv_inference_exec_count"] < 300
    session.close()


def test_a_model_whose_rows_see_each_other_is_never_merged(
    triton: TritonServer, shop: Shop
) -> None:
    session = connect(shop, triton, "event", in_flight=16)
    before = triton.metrics("event")
    events = [shop.event("event", session, 5) for _ in range(40)]
    for future in [session.run_async(*event) for event in events]:
        future.result()
    runs = "nv_inference_exec_count"  # Triton counts after it answers
    until(lambda: triton.metrics("event")[runs] - before[runs] >= 40)
    assert triton.metrics("event")[runs] - before[runs] == 40
    session.close()


def test_another_clients_bad_request_is_its_own(triton: TritonServer, shop: Shop) -> None:
    from tritonclient import grpc as triton_grpc
    from tritonclient.utils import InferenceServerException

    session = connect(shop, triton, "event")
    inputs, outputs = shop.event("event", session, 9)
    client = triton_grpc.InferenceServerClient(triton.url.removeprefix("triton://"))
    bad = []
    shapes = {"nodes.x": [3, 1], "nodes.y": [4, 1], "edges.weight": [5, 1], "nodes.z": [1]}
    for name, shape in shapes.items():
        column = triton_grpc.InferInput(name, shape, "FP32")
        column.set_data_from_numpy(np.ones(shape, np.float32))
        bad.append(column)
    future = session.run_async(inputs, outputs)
    with pytest.raises(InferenceServerException, match=r"nodes\.y has 4 rows"):
        client.infer("event", bad)
    future.result()
    assert outputs["out"]["score"].any()
    client.close()
    session.close()


def test_a_request_for_another_bundle_is_refused_by_the_model(
    triton: TritonServer, shop: Shop
) -> None:
    session = connect(shop, triton, "jets")
    model: Any = session.executable
    model.opened = replace(model.opened, bundle=replace(model.opened.bundle, digest="e" * 64))
    with pytest.raises(VersionMismatchError, match="asked for bundle eeeeeeeeeeee, this server"):
        session.run(*shop.event("jets", session, 3))
    session.close()


def test_a_request_for_an_unknown_version_is_refused_by_the_server(
    triton: TritonServer, shop: Shop
) -> None:
    session = connect(shop, triton, "jets")
    model: Any = session.executable
    model.opened = replace(model.opened, number=7)
    with pytest.raises((VersionMismatchError, ServerGoneError, RefusedError), match="version 7"):
        session.run(*shop.event("jets", session, 3))
    session.close()


@pytest.mark.parametrize("command", [("jets/1",), ("event/1", "--unload")], ids=["load", "unload"])
def test_a_server_of_a_fixed_repository_neither_loads_nor_unloads(
    triton: TritonServer, shop: Shop, command: tuple[str, ...]
) -> None:
    message = refusal("serve", *command, "--to", triton.url, "--registry", shop.registry.uri)
    assert message.endswith("it loads no models: start it with --model-control-mode=explicit")


def stopped(pid: int) -> bool:
    """Whether all threads are stopped: those on other cores may run on for a moment."""
    states = [
        (task / "stat").read_text().rpartition(")")[2].split()[0]
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) == {"T"}


def test_a_session_outlives_a_server_that_hangs_and_is_given_its_memory_back(
    jets_alone: Path, shop: Shop
) -> None:
    from tritonclient import grpc as triton_grpc

    with TritonServer(jets_alone) as server:
        session = connect(shop, server, "jets", deadline_s=0.5, retries=1, shared_memory=True)
        event = shop.event("jets", session, 3)
        session.run(*event)
        os.kill(server.pid, signal.SIGSTOP)
        while not stopped(server.pid):
            time.sleep(0.01)
        with pytest.raises(DeadlineError):
            session.run(*event)
        os.kill(server.pid, signal.SIGCONT)
        deadline = time.monotonic() + 30
        while True:  # it answers the old requests first
            try:
                session.run(*event)
                break
            except DeadlineError:
                assert time.monotonic() < deadline
        # The server has given back every region of a request that was given up.
        client = triton_grpc.InferenceServerClient(server.url.removeprefix("triton://"))
        while len(client.get_system_shared_memory_status().regions) > 1:
            session.run(*event)
            time.sleep(0.1)
            assert time.monotonic() < deadline
        client.close()
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises((ServerGoneError, DeadlineError)):
            session.run(*event)
        with pytest.raises(ServerError, match="ended with status -9"):
            server.wait()
        session.close()
    assert not list(Path("/dev/shm").glob(f"soa_triton_{os.getpid()}_{server.ports.grpc}_*"))
    assert not list(Path("/dev/shm").glob(f"soa_{os.getpid()}_*"))


def test_a_server_with_tls_answers_to_who_trusts_its_certificate(
    jets_alone: Path, shop: Shop, tmp_path: Path
) -> None:
    extra = certificate(tmp_path)
    if not extra:
        pytest.skip("no openssl to make a certificate with")
    with TritonServer(jets_alone, ServerOptions(extra=extra)) as server:
        session = connect(shop, server, "jets", tls=Tls(tmp_path / "certificate.pem"))
        event = shop.event("jets", session, 3)
        session.run(*event)
        assert event[1]["tags"]["x"].any()
        session.close()
        with pytest.raises(ServerGoneError):  # an untrusted certificate
            connect(shop, server, "jets", tls=Tls(), retries=0)
        with pytest.raises(ServerGoneError):  # no TLS
            connect(shop, server, "jets", retries=0)


def test_a_port_that_is_taken_is_refused(real_triton: None, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 cannot be used"),
            TritonServer(tmp_path, ServerOptions(ports=Ports(http=port))),
        ):
            pytest.fail("the server runs")


def test_a_model_that_does_not_load_is_an_error_of_the_server(jets_alone: Path) -> None:
    (jets_alone / "jets/1/.bundle/program.pt2").write_bytes(b"altered")
    with (
        pytest.raises(ServerError, match=r"failed to load 'jets' .*program\.pt2 is truncated or"),
        TritonServer(jets_alone),
    ):
        pytest.fail("the server runs")


def test_a_server_that_is_not_ready_in_time_is_given_up(jets_alone: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"was not ready after 0\.1 s"),
        TritonServer(jets_alone, ServerOptions(ready_s=0.1)),
    ):
        pytest.fail("the server is ready")


def test_the_command_serves_until_it_is_told_to_stop(real_triton: None, shop: Shop) -> None:
    """It runs as a daemon under nohup, which survives the end of its terminal."""
    command = [sys.executable, "-c", "import soa_pipeline; soa_pipeline.main()", "serve", "jets/1"]
    process = subprocess.Popen(
        ["nohup", *command, "--explicit", "--json", "--registry", shop.registry.uri],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    while (line := process.stdout.readline()) not in ("}\n", ""):
        lines.append(line)
    if process.poll() is not None:
        pytest.fail(process.communicate()[1])
    report = json.loads("".join([*lines, "}"]))
    assert report["worst"]["probabilities"] < 1e-4
    assert report["metrics"]["nv_inference_exec_count"] > 0
    session = pipeline.load(
        "jets@production", device=report["endpoints"]["gRPC"], registry=shop.registry
    )
    event = shop.event("jets", session, 3)
    process.send_signal(signal.SIGHUP)  # the end of its terminal
    time.sleep(0.5)
    session.run(*event)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors.endswith("stopping\n")
    assert "Traceback" not in errors
    with pytest.raises((ServerGoneError, DeadlineError)):
        session.run(*event)
    session.close()
