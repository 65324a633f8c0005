"""A tiny model whose answers show to which event they belong, in a registry and a repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.deployment.repository import Deployed, deploy
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.session.session import Session
from soa import RowRange
from tests.models.building import signature_of
from tests.models.project import PASSED, described

NAME = "tagged"
MOST = 200
ROW_BYTES = 16  # of one row in a request: an int64 and two float32
SIGNATURE = signature_of(
    {"event": "event:int64", "values": "x y"},
    {"tag": "event:int64", "score": "score"},
    RowRange(0, MOST, (50,)),
    names=("given", "found"),
)


class Tagged(nn.Module):
    """Passes the event's number on, and scores every row by itself."""

    def forward(self, event: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        score = torch.sigmoid(values[:, 0:1] * 2 - values[:, 1:2]) + (event % 97).to(values.dtype)
        return event.clone(), score


@dataclass(frozen=True)
class Tags:
    """Versions tagged/1 and tagged/2; `repository` serves the first, `newer` the second.

    `in_rows` serves the first one, with requests as rows. `forged` serves another bundle under the
    number of the first.
    """

    registry: Registry
    bundle: Bundle
    repository: Path
    newer: Path
    in_rows: Path
    forged: Path
    deployed: Deployed


def make(folder: Path, bundle: Bundle) -> Tags:
    """Registers, promotes and deploys `bundle`, which holds `Tagged`."""
    registry = Registry(f"sqlite:///{folder}/registry.db")
    other = described(bundle, folder / "second", "another")
    deployments = {}
    for label, registered in (("repository", bundle), ("newer", other)):
        version = registry.promote(registry.register(registered), "production", PASSED)
        deployments[label] = deploy(registry, version.ref, folder / label)
    deploy(registry, f"{NAME}/1", folder / "in_rows", requests="rows")
    elsewhere = Registry(f"sqlite:///{folder}/elsewhere.db")
    version = elsewhere.promote(elsewhere.register(other), "production", PASSED)
    deploy(elsewhere, version.ref, folder / "forged")
    return Tags(
        registry,
        bundle,
        folder / "repository",
        folder / "newer",
        folder / "in_rows",
        folder / "forged",
        deployments["repository"],
    )


@dataclass(frozen=True)
class Event:
    """Collections of one event, with its number in every row; the outputs hold other values."""

    number: int
    given: Any
    found: Any

    @classmethod
    def make(cls, session: Session, number: int, n: int) -> Event:
        """Event `number`, of n rows."""
        given = session.collection("given", n)
        spread = torch.arange(n, dtype=torch.float32)
        given["event"][:] = number
        given["x"][:] = torch.sin(spread + number).numpy()
        given["y"][:] = torch.cos(spread * number).numpy()
        event = cls(number, given, session.collection("found", n))
        event.spoil()
        return event

    def spoil(self) -> None:
        """Writes values that are no answer into the outputs."""
        self.found["event"][:] = -1
        self.found["score"][:] = -2.0

    @property
    def untouched(self) -> bool:
        """Whether nothing was written since `spoil`."""
        return bool((self.found["event"] == -1).all() and (self.found["score"] == -2.0).all())

    def require_right(self, local: Session, exact: bool = True) -> None:
        """The answer must be that of the local session. Not `exact`: the last bit of a score may
        depend on the row's place in a run."""
        mine = Event.make(local, self.number, self.found.n)
        local.run(mine.given, mine.found)
        (numbers, scores), (wanted, right) = self.answers(), mine.answers()
        assert torch.equal(numbers, wanted)
        torch.testing.assert_close(scores, right, rtol=0 if exact else 1e-6, atol=0)

    def answers(self) -> tuple[Tensor, Tensor]:
        """Copies of the numbers and the scores in the outputs."""
        return self.found.tensor("event").clone(), self.found.tensor("score").clone()
