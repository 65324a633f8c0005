"""A session over the places of a site: servers, local devices, and the local CPU when none is good.

It binds and runs as a local session does; where each request runs is serving/router.py's to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engines.base import Executable
from registry.store import Registry
from runtime.checked import CheckedSession
from runtime.errors import LoadError
from runtime.loader import Mode
from runtime.session import Origin, Session
from serving.places import OnDevice, Place
from serving.pooled_session import PooledSession
from serving.remote import Wanted, checked, find_wanted, open_client
from serving.remote_model import RemoteModel
from serving.router import Router, SiteReport
from serving.site import Site
from serving.watch import Watch
from soa.signature import Signature

OpenLocal = Callable[[str | Path, str], Session]
"""A session of a reference on a device of this host."""


class SiteSession(PooledSession):
    """Runs one model wherever the site's policy says, on CPU collections."""

    def __init__(self, signature: Signature, router: Router, origin: Origin) -> None:
        super().__init__(signature, router, router.policy.in_flight, origin)
        self._router = router

    def report(self) -> SiteReport:
        """What each place has answered and what failed there, up to now."""
        return self._router.report()


def connect_site(
    ref: str | Path,
    site: Site,
    folder: Path,
    open_local: OpenLocal,
    *,
    mode: Mode = "production",
    registry: Registry | str | None = None,
) -> SiteSession | CheckedSession:
    """A session of `ref` over a site. Paths in the site are relative to `folder`.

    A server that is away, busy or has another bundle now is no error, it is used once it is well;
    but where there is no falling back and nothing is well within the deadline, NowhereError is
    raised. Raises too what `runtime.load` raises about `ref`, also for this host's artifact.
    """
    wanted = find_wanted(ref, mode, registry)
    opened: list[Executable] = []
    try:
        router = _router(wanted, ref, site, folder, open_local, opened)
    except BaseException:
        for executable in opened:
            _close(executable)
        raise
    try:
        with ThreadPoolExecutor(max(1, len(router.watchers))) as pool:
            list(pool.map(lambda watch: watch.look(), router.watchers.values()))
        for watch in router.watchers.values():
            watch.start()
        if router.fall_back is None:
            router.wait_until_open()
        origin = wanted.origin("site", ", ".join(place.name for place in router.places) or "cpu")
        if mode == "production":
            return SiteSession(wanted.signature, router, origin)
        return checked(wanted, router, origin)
    except BaseException:
        router.close()
        raise


def _router(
    wanted: Wanted,
    ref: str | Path,
    site: Site,
    folder: Path,
    open_local: OpenLocal,
    opened: list[Executable],
) -> Router:
    """`opened` gets what is to be closed if this fails half-way."""

    def local(device: str) -> Executable:
        found = open_local(wanted.version.ref if wanted.version else ref, device)
        opened.append(found.executable)
        if found.origin is None or found.origin.digest != wanted.digest:
            raise LoadError(f"{ref} has changed while it was being loaded: load it again")
        return found.executable

    places: dict[Place, tuple[RemoteModel | None, str | None]] = {}
    for server in site.servers_for(wanted.name):
        client = open_client(server.address, server.options(site.policy, folder))
        model = RemoteModel(wanted.signature, client, wanted.name, wanted.number, wanted.digest)
        opened.append(model)
        places[Place(server.name, model, server.preference)] = (model, server.metrics)
    for name in site.local.devices:
        executable, device = local(name), torch.device(name)
        if device.type != "cpu":
            executable = OnDevice(executable, device, wanted.signature)
        places[Place(name, executable, site.local.preference)] = (None, None)
    fall_back = local("cpu") if site.falls_back(wanted.name) else None
    router = Router(wanted.label, list(places), fall_back, site.policy)
    for place, (remote, metrics) in places.items():
        router.watchers[place] = Watch(router, place, wanted, remote, metrics)
    return router


def _close(executable: Executable) -> None:
    close = getattr(executable, "close", None)
    if close:
        close()
