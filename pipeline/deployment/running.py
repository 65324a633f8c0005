"""Loads a version into a Triton that runs already and serves others, and unloads it again.

The files travel in the request, so the server's model repository is neither read nor written, and
a server that is restarted does not have the model. Triton does not lock a model while it is loaded.
If two processes load the same model at once, the one that notices it fails, and changes nothing
more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
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
    config_message,
    config_with_version,
    config_without_version,
    difference_of_requests,
    read_fact,
    version_files,
    write_version,
)
from soa.errors import needs_extra
from stages.reports import ValidationReport

if TYPE_CHECKING:
    from serving.client import Client

LOADING = RemoteOptions(deadline_s=120.0)


@dataclass(frozen=True)
class Loaded:
    """A version that was loaded into a running server.

    `report` compares its answers with the reference. `versions` are the numbers of all versions of
    the model that the server serves now.
    """

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

    `replace`: unload the other versions afterwards. `options.deadline_s`: the time limit of a load.
    `service`: further arguments of `deploy`.

    Raises ServerError if the answers are out of tolerance, ServingError, or the registry's errors.
    The server then serves what it served before, unless the message says that restoring it failed.
    """
    with TemporaryDirectory(prefix="soa-load-") as scratch, _open_client(url, options) as client:
        deployed = deploy(registry, ref, Path(scratch), **service)
        new_config = config_message(deployed.service)
        served = _ServedModel.read(client, deployed.service.name, deployed.folder)
        served.fetch_bundles(registry, served.numbers)
        others = [number for number in served.numbers if number != deployed.service.number]
        different = difference_of_requests(served.config, new_config) if others else None
        if different and not replace:
            raise ServingError(
                f"{url} cannot serve {new_config.name}/{others[0]} and {deployed.service.number} "
                f"together, which have other {different}: --replace changes over at once"
            )
        # The new version is first served beside the others, or in their place if the server cannot
        # serve both. `replace` unloads the others only after the answers were checked.
        first_config = new_config
        if others and not different:
            first_config = config_with_version(served.config, others, new_config)
        with served.put_back_after_an_error():
            served.send(first_config)
            report = check_answers(url, deployed, options)
            if replace and first_config is not new_config:
                served.send(new_config)
        return Loaded(deployed, report, served.fetch_versions())


def unload_from(
    registry: Registry, ref: str, url: str, *, options: RemoteOptions = LOADING
) -> tuple[str, list[int]]:
    """Unload a version from the Triton at `url`. Requests that it has accepted are still answered.

    Returns the version as `name/number`, and the numbers of the model's versions that are still
    served. Raises ServingError or the registry's errors; the server then serves what it served
    before, or what somebody else has loaded meanwhile.
    """
    version = registry.find(ref)
    with TemporaryDirectory(prefix="soa-load-") as scratch, _open_client(url, options) as client:
        served = _ServedModel.read(client, version.name, Path(scratch))
        if version.number not in served.numbers:
            have = ", ".join(map(str, served.numbers)) or "none"
            raise ServingError(f"{url} does not serve {version.ref}; versions there: {have}")
        remaining = [number for number in served.numbers if number != version.number]
        if remaining:
            served.fetch_bundles(registry, remaining)
            served.send(config_without_version(served.config, remaining, version.number))
        else:
            served.unload()
        return version.ref, remaining


@contextlib.contextmanager
def _open_client(url: str, options: RemoteOptions) -> Iterator[Client]:
    """Yields a client of the server at `url`, and closes it at the end. ServingError if the
    libraries of a client are not installed."""
    address = address_of(url)
    with needs_extra("serve", ServingError):
        from serving.client import Client
    with contextlib.closing(Client(address, options)) as client:
        yield client


@dataclass
class _ServedModel:
    """A model in a running server, as this process found and changed it.

    `numbers`: the versions that the server had at first. `config`: their `ModelConfig`, or None if
    there were none. `folder`: a folder on this host, with a subfolder of files for each version
    that may be sent. `may_serve`: lists of versions, the newest last. The server serves one of
    these lists unless somebody else loads the model too; there are several after a load whose end
    is unknown. `changed`: whether this process has sent a load, which an error must undo.
    """

    client: Client
    name: str
    folder: Path
    numbers: list[int]
    config: Any
    may_serve: list[list[int]]
    changed: bool = False

    @classmethod
    def read(cls, client: Client, name: str, folder: Path) -> _ServedModel:
        """Ask the server what it serves of the model `name`. ServingError if it serves a model of
        that name which `pipeline deploy` did not write."""
        numbers = client.ask_versions(name)
        config = client.ask_config(name, "") if numbers else None
        if config is not None:
            if config.backend != "python" or not read_fact(config, DIGEST):
                raise ServingError(
                    f"server {client.address}: its {name} was not made by `pipeline deploy`: "
                    "unload it first"
                )
            config.ClearField("model_repository_agents")  # they check files on the server's disk
        return cls(client, name, folder, numbers, config, [numbers])

    def fetch_bundles(self, registry: Registry, numbers: Sequence[int]) -> None:
        """Copy the bundles of versions that the server has from the registry into `folder`, since a
        load must send all versions. ServingError if the server's bundle is another one."""
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
        """Make the server serve exactly the versions of `config`. ServingError if somebody else has
        loaded the model meanwhile; then nothing is sent."""
        self.fetch_versions()  # raises if somebody else loads
        versions = sorted(config.version_policy.specific.versions)
        try:
            self.client.load(self.name, config, version_files(self.folder, versions))
        except (DeadlineError, ServerGoneError, KeyboardInterrupt):  # the server may go on loading
            self.may_serve, self.changed = [*self.may_serve, versions], True
            raise
        self.may_serve, self.changed = [versions], True

    def unload(self) -> None:
        """Unload all versions of the model. ServingError if somebody else has loaded it meanwhile;
        then nothing is unloaded."""
        self.fetch_versions()  # raises if somebody else loads
        self.client.unload(self.name)

    def fetch_versions(self) -> list[int]:
        """Ask the server for the versions that it serves, and return their numbers. ServingError if
        they are none of `may_serve`, since somebody else then loads the model too."""
        numbers = self.client.ask_versions(self.name)
        if numbers not in self.may_serve:
            raise ServingError(
                f"server {self.client.address}: somebody else loads {self.name} at the same time: "
                f"it serves the versions {numbers}, not {self.may_serve[-1]}"
            )
        return numbers

    @contextlib.contextmanager
    def put_back_after_an_error(self) -> Iterator[None]:
        """If the `with` block raises, restore what the server had before, and raise the same error.
        Does nothing if this process has sent no load. If restoring fails too, raises ServingError
        with both messages."""
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
            except ServingError as restoring:
                message = f"{first_line(error)}; what was there is not loaded again: {restoring}"
                raise ServingError(message) from error
            raise
