"""Remove a version that nobody needs any more, with its files; its record stays in the history.

The order is: event, version, files. So there is never a version without its files. If the process
is killed in between, the next command that writes closes the event. The run gets a tag first, with
which `registry.housekeeping.garbage` finds the remaining files.
"""

from __future__ import annotations

from dataclasses import dataclass

from registry.errors import RegistryError
from registry.history import Event
from registry.ref import Ref
from registry.store import Registry, bundle_files
from registry.version import Version

REMOVED = "soa.removed"
"""The tag of a run whose version was removed; its value is that version."""


@dataclass(frozen=True)
class Removal:
    """The result of a removal. `event`: its record in the history. `bytes`: the files' size."""

    version: Version
    event: Event
    bytes: int


def find_removable(registry: Registry, ref: Ref) -> Version:
    """Find the version that `ref` names by its number, if it can be removed.

    Raises RegistryError if it has an alias, or if another version has the same files.
    """
    if ref.version is None:
        raise RegistryError(f"{ref}: say which version by its number, as {ref.name}/3")
    version = registry.find(ref)
    if version.aliases:
        aliases = ", ".join(f"@{alias}" for alias in version.aliases)
        raise RegistryError(f"{version.ref} is {aliases}: move that to another version first")
    with registry.client() as client:
        sharing = client.search_model_versions(f"run_id = '{version.run_id}'")
    refs = [f"{shared.name}/{shared.version}" for shared in sharing]
    if others := [shared for shared in refs if shared != version.ref]:
        raise RegistryError(f"{version.ref}: {others[0]} has the same files: remove it first")
    return version


def remove(registry: Registry, ref: Ref, reason: str = "") -> Removal:
    """Remove for good the version that `ref` names by its number; see `find_removable`."""
    find_removable(registry, ref)  # raises before anything is written
    with registry.writing(ref.name) as writer:
        version, client = find_removable(registry, ref), writer.client
        run = str(version.run_id)
        if client.get_run(run).info.lifecycle_stage != "active":
            client.restore_run(run)  # it was deleted on MLflow's page: such a run takes no tag
        client.set_tag(run, REMOVED, version.ref)
        event = writer.new_event("removal", version, annexes=version.annexes, reason=reason)
        event = writer.apply(event)
    with registry.client(write=True) as client:
        return Removal(version, event, bundle_files.remove_run(registry, client, run))
