"""The commands that serve a version with Triton."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from pipeline.cli.answers import Answer, command, print_answer, say
from pipeline.cli.completion import complete_refs
from soa.text import number

if TYPE_CHECKING:
    from pipeline.deployment import ClusterFiles, Deployed
    from registry.store import Registry
    from serving.local import ServerOptions
    from serving.native import Backend
    from stages.reports import ValidationReport

F = TypeVar("F", bound=Callable[..., Any])


_SERVICE = ("devices", "instances", "queue_delay_us", "target", "requests", "merge")


def _service_options(function: F) -> F:
    """A decorator that adds the options in `_SERVICE`. Their names are those of arguments of
    `pipeline.deployment.deploy`."""
    for option in (
        click.option(
            "--requests", default="columns", show_default=True,
            type=click.Choice(["columns", "rows", "blocks"]),
            help="The tensors of a request: one for each column, the model's (n, F) tensors, or "
            "the SoA blocks (F, n), which are never merged.",
        ),
        click.option(
            "--merge/--alone", default=None,
            help="Whether requests share runs. Default: if rows are independent and the benchmark "
            "of the version shows a gain.",
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
            help="cpu, or cuda:0 and so on; may be repeated.",
        ),
    ):  # fmt: skip
        function = option(function)
    return function


def _tls_options(function: F) -> F:
    """A decorator that adds the options for the files of a `Tls`; the command gets them by the
    names of its fields."""
    for name, content in (
        ("certificate-chain", "the client's certificate, if the server asks for one."),
        ("private-key", "the client's key, if the server asks for one."),
        ("root-certificates", "the authority of the server's certificate."),
    ):
        text = f"With --to: use TLS. A PEM file with {content}"
        add = click.option(f"--{name}", metavar="FILE", type=click.Path(path_type=Path), help=text)
        function = add(function)
    return function


def _refuse_manifests(context: click.Context, option: click.Parameter, folder: str | None) -> None:
    """Refuse the option `--manifests`, which older releases had."""
    if folder is not None:
        raise click.UsageError(
            "--manifests is gone: write --helm values.yaml, and make manifests from it with "
            "helm template NAME fastml/supersonic -f values.yaml"
        )


def _cluster_options(function: F) -> F:
    """A decorator that adds the options that `_make_cluster_files` takes."""
    for option in reversed((
        click.option(
            "--helm", is_flag=False, flag_value="values.yaml", metavar="[FILE]",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Also write values for the SuperSONIC Helm chart. Default FILE: values.yaml.",
        ),
        click.option("--manifests", hidden=True, expose_value=False, callback=_refuse_manifests),
        click.option(
            "--image", metavar="IMAGE",
            help="For a cluster: a container image with Triton, torch and soa-pipeline.",
        ),
        click.option(
            "--models", default="pvc:models", show_default=True, metavar="PLACE",
            help="For a cluster: the place of DIR there: pvc:CLAIM[/FOLDER], nfs:HOST:/FOLDER, "
            "/cvmfs/FOLDER.",
        ),
        click.option(
            "--servers", default="1-10", show_default=True, metavar="LEAST-MOST",
            help="For a cluster: how many servers there may be.",
        ),
        click.option(
            "--queue-ms", type=int,
            help="For a cluster: add servers if requests wait longer. Default: the time of 4 runs.",
        ),
        click.option(
            "--memory-gib", type=int,
            help="For a cluster: memory of a server. Default: estimated from the artifact.",
        ),
        click.option(
            "--prometheus", metavar="URL",
            help="For a cluster: an existing Prometheus. Default: a new one.",
        ),
        click.option(
            "--connections-per-s", type=int, default=100, show_default=True,
            help="For a cluster: new clients that the proxy lets in.",
        ),
    )):  # fmt: skip
        function = option(function)
    return function


def _make_cluster_files(
    *,
    helm: Path | None,
    image: str | None,
    servers: str,
    replace: bool,
    **rest: Any,
) -> ClusterFiles | None:
    """Returns the files for a cluster that the options ask for, after a check; None without
    `--helm`. Raises UsageError for options that do not go together, and ServingError."""
    if helm is None:
        _refuse_options(("image", "servers", *rest), "is for a cluster: add --helm")
        return None
    from pipeline.deployment import ClusterFiles
    from serving.cluster import ClusterOptions

    if image is None:
        raise click.UsageError("a cluster needs --image: one with Triton, torch and soa-pipeline")
    least, _, most = servers.partition("-")
    most = most or least  # `--servers 4` means that there are always four
    if not (least.isdecimal() and most.isdecimal()):
        raise click.UsageError(f"--servers {servers!r}: write LEAST-MOST, as 1-10")
    options = ClusterOptions(image, min_servers=int(least), max_servers=int(most), **rest)
    files = ClusterFiles(options, helm, replace)
    files.check()
    return files


class _Backends(click.Choice[str]):
    """The names of backends. A name that older releases had gets an error with advice."""

    def convert(
        self, value: Any, option: click.Parameter | None, context: click.Context | None
    ) -> str:
        if value == "tensorrt":
            self.fail(
                "TensorRT plans are gone: write --device cuda:0 with a target for CUDA, which the "
                "Python backend runs, or --backend onnxruntime",
                option,
                context,
            )
        return super().convert(value, option, context)


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="The model repository; the model becomes the folder DIR/NAME.",
)  # fmt: skip
@_service_options
@click.option(
    "--backend", default="python", show_default=True,
    type=_Backends(["python", "onnxruntime", "pytorch"]),
    help="The Triton backend: soa-pipeline in the Python backend, or one of Triton's own, for a "
    "version with a valid artifact of onnxruntime or torchscript.",
)  # fmt: skip
@click.option("--replace", is_flag=True, help="Replace existing files.")
@_cluster_options
def deploy(
    ref: str,
    out: Path,
    backend: Backend,
    replace: bool,
    registry: Registry,
    **options: Any,
) -> Answer:
    """Write REF into a Triton model repository, for any Triton that has soa-pipeline.

    REF must have been promoted to production. The repository may be copied and moved.
    """
    from pipeline.deployment import deploy as write

    service = {name: options.pop(name) for name in _SERVICE}
    files = _make_cluster_files(replace=replace, **options)
    deployed = write(registry, ref, out, backend=backend, replace=replace, **service)
    data = _convert_to_data(deployed)
    line = f"{_format_ref(deployed)} ({deployed.service.target}) is in {deployed.folder}"
    lines = [line, _describe_batching(deployed)]
    if files is not None:
        data["cluster"] = files.write(deployed)
        lines += data["cluster"]
    return Answer(data, lines)


def _convert_to_data(deployed: Deployed) -> dict[str, Any]:
    """Returns a deployment as data for JSON."""
    service = deployed.service
    return {
        "version": _format_ref(deployed),
        "digest": service.digest,
        "target": service.target,
        "requests": service.requests,
        "backend": service.backend,
        "folder": str(deployed.folder),
        "max_batch_size": service.max_batch_size,
        "preferred_batch_size": [] if deployed.why_alone else list(service.preferred),
    }


def _describe_batching(deployed: Deployed) -> str:
    """Returns a sentence that says up to how many rows requests share runs, or why they do not."""
    if deployed.why_alone:
        return f"requests are not merged: {deployed.why_alone}"
    service = deployed.service
    sizes = ", ".join(map(str, service.preferred)) or "none"
    return f"requests are merged up to {service.max_batch_size} rows; preferred: {sizes}"


_TLS = ("root_certificates", "private_key", "certificate_chain")
_STARTED_SERVER = ("servers", "check", "explicit", "host", "grpc_port", "http_port", "metrics_port",
                   "tritonserver")  # fmt: skip


@command()
@click.argument("ref", shell_complete=complete_refs)
@_service_options
@click.option(
    "--to", metavar="URL",
    help="Load REF into the Triton that runs at triton://HOST:PORT, beside the models and versions "
    "that it serves, instead of starting one.",
)  # fmt: skip
@click.option(
    "--replace", is_flag=True,
    help="With --to: afterwards unload the other versions of the model there.",
)  # fmt: skip
@click.option("--unload", is_flag=True, help="With --to: unload REF there instead.")
@_tls_options
@click.option(
    "--servers", default=1, show_default=True,
    help="Number of Triton servers; several get an Envoy proxy in front.",
)  # fmt: skip
@click.option("--check", is_flag=True, help="Stop after the comparison with the reference.")
@click.option(
    "--explicit", is_flag=True,
    help="Let `serve --to` load models: whoever reaches the server's port can run programs there.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--grpc-port", default=0, help="Default: a free one.")
@click.option("--http-port", default=0, help="Default: a free one.")
@click.option("--metrics-port", default=0, help="Default: a free one.")
@click.option(
    "--ready-s", default=120.0, show_default=True,
    help="How long starting or loading may take, in seconds.",
)  # fmt: skip
@click.option(
    "--tritonserver", metavar="FILE",
    help="The server to start. Default: $PIPELINE_TRITONSERVER, that of `make triton`, or PATH.",
)  # fmt: skip
def serve(
    ref: str,
    to: str | None,
    replace: bool,
    unload: bool,
    ready_s: float,
    registry: Registry,
    **options: Any,
) -> None:
    """Start a real Triton here with REF, compare its answers with the reference, and serve.

    It serves until Ctrl-C, SIGTERM or SIGHUP. A signal that was ignored when it started stays
    ignored; nohup does this with SIGHUP. If answers are out of tolerance, it exits with 1.

    With --to, REF is loaded into a running Triton, without a lost request, and compared likewise.
    If that fails, the server has what it had before.
    """
    service = {name: options.pop(name) for name in _SERVICE}
    tls = {name: options.pop(name) for name in _TLS}
    if to is None:
        _refuse_options(("replace", "unload", *_TLS), "is for a running server: add --to")
        count, check = options.pop("servers"), options.pop("check")
        _serve_here(registry, ref, service, count, check, _make_server_options(ready_s, **options))
        return
    _refuse_options(_STARTED_SERVER, "starts a server, and --to names one that runs")
    from pipeline.deployment import LOADING, load_on, unload_from
    from serving.client import Tls

    secured = Tls(**tls) if any(tls.values()) else None
    connection = dataclasses.replace(LOADING, deadline_s=ready_s, tls=secured)
    if unload:
        _refuse_options(("replace", *_SERVICE), "does not go with --unload")
        ref, left = unload_from(registry, ref, to, options=connection)
        print_answer(_make_server_answer(ref, to, left, {}, [f"{ref} is unloaded"]))
        return
    say(f"loading {ref} at {to}, and comparing its answers with the reference")
    loaded = load_on(registry, ref, to, replace=replace, options=connection, **service)
    deployed = loaded.deployed
    data, lines = _list_worst(deployed, loaded.report)
    lines.append(_describe_batching(deployed))
    data |= {"metrics": {}, "folder": ""}
    print_answer(_make_server_answer(_format_ref(deployed), to, loaded.versions, data, lines))


def _refuse_options(names: Sequence[str], why: str) -> None:
    """Raises UsageError if one of the options `names` was given on the command line. `why`: the
    text of the error after the option."""
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name in names and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} {why}")


def _format_ref(deployed: Deployed) -> str:
    """Returns the version that was deployed, as NAME/NUMBER."""
    return f"{deployed.service.name}/{deployed.service.number}"


def _make_server_answer(
    ref: str, url: str, versions: Sequence[int], data: dict[str, Any], lines: Sequence[str]
) -> Answer:
    """Returns the answer about the running server at `url`, which now serves `versions` of the
    model of `ref`. `data` and `lines` say what was done there."""
    name = ref.partition("/")[0]
    serves = ", ".join(f"{name}/{number}" for number in versions) or f"no version of {name}"
    about_server = {"version": ref, "endpoints": {"gRPC": url}, "versions": list(versions)}
    return Answer(data | about_server, [*lines, f"{url} serves {serves}"])


def _make_server_options(
    ready_s: float,
    *,
    host: str,
    grpc_port: int,
    http_port: int,
    metrics_port: int,
    explicit: bool,
    tritonserver: str | None,
) -> ServerOptions:
    """Converts the options of `serve` about the server that it starts."""
    from serving.local import EXPLICIT, Ports, ServerOptions

    ports = Ports(grpc_port, http_port, metrics_port)
    return ServerOptions(host, ports, ready_s, tritonserver, EXPLICIT if explicit else ())


def _serve_here(
    registry: Registry,
    ref: str,
    service: dict[str, Any],
    count: int,
    check: bool,
    options: ServerOptions,
) -> None:
    """Start `count` Tritons with a version, compare their answers with the reference, and wait for
    Ctrl-C unless `check`."""
    from pipeline.deployment import check_answers
    from pipeline.deployment import deploy as write
    from serving.local import find_triton, make_server

    find_triton(options.binary)  # before any work
    with _sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="soa-serve-") as scratch:
        deployed = write(registry, ref, Path(scratch), **service)
        say(f"starting Triton with {_format_ref(deployed)}; {_describe_batching(deployed)}")
        with make_server(count, Path(scratch), options) as server:
            say("comparing its answers with the reference")
            data, lines = _list_worst(deployed, check_answers(server.url, deployed))
            endpoints, metrics = server.endpoints(), server.metrics(deployed.service.name)
            lines += [f"{protocol:8} {address}" for protocol, address in endpoints.items()]
            for counter in ("request_success", "count", "exec_count"):
                name = f"nv_inference_{counter}"
                lines.append(f"{name} {metrics.get(name, 0.0):.0f}")
            print_answer(Answer(data | {"endpoints": endpoints, "metrics": metrics}, lines))
            if not check:
                with contextlib.suppress(KeyboardInterrupt):
                    server.wait()
                say("stopping")


def _list_worst(deployed: Deployed, report: ValidationReport) -> tuple[dict[str, Any], list[str]]:
    """Returns what the comparison of a deployed version with its reference found, as data for JSON
    and as lines: the largest deviation of each output."""
    worst = {output: deviation.max_abs for output, deviation in report.worst.items()}
    lines = [f"{_format_ref(deployed)} answers as its reference does"]
    lines += [f"  {name}: largest deviation {number(value, 2)}" for name, value in worst.items()]
    return _convert_to_data(deployed) | {"worst": worst}, lines


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM (from a service manager) and SIGHUP (the terminal was closed) act like
    Ctrl-C, so that servers are stopped properly."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # A signal that was ignored at the start stays ignored: nohup ignores SIGHUP on purpose.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
