"""A `Store` that asks MLflow's own client, and other questions to that client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from registry.mlflow.store_protocol import (
    PAGE,
    RunQuery,
    StoredExperiment,
    StoredModel,
    StoredRun,
    StoredVersion,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def find_model(client: MlflowClient, name: str) -> Any | None:
    """Return MLflow's RegisteredModel, or None if there is no model of that name."""
    try:
        return client.get_registered_model(name)
    except Exception as error:
        if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
            return None
        raise


def has_code(error: Exception, *codes: str) -> bool:
    """Return whether an error has one of these error codes of MLflow."""
    return getattr(error, "error_code", None) in codes


def fetch_all_pages(search: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Return all results of a search method of MLflow's client, which gives one page a call."""
    results: list[Any] = []
    token = None
    while True:
        page = search(*arguments, page_token=token, **options)
        results.extend(page)
        token = page.token
        if not token:
            return results


def aliases_of(model: Any) -> dict[str, int]:
    """Return the version numbers of MLflow's RegisteredModel, by alias."""
    return {str(alias): int(number) for alias, number in model.aliases.items()}


class ClientStore:
    """A `Store` that asks MLflow's client. `Store` says what the methods return."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def model(self, name: str) -> StoredModel | None:
        registered = find_model(self._client, name)
        return None if registered is None else _convert_model(registered)

    def models(self) -> list[StoredModel]:
        models = fetch_all_pages(self._client.search_registered_models)
        return [_convert_model(model) for model in models]

    def versions(self, name: str) -> list[StoredVersion]:
        versions = fetch_all_pages(self._client.search_model_versions, f"name = '{name}'")
        return [_convert_version(version) for version in versions]

    def version(self, name: str, number: int) -> StoredVersion | None:
        """Return one version of a model, or None. Other errors stay those of MLflow."""
        try:
            return _convert_version(self._client.get_model_version(name, str(number)))
        except Exception as error:
            if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
                return None
            raise

    def experiment(self, name: str) -> StoredExperiment | None:
        """Return the experiment of that name, or None. MLflow's client also finds a deleted one."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return None
        active = experiment.lifecycle_stage == "active"
        return StoredExperiment(str(experiment.experiment_id), active)

    def runs(self, query: RunQuery) -> list[StoredRun]:
        """Return the runs that `query` asks for, also deleted ones."""
        from mlflow.entities import ViewType

        def search(page_token: str | None) -> Any:
            """Return one page of results; None asks for the first one."""
            return self._client.search_runs(
                [query.experiment],
                query.filter,
                run_view_type=ViewType.ALL,
                order_by=query.order_by,
                max_results=query.limit or PAGE,
                page_token=page_token,
            )

        # With a limit, one page holds all that was asked for.
        runs = search(page_token=None) if query.limit else fetch_all_pages(search)
        return [_convert_run(run) for run in runs]


def _convert_model(model: Any) -> StoredModel:
    """Return our record of MLflow's RegisteredModel."""
    return StoredModel(str(model.name), model.description or "", aliases_of(model))


def _convert_version(version: Any) -> StoredVersion:
    """Return our record of MLflow's ModelVersion."""
    return StoredVersion(
        str(version.name),
        int(version.version),
        created=int(version.creation_timestamp),
        run_id=version.run_id or "",
        source=str(version.source),
        tags=_convert_tags(version.tags),
    )


def _convert_run(run: Any) -> StoredRun:
    """Return our record of MLflow's Run."""
    info, tags = run.info, _convert_tags(run.data.tags)
    return StoredRun(info.run_id, info.status, info.start_time, info.end_time, tags)


def _convert_tags(tags: Mapping[Any, Any]) -> dict[str, str]:
    """Return MLflow's tags with both keys and values as text."""
    return {str(key): str(value) for key, value in tags.items()}
