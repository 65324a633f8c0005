"""A session over the places of a site: servers, local devices, and the local CPU when none is good.

It binds and runs as a local session does; where each request runs is serving/site/router.py's to
choose.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engines.base import Executable
from runtime.checked import CheckedSession
from runtime.errors import LoadError
from runtime.loader import AUTO, checked, device_here, session_on
from runtime.opening import Opened, Opening, open_version
from runtime.session import Origin
from serving.remote import PooledSession, RemoteModel, open_client, open_model, origin_of
from serving.site.options import Site
from serving.site.places import OnDevice, Place
from serving.site.router import Router, SiteReport
from serving.site.watch import Watch
from soa.signature import Signature


class SiteSession(PooledSession):
    """Runs one model wherever the site's policy says, on CPU collections."""

    def __init__(self, signature: Signature, router: Router, origin: Origin) -> None:
        super().__init__(signature, router, router.policy.in_flight, origin)
        self._router = router

    def report(self) -> SiteReport:
        """What each place has answered and what failed there, up to now."""
        return self._router.report()


def connect_site(opening: Opening, site: Site, folder: Path) -> SiteSession | CheckedSession:
    """A session over a site. Paths in the site are relative to `folder`.

    A server that is away, busy or has another bundle now is no error, it is used once it is well;
    but where there is no falling back and nothing is well within the deadline, NowhereError is
    raised. Raises too what the route to an artifact raises, also for this host's artifact.
    """
    opened = open_version(opening)
    closing: list[Executable] = []
    try:
        router = _router(opened, opening, site, folder, closing)
    except BaseException:
        for executable in closing:
            _close(executable)
        raise
    try:
        with ThreadPoolExecutor(max(1, len(router.watchers))) as pool:
            list(pool.map(lambda watch: watch.look(), router.watchers.values()))
        for watch in router.watchers.values():
            watch.start()
        if router.fall_back is None:
            router.wait_until_open()
        places = ", ".join(place.name for place in router.places) or "cpu"
        origin = origin_of(opened, "site", places)
        if opened.production:
            return SiteSession(opened.signature, router, origin)
        return checked(opened, router, torch.device("cpu"), origin)
    except BaseException:
        router.close()
        raise


def _router(
    opened: Opened, opening: Opening, site: Site, folder: Path, closing: list[Executable]
) -> Router:
    """`closing` gets what is to be closed if this fails half-way."""

    def local(name: str) -> Executable:
        if name == AUTO:
            raise LoadError(f"device {name!r} in a site: use 'cpu', 'cuda' or 'cuda:1'")
        executable = session_on(opened, opening, device_here(name)).executable
        closing.append(executable)
        return executable

    places: dict[Place, tuple[RemoteModel | None, str | None]] = {}
    for server in site.servers_for(opened.name):
        client = open_client(server.address, server.options(site.policy, folder))
        model = open_model(opened, client)
        closing.append(model)
        places[Place(server.name, model, server.preference)] = (model, server.metrics)
    for name in site.local.devices:
        executable, device = local(name), torch.device(name)
        if device.type != "cpu":
            executable = OnDevice(executable, device, opened.signature)
        places[Place(name, executable, site.local.preference)] = (None, None)
    fall_back = local("cpu") if site.falls_back(opened.name) else None
    router = Router(opened.label, list(places), fall_back, site.policy)
    for place, (remote, metrics) in places.items():
        router.watchers[place] = Watch(router, place, opened, remote, metrics)
    return router


def _close(executable: Executable) -> None:
    close = getattr(executable, "close", None)
    if close:
        close()
