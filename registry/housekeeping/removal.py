"""Remove: a version that nobody needs any more, with its files; its record stays in the history.

First the event, then the version, then the files, so that there is never a version without its
files. Killed in between, the next command that writes closes the event, and what is left of the
files is `registry.housekeeping.garbage`, told by the tag that the run got before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

from registry.errors import RegistryError
from registry.history import Event
from registry.mlflow import Version
from registry.reference import Ref
from registry.store import Registry, discard_files

REMOVED = "soa.removed"
"""A run's tag: the version whose files it had, when that was removed."""


@dataclass(frozen=True)
class Removal:
    """`event` is the record of it; `bytes` is what the files took."""

    version: Version
    event: Event
    bytes: int


def remove(registry: Registry, ref: Ref, reason: str = "") -> Removal:
    """Remove the version that `ref` names by its number, for good.

    Refused with a RegistryError while it holds an alias, or while another version has its files.
    """
    if ref.version is None:
        raise RegistryError(f"{ref}: say which version by its number, as {ref.name}/3")
    registry.find(ref)  # an unknown one is said before anything is written
    with registry._writing(ref.name) as mover:
        version = registry.find(ref)
        if version.aliases:
            held = ", ".join(f"@{alias}" for alias in version.aliases)
            raise RegistryError(f"{version.ref} is {held}: move that to another version first")
        run = str(version.run_id)
        sharing = [
            f"{each.name}/{each.version}"
            for each in mover.client.search_model_versions(f"run_id = '{run}'")
            if (each.name, int(each.version)) != (version.name, version.number)
        ]
        if sharing:
            raise RegistryError(f"{version.ref}: {sharing[0]} has the same files: remove it first")
        if mover.client.get_run(run).info.lifecycle_stage != "active":
            mover.client.restore_run(run)  # deleted in MLflow's page, it takes no tag
        mover.client.set_tag(run, REMOVED, version.ref)
        event = mover.move(
            Event(
                "removal",
                version.name,
                dict(mover.aliases),
                dict(mover.aliases),
                version=version.number,
                digests={version.ref: version.digest},
                annexes=version.annexes,
                reason=reason,
            )
        )
    with registry._access.client(write=True) as client:
        return Removal(version, event, discard_files(registry._access, client, run))
