"""A site: the servers and devices that a job may use there, and the rules for their use.

These classes are plain data. pipeline/config/site_file.py reads them from YAML.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from serving.client import HEADERS, LARGEST, RemoteOptions, Tls, address_of
from serving.errors import ServingError
from soa.options import find_repeated

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class _Part(BaseModel):
    """A part of a site file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SiteTls(_Part):
    """Paths of PEM files, relative to the site file's folder."""

    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None

    @model_validator(mode="after")
    def _check_key(self) -> SiteTls:
        """Refuse a key without its certificate, and a certificate without its key."""
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError(
                "found one of private_key and certificate_chain; name both, or neither"
            )
        return self


class SiteServer(_Part):
    """A server. Servers with the lowest `preference` are used first; the others only if none of
    these can be used.

    `metrics` is the URL of Triton's own metrics; without it the wait in the queue is unknown.
    """

    name: str
    url: str
    metrics: str | None = None
    preference: int = 0
    shared_memory: bool = False
    compression: Literal["none", "gzip", "deflate"] = "none"
    message_bytes: Annotated[int, Field(gt=HEADERS, le=LARGEST)] = LARGEST
    tls: SiteTls | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        """Refuse a URL that is not `triton://HOST:PORT`."""
        try:
            address_of(url)
        except ServingError as error:
            raise ValueError(f"found {error}") from None
        return url

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: str | None) -> str | None:
        """Refuse a URL of the metrics that is not of HTTP, or has no host."""
        if metrics is None:
            return None
        try:
            parts = urlsplit(metrics)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # raised for brackets that do not match, or a port that is no number
            valid = False
        if not valid:
            raise ValueError(f"found {metrics!r}; write http://HOST:8002/metrics")
        return metrics

    @property
    def address(self) -> str:
        """The `host:port` of the server's gRPC."""
        return address_of(self.url)

    def options(self, policy: SitePolicy, folder: Path) -> RemoteOptions:
        """Return the options of one attempt. There are no retries: the session tries another place.

        `folder`: the site file's folder, to which paths are relative.
        """
        tls = None
        if self.tls is not None:
            paths = self.tls.model_dump(exclude_none=True)
            tls = Tls(**{name: folder / path for name, path in paths.items()})
        return RemoteOptions(
            deadline_s=policy.attempt_s,
            retries=0,
            in_flight=policy.in_flight,
            shared_memory=self.shared_memory,
            compression=self.compression,
            tls=tls,
            allow_nan=policy.allow_nan,
            message_bytes=self.message_bytes,
        )


class SiteLocal(_Part):
    """The use of this host. `devices`: the devices that are used in the same way as servers.

    `fall_back`: the local CPU runs requests that no other place answers.
    """

    devices: Texts = ()
    preference: int = 0
    fall_back: bool = True


class SitePolicy(_Part):
    """The limits by which a session chooses places.

    `attempt_s`: the time limit for one request at one place. `deadline_s`: the time limit for all
    attempts; no attempt begins that could end later. `health_s`: the time between two checks of
    a server. `queue_us`: if requests wait longer than this in a server's queue, the server is busy.
    It gets no more requests until the wait is at most half of this.
    """

    deadline_s: Positive = 10.0
    attempt_s: Positive = 2.0
    health_s: Positive = 1.0
    queue_us: Positive = 20_000.0
    in_flight: PositiveInt = 8
    allow_nan: bool = False

    @model_validator(mode="after")
    def _check_limits(self) -> SitePolicy:
        """Refuse a limit of one attempt that is longer than the limit of all attempts."""
        if self.attempt_s > self.deadline_s:
            raise ValueError(
                f"found attempt_s {self.attempt_s:g} above deadline_s {self.deadline_s:g}; an "
                "attempt is part of a call"
            )
        return self


class ModelRule(_Part):
    """The rules for one model, each None where it has no rule of its own.

    `servers`: the names of the servers that it may use. `fall_back`: replaces that of `SiteLocal`.
    """

    servers: Texts | None = None
    fall_back: bool | None = None


class Site(_Part):
    """A site file: servers, local devices, and the rules for choosing among them."""

    site: str = ""
    servers: Annotated[tuple[SiteServer, ...], Field(strict=False)] = ()
    local: SiteLocal = SiteLocal()
    policy: SitePolicy = SitePolicy()
    models: dict[str, ModelRule] = {}

    @field_validator("servers")
    @classmethod
    def _check_unique(cls, servers: tuple[SiteServer, ...]) -> tuple[SiteServer, ...]:
        """Refuse two servers with the same name or the same URL."""
        _require_unique("name", [server.name for server in servers])
        _require_unique("url", [server.url for server in servers])
        return servers

    @model_validator(mode="after")
    def _check_site(self) -> Site:
        """Refuse a site whose parts do not fit together.

        Devices may not have a server's name, rules must name servers of the site, and there must be
        a place for requests.
        """
        known = [server.name for server in self.servers]
        _require_unique("name", [*known, *self.local.devices])
        for model, rule in self.models.items():
            for name in rule.servers or ():
                if name not in known:
                    raise ValueError(
                        f"found server {name!r} for model {model}; the site has: "
                        f"{', '.join(known) or 'none'}"
                    )
        if not self.servers and not self.local.devices and not self.local.fall_back:
            raise ValueError("found no server, no device and no fall-back; name one of them")
        return self

    def servers_for(self, model: str) -> tuple[SiteServer, ...]:
        """Return the servers that a model may use, in the order of the site file."""
        rule = self.models.get(model)
        if rule is None or rule.servers is None:
            return self.servers
        return tuple(server for server in self.servers if server.name in rule.servers)

    def falls_back(self, model: str) -> bool:
        """Whether the local CPU runs requests of a model that no other place answers."""
        rule = self.models.get(model)
        if rule is None or rule.fall_back is None:
            return self.local.fall_back
        return rule.fall_back


def _require_unique(field: str, values: Sequence[str]) -> None:
    """Raise ValueError if a value of this field occurs more than once."""
    if twice := find_repeated(values):
        raise ValueError(f"found the {field} {twice[0]!r} twice; give each server one of its own")
