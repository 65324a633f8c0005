"""A job and its pieces: which version scores which rows, and into which part files.

All of these records can be pickled, and are valid in every process and on every host that sees the
files. `score(plan, piece)` (score_piece.py) does one piece of a job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.applying.origin_record import Input
from runtime.loader import Reopening
from runtime.watch import Counts, Profile, add_counts
from soa.dtypes import itemsize
from soa.signature import BoundBlock, Signature

_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 100_000


@dataclass(frozen=True)
class Plan:
    """The work to be done with the rows of every piece."""

    session: Reopening
    """Says which version, and how it runs: `plan.session()` is the session of this process."""
    columns: Mapping[str, str]
    """By `collection/column` that the model reads: the name of that column in the files."""
    outputs: Mapping[str, str]
    """By `collection/column` that the model writes: the name of that column in the outputs."""
    keep: tuple[str, ...]
    """Columns of the files that are copied into the outputs unchanged."""
    batch: int
    """The largest number of rows in memory at a time."""
    missing: bool = False
    """True if nulls among floating-point numbers become NaN, as boosted trees expect."""
    fill: Mapping[str, float] = field(default_factory=dict)
    """By column of the files that the model reads: the value of its nulls."""
    profile: Profile | None = None
    """The bins in which the values of each column are counted; None: they are not counted."""

    @property
    def names(self) -> list[str]:
        """The columns of the files that are read."""
        return list(dict.fromkeys([*self.columns.values(), *self.keep]))

    def key(self) -> str:
        """A digest of the version and the settings."""
        settings, opening = vars(self) | {"session": None}, self.session.opening
        del settings["profile"]  # the version has only one
        if not self.fill:
            del settings["fill"]  # the key is that of earlier releases
        return _digest_json([self.session.digest, str(opening.ref), opening.mode, settings])


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a file. `part` is the Arrow file with their part of the output."""

    input: Input
    start: int
    stop: int
    part: str

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Output:
    """A file to be written, with its pieces in the order of their rows."""

    path: str
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True)
class Job:
    """A job of `pipeline apply`. `folder` holds the parts until the outputs are complete; only one
    job at a time works in it."""

    plan: Plan
    outputs: tuple[Output, ...]
    folder: str
    about: Mapping[str, Any]
    """The fields of `About` that describe the version."""
    counters: Mapping[str, str]
    """By jagged column of the outputs: the TTree branch with the number of items per row."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for output in self.outputs for piece in output.pieces)

    def key(self) -> str:
        """A digest of the version, the settings and the files."""
        return _digest_json([self.plan.key(), *map(asdict, self.outputs)])


@dataclass(frozen=True)
class Scored:
    """The time that scoring took: seconds, summed over threads. `counts`: the values of the rows,
    if they were counted."""

    rows: int
    decoding: float
    model: float
    encoding: float
    counts: Counts | None = None

    @property
    def times(self) -> dict[str, float]:
        """The seconds by name."""
        return {"decoding": self.decoding, "model": self.model, "encoding": self.encoding}

    def __add__(self, other: Scored) -> Scored:
        counted = [counts for counts in (self.counts, other.counts) if counts is not None]
        return Scored(
            self.rows + other.rows,
            self.decoding + other.decoding,
            self.model + other.model,
            self.encoding + other.encoding,
            add_counts(counted) if counted else None,
        )


def _digest_json(data: list[Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


Execute = Callable[[Plan, Sequence[Piece]], Iterator[tuple[Piece, Scored]]]
"""Scores pieces and yields each once its part is written, in any order."""


def blocks_by_column(blocks: Iterable[BoundBlock]) -> dict[str, BoundBlock]:
    """By `collection/column` of some blocks: the block that has it; the last one, if several do."""
    return {
        f"{bound.block.collection}/{name}": bound
        for bound in blocks
        for name in bound.block.columns
    }


def choose_batch_rows(signature: Signature, keep: int) -> int:
    """How many rows take about 16 MiB, at most 100 000. `keep`: the number of kept columns, of
    which 8 bytes a row are assumed."""
    row_bytes = 8 * keep
    for name in signature.input_collections:
        columns = signature.layouts[name].columns
        item_bytes = sum(itemsize(c.dtype) * c.components for c in columns)
        row_bytes += item_bytes * signature.jagged.get(name, 1)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def choose_cuts(edges: Sequence[int], rows: int, seeks: bool) -> Iterable[int]:
    """The rows at which a file is cut into pieces of about `rows` rows, from 0 to its end. It is
    cut at its `edges` (of row groups, baskets or clusters); if `seeks`, long groups are cut as
    well."""
    last = 0
    yield last
    for edge in edges[1:]:
        while seeks and edge - last >= 2 * rows:
            last += rows
            yield last
        if edge > last and (edge - last >= rows or edge == edges[-1]):  # groups may be empty
            last = edge
            yield last
