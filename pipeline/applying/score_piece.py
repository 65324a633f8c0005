"""Scores a piece: reads its rows, runs the model, and writes one part, completely or not at all.

A piece is a range of rows of one file, and a part the temporary file with the answers to it
(`job.py`). Rows are read in batches, and a batch runs in windows, which fit into the model's ranges
of rows.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.applying.columns import (
    Array,
    FileColumn,
    as_arrow,
    column_of,
    count_nulls,
    fill_items,
    is_jagged,
)
from pipeline.applying.job import Piece, Plan, Scored
from pipeline.applying.origin_record import Input
from pipeline.applying.outputs import Rows, write
from pipeline.applying.sources import Source, open_source
from pipeline.errors import ApplyError, DataError
from runtime.errors import BindError, DeviationError
from runtime.session import Session
from runtime.watch import Counter, Counts
from soa.dtypes import is_float, numpy_dtype
from soa.errors import CollectionError
from soa.layout import Layout
from soa.memory import Collection, as_collection, from_jagged, plain_arrow
from soa.signature import Signature


def score(plan: Plan, piece: Piece) -> Scored:
    """Score a piece, and write its part. Returns the rows and the seconds that this took. A second
    call writes the same rows again.

    Raises DataError, with the file and the rows, if they cannot be scored; ApplyError if the
    version or the file has changed; and OSError if the part cannot be written.
    """
    session = plan.session()
    spent = dict.fromkeys(("decoding", "model", "encoding"), 0.0)
    part = Path(piece.part)
    counter = None if plan.profile is None else Counter(plan.profile, session.signature)
    scorer = Scorer(session, plan, counter)
    with reopen(piece.input) as source:
        tables = _score_batches(piece, source, scorer, plan, spent)
        table = next(tables)  # read here for its schema; a piece without rows has one table too
        origin = session.origin
        assert origin is not None  # the session is of an opened version
        notes = {"target": origin.target, "engine": origin.engine, "host": socket.gethostname()}
        about = json.dumps(notes)
        rows = Rows(table.schema, piece.rows, lambda: chain([table], tables), lambda: about)
        write(part, rows, part.parent)
    counts = None
    if counter is not None:
        counts = counter.counts(origin.name, origin.version, plan.session.digest)
    return Scored(piece.rows, **spent, counts=counts)


def _score_batches(
    piece: Piece, source: Source, scorer: Scorer, plan: Plan, spent: dict[str, float]
) -> Iterator[Any]:
    """Yields a table of the answers to each batch of a piece. Adds to `spent` the seconds in which
    the source decodes, the model runs, and the caller writes a table. Errors are as for `score`."""
    source.cast(scorer.dtypes)
    row, begun = piece.start, time.perf_counter()
    for batch in source.batches(plan.names, piece.start, piece.stop, plan.batch):
        spent["decoding"] += time.perf_counter() - begun
        try:
            table = scorer.make_table(batch, spent)
        except (CollectionError, BindError, DeviationError, ValueError) as error:
            raise _name_rows(piece, row, plan.batch, error) from error
        row += len(table)
        begun = time.perf_counter()
        yield table
        spent["encoding"] += time.perf_counter() - begun  # the table was written meanwhile
        begun = time.perf_counter()


def count_values(plan: Plan, piece: Piece) -> Counts:
    """Count the values of a piece's rows, and of the answers to them, and write nothing. Errors are
    as for `score`."""
    assert plan.profile is not None
    session = plan.session()
    counter = Counter(plan.profile, session.signature)
    scorer = Scorer(session, plan, counter)
    row = piece.start
    with reopen(piece.input) as source:
        source.cast(scorer.dtypes)
        for batch in source.batches(plan.names, piece.start, piece.stop, plan.batch):
            try:
                scorer.compute_answers(batch)
            except (CollectionError, BindError, DeviationError, ValueError) as error:
                raise _name_rows(piece, row, plan.batch, error) from error
            row += len(next(iter(batch.values())))  # a group may end before the batch is full
    origin = session.origin
    assert origin is not None  # the session is of an opened version
    return counter.counts(origin.name, origin.version, plan.session.digest)


def _name_rows(piece: Piece, begin: int, batch: int, error: Exception) -> DataError:
    """Return `error` as a DataError that names the file, and the rows of the batch in which it was
    raised. `begin`: the first row of that batch. `batch`: the size of a full batch."""
    return DataError(
        f"{piece.input.path}, rows {begin} to {min(begin + batch, piece.stop)}: {error}"
    )


def reopen(file: Input) -> Source:
    """Open an input file of a job again. ApplyError if it is missing, or if its size or its time of
    change is not that from the job's beginning."""
    path = Path(file.path)
    try:
        status = path.stat()
    except OSError as error:
        raise ApplyError(f"{path}: {error.strerror}, but the job began with it") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise ApplyError(f"{path} was changed since the job began: begin a new job")
    return open_source(path, file.tree)


def find_row_dimension(signature: Signature) -> str:
    """Return the row dimension of the model that stands for the rows of a file. The items of jagged
    collections are not such a dimension.

    ApplyError if the model has several such dimensions, or a block with one value for all rows:
    such a model cannot run on files.
    """
    items = {signature.rows_of[name] for name in signature.jagged}
    dims = [dim for dim in signature.dims if dim not in items]
    if len(dims) != 1:
        raise ApplyError(
            f"the model has the row dimensions {', '.join(dims)}, and files have rows of one kind: "
            "bind such events one by one (docs/howto/runtime.md)"
        )
    for bound in (*signature.inputs, *signature.outputs):
        if bound.plan.kind == "scalars":
            raise ApplyError(
                f"block {bound.name!r} has one value for all rows, and a file has one for each: "
                "make it a column, or bind such events one by one (docs/howto/runtime.md)"
            )
    return dims[0]


@dataclass(frozen=True)
class Answers:
    """The answers to a batch. `columns` holds arrays `(n, *shape)` by `collection/column`.

    If each item of jagged columns is one row of the model, n is the number of items, and
    `offsets[i]` is the first item of row i of the file. Else n is the number of rows, and `offsets`
    is None.
    """

    columns: dict[str, Array]
    offsets: Array | None


@dataclass(frozen=True)
class _Flat:
    """The flat collections of a batch, by name. `offsets` is as in `Answers`."""

    columns: dict[str, Collection]
    offsets: Array | None


class Scorer:
    """Runs a session on one batch of rows after another, in one thread.

    It owns memory for a window of rows. Flat columns are copied into it, one window after the
    other; jagged columns are bound in place. If `counter` is given, it counts the values of each
    window.
    """

    def __init__(self, session: Session, plan: Plan, counter: Counter | None = None) -> None:
        self._session, self._plan = session, plan
        self._signature = signature = session.signature
        rows = signature.ranges[find_row_dimension(signature)]
        self._least, self._most = rows.min, max(min(rows.limit, plan.batch), rows.min)
        self._file_columns: dict[str, dict[str, str]] = {}
        """By collection and column that the model reads: the column of the files."""
        for key, name in plan.columns.items():
            collection, _, column = key.partition("/")
            self._file_columns.setdefault(collection, {})[column] = name
        self._flat = [name for name in self._file_columns if name not in signature.jagged]
        self._jagged = [name for name in self._file_columns if name in signature.jagged]
        self._memory = {
            name: session.collection(name, self._most)
            for name in dict.fromkeys((*self._flat, *signature.output_collections))
        }
        self._binding: Any = None
        """The bound memory, from the first window on; None if there are jagged collections."""
        self._counter = counter

    def make_table(self, batch: Mapping[str, Any], spent: dict[str, float]) -> Any:
        """Run the model on a batch, and return the kept columns and the answers as an Arrow table.
        Adds the seconds that this takes to the entries "model" and "encoding" of `spent`."""
        import pyarrow as pa

        begun = time.perf_counter()
        answers = self.compute_answers(batch)
        ran = time.perf_counter()
        columns = {name: as_arrow(batch[name]) for name in self._plan.keep}
        for key, values in answers.columns.items():
            columns[self._plan.outputs[key]] = as_arrow(values, answers.offsets)
        table = pa.table(columns)
        spent["model"] += ran - begun
        spent["encoding"] += time.perf_counter() - ran
        return table

    def compute_answers(self, batch: Mapping[str, Any]) -> Answers:
        """Run the model on a batch, and return its answers. `batch`: at least the columns that the
        model reads, by their name in the file. Raises CollectionError, BindError or ValueError if
        they do not fit the model."""
        read = {name: self._to_plain(name, batch[name]) for name in self._plan.columns.values()}
        batch = {**batch, **read}
        flat = self._make_flat(batch)
        jagged = {name: self._zip_lists(name, batch) for name in self._jagged}
        # All flat collections have the same number of rows. If there are none, all jagged ones do.
        counts = {collection.n for collection in flat.columns.values()}
        (n,) = counts or {len(lists) for lists in jagged.values()}
        answers: dict[str, Array] = {}
        for key in self._plan.outputs:
            name, _, column = key.partition("/")
            member = self._signature.layouts[name][column]
            answers[key] = np.empty((n, *member.shape), numpy_dtype(member.dtype))
        for low, high in self._cut_windows(n, jagged):
            for name, columns in flat.columns.items():
                _copy_rows(columns, slice(low, high), self._memory[name], slice(0, high - low))
            self._run(high - low, {name: lists[low:high] for name, lists in jagged.items()})
            for key, values in answers.items():
                self._copy_answers(key, values[low:high])
        return Answers(answers, flat.offsets)

    def _copy_answers(self, key: str, into: Array) -> None:
        """Copy answers from the bound memory to `into`, as many as it has rows. `key`: the column,
        as `collection/column`."""
        name, _, column = key.partition("/")
        memory = self._memory[name]
        member = memory.layout[column]
        rows = into.reshape(len(into), member.components)  # a view, so `into` is written
        for i in range(member.components):
            rows[:, i] = memory.span(column, member.component_of(i)).numpy()[: len(into)]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype in the model's layout, by column of the files that the model reads."""
        dtypes = {}
        for key, name in self._plan.columns.items():
            collection, _, column = key.partition("/")
            dtypes[name] = self._signature.layouts[collection][column].dtype
        return dtypes

    def _to_plain(self, name: str, values: Any) -> Any:
        """Return a column of the file as an array of NumPy, or as a plain one of Arrow. ValueError
        if it has nulls that nothing fills. `name`: the column's name, for the message."""
        if isinstance(values, np.ndarray):
            return values
        plan, values = self._plan, plain_arrow(values)
        if name not in plan.fill and not plan.missing and (nulls := count_nulls(values)):
            raise ValueError(
                f"{name!r} has {nulls} nulls: give the value that the model was trained with for "
                f"them, --fill {name}=VALUE"
            )
        return values

    def _make_flat(self, batch: Mapping[str, Any]) -> _Flat:
        """Make the flat collections of the model from a batch, in place where possible.

        If the columns of the batch are jagged, each item becomes one row of the model. Lists that
        fill a vector column of the model do not count as jagged.
        """
        values = {
            file_column: batch[file_column]
            for name in self._flat
            for file_column in self._file_columns[name].values()
        }
        columns = self._convert_jagged_columns(values)
        values |= {column.name: column.values for column in columns}
        collections = {name: self._make_flat_collection(name, values) for name in self._flat}
        return _Flat(collections, columns[0].offsets if columns else None)

    def _convert_jagged_columns(self, values: Mapping[str, Any]) -> list[FileColumn]:
        """Convert the jagged columns among those that flat collections read. Returns none of them
        or all, as there may not be both kinds. ValueError if only some are jagged, or if they
        differ in their items per row. `values`: arrays by column of the files."""
        vectors = {
            file_column
            for name in self._flat
            for column, file_column in self._file_columns[name].items()
            if self._signature.layouts[name][column].shape
        }
        jagged = [name for name in values if name not in vectors and is_jagged(values[name])]
        if jagged and len(jagged) != len(values):
            other = next(name for name in values if name not in jagged)
            raise ValueError(
                f"{jagged[0]!r} is jagged, {other!r} is not: the columns must all be of one kind"
            )
        missing, fill = self._plan.missing, self._plan.fill
        columns = [column_of(name, values[name], missing, fill.get(name)) for name in jagged]
        for column in columns:
            if column.cut != columns[0].cut:
                raise ValueError(
                    f"{columns[0].name!r} and {column.name!r} differ in their items per row"
                )
        return columns

    def _make_flat_collection(self, name: str, values: Mapping[str, Any]) -> Collection:
        """Make the flat collection `name` of the model from `values`, which are arrays by column of
        the files. Nulls are filled as the plan says."""
        file_columns = self._file_columns[name]
        layout = self._signature.layouts[name]
        members = [member for member in layout.columns if member.name in file_columns]
        fill: dict[str, float] = {}
        for member in members:
            if file_columns[member.name] in self._plan.fill:
                fill[member.name] = self._plan.fill[file_columns[member.name]]
            elif self._plan.missing and is_float(member.dtype):
                fill[member.name] = math.nan
        return as_collection(
            {member.name: values[file_columns[member.name]] for member in members},
            Layout(members, storage="columns"),
            fill=fill,
        )

    def _zip_lists(self, name: str, batch: Mapping[str, Any]) -> Any:
        """Make an Awkward array of the jagged collection `name`, in which each row is a record of
        lists. Columns that the model does not read are zero."""
        import awkward as ak

        layout, lists = self._signature.layouts[name], dict[str, Any]()
        for column, file_column in self._file_columns[name].items():
            values, dtype = batch[file_column], layout[column].dtype
            fill = self._plan.fill.get(file_column)
            if fill is None and self._plan.missing and is_float(dtype):
                fill = math.nan
            if not is_jagged(values):  # a vector: all rows have the same number of items
                lists[column] = ak.Array(column_of(file_column, values, fill=fill).values)
            else:
                lists[column] = ak.from_arrow(fill_items(values, fill))
        any_column = next(iter(lists.values()))
        for member in layout.columns:
            if member.name not in lists:  # the model does not read it
                lists[member.name] = ak.values_astype(ak.zeros_like(any_column), member.dtype)
        return ak.zip(lists, depth_limit=1)

    def _cut_windows(self, n: int, jagged: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Cut n rows into windows that the model can run, and yield the first row and the end of
        each. `jagged`: the jagged collections, whose items have limits too. A row with more items
        than the limit becomes a window of its own, which binding then refuses."""
        offsets_of = {name: self._compute_offsets(records) for name, records in jagged.items()}
        low = 0
        while low < n:
            high = min(n, low + self._most)
            for name, offsets in offsets_of.items():
                limit = self._signature.ranges[self._signature.rows_of[name]].limit
                fits = int(np.searchsorted(offsets, offsets[low] + limit, "right")) - 1
                high = max(min(high, fits), low + 1)
            yield low, high
            low = high

    def _compute_offsets(self, records: Any) -> Array:
        """Return the item at which each row of a jagged collection begins, and at the end the
        number of all items."""
        import awkward as ak

        return np.append(0, np.cumsum(ak.num(records[records.fields[0]], axis=1)))

    def _run(self, rows: int, jagged: Mapping[str, Any]) -> None:
        """Run the session on the first `rows` rows of the memory, and count the values. `jagged`:
        the rows of jagged collections, which are bound anew each time."""
        if not jagged:
            if self._binding is None:
                inputs, outputs = self._first_rows(self._most)
                self._binding = self._session.bind(inputs, outputs)
            # A window below the model's minimum runs with further rows of the memory, whose answers
            # are not read.
            self._binding(max(rows, self._least))
            self._count_values(self._memory, rows)
            return
        inputs, outputs = self._first_rows(rows)
        for name, records in jagged.items():
            inputs |= from_jagged(records, self._signature, name)
        self._session.run(inputs, outputs)
        self._count_values({**inputs, **outputs})

    def _count_values(self, memory: Mapping[str, Collection], rows: int | None = None) -> None:
        """Count the values of the first `rows` rows of collections, by default of all rows. Does
        nothing without a counter."""
        if self._counter is not None:
            counted = {
                name: collection.n if rows is None else rows for name, collection in memory.items()
            }
            self._counter.add(memory, counted)

    def _first_rows(self, rows: int) -> tuple[dict[str, Collection], dict[str, Collection]]:
        """Return the first rows of the memory, as flat inputs and as outputs. A collection that the
        model reads and writes is in both."""
        memory = {name: collection.rows(rows) for name, collection in self._memory.items()}
        outputs = {name: memory[name] for name in self._signature.output_collections}
        return {name: memory[name] for name in self._flat}, outputs


def _copy_rows(source: Collection, rows: slice, into: Collection, into_rows: slice) -> None:
    """Copy the rows `rows` of all columns of `source` to the rows `into_rows` of `into`."""
    for member in source.layout.columns:
        for k in range(member.components):
            values = source.span(member.name, k).numpy()[rows]
            into.span(member.name, k).numpy()[into_rows] = values
