"""A session whose model runs in a Triton server: SoA in, SoA out, as a local one.

The server takes the place of an opened artifact: everything that a local session checks when memory
is bound is checked here too, and test mode compares the server's answers with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.engine import Executable, engine
from registry.bundle import Bundle
from registry.promoted import read_promoted
from registry.reference import Ref, parse_ref
from registry.store import Registry
from registry.version import Version
from runtime.checked import CheckedSession
from runtime.loader import Mode, open_bundle, require_promoted, tolerances_of
from runtime.session import Origin
from serving.errors import AnswerError, RefusedError, ServingError, VersionMismatchError
from serving.model_config import DIGEST, REQUESTS, TARGET
from serving.own_process import OwnProcess
from serving.pooled_session import PooledSession
from serving.remote_options import HEADERS, RemoteOptions, address_of
from serving.wire import FORMS, Array, Form, Wire, WireTensor, locations
from soa.signature import Signature

if TYPE_CHECKING:
    from serving.client import Client

_ALIGNMENT = 64  # of each array in shared memory


class RemoteSession(PooledSession):
    """Runs one model in a server, on CPU collections. Any number of threads may bind and run."""

    def __init__(
        self, signature: Signature, model: RemoteModel, origin: Origin | None = None
    ) -> None:
        super().__init__(signature, model, model.options.in_flight, origin)


class RemoteModel(Executable):
    """The executable of a remote session: argument tensors to the server, answers into them.

    Nothing is written unless the whole answer is in order. `name` and `version` are Triton's,
    `requests` the form that the server takes. `merge`: rows are independent, so that more of them
    than a message carries go in several.
    """

    def __init__(
        self,
        signature: Signature,
        client: Client,
        name: str,
        version: str,
        digest: str,
        requests: Form = "columns",
        *,
        merge: bool = False,
    ) -> None:
        self.options = client.options
        self._wire = Wire.of(signature, requests)
        self._merge = merge
        self._outputs = {t.name: t for t in self._wire.outputs}
        self._dims = signature.dims
        self._client = client
        self._name, self._version, self._digest = name, version, digest
        self._given = locations(signature, self._wire.inputs, "input")
        self._written = locations(signature, self._wire.outputs, "output")
        self._process = OwnProcess()
        self._regions: Any = None
        if self.options.shared_memory:
            from serving.shared_memory import Regions

            self._regions = Regions(client)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self._process.require()
        with self._client.one_deadline():
            self._run(arguments)

    def _run(self, arguments: Sequence[torch.Tensor]) -> None:
        rows = {dim: arguments[i].shape[0] for i, dim in enumerate(self._dims)}
        given = {
            t.name: t.gather(self._given[t.name].parts(arguments), 0, rows[t.rows])
            for t in self._wire.inputs
        }
        tensors = (*self._wire.inputs, *self._wire.outputs)
        # Triton takes no empty array from shared memory.
        if self._regions is None or not all(t.nbytes(rows[t.rows]) for t in tensors):
            found = self._ask_in_parts(given, rows)
        else:
            try:
                found = self._ask_shared(given, rows)
            except (RefusedError, VersionMismatchError) as error:
                if "shared memory region" not in str(error):
                    raise
                self._regions.forget()  # a new server knows none of them
                found = self._ask_shared(given, rows)
        self._check_values(found, given)
        for t in self._wire.outputs:
            t.scatter(self._written[t.name].parts(arguments), 0, found[t.name])

    def close(self) -> None:
        if not self._process.here():
            return  # all of it is the parent's
        if self._regions is not None:
            self._regions.close()
        self._client.close()

    def _request(self, given: Mapping[str, Array]) -> Any:
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelInferRequest(model_name=self._name, model_version=self._version)
        request.parameters[DIGEST].string_param = self._digest
        for t in self._wire.inputs:
            request.inputs.add(name=t.name, datatype=t.datatype, shape=given[t.name].shape)
        for t in self._wire.outputs:
            request.outputs.add(name=t.name)
        return request

    def _ask_in_parts(
        self, given: Mapping[str, Array], rows: Mapping[str, int]
    ) -> dict[str, Array]:
        """In as many messages as it takes; raises TooLargeError where rows belong together."""
        largest = max(self._nbytes(self._wire.inputs, rows), self._nbytes(self._wire.outputs, rows))
        room = self.options.message_bytes - HEADERS
        if largest <= room:
            return self._ask(given, rows)
        if not self._merge:
            self._client.require_size(
                largest + HEADERS, "a message, whose rows may not be taken apart,"
            )
        ((dim, n),) = rows.items()
        cuts = np.linspace(0, n, min(n, -(-largest // room)) + 1).astype(int).tolist()
        found = [
            self._ask({name: values[i:j] for name, values in given.items()}, {dim: j - i})
            for i, j in pairwise(cuts)
        ]
        return {
            t.name: np.concatenate([part[t.name] for part in found]) for t in self._wire.outputs
        }

    @staticmethod
    def _nbytes(tensors: Sequence[WireTensor], rows: Mapping[str, int]) -> int:
        return sum(t.nbytes(rows[t.rows]) for t in tensors)

    def _ask(self, given: Mapping[str, Array], rows: Mapping[str, int]) -> dict[str, Array]:
        request = self._request(given)
        request.raw_input_contents.extend(given[t.name].tobytes() for t in self._wire.inputs)
        answer = self._client.infer(request)
        self._check_shapes(answer, rows)
        if len(answer.raw_output_contents) != len(answer.outputs):
            raise AnswerError(f"{self}: {len(answer.raw_output_contents)} arrays in the answer")
        found: dict[str, Array] = {}
        for described, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            t = self._output(described.name)
            if len(raw) != t.nbytes(rows[t.rows]):
                raise AnswerError(
                    f"{self}: output {t.name} has {len(raw)} bytes, needed are "
                    f"{t.nbytes(rows[t.rows])}"
                )
            found[t.name] = np.frombuffer(raw, t.dtype).reshape(t.shape(rows[t.rows]))
        return found

    def _ask_shared(self, given: Mapping[str, Array], rows: Mapping[str, int]) -> dict[str, Array]:
        """The same with the arrays in shared memory. The answer is a copy of it."""
        tensors = (*self._wire.inputs, *self._wire.outputs)
        offsets: dict[str, int] = {}
        size = 0
        for t in tensors:
            offsets[t.name] = size
            size += -(-t.nbytes(rows[t.rows]) // _ALIGNMENT) * _ALIGNMENT
        request = self._request(given)
        with self._regions.taken(size) as region:

            def view(t: WireTensor) -> Array:
                part = region.memory[offsets[t.name] :][: t.nbytes(rows[t.rows])]
                array: Array = part.view(t.dtype).reshape(t.shape(rows[t.rows]))
                return array

            for t, described in zip(tensors, (*request.inputs, *request.outputs), strict=True):
                described.parameters["shared_memory_region"].string_param = region.name
                described.parameters["shared_memory_offset"].int64_param = offsets[t.name]
                described.parameters["shared_memory_byte_size"].int64_param = t.nbytes(rows[t.rows])
            for t in self._wire.inputs:
                view(t)[...] = given[t.name]
            self._check_shapes(self._client.infer(request, region.doubt), rows)
            return {t.name: view(t).copy() for t in self._wire.outputs}

    def _check_shapes(self, answer: Any, rows: Mapping[str, int]) -> None:
        names = [described.name for described in answer.outputs]
        wanted = [t.name for t in self._wire.outputs]
        if sorted(names) != sorted(wanted):
            raise AnswerError(
                f"{self}: the answer has outputs {', '.join(names) or 'none'}, the model has "
                f"{', '.join(wanted)}"
            )
        for described in answer.outputs:
            t = self._output(described.name)
            found = (described.datatype, tuple(described.shape))
            if found != (t.datatype, t.shape(rows[t.rows])):
                raise AnswerError(
                    f"{self}: output {t.name} is {found[0]} {found[1]}, needed is {t.datatype} "
                    f"{t.shape(rows[t.rows])}"
                )

    def _check_values(self, found: Mapping[str, Array], given: Mapping[str, Array]) -> None:
        if self.options.allow_nan:
            return
        for name, values in found.items():
            if values.dtype.kind != "f" or not np.isnan(values).any():
                continue
            if all(np.isfinite(v).all() for v in given.values() if v.dtype.kind == "f"):
                nan = np.isnan(values)
                by_row = nan.T if self._outputs[name].rows_last else nan
                row = int(by_row.reshape(len(by_row), -1).any(axis=1).argmax())
                raise AnswerError(
                    f"{self}: output {name} is NaN at row {row}, and no input is NaN or Inf"
                )

    def _output(self, name: str) -> WireTensor:
        return self._outputs[name]

    def __str__(self) -> str:
        return f"server {self._client.address}, {self._name}/{self._version or 'any'}"


def connect(
    ref: str | Path,
    url: str,
    *,
    mode: Mode = "production",
    registry: Registry | str | None = None,
    options: RemoteOptions | None = None,
) -> RemoteSession | CheckedSession:
    """A session of `ref` that runs in the server at `triton://host:port`.

    The server must have the model under the registry's name and number, with the same bundle: that
    is checked now, and by the server again for every request. `mode="test"` gives a session that
    also runs the reference program here and compares.

    Raises RemoteError, ServingError, or what `runtime.load` raises about `ref`.
    """
    address = address_of(url)
    client = open_client(address, options or RemoteOptions())
    try:
        wanted = find_wanted(ref, mode, registry)
        served = find_served(client, wanted)
        model = RemoteModel(
            wanted.signature, client, wanted.name, wanted.number, wanted.digest, served.requests,
            merge=served.merge,
        )  # fmt: skip
    except BaseException:
        client.close()
        raise
    origin = wanted.origin(served.target, f"triton at {address}")
    if mode == "production":
        return RemoteSession(wanted.signature, model, origin)
    return checked(wanted, model, origin)


@dataclass(frozen=True)
class Wanted:
    """What a server must have: `name` and `number` are Triton's; number "" is any."""

    bundle: Bundle
    version: Version | None
    signature: Signature
    name: str
    number: str

    @property
    def digest(self) -> str:
        return self.bundle.digest

    @property
    def label(self) -> str:
        return f"{self.name}/{self.number}" if self.number else self.name

    def origin(self, target: str, engine_name: str) -> Origin:
        return Origin(self.name, self.number or None, self.digest, target, engine_name)


def find_wanted(ref: str | Path, mode: Mode, registry: Registry | str | None) -> Wanted:
    """By the registry, or the folder; raises what `runtime.load` raises about `ref`."""
    bundle, version = open_bundle(ref, registry)
    if mode == "production":
        require_promoted(ref, bundle, version)
    name = bundle.manifest.name if version is None else version.name
    signature = Signature.from_dict(bundle.manifest.signature)
    return Wanted(bundle, version, signature, name, _number(bundle.path, version))


def checked(wanted: Wanted, model: Executable, origin: Origin) -> CheckedSession:
    """A session in test mode: every answer is compared with the reference program's here."""
    bundle = wanted.bundle
    reference = engine("exported").open(bundle.file(bundle.manifest.program), torch.device("cpu"))
    tolerances = tolerances_of(bundle.manifest)
    return CheckedSession(wanted.signature, model, reference, tolerances, "cpu", origin)


def open_client(address: str, options: RemoteOptions) -> Client:
    """A connection; raises ServingError where tritonclient or a certificate is missing."""
    try:
        from serving.client import Client
    except ImportError as error:
        raise ServingError(
            f"a remote session needs tritonclient ({error}): pip install 'soa-pipeline[serve]'"
        ) from None
    return Client(address, options)


def _number(folder: Path, version: Version | None) -> str:
    """Triton's version: the registry's number, or that of a pulled folder's note, or any."""
    if version is not None:
        return str(version.number)
    record = read_promoted(folder)
    found = parse_ref(record.ref) if record else None
    return str(found.version) if isinstance(found, Ref) and found.version else ""


@dataclass(frozen=True)
class Served:
    """How a server runs a model. `merge`: it puts the rows of several requests together."""

    target: str
    requests: Form
    merge: bool


def find_served(client: Client, wanted: Wanted, within_s: float | None = None) -> Served:
    """Raises VersionMismatchError if the server's model is not that bundle, or not ours."""
    what = wanted.label
    try:
        config = client.model_config(wanted.name, wanted.number, within_s)
    except RefusedError as error:
        raise VersionMismatchError(f"{what} is not served there: {error}") from None
    found = config.parameters[DIGEST].string_value if DIGEST in config.parameters else ""
    if not found:
        raise VersionMismatchError(
            f"server {client.address}: its {what} was not made by `pipeline deploy`"
        )
    if found != wanted.digest:
        raise VersionMismatchError(
            f"server {client.address}: its {what} is bundle {found[:12]}, the registry's is "
            f"{wanted.digest[:12]}: deploy that version there"
        )
    if config.backend != "python":
        raise VersionMismatchError(
            f"server {client.address}: Triton's {config.backend} backend runs its {what}, and it "
            "cannot check a request's bundle: use tritonclient, or deploy it with --backend python"
        )
    given = config.parameters[REQUESTS].string_value or "columns"
    form = next((form for form in FORMS if form == given), None)
    if form is None:
        raise VersionMismatchError(
            f"server {client.address}: its {what} takes requests of the form {given!r}, which is "
            f"none of {', '.join(FORMS)}"
        )
    return Served(config.parameters[TARGET].string_value, form, config.max_batch_size > 0)
