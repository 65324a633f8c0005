"""The requests that read MLflow's store, and their answers.

`Store` is the interface. Three classes implement it: `ClientStore` (here) asks MLflow's own client;
`RestStore` and `TableStore` (rest_store.py, database_store.py) ask a server or a database
directly, because `import mlflow` takes more than a second. `Access.reading` chooses one. All three
give the same answers, which tests/registry/mlflow/test_reading.py checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from registry.mlflow.models import aliases_of, all_pages, has_code, model_of

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True)
class StoredModel:
    """MLflow's registered model."""

    name: str
    description: str
    aliases: Mapping[str, int]


@dataclass(frozen=True)
class StoredVersion:
    """MLflow's model version. `created`: in milliseconds since 1970, UTC."""

    name: str
    number: int
    created: int
    run_id: str
    source: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class StoredExperiment:
    id: str
    active: bool


@dataclass(frozen=True)
class StoredRun:
    """MLflow's run. `start`, `end`: in milliseconds since 1970, UTC."""

    id: str
    status: str
    start: int | None
    end: int | None
    tags: Mapping[str, str]


Order = Literal["start_time ASC", "start_time DESC", "end_time DESC"]


@dataclass(frozen=True)
class RunQuery:
    """A query for the runs of an experiment that have a tag, including deleted runs."""

    experiment: str
    tag: str
    value: str | None = None
    """The value of the tag; None: any value."""
    status: str | None = None
    started: tuple[int, int] | None = None
    """The start of a run: from the first time on and before the second, in milliseconds since
    1970."""
    order: Order = "start_time ASC"
    limit: int | None = None

    @property
    def filter(self) -> str:
        """The query as a filter string of MLflow."""
        asked = [f"tags.`{self.tag}` " + (f"= '{self.value}'" if self.value else "LIKE '%'")]
        if self.status is not None:
            asked.append(f"attributes.status = '{self.status}'")
        if self.started is not None:
            asked.append(f"attributes.start_time >= {self.started[0]}")
            asked.append(f"attributes.start_time < {self.started[1]}")
        return " AND ".join(asked)

    @property
    def order_by(self) -> list[str]:
        return [f"attributes.{self.order}"]


PROMPT = "mlflow.prompt.is_prompt"
"""The tag of prompts, which MLflow stores as registered models."""
PAGE = 1000
"""The number of runs in one answer."""


class Store(Protocol):
    """Reads a registry. Prompts, which MLflow stores as models, are left out.

    `name` may be any name that MLflow accepts. For `versions` it must not contain `'`, because
    MLflow's search cannot quote that character.
    """

    def model(self, name: str) -> StoredModel | None: ...

    def models(self) -> list[StoredModel]: ...

    def versions(self, name: str) -> list[StoredVersion]: ...

    def version(self, name: str, number: int) -> StoredVersion | None: ...

    def experiment(self, name: str) -> StoredExperiment | None:
        """The experiment of that name, also if it was deleted, or None."""
        ...

    def runs(self, query: RunQuery) -> list[StoredRun]: ...


class ClientStore:
    """A `Store` that asks MLflow's client."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def model(self, name: str) -> StoredModel | None:
        found = model_of(self._client, name)
        return None if found is None else _model(found)

    def models(self) -> list[StoredModel]:
        return [_model(each) for each in all_pages(self._client.search_registered_models)]

    def versions(self, name: str) -> list[StoredVersion]:
        found = all_pages(self._client.search_model_versions, f"name = '{name}'")
        return [_version(each) for each in found]

    def version(self, name: str, number: int) -> StoredVersion | None:
        try:
            return _version(self._client.get_model_version(name, str(number)))
        except Exception as error:
            if has_code(error, "RESOURCE_DOES_NOT_EXIST"):
                return None
            raise

    def experiment(self, name: str) -> StoredExperiment | None:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return None
        return StoredExperiment(str(found.experiment_id), found.lifecycle_stage == "active")

    def runs(self, query: RunQuery) -> list[StoredRun]:
        from mlflow.entities import ViewType

        def search(page_token: str | None) -> Any:
            return self._client.search_runs(
                [query.experiment],
                query.filter,
                run_view_type=ViewType.ALL,
                order_by=query.order_by,
                max_results=query.limit or PAGE,
                page_token=page_token,
            )

        return [_run(each) for each in (search(None) if query.limit else all_pages(search))]


def _model(found: Any) -> StoredModel:
    return StoredModel(str(found.name), found.description or "", aliases_of(found))


def _version(found: Any) -> StoredVersion:
    return StoredVersion(
        str(found.name),
        int(found.version),
        int(found.creation_timestamp),
        found.run_id or "",
        str(found.source),
        _texts(found.tags),
    )


def _run(found: Any) -> StoredRun:
    info = found.info
    return StoredRun(
        info.run_id, info.status, info.start_time, info.end_time, _texts(found.data.tags)
    )


def _texts(tags: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in tags.items()}
