"""Pieces of files, and a job of them, decided once: which version scores which rows, into which
parts.

All of it pickles, and means the same in every process and on every host that sees the files.
`score(plan, piece)` (score.py) does one piece of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.applying.about import Input
from runtime.loader import Reopening
from soa.dtypes import itemsize
from soa.signature import Signature

_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 100_000


@dataclass(frozen=True)
class Plan:
    """What is done with the rows of every piece."""

    session: Reopening
    """Which version, and how it is run: `plan.session()` is that of this process."""
    columns: Mapping[str, str]
    """Of each `collection/column` that the model reads, the column of the files."""
    outputs: Mapping[str, str]
    """Of each `collection/column` that the model writes, the column of the outputs."""
    keep: tuple[str, ...]
    """Columns of the files that go into the outputs as they are."""
    batch: int
    """Rows that are in memory at a time."""
    missing: bool = False
    """Whether a null of floating-point numbers is NaN, as for boosted trees."""

    @property
    def names(self) -> list[str]:
        """The columns of the files that are read."""
        return list(dict.fromkeys([*self.columns.values(), *self.keep]))

    def key(self) -> str:
        """A digest: another version, or other settings, is another plan."""
        plan, opening = vars(self) | {"session": None}, self.session.opening
        return _digest([self.session.digest, str(opening.ref), opening.mode, plan])


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a file, and the Arrow file that their part of an output becomes."""

    input: Input
    start: int
    stop: int
    part: str

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Output:
    """A file to be written: its pieces, in their order."""

    path: str
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True)
class Job:
    """`folder` holds the parts until the outputs are whole; one job at a time works in it."""

    plan: Plan
    outputs: tuple[Output, ...]
    folder: str
    about: Mapping[str, Any]
    """Of the version, the first fields of `About`."""
    counters: Mapping[str, str]
    """Of jagged columns of the outputs, what a TTree calls the number of items of a row."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for output in self.outputs for piece in output.pieces)

    def key(self) -> str:
        """A digest: another version, file or setting is another job."""
        return _digest([self.plan.key(), *map(asdict, self.outputs)])


@dataclass(frozen=True)
class Scored:
    """What scoring a piece took: seconds of one thread."""

    rows: int
    decoding: float
    model: float
    encoding: float

    def __add__(self, other: Scored) -> Scored:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Scored(*(one + two for one, two in pairs))


def _digest(of: list[Any]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


Execute = Callable[[Plan, Sequence[Piece]], Iterator[tuple[Piece, Scored]]]
"""Scores pieces somewhere, and yields each once its part is written, in any order."""


def rows_at_a_time(signature: Signature, keep: int) -> int:
    """Rows that take about 16 MiB."""
    row = 8 * keep
    for name in signature.input_collections:
        items = signature.jagged.get(name, 1)
        row += (
            sum(itemsize(c.dtype) * c.components for c in signature.layouts[name].columns) * items
        )
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row))


def cuts(edges: Sequence[int], rows: int, seeks: bool) -> Iterable[int]:
    """Where a file is cut into pieces of about so many rows: at its own edges, if it has some."""
    last = 0
    yield last
    for edge in edges[1:]:
        while seeks and edge - last >= 2 * rows:
            last += rows
            yield last
        if edge > last and (edge - last >= rows or edge == edges[-1]):  # some groups are empty
            last = edge
            yield last
