"""The commands that put a version behind Triton."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.cluster import cluster_files, cluster_options
from pipeline.cli.options import F, json_option, registry_at, registry_option, say, tell, tell_json

if TYPE_CHECKING:
    from serving.native import Backend
    from serving.wire import Form


def _service_options(command: F) -> F:
    for option in (
        click.option(
            "--requests", default="columns", show_default=True,
            type=click.Choice(["columns", "rows", "blocks"]),
            help="What a request carries: a tensor for each column, the model's own (n, F) "
            "tensors, or the SoA blocks (F, n), which are never merged.",
        ),
        click.option(
            "--merge/--alone", default=None,
            help="Whether requests share runs. Default: where rows are independent and, by the "
            "version's own benchmark, more of them are served that way.",
        ),
        click.option("--target", help="Serve this target. Default: the best that this host runs."),
        click.option(
            "--queue-delay-us", default=0, show_default=True,
            help="How long a request may wait for others to share its run.",
        ),
        click.option(
            "--instances", default=1, show_default=True, help="Processes on each device."
        ),
        click.option(
            "--device", "devices", multiple=True, default=("cpu",), show_default=True,
            help="cpu, or cuda:0 and so on; may be given again.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("ref")
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="The model repository; the model becomes the folder DIR/NAME.",
)  # fmt: skip
@_service_options
@click.option(
    "--backend", default="python", show_default=True,
    type=click.Choice(["python", "onnxruntime", "pytorch", "tensorrt"]),
    help="What of Triton runs it: soa-pipeline in its Python backend, or a backend of its own, for "
    "a version with a valid artifact of onnxruntime or torchscript. A plan for tensorrt is built "
    "here, of onnxruntime's, on a GPU of the kind that serves it.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="Replace what is there already.")
@cluster_options
@registry_option
@json_option
def deploy(
    ref: str,
    out: Path,
    devices: tuple[str, ...],
    instances: int,
    queue_delay_us: int,
    target: str | None,
    requests: Form,
    merge: bool | None,
    backend: Backend,
    replace: bool,
    registry_uri: str | None,
    as_json: bool,
    **cluster: Any,
) -> None:
    """Write REF as a model of a Triton repository: for any Triton that has soa-pipeline.

    REF must have been promoted to production. The repository may be copied and moved.
    """
    from pipeline.deployment import deploy as write

    files = cluster_files(replace=replace, **cluster)
    done = write(
        registry_at(registry_uri), ref, out, devices=devices, instances=instances,
        queue_delay_us=queue_delay_us, target=target, requests=requests,
        backend=backend, merge=merge, replace=replace,
    )  # fmt: skip
    said = files.write(done) if files else []
    if as_json:
        found = _described(done) | ({"cluster": said} if files else {})
        tell_json(found)
        return
    service = done.service
    tell(f"{service.name}/{service.number} ({service.target}) is in {done.folder}")
    tell(_batching(done))
    for line in said:
        tell(line)


def _described(done: Any) -> dict[str, Any]:
    return {
        "version": f"{done.service.name}/{done.service.number}",
        "digest": done.service.digest,
        "target": done.service.target,
        "requests": done.service.requests,
        "backend": done.service.backend,
        "folder": str(done.folder),
        "max_batch_size": done.service.max_batch_size,
        "preferred_batch_size": [] if done.why_alone else list(done.service.preferred),
    }


def _batching(done: Any) -> str:
    if done.why_alone:
        return f"requests are not merged: {done.why_alone}"
    sizes = ", ".join(map(str, done.service.preferred)) or "none"
    return f"requests are merged up to {done.service.max_batch_size} rows; preferred: {sizes}"


@click.command()
@click.argument("ref")
@_service_options
@click.option(
    "--servers", default=1, show_default=True, help="Tritons; several stand behind an Envoy."
)
@click.option("--check", is_flag=True, help="Stop after the comparison with the reference.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--grpc-port", default=0, help="Default: a free one.")
@click.option("--http-port", default=0, help="Default: a free one.")
@click.option("--metrics-port", default=0, help="Default: a free one.")
@click.option(
    "--ready-s", default=120.0, show_default=True, help="How long starting may take, in seconds."
)
@click.option(
    "--tritonserver", metavar="FILE",
    help="The server to start. Default: $PIPELINE_TRITONSERVER, what `make triton` made, or PATH.",
)  # fmt: skip
@registry_option
@json_option
def serve(
    ref: str,
    devices: tuple[str, ...],
    instances: int,
    queue_delay_us: int,
    target: str | None,
    requests: Form,
    merge: bool | None,
    servers: int,
    check: bool,
    host: str,
    grpc_port: int,
    http_port: int,
    metrics_port: int,
    ready_s: float,
    tritonserver: str | None,
    registry_uri: str | None,
    as_json: bool,
) -> None:
    """Start a real Triton here with REF, compare its answers with the reference, and serve.

    It serves until Ctrl-C, SIGTERM or SIGHUP; a signal that was ignored when it started, as nohup
    has SIGHUP, stays ignored. Answers out of tolerance stop it, with exit status 1.
    """
    from pipeline.deployment import check_answers
    from pipeline.deployment import deploy as write
    from serving.local import Ports, ServerOptions, find_triton, serve_by

    find_triton(tritonserver)  # before any work
    options = ServerOptions(host, Ports(grpc_port, http_port, metrics_port), ready_s, tritonserver)
    with _sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="soa-serve-") as scratch:
        done = write(
            registry_at(registry_uri), ref, Path(scratch), devices=devices, instances=instances,
            queue_delay_us=queue_delay_us, target=target, requests=requests, merge=merge,
        )  # fmt: skip
        say(f"starting Triton with {done.service.name}/{done.service.number}; {_batching(done)}")
        with serve_by(servers, Path(scratch), options) as server:
            say("comparing its answers with the reference")
            report = check_answers(server, done)
            found = {
                **_described(done),
                "endpoints": server.endpoints(),
                "worst": {name: d.max_abs for name, d in report.worst.items()},
                "metrics": server.metrics(done.service.name),
            }
            _print(found, as_json)
            if not check:
                with contextlib.suppress(KeyboardInterrupt):
                    server.wait()
                say("stopping")


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        tell_json(found)
        return
    tell(f"{found['version']} answers as its reference does")
    for output, worst in found["worst"].items():
        tell(f"  {output}: largest deviation {worst:.2g}")
    for protocol, address in found["endpoints"].items():
        tell(f"{protocol:8} {address}")
    for name in ("request_success", "count", "exec_count"):
        value = found["metrics"].get(f"nv_inference_{name}", 0.0)
        tell(f"nv_inference_{name} {value:.0f}")


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """So that whatever was started is stopped in order, also by a service manager, and when the
    terminal goes."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # One that came in as ignored stays so: nohup has SIGHUP ignored, and means it.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
