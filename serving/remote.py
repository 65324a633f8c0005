"""A session whose model runs in a Triton server: SoA in, SoA out, as a local one.

The server takes the place of an opened artifact: everything that a local session checks when memory
is bound is checked here too, and test mode compares the server's answers with the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engines.base import Executable, engine
from registry.bundle import Bundle
from registry.promoted import read_promoted
from registry.reference import Ref, parse_ref
from registry.store import Registry
from registry.version import Version
from runtime.checked import CheckedSession
from runtime.loader import Mode, open_bundle, require_promoted, tolerances_of
from runtime.session import Origin
from serving.errors import RefusedError, ServingError, VersionMismatchError
from serving.model_config import DIGEST, REQUESTS, TARGET
from serving.pooled_session import PooledSession
from serving.remote_model import RemoteModel, Served
from serving.remote_options import RemoteOptions, address_of
from serving.wire import FORMS
from soa.signature import Signature

if TYPE_CHECKING:
    from serving.client import Client


class RemoteSession(PooledSession):
    """Runs one model in a server, on CPU collections, or on a GPU's where CUDA memory is shared.

    Any number of threads may bind and run. On a GPU the outputs are there when a call returns.
    """

    def __init__(
        self, signature: Signature, model: RemoteModel, origin: Origin | None = None
    ) -> None:
        super().__init__(signature, model, model.options.in_flight, origin, model.device)


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
        model = _open_model(wanted, client)
        model.follow(served)
    except BaseException:
        client.close()
        raise
    origin = wanted.origin(served.target, f"triton at {address}")
    if mode == "production":
        return RemoteSession(wanted.signature, model, origin)
    return checked(wanted, model, origin, model.device)


def _open_model(wanted: Wanted, client: Client) -> RemoteModel:
    what = (wanted.signature, client, wanted.name, wanted.number, wanted.digest)
    if client.options.cuda is None:
        return RemoteModel(*what)
    from serving.remote_cuda import open_cuda_model

    return open_cuda_model(*what)


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


def checked(
    wanted: Wanted, model: Executable, origin: Origin, device: torch.device | None = None
) -> CheckedSession:
    """A session in test mode: every answer is compared with the reference program's here."""
    bundle, where = wanted.bundle, device or torch.device("cpu")
    reference = engine("exported").open(bundle.file(bundle.manifest.program), where)
    tolerances = tolerances_of(bundle.manifest)
    return CheckedSession(wanted.signature, model, reference, tolerances, where, origin)


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
