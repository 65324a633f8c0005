"""`pipeline.load`: opens a version on a device of this host, in a server, or at a site."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

from engines.errors import EngineError
from runtime.errors import LoadError
from runtime.loader import find_device, load_here, open_session
from runtime.opening import Mode, Opened, Opening, Options, open_version
from runtime.process import has_torch
from runtime.session import Session
from runtime.versions import CanaryLimits
from serving.client import SCHEME, RemoteOptions, address_of
from soa.options import DEVICE, FLAG, NUMBER, PATH, REF, TEXT, known_options, of_type, takes

if TYPE_CHECKING:  # a session whose artifact needs no torch must not import torch
    import torch

    from runtime.devices import MultiDeviceSession
    from runtime.versions import CanarySession, LiveSession, ShadowedSession
    from serving.remote import RemoteSession
    from serving.site import Site, SiteSession

    Device = str | torch.device

Ref = str | Path
Build = Literal["never", "missing"]
Production = Literal["production"]

_SERVER_CHOOSES = ("target", "engine_name", "threads", "instances", "builder")


@overload
def load(
    ref: Ref, *, live: Literal[True],
    device: Device = ..., mode: Mode = ..., build: Build = ..., **options: Unpack[Options],
) -> LiveSession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, device: Literal["auto"],
    mode: Mode = ..., build: Build = ..., **options: Unpack[Options],
) -> MultiDeviceSession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, device: str, remote: RemoteOptions,
    mode: Production = ..., **options: Unpack[Options],
) -> RemoteSession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, canary: Ref, share: float = ..., canary_limits: CanaryLimits = ...,
    shadow_record: Ref | None = ..., device: Device = ..., site: Ref | Site | None = ...,
    mode: Mode = ..., build: Build = ..., **options: Unpack[Options],
) -> CanarySession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, site: Ref | Site,
    mode: Production = ..., build: Build = ..., **options: Unpack[Options],
) -> SiteSession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, shadow: Ref, shadow_fraction: float = ..., shadow_record: Ref | None = ...,
    device: Device = ..., mode: Mode = ..., build: Build = ..., **options: Unpack[Options],
) -> ShadowedSession: ...  # fmt: skip
@overload
def load(
    ref: Ref, *, remote: RemoteOptions | None = ..., site: Ref | Site | None = ...,
    device: Device = ..., mode: Mode = ..., build: Build = ..., **options: Unpack[Options],
) -> Session: ...  # fmt: skip


@known_options(Opening)
@takes(
    LoadError,
    ref=REF,
    device=DEVICE,
    live=FLAG,
    build=TEXT,
    remote=of_type("pipeline.RemoteOptions(…)", RemoteOptions).or_none,
    canary=REF.or_none,
    share=NUMBER,
    canary_limits=of_type("pipeline.CanaryLimits(…)", CanaryLimits).or_none,
    shadow=REF.or_none,
    shadow_fraction=NUMBER,
    shadow_record=PATH.or_none,
)
def load(
    ref: Ref,
    *,
    device: Device = "cpu",
    mode: Mode = "production",
    live: bool = False,
    build: Build = "never",
    remote: RemoteOptions | None = None,
    site: Ref | Site | None = None,
    canary: Ref | None = None,
    share: float = 0.05,
    canary_limits: CanaryLimits | None = None,
    shadow: Ref | None = None,
    shadow_fraction: float = 0.01,
    shadow_record: Ref | None = None,
    **options: Unpack[Options],
) -> Session:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `mode="production"` accepts only a version that a gate let into production, or a folder that
    `pipeline pull` made of such a version. This host (PIPELINE_TRUSTED_KEYS), the registry's
    policies and `trusted_keys` may each name keys. The version must then be signed by at least one
    key of each of these lists. Targets that were built later are used if a promotion covers them.
    Memory is checked when it is bound; each later call checks only n. If torch is imported, it is
    set to `threads` threads in this process (by default 1: the caller's thread does the work).

    `mode="test"` accepts any version, also runs every event with the portable program, and compares
    the answers. It does not change the number of torch's threads. In both modes the digest of every
    file is checked before the bundle is used.

    `device`: "cpu", "cuda", "cuda:1" (also for ROCm), or "auto": the session then runs on the
    device that holds the data, and deploys the model there at the first event.

    `device="triton://host:port"` is a server that has the version. The session binds and runs CPU
    collections like a local session; in production mode it is a `RemoteSession`, which also has
    `run_async`. `remote` says how to talk to the server: deadline, retries, shared memory, TLS.
    The server chooses the target, the engine and the threads.

    `device="site"` runs each request in a place that the site file names: one of several servers, a
    device of this host, or the local CPU if no other place is usable (docs/howto/sites.md). `site`
    is that file, or a `Site`; by default the file that PIPELINE_SITE names. In production mode the
    result is a `SiteSession`, which also has `run_async` and `report`. Options on how to run apply
    only to the places on this host.

    `live=True` gives a `LiveSession`. If the name is moved to another version later, it follows.

    `build="missing"`: if the version has no verified artifact for this host, build one at the first
    use. It is built from the version's program, validated against its reference, and kept in this
    host's cache (see `pipeline registry cache --help`). This needs the compilers, and takes seconds
    to minutes, once. In production the version must still be promoted, but the new artifact has
    passed the validation only, and no gate.

    `shadow="@staging"`: that version also runs on a sampled fraction of the events, in another
    thread and for comparison only (docs/howto/shadow.md). The result is a `ShadowedSession`. The
    comparison is kept in the registry, or in the new file `shadow_record`.

    `canary="@staging"`: that version answers a `share` of the calls, until it fails or exceeds
    `canary_limits` (docs/howto/canary.md). The result is a `CanarySession`. In production, gates
    must have let that version into its alias or into `staging`. The counts are kept in the record
    of a shadow.

    The other options are those of `runtime.opening.Opening`. Raises LoadError, OptionError, or the
    error type of the part that failed: registry, bundle, target or engine.

    Examples
    --------
    >>> session = pipeline.load("jet-tagger@production")
    >>> jets, tags = session.collection("jets", 50), session.collection("tags", 50)
    >>> session.run(jets, tags)
    >>> tags["p_top"].shape
    (50,)
    """
    opening = _make_opening(ref, mode, build, options)
    remote_place = _check_place(device, site, remote)
    if remote_place and (live or opening.watch is not None):
        option = "live" if live else "watch"
        raise LoadError(f"{option} with {remote_place}: only sessions on this host have that")
    if shadow is not None and (live or remote_place or device == "auto"):
        raise LoadError("a shadow runs beside one version on one device of this host")
    if canary is not None and (live or device == "auto" or shadow is not None):
        raise LoadError("a canary runs beside one version: without live, device 'auto', a shadow")
    if canary is None and canary_limits is not None:
        raise LoadError("canary_limits without a canary: name one")
    if canary is None and shadow is None and shadow_record is not None:
        raise LoadError("shadow_record without a shadow or a canary: name one")
    if remote_place:
        if isinstance(device, str) and device.startswith(SCHEME):
            opener = _make_server_opener(opening, device, remote)
        else:
            opener = _make_site_opener(opening, site)
        session = opener(open_version(opening))
    else:
        opener = partial(open_session, device=find_device("cpu"))
        session = load_here(opening, device, live)
    with ExitStack() as after_an_error:  # a wrapper that cannot be made must not leak the session
        after_an_error.callback(session.close)
        if shadow is not None:
            from runtime.versions import open_with_shadow

            session = open_with_shadow(session, opening, shadow, shadow_fraction, shadow_record)
        elif canary is not None:
            from runtime.versions import open_with_canary

            limits = canary_limits or CanaryLimits()
            session = open_with_canary(
                session, opening, canary, share, limits, shadow_record, opener
            )
        after_an_error.pop_all()
    return session


def _check_place(device: Device, site: Ref | Site | None, remote: RemoteOptions | None) -> str:
    """Check that `device`, `site` and `remote` fit together, and return where the session runs.

    Returns the server's address in quotes, or "a site", as words for messages; "" means this host.
    Raises LoadError if the arguments contradict each other.
    """
    at_site = device == "site" or (site is not None and str(device) == "cpu")
    if site is not None and not at_site:
        raise LoadError(f"a site with device {str(device)!r}: write device='site', or no device")
    if isinstance(device, str) and device.startswith(SCHEME):
        return repr(device)
    if remote is not None:
        reason = "the site file has them" if at_site else f"they are for device {SCHEME}HOST:PORT"
        raise LoadError(f"remote options with device {str(device)!r}: {reason}")
    return "a site" if at_site else ""


def _make_opening(ref: Ref, mode: Mode, build: Build, options: Options) -> Opening:
    """Return the options of `load` as an `Opening`.

    It gets the function that builds a missing artifact (only with `build="missing"`), and the one
    that validates an artifact at its first use on this host. Raises LoadError if `build` is neither
    of its two values.
    """
    if build not in ("never", "missing"):
        raise LoadError(f"build {build!r} is neither 'never' nor 'missing'")
    if build == "missing":
        from pipeline.building import build_at_first_use  # here: importing it takes a second

        options["builder"] = build_at_first_use
    options.setdefault("prover", _validate_here)
    return Opening(ref, mode=mode, **options)


def _make_server_opener(
    opening: Opening, url: str, remote: RemoteOptions | None
) -> Callable[[Opened], Session]:
    """Return a function that opens a version at the server `url`. Raises LoadError if `opening`
    sets an option that the server chooses."""
    for name in _SERVER_CHOOSES:
        if getattr(opening, name) is not None:
            option = "build" if name == "builder" else name
            raise LoadError(f"{option} with device {url!r}: the server chooses that")
    from serving.remote import connect

    return partial(connect, address=address_of(url), options=remote or RemoteOptions())


def _validate_here(opened: Opened, target: str, engine_name: str) -> str | None:
    """Validate an artifact against the version's reference, in a child process, as a `Prover`.

    Returns the reason if the artifact is refused, and None if it is valid. Raises LoadError if
    there is no verdict, because torch is missing or the run failed.
    """
    step = f"{opened.label}: {engine_name} for {target} is validated here at its first use"
    if not has_torch():
        raise LoadError(f"{step}, which takes torch: pip install torch", code="load-without-torch")
    from pipeline.promotion import revalidate  # here: importing it takes a second

    try:
        report = revalidate(opened, target, engine_name)
    except EngineError as error:
        raise LoadError(f"{step}: {error}", code="load-not-verified") from None
    if report.verdict == "failed":  # for example out of memory: another attempt may succeed
        raise LoadError(f"{step}, which failed: {report.reason}", code="load-not-verified")
    return None if report.valid else report.reason or "it was not validated"


def _make_site_opener(opening: Opening, site: Ref | Site | None) -> Callable[[Opened], Session]:
    """Return a function that opens a version at `site`: a `Site`, the path of a site file, or None
    for the file that PIPELINE_SITE names. Raises LoadError for another type, or for an opening with
    a target."""
    if opening.target is not None:
        raise LoadError("target with device 'site': each place chooses its own")
    from pipeline.config import find_site, load_site
    from serving.site import Site, connect_site

    folder = Path()  # the folder of the site file; paths in that file are relative to it
    if site is None:
        site, folder = find_site()
    elif isinstance(site, str | Path):
        folder = Path(site).parent
        site = load_site(site)
    if not isinstance(site, Site):
        raise LoadError(f"site is a {type(site).__name__}: give the path of a site file, or a Site")
    return partial(connect_site, site=site, folder=folder)
