"""Find MLflow's registered models and experiments, and read its versions as `Version`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from registry.errors import RegistryError
from registry.version import DIGEST, Version

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow.access import Access
    from registry.mlflow.store_protocol import Store, StoredModel


def model_of(client: MlflowClient, name: str) -> Any | None:
    """MLflow's RegisteredModel, or None if there is no model of that name."""
    try:
        return client.get_registered_model(name)
    except Exception as error:
        if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
            return None
        raise


def has_code(error: Exception, *codes: str) -> bool:
    """True if `error` has one of these error codes of MLflow."""
    return getattr(error, "error_code", None) in codes


def all_pages(search: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        page = search(*arguments, page_token=token, **more)
        found.extend(page)
        token = page.token
        if not token:
            return found


def aliases_of(model: Any) -> dict[str, int]:
    """Version numbers by alias. `model`: MLflow's RegisteredModel."""
    return {str(alias): int(number) for alias, number in model.aliases.items()}


def our_versions(store: Store, model: StoredModel) -> list[Version]:
    """The versions that soa-pipeline registered, oldest first."""
    found = [v for v in store.versions(model.name) if DIGEST in v.tags]
    return sorted((Version.of(v, model.aliases) for v in found), key=lambda v: v.number)


def registered(store: Store, name: str, digest: str) -> Version | None:
    """The version of model `name` with this digest, if soa-pipeline registered one."""
    model = store.model(name)
    found = [] if model is None else our_versions(store, model)
    return next((version for version in found if version.digest == digest), None)


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


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text for people, such as `1-4, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts) or "none"
