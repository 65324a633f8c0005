"""A session over the places of a site: servers, local devices, and the local CPU as a fall-back.

It binds and runs as a local session does. router.py chooses the place of each request.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engines.base import Executable
from runtime.checked import CheckedSession
from runtime.errors import LoadError
from runtime.loader import AUTO, find_device, open_checked_session, open_session
from runtime.opening import Opened
from runtime.session import Origin
from serving.remote import RemoteSession, open_model
from serving.site.options import Site
from serving.site.place import Place, SiteReport
from serving.site.router import OnDevice, Router
from soa.signature import Signature


class SiteSession(RemoteSession):
    """Runs one model on CPU collections, at the servers and devices of a site.

    Examples
    --------
    >>> site = pipeline.load("jet-tagger@production", site="site.yaml")
    >>> site.run(jets, tags)
    """

    def __init__(self, signature: Signature, router: Router, origin: Origin) -> None:
        super().__init__(signature, router, router.policy.in_flight, origin)
        self._router = router

    def report(self) -> SiteReport:
        """Return the numbers of answers and failures of each place up to now."""
        return self._router.report()


def connect_site(opened: Opened, site: Site, folder: Path) -> SiteSession | CheckedSession:
    """Open a session of a version that runs at the places of a site.

    `folder`: paths in the site are relative to it. A server that does not answer, is busy or has
    another bundle is no error: it is used as soon as it is healthy. Without a fall-back, raises
    NowhereError if no place is usable within the deadline. Also raises the errors of opening the
    artifacts for local devices.
    """
    executables: list[Executable] = []
    try:
        router = _open_router(opened, site, folder, executables)
    except BaseException:
        for executable in executables:
            executable.close()
        raise
    try:
        router.start()
        names = ", ".join(place.name for place in router.places)
        origin = opened.origin("site", names or "cpu")
        if opened.production:
            return SiteSession(opened.signature, router, origin)
        return open_checked_session(opened, router, torch.device("cpu"), origin, any_start=True)
    except BaseException:
        router.close()
        raise


def _open_router(opened: Opened, site: Site, folder: Path, executables: list[Executable]) -> Router:
    """Open all places of the site, and return the router that chooses among them.

    Each executable is added to `executables` when it is open, so that the caller can close it after
    a failure. The router closes them later.
    """

    def open_local(name: str) -> Executable:
        """Open the version on a device of this host, and return its executable."""
        if name == AUTO:
            raise LoadError(f"device {name!r} in a site: use 'cpu', 'cuda' or 'cuda:1'")
        executable = open_session(opened, find_device(name)).executable
        executables.append(executable)
        return executable

    places = []
    for server in site.servers_for(opened.name):
        model = open_model(opened, server.address, server.options(site.policy, folder))
        executables.append(model)
        places.append(Place(server.name, model, server.preference, server.metrics))
    for name in site.local.devices:
        executable, device = open_local(name), torch.device(name)
        if device.type != "cpu":
            executable = OnDevice(executable, device, opened.signature)
        places.append(Place(name, executable, site.local.preference))
    fall_back = open_local("cpu") if site.falls_back(opened.name) else None
    label = f"{opened.label} at {site.site}" if site.site else opened.label
    return Router(label, places, fall_back, site.policy)
