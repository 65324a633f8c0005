"""The models, versions and experiments of soa-pipeline among those in MLflow's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from registry.errors import RegistryError
from registry.mlflow.client_store import ClientStore
from registry.version import DIGEST, Version
from soa.text import in_markdown

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow.access import Access
    from registry.mlflow.store_protocol import Store, StoredModel


_DESCRIPTION_LIMIT = 5000  # of MLflow; SQLite does not enforce it, MySQL and PostgreSQL do


def our_versions(store: Store, model: StoredModel) -> list[Version]:
    """Return the versions of a model that soa-pipeline registered, oldest first."""
    ours = [
        Version.of(stored, model.aliases)
        for stored in store.versions(model.name)
        if DIGEST in stored.tags
    ]
    return sorted(ours, key=lambda version: version.number)


def find_registered(store: Store, name: str, digest: str) -> Version | None:
    """Return the version of model `name` that soa-pipeline registered with this digest, or None."""
    model = store.model(name)
    versions = [] if model is None else our_versions(store, model)
    return next((version for version in versions if version.digest == digest), None)


def find_experiment(access: Access, store: Store, name: str) -> str | None:
    """Return the id of an experiment, or None. Raises RegistryError if it was deleted."""
    experiment = store.experiment(name)
    if experiment is None:
        return None
    if not experiment.active:
        raise RegistryError(
            f"registry {access.shown}: MLflow's experiment {name!r} is deleted: restore "
            f"it with 'mlflow experiments restore -x {experiment.id}'"
        )
    return experiment.id


def ensure_experiment(access: Access, client: MlflowClient, name: str, folder: str) -> str:
    """Return the id of an experiment, which is created if it does not exist.

    The files of its runs are in `folder` of the place for artifacts. The caller holds the write
    lock.
    """
    existing = find_experiment(access, ClientStore(client), name)
    if existing is not None:
        return existing
    return str(client.create_experiment(name, artifact_location=access.artifact_location(folder)))


def ensure_model(client: MlflowClient, name: str, description: str) -> None:
    """Create a registered model if it does not exist. The caller holds the write lock."""
    if ClientStore(client).model(name) is None:
        shown = in_markdown(description)[:_DESCRIPTION_LIMIT] or None
        client.create_registered_model(name, description=shown)


def ranges_text(numbers: Sequence[int]) -> str:
    """Write ascending numbers for people: 1, 2, 3, 4, 6 give `1-4, 6`."""
    runs: list[list[int]] = []  # each has numbers without a gap
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(texts) or "none"
