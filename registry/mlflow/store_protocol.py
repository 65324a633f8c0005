"""The requests that read MLflow's store, and their answers.

`Store` is the interface. Three classes implement it: `ClientStore` (client_store.py) asks MLflow's
own client; `RestStore` and `TableStore` (rest_store.py, database_store.py) ask a server or a
database directly, because `import mlflow` takes more than a second. `Access.reading` chooses one.
All three give the same answers, which tests/registry/mlflow/test_reading.py checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol


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
    """MLflow's experiment. `active`: False if it was deleted."""

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
    """A run must have started at or after the first time and before the second, both in
    milliseconds since 1970."""
    order: Order = "start_time ASC"
    limit: int | None = None

    @property
    def filter(self) -> str:
        """The query as a filter string of MLflow."""
        value = f"= '{self.value}'" if self.value else "LIKE '%'"
        conditions = [f"tags.`{self.tag}` {value}"]
        if self.status is not None:
            conditions.append(f"attributes.status = '{self.status}'")
        if self.started is not None:
            conditions.append(f"attributes.start_time >= {self.started[0]}")
            conditions.append(f"attributes.start_time < {self.started[1]}")
        return " AND ".join(conditions)

    @property
    def order_by(self) -> list[str]:
        """The order as MLflow's search takes it."""
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

    def model(self, name: str) -> StoredModel | None:
        """Return the model of that name, or None."""

    def models(self) -> list[StoredModel]:
        """Return all models, in any order."""

    def versions(self, name: str) -> list[StoredVersion]:
        """Return all versions of a model that are not deleted, in any order.

        There are none for a name that is no model's.
        """

    def version(self, name: str, number: int) -> StoredVersion | None:
        """Return one version of a model; None if there is no such version or model."""

    def experiment(self, name: str) -> StoredExperiment | None:
        """Return the experiment of that name, also if it was deleted, or None."""

    def runs(self, query: RunQuery) -> list[StoredRun]:
        """Return the runs that `query` asks for, in its order."""
