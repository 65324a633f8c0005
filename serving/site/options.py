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
from soa.options import repeated

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SiteTls(_Part):
    """Paths of PEM files, relative to the site file's folder."""

    root_certificates: str | None = None
    private_key: str | None = None
    certificate_chain: str | None = None

    @model_validator(mode="after")
    def _both(self) -> SiteTls:
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
    def _an_address(cls, url: str) -> str:
        try:
            address_of(url)
        except ServingError as error:
            raise ValueError(f"found {error}") from None
        return url

    @field_validator("metrics")
    @classmethod
    def _a_page(cls, metrics: str | None) -> str | None:
        if metrics is None:
            return None
        try:
            parts = urlsplit(metrics)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"found {metrics!r}; write http://HOST:8002/metrics")
        return metrics

    @property
    def address(self) -> str:
        return address_of(self.url)

    def options(self, policy: SitePolicy, folder: Path) -> RemoteOptions:
        """The options of one attempt. There are no retries: the session tries another place."""
        tls = None
        if self.tls is not None:
            tls = Tls(**{k: folder / v for k, v in self.tls.model_dump(exclude_none=True).items()})
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
    """The devices of this host. `devices` are used like the servers.

    `fall_back`: the local CPU runs requests that no other place answers.
    """

    devices: Texts = ()
    preference: int = 0
    fall_back: bool = True


class SitePolicy(_Part):
    """`attempt_s`: the time limit for one request at one place. `deadline_s`: the time limit for
    all attempts; no attempt begins that could end later. `health_s`: the time between two checks of
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
    def _in_order(self) -> SitePolicy:
        if self.attempt_s > self.deadline_s:
            raise ValueError(
                f"found attempt_s {self.attempt_s:g} above deadline_s {self.deadline_s:g}; an "
                "attempt is part of a call"
            )
        return self


class ModelRule(_Part):
    """Rules for one model: the site's servers that it may use, and its value of `fall_back`."""

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
    def _own_names(cls, servers: tuple[SiteServer, ...]) -> tuple[SiteServer, ...]:
        _once("name", [server.name for server in servers])
        _once("url", [server.url for server in servers])
        return servers

    @model_validator(mode="after")
    def _something(self) -> Site:
        known = [server.name for server in self.servers]
        _once("name", [*known, *self.local.devices])
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
        rule = self.models.get(model)
        if rule is None or rule.servers is None:
            return self.servers
        return tuple(server for server in self.servers if server.name in rule.servers)

    def falls_back(self, model: str) -> bool:
        rule = self.models.get(model)
        own = rule.fall_back if rule else None
        return self.local.fall_back if own is None else own


def _once(what: str, names: Sequence[str]) -> None:
    if twice := repeated(names):
        raise ValueError(f"found the {what} {twice[0]!r} twice; give each server one of its own")
