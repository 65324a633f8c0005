"""A session whose model runs in a Triton server: SoA in, SoA out, as a local one.

The server takes the place of an opened artifact: everything that a local session checks when memory
is bound is checked here too, and test mode compares the server's answers with the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.checked import CheckedSession
from runtime.loader import checked
from runtime.opening import Opened, Opening, open_version
from runtime.session import Origin
from serving.client import RemoteOptions, address_of
from serving.errors import RefusedError, ServingError, VersionMismatchError
from serving.remote.model import RemoteModel, Served
from serving.remote.pooled import PooledSession
from serving.triton import DIGEST, REQUESTS, TARGET
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
    opening: Opening, url: str, options: RemoteOptions | None = None
) -> RemoteSession | CheckedSession:
    """A session that runs in the server at `triton://host:port`.

    The server must have the model under the registry's name and number, with the same bundle: that
    is checked now, and by the server again for every request. `mode="test"` gives a session that
    also runs the reference program here and compares.

    Raises RemoteError, ServingError, or what the route to an artifact raises (runtime/opening).
    """
    address = address_of(url)
    opened = open_version(opening)
    client = open_client(address, options or RemoteOptions())
    try:
        served = find_served(client, opened)
        model = open_model(opened, client)
        model.follow(served)
    except BaseException:
        client.close()
        raise
    origin = origin_of(opened, served.target, f"triton at {address}")
    if opened.production:
        return RemoteSession(opened.signature, model, origin)
    return checked(opened, model, model.device, origin)


def open_model(opened: Opened, client: Client) -> RemoteModel:
    what = (opened.signature, client, opened.name, number_of(opened), opened.bundle.digest)
    if client.options.cuda is None:
        return RemoteModel(*what)
    from serving.remote.cuda import open_cuda_model

    return open_cuda_model(*what)


def number_of(opened: Opened) -> str:
    """Triton's version, which is the registry's number; "" is any."""
    return "" if opened.number is None else str(opened.number)


def origin_of(opened: Opened, target: str, engine_name: str) -> Origin:
    number, digest = number_of(opened) or None, opened.bundle.digest
    return Origin(opened.name, number, digest, target, engine_name, opened.lookup)


def open_client(address: str, options: RemoteOptions) -> Client:
    """A connection; raises ServingError where tritonclient or a certificate is missing."""
    try:
        from serving.client import Client
    except ImportError as error:
        raise ServingError(
            f"a remote session needs tritonclient ({error}): pip install 'soa-pipeline[serve]'"
        ) from None
    return Client(address, options)


def find_served(client: Client, opened: Opened, within_s: float | None = None) -> Served:
    """Raises VersionMismatchError if the server's model is not that bundle, or not ours."""
    what, digest = opened.label, opened.bundle.digest
    try:
        config = client.model_config(opened.name, number_of(opened), within_s)
    except RefusedError as error:
        raise VersionMismatchError(f"{what} is not served there: {error}") from None
    found = config.parameters[DIGEST].string_value if DIGEST in config.parameters else ""
    if not found:
        raise VersionMismatchError(
            f"server {client.address}: its {what} was not made by `pipeline deploy`"
        )
    if found != digest:
        raise VersionMismatchError(
            f"server {client.address}: its {what} is bundle {found[:12]}, the registry's is "
            f"{digest[:12]}: deploy that version there"
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
