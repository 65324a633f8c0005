"""The models, versions and experiments of soa-pipeline among those in MLflow's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from registry.errors import RegistryError
from registry.mlflow.client_store import ClientStore
from registry.version import DIGEST, Version

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow.access import Access
    from registry.mlflow.store_protocol import Store, StoredModel


def our_versions(store: Store, model: StoredModel) -> list[Version]:
    """The versions that soa-pipeline registered, oldest first."""
    ours = [v for v in store.versions(model.name) if DIGEST in v.tags]
    return sorted((Version.of(v, model.aliases) for v in ours), key=lambda v: v.number)


def registered(store: Store, name: str, digest: str) -> Version | None:
    """The version of model `name` with this digest, if soa-pipeline registered one."""
    model = store.model(name)
    versions = [] if model is None else our_versions(store, model)
    return next((version for version in versions if version.digest == digest), None)


def experiment_of(access: Access, store: Store, name: str) -> str | None:
    """The id of a model's experiment, or None. Raises RegistryError if it was deleted."""
    experiment = store.experiment(name)
    if experiment is None:
        return None
    if not experiment.active:
        raise RegistryError(
            f"registry {access.shown}: MLflow's experiment {name!r} is deleted: restore "
            f"it with 'mlflow experiments restore -x {experiment.id}'"
        )
    return experiment.id


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
