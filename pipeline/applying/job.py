"""A job and its pieces: which version scores which rows, and into which part files.

A job turns input files into outputs. It is cut into pieces, ranges of rows of one file. The answers
to each piece are written to a temporary file of its own, a part; outputs are joined from parts.

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
    """What to do with the rows of every piece: which columns to read, which version to run on them,
    and which columns to write."""

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
        """The names of the columns that are read from the files."""
        return list(dict.fromkeys([*self.columns.values(), *self.keep]))

    def key(self) -> str:
        """Return a digest of the version and the settings."""
        settings, opening = vars(self) | {"session": None}, self.session.opening
        del settings["profile"]  # a version has only one, so its digest stands for it
        if not self.fill:
            del settings["fill"]  # so that the key is the same as in earlier releases
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
        """Return a digest of the version, the settings and the files."""
        return _digest_json([self.plan.key(), *map(asdict, self.outputs)])


@dataclass(frozen=True)
class Scored:
    """What was scored: a number of rows, and the seconds for each part of the work, summed over
    threads. `counts`: how often the rows have which values; None if they were not counted."""

    rows: int
    decoding: float
    model: float
    encoding: float
    counts: Counts | None = None

    @property
    def times(self) -> dict[str, float]:
        """The seconds, by the name of the work."""
        return {"decoding": self.decoding, "model": self.model, "encoding": self.encoding}

    def __add__(self, other: Scored) -> Scored:
        """Add rows, seconds and counts. Without counts on either side, the sum has none."""
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
    """Return the block that has each column, by `collection/column`; the last one, if several
    blocks have the same column."""
    return {
        f"{bound.block.collection}/{name}": bound
        for bound in blocks
        for name in bound.block.columns
    }


def size_batches(signature: Signature, keep: int) -> int:
    """Choose how many rows a batch has: as many as take about 16 MiB, but at most 100 000. `keep`:
    the number of columns that are kept; 8 bytes a row are assumed for each."""
    row_bytes = 8 * keep
    for name in signature.input_collections:
        columns = signature.layouts[name].columns
        item_bytes = sum(itemsize(c.dtype) * c.components for c in columns)
        row_bytes += item_bytes * signature.jagged.get(name, 1)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def cut_file(edges: Sequence[int], rows: int, seeks: bool) -> Iterable[int]:
    """Yields the rows at which to cut a file into pieces of about `rows` rows: 0, the cuts between
    pieces, and the number of rows in the file.

    `edges`: the rows at which row groups, baskets or clusters of the file begin, and its number of
    rows. Pieces end at edges, since a group is read as a whole. If `seeks`, a part of a group can
    be read alone, and long groups are cut too. Edges 0, 10, 20, 30 with 20 rows give 0, 20, 30.
    """
    last_cut = 0
    yield last_cut
    for edge in edges[1:]:
        while seeks and edge - last_cut >= 2 * rows:
            last_cut += rows
            yield last_cut
        if edge > last_cut and (edge - last_cut >= rows or edge == edges[-1]):
            last_cut = edge
            yield last_cut
