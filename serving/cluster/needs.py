"""The needs of a deployment in a cluster.

Many of them follow from the version: the vendor and the kind of node from its target, the memory
from the size of its files, the limit on the wait in the queue from its benchmark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from engines.target import Target
from registry.bundle import Bundle
from serving.errors import ServingError
from serving.triton import Service, run_times
from serving.wire import Wire

Vendor = Literal["cpu", "nvidia", "amd"]
_VENDORS: dict[str, Vendor] = {"cpu": "cpu", "cuda": "nvidia", "rocm": "amd"}
RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""The resource name of a GPU in Kubernetes, by vendor."""

SHM_MIB = 64
"""The default size of /dev/shm that Kubernetes gives a container."""

_GIB = 2**30
# Memory, with a margin. Measured: Triton 2.51 itself uses 0.04 GiB, and a process of the Python
# backend with a small model on a CPU 0.3 GiB. The host memory for a GPU was not measured.
_SERVER_GIB = 0.5
_PROCESS_GIB: dict[Vendor, float] = {"cpu": 1.0, "nvidia": 4.0, "amd": 4.0}
_COPIES = 4  # copies of the artifact's bytes: mapped, read, packed by the engine, work memory
_QUEUED_RUNS = 4  # more servers are started if requests wait longer than this many full runs
_DEFAULT_QUEUE_MS = 100  # the chart's default, if no time was measured
_LEAST_QUEUE_MS = 5
_NAME_LENGTH = 40  # of `Needs.name`: objects add up to 20 letters, and Kubernetes allows 63


@dataclass(frozen=True)
class ClusterOptions:
    """The facts of a deployment that only the user knows.

    `image`: a container image with Triton, torch and soa-pipeline. `models`: the place of the model
    repository: `pvc:CLAIM[/FOLDER]`, `nfs:HOST:/FOLDER`, or `/cvmfs/FOLDER`. `queue_ms`: the
    accepted mean wait of requests. `memory_gib`: the memory of one server. `prometheus`: the URL of
    an existing Prometheus. `connections_per_s`: the proxy's limit on new clients in a second.
    """

    image: str
    models: str = "pvc:models"
    min_servers: int = 1
    max_servers: int = 10
    queue_ms: int | None = None
    memory_gib: int | None = None
    prometheus: str | None = None
    connections_per_s: int = 100

    def __post_init__(self) -> None:
        """Raise ServingError for a value that cannot be used."""
        if not re.fullmatch(r"[\w./:@-]+", self.image):
            raise ServingError(f"image {self.image!r} is not the name of a container image")
        if not 1 <= self.min_servers <= self.max_servers:
            raise ServingError(
                f"{self.min_servers} to {self.max_servers} servers: the first number must be at "
                "least 1 and at most the second"
            )
        for name, value in (
            ("queue limit", self.queue_ms),
            ("memory", self.memory_gib),
            ("connections a second", self.connections_per_s),
        ):
            if value is not None and value < 1:
                raise ServingError(f"{name} {value}: at least 1 is needed")
        Storage.parse(self.models)  # raises
        prometheus_with_port(self.prometheus)  # raises


@dataclass(frozen=True)
class Storage:
    """The volume with the model repository.

    `source`: the name of the claim, or the host of a network file system. `exported`: the folder of
    that host which is mounted. `mount`: the path of the volume in the server. `folder`: the path of
    the repository in the server.
    """

    kind: Literal["pvc", "nfs", "cvmfs"]
    source: str
    mount: str
    folder: str
    exported: str = ""

    @classmethod
    def parse(cls, text: str) -> Storage:
        """Read `pvc:CLAIM/FOLDER`, `nfs:HOST:/FOLDER` or `/cvmfs/FOLDER`. Raises ServingError."""
        if match := re.fullmatch(r"pvc:([a-z0-9]([a-z0-9.-]*[a-z0-9])?)(/.+)?", text):
            return cls("pvc", match[1], "/models", _check_plain(text, f"/models{match[3] or ''}"))
        if match := re.fullmatch(r"nfs:([\w.-]+):(/.*)", text):
            return cls("nfs", match[1], "/models", "/models", exported=_check_plain(text, match[2]))
        if text.startswith("/cvmfs/"):
            return cls("cvmfs", "cvmfs", "/cvmfs", _check_plain(text, text))
        raise ServingError(
            f"models at {text!r}: use pvc:CLAIM, pvc:CLAIM/FOLDER, nfs:HOST:/FOLDER or "
            "/cvmfs/FOLDER"
        )


def _check_plain(text: str, folder: str) -> str:
    """Return `folder` without a slash at its end.

    Raises ServingError unless it is an absolute path of plain names. `text`: the whole option, for
    the message.
    """
    if not re.fullmatch(r"(/[\w.+@=-]+)+/?", folder) or ".." in folder.split("/"):
        raise ServingError(f"models at {text!r}: {folder!r} is not a plain absolute folder")
    return folder.rstrip("/")


def prometheus_with_port(url: str | None) -> str | None:
    """Return the URL of a Prometheus with its port, which may be the default; None for None.

    Raises ServingError if the URL is not `http[s]://HOST[:PORT]`.
    """
    if url is None:
        return None
    bad_url = ServingError(f"Prometheus at {url!r}: write http://HOST:PORT")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 9090)
    except ValueError:  # raised for brackets that do not match, or a port that is no number
        raise bad_url from None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/"):
        raise bad_url
    if ":" in host:  # an IPv6 address, of which urlsplit removed the brackets
        host = f"[{host}]"
    return f"{parts.scheme}://{host}:{port}"


@dataclass(frozen=True)
class Needs:
    """The needs of a deployment.

    `name`: the beginning of the names of all objects. `gpus`, `cpus`, `memory_gib` and `shm_mib`
    are for one server. `shm_mib`: the size of its /dev/shm, through which its processes exchange
    tensors.
    """

    name: str
    model: str
    version: str
    digest: str
    target: Target
    cpus: int
    memory_gib: int
    shm_mib: int
    gpus: int
    queue_ms: int
    options: ClusterOptions

    @property
    def vendor(self) -> Vendor:
        """The vendor of the GPU, or "cpu"."""
        return _VENDORS[self.target.device]

    @property
    def storage(self) -> Storage:
        """The volume with the model repository."""
        return Storage.parse(self.options.models)

    @property
    def prometheus(self) -> str | None:
        """The URL of an existing Prometheus with its port; None: the chart starts its own."""
        return prometheus_with_port(self.options.prometheus)

    @property
    def scales(self) -> bool:
        """Whether the number of servers changes with the load."""
        return self.options.max_servers > self.options.min_servers

    @property
    def resources(self) -> dict[str, int | str]:
        """The resources of one server, with Kubernetes' names and units.

        They are both its requests and its limits.
        """
        resources: dict[str, int | str] = {"cpu": self.cpus, "memory": f"{self.memory_gib}Gi"}
        if self.vendor in RESOURCES:
            resources[RESOURCES[self.vendor]] = self.gpus
        return resources

    @property
    def node_selector(self) -> dict[str, str]:
        """The labels of nodes that can run the target. For NVIDIA GPUs these are labels of its
        feature discovery; for CPUs a label that every node has."""
        arch = self.target.arch
        if self.vendor == "nvidia":
            digits = re.sub(r"\D", "", arch)  # sm_90 → 90: the last digit is the minor number
            return {
                "nvidia.com/gpu.compute.major": digits[:-1],
                "nvidia.com/gpu.compute.minor": digits[-1],
            }
        if self.vendor == "amd":
            return {}
        return {"kubernetes.io/arch": "arm64" if arch == "aarch64" else "amd64"}


def needs_of(service: Service, bundle: Bundle, options: ClusterOptions) -> Needs:
    """Compute the needs of `service`, which `pipeline deploy` wrote from `bundle`.

    Each instance is a process on its device. A process has the tensors of its largest request twice
    in its memory, and twice in /dev/shm, where it gets another MiB as a margin.
    """
    target = Target.parse(service.target)
    vendor = _VENDORS[target.device]
    processes = service.instances * len(service.devices)
    tensor_bytes = _tensor_bytes(service)
    process_bytes = _COPIES * _artifact_bytes(bundle, service.target) + 2 * tensor_bytes
    process_gib = _PROCESS_GIB[vendor] + process_bytes / _GIB
    shm_mib = max(SHM_MIB, processes + math.ceil(2 * tensor_bytes * processes / 2**20))
    memory_gib = math.ceil(_SERVER_GIB + processes * process_gib + shm_mib / 1024)
    return Needs(
        name=object_name(service.name),
        model=service.name,
        version=f"{service.name}/{service.number}",
        digest=service.digest,
        target=target,
        cpus=processes * bundle.manifest.session.threads + 1,
        memory_gib=options.memory_gib or memory_gib,
        shm_mib=shm_mib,
        gpus=0 if vendor == "cpu" else len(service.devices),
        queue_ms=options.queue_ms or _queue_ms(run_times(bundle.manifest, service.target)),
        options=options,
    )


def object_name(model: str) -> str:
    """Return the model's name in a form that is valid for Kubernetes and Helm.

    It has lower-case letters, digits and dashes, with a letter first and no dash last.
    """
    name = re.sub(r"[^a-z0-9]+", "-", model.lower())
    name = name if name[:1].isalpha() else f"m-{name}"
    return name[:_NAME_LENGTH].strip("-")


def _artifact_bytes(bundle: Bundle, target: str) -> int:
    """Return the bytes of all files of the artifacts that a session of the target runs."""
    record = bundle.manifest.targets[target]
    names = {name for engine in record.engines() for name in record.candidates[engine].files}
    return sum(bundle.file(name).stat().st_size for name in names)


def _tensor_bytes(service: Service) -> int:
    """Return the bytes of all inputs and outputs of the largest request."""
    wire = Wire.of(service.signature)
    rows = {dim: limits.max for dim, limits in service.signature.ranges.items()}
    return sum(tensor.nbytes(rows[tensor.rows]) for tensor in (*wire.inputs, *wire.outputs))


def _queue_ms(times: Mapping[int, float]) -> int:
    """Return the accepted mean wait: the time of `_QUEUED_RUNS` full runs, in milliseconds.

    `times`: the time of a run in µs, by row count. The largest row count is a full run.
    """
    if not times:
        return _DEFAULT_QUEUE_MS
    return max(_LEAST_QUEUE_MS, math.ceil(_QUEUED_RUNS * times[max(times)] / 1000))
