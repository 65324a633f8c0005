"""`pipeline.load`: on a device of this host, packaged for it or not, in a server, or at a site."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch

from registry.store import Registry
from runtime import loader
from runtime.choice import Builder
from runtime.devices import MultiDeviceSession
from runtime.errors import LoadError
from runtime.live import LiveSession
from runtime.loader import Mode, Options
from runtime.session import Session
from serving.remote_options import SCHEME, RemoteOptions

if TYPE_CHECKING:
    from serving.remote import RemoteSession
    from serving.site import Site
    from serving.site_session import SiteSession

SITE = "site"

Build = Literal["never", "missing"]


@overload
def load(
    ref: str | Path,
    *,
    live: Literal[True],
    device: str | torch.device = ...,
    target: str | None = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> LiveSession: ...


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path, *, device: Literal["auto"], build: Build = ..., **options: Unpack[Options]
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    target: str | None = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> Session: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str,
    remote: RemoteOptions,
    mode: Literal["production"] = ...,
    registry: Registry | str | None = ...,
) -> RemoteSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str,
    remote: RemoteOptions,
    mode: Mode,
    registry: Registry | str | None = ...,
) -> Session: ...


@overload
def load(
    ref: str | Path,
    *,
    site: str | Path | Site,
    mode: Literal["production"] = ...,
    build: Build = ...,
    registry: Registry | str | None = ...,
    trusted_keys: Sequence[str | Path] | None = ...,
    threads: int | None = ...,
    instances: int | None = ...,
) -> SiteSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: Literal["site"] = ...,
    site: str | Path | Site | None = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> Session: ...


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    target: str | None = None,
    build: Build = "never",
    remote: RemoteOptions | None = None,
    live: bool = False,
    site: str | Path | Site | None = None,
    **options: Unpack[Options],
) -> Session | MultiDeviceSession | LiveSession:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `build="missing"`: on a host for which the version holds no verified artifact, build one at the
    first use, from the version's program, validated against its reference, into this host's cache
    (as `pipeline cache --help` says where). That takes seconds to minutes, once, and the
    compilers. In production too: the version has to be promoted, what is built has passed no gate
    but the validation.

    `device="triton://host:port"` is a server that has the version. What comes back then binds and
    runs CPU collections as a local session does; in production mode it is a `RemoteSession`, which
    has `run_async` too. `remote` says how to talk to the server: deadline, retries, shared memory,
    TLS. Everything else is then the server's.

    `device="site"` runs each request wherever the site file says: in one of several servers, on a
    device here, and on the local CPU when none of them is good (docs/sites.md). `site` is that
    file, or a `Site`; without it the file is the one that PIPELINE_SITE names, or CMS's. What comes
    back in production mode is a `SiteSession`, which has `run_async` and `report` too. The other
    options are for what runs here.

    Everything else is `runtime.loader.load`'s.
    """
    if device == SITE or (site is not None and str(device) == "cpu"):
        if live:
            raise LoadError("live at a site: its servers choose for themselves what they serve")
        return _at_a_site(ref, target, build, remote, site, options)
    if site is not None:
        raise LoadError(f"a site with device {str(device)!r}: write {SITE!r}, or no device")
    if isinstance(device, str) and device.startswith(SCHEME):
        if live:
            raise LoadError(f"live with device {device!r}: that is the server's to choose")
        return _in_a_server(ref, device, target, build, remote, options)
    if remote is not None:
        raise LoadError(f"remote options with device {str(device)!r}: write {SCHEME}HOST:PORT")
    if build not in ("never", "missing"):
        raise LoadError(f"build {build!r} is neither 'never' nor 'missing'")
    builder: Builder | None = None
    if build == "missing":
        from pipeline.first_use import build_at_first_use  # only here: the stages take a second

        builder = build_at_first_use
    if live:
        return loader.load(ref, live=True, device=device, target=target, builder=builder, **options)
    return loader.load(ref, device=device, target=target, builder=builder, **options)


def _in_a_server(
    ref: str | Path,
    device: str,
    target: str | None,
    build: Build,
    remote: RemoteOptions | None,
    options: Options,
) -> Session:
    mode = options.get("mode", "production")
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    local = {
        "target": target,
        "build": None if build == "never" else build,
        **{name: value for name, value in options.items() if name not in ("mode", "registry")},
    }
    if given := sorted(name for name, value in local.items() if value is not None):
        raise LoadError(f"{given[0]} with device {device!r}: that is the server's to choose")
    from serving.remote import connect

    return connect(ref, device, mode=mode, registry=options.get("registry"), options=remote)


def _at_a_site(
    ref: str | Path,
    target: str | None,
    build: Build,
    remote: RemoteOptions | None,
    given: str | Path | Site | None,
    options: Options,
) -> Session:
    mode = options.get("mode", "production")
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    for name, value in (("target", target), ("remote", remote)):
        if value is not None:
            raise LoadError(f"{name} with device {SITE!r}: that is the site file's to say")
    from pipeline.site_file import find_site, load_site
    from serving.site_session import connect_site

    folder = Path()
    if given is None:
        given, folder = find_site()
    elif isinstance(given, str | Path):
        folder = Path(given).parent
        given = load_site(given)

    def here(ref: str | Path, device: str) -> Session:
        if device == "auto" or device == SITE or device.startswith(SCHEME):
            raise LoadError(f"device {device!r} in a site: use 'cpu', 'cuda' or 'cuda:1'")
        return load(ref, device=device, build=build, **options)

    return connect_site(ref, given, folder, here, mode=mode, registry=options.get("registry"))
