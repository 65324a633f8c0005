"""The models, versions and experiments of soa-pipeline among those in MLflow's store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from registry import stamp
from registry.errors import RegistryError
from registry.mlflow.client_store import ClientStore
from registry.ref import TARGET_PATTERN
from registry.version import ANNEX, CHOSEN, DIGEST, TARGET, Version

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow.access import Access
    from registry.mlflow.store_protocol import Store, StoredModel, StoredVersion


def version_of(found: StoredVersion, aliases: Mapping[str, int]) -> Version:
    """`aliases`: all aliases of the model."""
    number, tags = found.number, dict(found.tags)
    if DIGEST not in tags:
        raise RegistryError(
            f"{found.name}/{number} was not registered by soa-pipeline: no tag '{DIGEST}'"
        )
    return Version(
        name=found.name,
        number=number,
        digest=tags[DIGEST],
        aliases=tuple(sorted(alias for alias, to in aliases.items() if to == number)),
        targets=_by_target(tags, TARGET),
        chosen=_by_target(tags, CHOSEN),
        annexes=_by_target(tags, ANNEX),
        created=stamp.time_of(found.created),
        run_id=found.run_id or None,
        source=found.source,
        tags=MappingProxyType(tags),
    )


def _by_target(tags: Mapping[str, str], prefix: str) -> Mapping[str, str]:
    """The tags that begin with `prefix`, by target. A tag that names no valid target is not ours,
    and its name might be an unsafe path: it is left out."""
    by_target = {}
    for key in sorted(tags):
        # A target has one slash, after a device that has no dot: `tag_of` wrote a dot for it.
        target = key.removeprefix(prefix).replace(".", "/", 1)
        if key.startswith(prefix) and re.fullmatch(TARGET_PATTERN, target):
            by_target[target] = tags[key]
    return MappingProxyType(by_target)


def our_versions(store: Store, model: StoredModel) -> list[Version]:
    """The versions that soa-pipeline registered, oldest first."""
    ours = [v for v in store.versions(model.name) if DIGEST in v.tags]
    return sorted((version_of(v, model.aliases) for v in ours), key=lambda v: v.number)


def registered(store: Store, name: str, digest: str) -> Version | None:
    """The version of model `name` with this digest, if soa-pipeline registered one."""
    model = store.model(name)
    versions = [] if model is None else our_versions(store, model)
    return next((version for version in versions if version.digest == digest), None)


def experiment_of(access: Access, store: Store, name: str) -> str | None:
    """The id of a model's experiment, or None. Raises RegistryError if it was deleted."""
    found = store.experiment(name)
    if found is None:
        return None
    if not found.active:
        raise RegistryError(
            f"registry {access.shown}: MLflow's experiment {name!r} is deleted: restore "
            f"it with 'mlflow experiments restore -x {found.id}'"
        )
    return found.id


def made_experiment(access: Access, client: MlflowClient, name: str, folder: str) -> str:
    """The id of an experiment, which is created if it does not exist. The files of its runs are in
    `folder` of the place for artifacts. The caller holds the write lock."""
    known = experiment_of(access, ClientStore(client), name)
    if known is not None:
        return known
    return str(client.create_experiment(name, artifact_location=access.artifact_location(folder)))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text for people, such as `1-4, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts) or "none"
