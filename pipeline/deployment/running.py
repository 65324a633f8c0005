"""Loads a version into a Triton that runs already and serves others, and unloads it again.

The files travel in the request, so the server's model repository is neither read nor written, and
a server that is restarted does not have the model. Triton does not keep two loads of one model at
the same time apart: the one that finds it out fails, and changes nothing more.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.errors import first_line
from pipeline.deployment.repository import Deployed, check_answers, deploy
from pipeline.promotion import pull
from registry.store import Registry
from serving.client import RemoteOptions, address_of
from serving.errors import DeadlineError, ServerGoneError, ServingError
from serving.triton import (
    BUNDLE,
    DIGEST,
    beside,
    config_message,
    difference_of_requests,
    read_fact,
    version_files,
    without,
    write_version,
)
from soa.errors import needs_extra
from stages.reports import ValidationReport

if TYPE_CHECKING:
    from serving.client import Client

LOADING = RemoteOptions(deadline_s=120.0)


@dataclass(frozen=True)
class Loaded:
    """A version in a running server. `report`: the comparison of its answers with the reference.
    `versions`: the numbers of the model's versions that the server serves now."""

    deployed: Deployed
    report: ValidationReport
    versions: list[int]


def load_on(
    registry: Registry,
    ref: str,
    url: str,
    *,
    replace: bool = False,
    options: RemoteOptions = LOADING,
    **service: Any,
) -> Loaded:
    """Load a version in production into the Triton at `url`, beside the versions of its model that
    are there, and compare its answers with the reference. No request is lost.

    `replace`: unload the others afterwards. `options.deadline_s`: the time limit of a load.
    `service`: the arguments of `deploy`. Raises ServingError, ServerError if the answers are out of
    tolerance, or the registry's errors; then the server has what it had before, unless the message
    says that this failed too.
    """
    with (
        tempfile.TemporaryDirectory(prefix="soa-load-") as scratch,
        _open_client(url, options) as client,
    ):
        deployed = deploy(registry, ref, Path(scratch), **service)
        new = config_message(deployed.service)
        served = _ServedModel.on(client, deployed.service.name, deployed.folder)
        served.fetch(registry, served.numbers)
        others = [number for number in served.numbers if number != deployed.service.number]
        different = difference_of_requests(served.config, new) if others else None
        if different and not replace:
            raise ServingError(
                f"{url} cannot serve {new.name}/{others[0]} and {deployed.service.number} "
                f"together, which have other {different}: --replace changes over at once"
            )
        # The new version beside the others, if one server can have both; else in their place.
        first = beside(served.config, others, new) if others and not different else new
        with served.put_back_after_an_error():
            served.send(first)
            report = check_answers(url, deployed, options)
            if replace and first is not new:
                served.send(new)
        return Loaded(deployed, report, served.fetch_versions())


def unload_from(
    registry: Registry, ref: str, url: str, *, options: RemoteOptions = LOADING
) -> tuple[str, list[int]]:
    """Unload a version from the Triton at `url`, which answers the requests that it has accepted.
    Returns the version's name, and the numbers of the model's versions that are still there.

    Raises ServingError, or the registry's errors; then the server has what it had before, or what
    somebody else has loaded meanwhile.
    """
    version = registry.find(ref)
    with (
        tempfile.TemporaryDirectory(prefix="soa-load-") as scratch,
        _open_client(url, options) as client,
    ):
        served = _ServedModel.on(client, version.name, Path(scratch))
        if version.number not in served.numbers:
            have = ", ".join(map(str, served.numbers)) or "none"
            raise ServingError(f"{url} does not serve {version.ref}; versions there: {have}")
        left = [number for number in served.numbers if number != version.number]
        if left:
            served.fetch(registry, left)
            served.send(without(served.config, left, version.number))
        else:
            served.unload()
        return version.ref, left


@contextlib.contextmanager
def _open_client(url: str, options: RemoteOptions) -> Iterator[Client]:
    """A client of the server at `url`, closed at the end."""
    address = address_of(url)
    with needs_extra("serve", ServingError):
        from serving.client import Client
    with contextlib.closing(Client(address, options)) as client:
        yield client


@dataclass
class _ServedModel:
    """The versions of a model in a server, and its `ModelConfig`, which is None if there are none.
    `folder`: here, with a folder for each version that may be sent. `may_serve`: the lists of
    versions of which the server has one, if nobody else loads this model; the last is the newest.
    `changed`: whether this process has sent a load, so that there is something to put back."""

    client: Client
    name: str
    folder: Path
    numbers: list[int]
    config: Any
    may_serve: list[list[int]]
    changed: bool = False

    @classmethod
    def on(cls, client: Client, name: str, folder: Path) -> _ServedModel:
        """What the server has of the model `name`. ServingError if it is no model of ours."""
        numbers = client.versions(name)
        config = client.model_config(name, "") if numbers else None
        if config is not None:
            if config.backend != "python" or not read_fact(config, DIGEST):
                raise ServingError(
                    f"server {client.address}: its {name} was not made by `pipeline deploy`: "
                    "unload it first"
                )
            config.ClearField("model_repository_agents")  # they check files on the server's disk
        return cls(client, name, folder, numbers, config, [numbers])

    def fetch(self, registry: Registry, numbers: Sequence[int]) -> None:
        """Get the bundles of versions that are there. Raises ServingError if the registry has
        another bundle."""
        for number in numbers:
            version = registry.find(f"{self.name}/{number}")
            digest = read_fact(self.config, DIGEST, number)
            if version.digest != digest:
                raise ServingError(
                    f"server {self.client.address}: its {version.ref} is bundle {digest[:12]}, the "
                    f"registry's is {version.digest[:12]}: unload it first"
                )
            folder = self.folder / str(number)
            if not folder.exists():
                folder.mkdir(parents=True)
                _, bundle = pull(registry, version.ref, folder / BUNDLE)
                write_version(folder, bundle, digest)

    def send(self, config: Any) -> None:
        """Load exactly the versions of `config`, over nothing that somebody else has loaded."""
        self.fetch_versions()
        versions = sorted(config.version_policy.specific.versions)
        try:
            self.client.load(self.name, config, version_files(self.folder, versions))
        except (DeadlineError, ServerGoneError, KeyboardInterrupt):  # the server may go on loading
            self.may_serve, self.changed = [*self.may_serve, versions], True
            raise
        self.may_serve, self.changed = [versions], True

    def unload(self) -> None:
        """Unload all versions, unless somebody else has loaded some."""
        self.fetch_versions()
        self.client.unload(self.name)

    def fetch_versions(self) -> list[int]:
        """The versions that the server has. Raises ServingError if somebody else loaded some."""
        now = self.client.versions(self.name)
        if now not in self.may_serve:
            raise ServingError(
                f"server {self.client.address}: somebody else loads {self.name} at the same time: "
                f"it serves the versions {now}, not {self.may_serve[-1]}"
            )
        return now

    @contextlib.contextmanager
    def put_back_after_an_error(self) -> Iterator[None]:
        """After an error in the `with` block, loads what the server had before, if that changed. If
        this fails too, ServingError says both."""
        try:
            yield
        except BaseException as error:
            if not self.changed:
                raise
            try:
                if self.config is None:
                    self.unload()
                else:
                    self.send(self.config)
            except ServingError as second:
                both = f"{first_line(error)}; what was there is not loaded again: {second}"
                raise ServingError(both) from error
            raise
