"""`pipeline.load`: on a device of this host, packaged for it or not, in a server, or at a site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch

from runtime.devices import LiveSession, MultiDeviceSession
from runtime.errors import LoadError
from runtime.loader import AUTO, device_here, load_everywhere, load_live, session_on
from runtime.opening import Mode, Opening, Options, open_version
from runtime.session import Session
from serving.client import SCHEME, RemoteOptions
from soa.options import known_options

if TYPE_CHECKING:
    from serving.remote import RemoteSession
    from serving.site import Site, SiteSession

SITE = "site"

Build = Literal["never", "missing"]


@overload
def load(
    ref: str | Path,
    *,
    live: Literal[True],
    device: str | torch.device = ...,
    mode: Mode = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> LiveSession: ...


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path,
    *,
    device: Literal["auto"],
    mode: Mode = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str,
    remote: RemoteOptions,
    mode: Literal["production"] = ...,
    **options: Unpack[Options],
) -> RemoteSession: ...


@overload
def load(
    ref: str | Path,
    *,
    site: str | Path | Site,
    mode: Literal["production"] = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> SiteSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    mode: Mode = ...,
    build: Build = ...,
    remote: RemoteOptions | None = ...,
    site: str | Path | Site | None = ...,
    **options: Unpack[Options],
) -> Session: ...


@known_options(Opening)
def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    live: bool = False,
    build: Build = "never",
    remote: RemoteOptions | None = None,
    site: str | Path | Site | None = None,
    **options: Unpack[Options],
) -> Session | MultiDeviceSession | LiveSession:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `mode="production"` takes only what a gate let into production (the version, or a folder that
    `pipeline pull` made of it) and what is signed as this host (PIPELINE_TRUSTED_KEYS), the
    registry's policies and `trusted_keys` ask, each by one of its own keys. It runs without any
    check beyond those made when memory is bound, and sets torch to `threads` threads in this
    process (1 by default: the caller's thread does the work). `mode="test"` takes anything and
    gives a session that runs every event on the reference too; it leaves torch's threads alone.
    Every file's digest is checked before anything in the bundle is used. Of what was built for the
    version later, production takes what a promotion let pass.

    `device`: "cpu", "cuda", "cuda:1" (ROCm too is "cuda"), or "auto" for a session that runs
    wherever its data is and deploys the model on a device at the first event there.

    `device="triton://host:port"` is a server that has the version. What comes back then binds and
    runs CPU collections as a local session does; in production mode it is a `RemoteSession`, which
    has `run_async` too. `remote` says how to talk to the server: deadline, retries, shared memory,
    TLS. How it is run is then the server's to say.

    `device="site"` runs each request wherever the site file says: in one of several servers, on a
    device here, and on the local CPU when none of them is good (docs/sites.md). `site` is that
    file, or a `Site`; without it the file is the one that PIPELINE_SITE names. What comes
    back in production mode is a `SiteSession`, which has `run_async` and `report` too. Options on
    how to run are for what runs here.

    `live=True` gives a `LiveSession`, which moves to what the name means later.

    `build="missing"`: on a host for which the version holds no verified artifact, build one at the
    first use, from the version's program, validated against its reference, into this host's cache
    (as `pipeline cache --help` says where). That takes seconds to minutes, once, and the
    compilers. In production too: the version has to be promoted, what is built has passed no gate
    but the validation.

    The other options are those of `runtime.opening.Opening`. Raises LoadError, OptionError, or the
    typed error of what went wrong: registry, bundle, target or engine.
    """
    if build not in ("never", "missing"):
        raise LoadError(f"build {build!r} is neither 'never' nor 'missing'")
    if build == "missing":
        from pipeline.building import build_at_first_use  # only here: the stages take a second

        options["builder"] = build_at_first_use
    opening = Opening(ref, mode=mode, **options)
    at_site = device == SITE or (site is not None and str(device) == "cpu")
    if site is not None and not at_site:
        raise LoadError(f"a site with device {str(device)!r}: write {SITE!r}, or no device")
    url = device if isinstance(device, str) and device.startswith(SCHEME) else None
    if remote is not None and url is None:
        whose = "that is the site file's to say" if at_site else f"write {SCHEME}HOST:PORT"
        raise LoadError(f"remote options with device {str(device)!r}: {whose}")
    if live and (at_site or url):
        raise LoadError(f"live with device {str(device)!r}: that is the server's to choose")
    if at_site:
        return _at_a_site(opening, site)
    if url:
        return _in_a_server(opening, url, remote)
    if live:
        return load_live(opening, device)
    if device == AUTO:
        return load_everywhere(opening)
    where = device_here(device)
    return session_on(open_version(opening), opening, where)


def _in_a_server(opening: Opening, url: str, remote: RemoteOptions | None) -> Session:
    for name in ("target", "engine_name", "threads", "instances", "builder"):
        if getattr(opening, name) is not None:
            what = "build" if name == "builder" else name
            raise LoadError(f"{what} with device {url!r}: that is the server's to choose")
    from serving.remote import connect

    return connect(opening, url, remote)


def _at_a_site(opening: Opening, given: str | Path | Site | None) -> Session:
    if opening.target is not None:
        raise LoadError(f"target with device {SITE!r}: that is the site file's to say")
    from pipeline.config import find_site, load_site
    from serving.site import connect_site

    folder = Path()
    if given is None:
        given, folder = find_site()
    elif isinstance(given, str | Path):
        folder = Path(given).parent
        given = load_site(given)
    return connect_site(opening, given, folder)
