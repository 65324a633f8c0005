"""config.pbtxt: Triton's description of a model, made from a version's manifest.

It is built as Triton's own protobuf message and printed as protobuf text, so it always fits
Triton's schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.target import Target
from serving.errors import ServingError
from serving.native import FILES, Backend
from serving.wire import Form, Wire, WireTensor, mergeable
from soa.errors import needs_extra
from soa.signature import Signature

DIGEST = "digest"
VERSION = "version"
TARGET = "target"
REQUESTS = "requests"

BLOCKS_ALONE = "a block (F, n) has its rows last, and Triton joins requests at the first dimension"

_DEVICE = re.compile(r"cpu|cuda:\d+")
_LARGEST = 2**31 - 1  # the largest number in Triton's message


@dataclass(frozen=True)
class Service:
    """A version to serve, and the settings for it. Raises ServingError for settings that conflict.

    `devices`: "cpu", "cuda:0", ...; each gets `instances` instances. `merge`: rows of several
    requests may share a run, and a client may cut a long request. `batching`: Triton's batcher
    joins requests, and waits at most `queue_delay_us` for more of them. `preferred`: the preferred
    row counts of a batch. `requests`: the form of requests and answers, see serving/wire.py.
    `backend`: the Triton backend that runs the model, see serving/native/artifact.py.
    """

    name: str
    number: int
    digest: str
    target: str
    signature: Signature
    merge: bool
    batching: bool = True
    preferred: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    instances: int = 1
    queue_delay_us: int = 0
    requests: Form = "columns"
    backend: Backend = "python"

    def __post_init__(self) -> None:
        """Raise ServingError for settings that are out of range or conflict."""
        if not (1 <= self.instances <= _LARGEST and 0 <= self.queue_delay_us <= _LARGEST):
            raise ServingError(
                f"{self.instances} instances with a queue delay of {self.queue_delay_us} us: "
                f"at least 1 instance and 0 us are needed, and at most {_LARGEST:,} of each"
            )
        self._check_devices()
        if self.merge and not mergeable(self.signature):
            raise ServingError(f"{self.name} has scalars or several row dimensions: never merged")
        if self.merge and self.requests == "blocks":
            raise ServingError(f"{self.name}: {BLOCKS_ALONE}")
        if self.backend not in FILES:
            raise ServingError(f"backend {self.backend!r}: use {', '.join(FILES)}")
        if self.backend != "python" and self.devices != ("cpu",):
            raise ServingError(
                f"a model for Triton's {self.backend} backend is tried here, on the CPU, before it "
                f"is written: it cannot be for {', '.join(self.devices)}"
            )

    def _check_devices(self) -> None:
        """Raise ServingError unless there is a device, each is named once, and all can run the
        target."""
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                raise ServingError(f"device {device!r}: use cpu or cuda:<number>")
            if (device == "cpu") != (Target.parse(self.target).device == "cpu"):
                raise ServingError(f"target {self.target} does not run on device {device!r}")
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ServingError(f"devices {', '.join(self.devices) or 'none'}: name each one once")

    @property
    def wire(self) -> Wire:
        """The tensors of requests and answers. Raises ServingError if the form cannot send them."""
        return Wire.of(self.signature, self.requests)

    @property
    def max_batch_size(self) -> int:
        """Triton's setting of the same name, in rows; 0 if rows of several requests must not share
        a run."""
        if not self.merge:
            return 0
        (dim,) = self.signature.dims
        return self.signature.ranges[dim].max


def config_text(service: Service, checksums: Mapping[str, str] | None = None) -> str:
    """Return the text of config.pbtxt. Raises ServingError if tritonclient is missing.

    `checksums`: the MD5 of each file, by its path in the model's folder. Triton's agent `checksum`
    checks them at loading, and CMSSW's client compares them with its own.
    """
    from google.protobuf import text_format

    text = str(text_format.MessageToString(config_message(service, checksums)))
    return f"# {service.name}/{service.number}, written by `pipeline deploy`\n{text}"


def config_message(service: Service, checksums: Mapping[str, str] | None = None) -> Any:
    """Make Triton's `ModelConfig` message for a service. `checksums`: as in `config_text`."""
    schema = _import_schema()
    wire = service.wire
    config = schema.ModelConfig(
        name=service.name, backend=service.backend, max_batch_size=service.max_batch_size
    )
    config.default_model_filename = FILES[service.backend]
    config.version_policy.specific.versions.append(service.number)
    for tensors, entries in ((wire.inputs, config.input), (wire.outputs, config.output)):
        for tensor, name in zip(tensors, tensor_names(service.backend, tensors), strict=True):
            entries.add(
                name=name,
                data_type=schema.DataType.Value(f"TYPE_{tensor.datatype}"),
                dims=_dims(tensor, service.merge),
            )
    if service.merge and service.batching:
        config.dynamic_batching.max_queue_delay_microseconds = service.queue_delay_us
        config.dynamic_batching.preferred_batch_size.extend(
            rows for rows in service.preferred if 1 <= rows <= service.max_batch_size
        )
    _add_instances(config, service, schema)
    _add_warmup(config, service, wire, schema)
    for key, value in _parameters(service).items():
        config.parameters[key].string_value = value
    if checksums:
        agent = config.model_repository_agents.agents.add(name="checksum")
        agent.parameters.update({f"MD5:{file}": md5 for file, md5 in checksums.items()})
    return config


_SETTINGS: dict[Backend, dict[str, str]] = {
    "python": {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes"},  # NumPy reads the arrays of requests
    "onnxruntime": {},
    "pytorch": {"DISABLE_OPTIMIZED_EXECUTION": "true"},  # the same as in the torchscript engine
}


def _parameters(service: Service) -> dict[str, str]:
    """Return the parameters of the configuration: facts about the version, and settings."""
    parameters = {
        DIGEST: service.digest,
        VERSION: f"{service.name}/{service.number}",
        TARGET: service.target,
        REQUESTS: service.requests,
        **_SETTINGS[service.backend],
    }
    if service.backend == "python" and service.devices != ("cpu",):
        parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] = "no"  # tensors in GPU memory stay there
    return parameters


def tensor_names(backend: Backend, tensors: Sequence[WireTensor]) -> list[str]:
    """Return the names that tensors have in Triton.

    Triton's PyTorch backend needs the index of the tensor at the end of the name.
    """
    if backend == "pytorch":
        return [f"{tensor.name}__{i}" for i, tensor in enumerate(tensors)]
    return [tensor.name for tensor in tensors]


def _dims(tensor: WireTensor, merge: bool) -> tuple[int, ...]:
    """Return the shape for config.pbtxt. If rows may be merged, Triton adds the row dimension."""
    return tensor.dims if merge else tensor.shape(-1)


def _add_instances(config: Any, service: Service, schema: Any) -> None:
    """Add the instances on each device to `config`."""
    group = schema.ModelInstanceGroup
    for device in service.devices:
        if device == "cpu":
            config.instance_group.add(name="cpu", kind=group.KIND_CPU, count=service.instances)
        else:
            index = int(device.removeprefix("cuda:"))
            config.instance_group.add(
                name=f"gpu{index}", kind=group.KIND_GPU, count=service.instances, gpus=[index]
            )


def _add_warmup(config: Any, service: Service, wire: Wire, schema: Any) -> None:
    """Let Triton run the model on zeros before it reports that the model is ready.

    It runs once for each of `_warmup_rows`.
    """
    names = tensor_names(service.backend, wire.inputs)
    for rows in _warmup_rows(service):
        label = ",".join(f"{dim}={n}" for dim, n in rows.items())
        warmup = config.model_warmup.add(name=label)
        if service.merge:
            (warmup.batch_size,) = rows.values()
        for tensor, name in zip(wire.inputs, names, strict=True):
            zeros = warmup.inputs[name]
            zeros.data_type = schema.DataType.Value(f"TYPE_{tensor.datatype}")
            zeros.dims.extend(tensor.dims if service.merge else tensor.shape(rows[tensor.rows]))
            zeros.zero_data = True


def _warmup_rows(service: Service) -> list[Mapping[str, int]]:
    """Return the row counts by dimension of each warm-up run.

    There is one with the fewest rows, and, if Triton joins requests, one with the largest preferred
    number of rows.
    """
    ranges = service.signature.ranges
    smallest = {dim: max(1, ranges[dim].min) for dim in service.signature.dims}
    if not (service.merge and service.batching and service.preferred):
        return [smallest]
    (dim,) = smallest  # merged requests have one dimension
    largest = min(max(service.preferred), ranges[dim].max)
    return [smallest, {dim: largest}] if largest > smallest[dim] else [smallest]


def _import_schema() -> Any:
    """Import Triton's protobuf messages of a configuration. Raises ServingError if it cannot."""
    with needs_extra("serve", ServingError):
        from tritonclient.grpc import model_config_pb2
    return model_config_pb2
