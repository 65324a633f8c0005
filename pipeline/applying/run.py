"""Runs a job, from its beginning or from where it was interrupted, until its outputs are complete.

A job is cut into pieces (`job.py`). The answers to a piece are written to a temporary file, its
part. A function of type `Execute` scores the pieces whose parts are missing: in threads, or on a
Dask cluster. An output is written from its parts, in their order, while later pieces are still
being scored. Every part and every output is written completely or not at all. A job that was killed
leaves its folder, and the same command continues from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version as installed
from pathlib import Path
from tempfile import gettempdir
from typing import Any, cast

from filelock import FileLock, Timeout

from pipeline.applying.columns import column_of
from pipeline.applying.dask_cluster import on_dask
from pipeline.applying.job import Execute, Job, Output, Piece, Plan, Scored
from pipeline.applying.origin_record import About, read_about
from pipeline.applying.outputs import Rows, write
from pipeline.applying.prepare import Wanted, prepare
from pipeline.applying.score_piece import count_values, score
from pipeline.applying.sources import ABOUT
from pipeline.errors import ApplyError, FormatError
from registry.stamp import now, user_at_host
from registry.store import Registry
from runtime.opening import LookupPolicy, Mode, Opening
from runtime.watch import Counts, Moved, Profile, add_counts, measure_drift
from soa.errors import SoaPipelineError
from soa.files import read_plain, write_whole
from soa.options import AT_LEAST_ONE, BY_NAME, FUNCTION, PATH, PATHS, REF, TEXT, TEXTS, takes
from soa.records import as_data, as_record, parse_json
from stages.histogram import Histogram

Progress = Callable[[int, int], object]
"""Called with the number of rows that are done, and the number of all rows."""
_RECORD, _LOCK = "job.json", "lock"  # files in the folder of a job, beside the parts


@dataclass(frozen=True)
class Report:
    """The result of a job. `rows`: the number of all its rows. `found`: how many of them an earlier
    run had scored.

    Examples
    --------
    >>> report = pipeline.apply("jet-tagger@production", "jets.npz", "scored")
    >>> report.rows, report.outputs
    (40, ('.../scored/jets.npz',))
    """

    outputs: tuple[str, ...]
    written: tuple[str, ...]
    """The outputs that this run wrote; the others were complete before."""
    rows: int
    found: int
    start: float
    """Seconds until the version was open and the files inspected."""
    seconds: float
    """Wall time of the run, `start` included."""
    spent: Scored
    """The rows scored in this run, and the seconds that this took, summed over threads."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """By column that the model wrote: its values in the outputs that this run wrote."""
    counts: Counts | None = None
    """The numbers of values in the rows that this run scored; None if they were not counted."""
    moved: tuple[Moved, ...] = ()
    """How far the columns of these rows moved from those of the reference, the farthest first."""


@takes(
    ApplyError,
    ref=REF,
    inputs=PATHS,
    out=PATH,
    columns=BY_NAME.or_none,
    keep=TEXTS,
    fill=BY_NAME.or_none,
    tree=TEXT.or_none,
    suffix=TEXT.or_none,
    threads=AT_LEAST_ONE.or_none,
    dask=TEXT.or_none,
    execute=FUNCTION.or_none,
    progress=FUNCTION.or_none,
)
def apply(
    ref: str | Path,
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    fill: Mapping[str, float] | None = None,
    tree: str | None = None,
    suffix: str | None = None,
    mode: Mode = "production",
    registry: Registry | str | None = None,
    lookup: LookupPolicy = "fresh",
    threads: int | None = None,
    dask: str | None = None,
    force: bool = False,
    execute: Execute | None = None,
    progress: Progress | None = None,
    histograms: bool = False,
    watch: bool = False,
) -> Report:
    """Score files: compute the model's answers to each row of ROOT, Parquet, Arrow (files and
    streams), HDF5, npz or CSV files, and write them to new files.

    `inputs`: files, folders (all such files in them), or patterns such as `run*.parquet`.

    `out`: a folder, which gets one output for each input, or one file for all inputs. An output has
    the format of its input, or that of `suffix`; for CSV it is Parquet. `columns`: by
    `collection/column` of the model, the column of the files (`{"jets/*": "Jet_*"}` for a whole
    collection). `keep`: columns of the files, or patterns, that are copied into the outputs.
    `fill`: by column of the files, or of the model, the value that replaces its nulls. `tree`: the
    name of the tree in ROOT files. `lookup`: as in `pipeline.load`. `threads`: how many threads of
    this process score at once, by default one per core. `dask`: the address of a scheduler whose
    workers score; "local:4" starts four workers here. `execute`: your own function that runs the
    pieces. `force`: replace existing outputs of other jobs. `histograms`: count the answers while
    they are written, for the report. `watch`: count the values of each column, to compare them with
    those of the reference.

    If a job was killed, the same call continues it. Raises ApplyError, DataError, OSError if a disk
    fails, and the errors of `pipeline.load`.

    Examples
    --------
    >>> pipeline.apply("jet-tagger@production", "jets.npz", "scored.parquet", keep=["pt"]).rows
    40
    """
    if dask is not None and (threads or execute):
        raise ApplyError(f"dask={dask!r} with threads or execute: its workers have their own")
    begun = time.perf_counter()
    files = [inputs] if isinstance(inputs, str | Path) else inputs
    wanted = Wanted(
        [*map(Path, files)],
        Path(out),
        columns=columns or {},
        keep=keep,
        fill=fill or {},
        tree=tree,
        suffix=suffix,
        watch=watch or (None if histograms else False),
    )
    opening = Opening(ref, mode=mode, registry=registry, lookup=lookup, threads=1, watch=0)
    job = prepare(opening, wanted)
    local = contextlib.nullcontext(execute or make_thread_executor(threads))
    with local if dask is None else on_dask(dask) as executor:
        return run(
            job, executor, begun=begun, force=force, progress=progress, histograms=histograms
        )


def make_thread_executor(threads: int | None = None) -> Execute:
    """Return a function that scores pieces in threads of this process. `threads`: how many; by
    default one per core."""

    def execute(plan: Plan, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Scored]]:
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            futures = {pool.submit(score, plan, piece): piece for piece in pieces}
            try:
                for future in as_completed(futures):
                    yield futures.pop(future), future.result()
            finally:
                for future in futures:  # not empty after an error, or if the caller stops
                    future.cancel()

    return execute


def run(
    job: Job,
    execute: Execute,
    *,
    begun: float,
    force: bool,
    progress: Progress | None,
    histograms: bool = False,
) -> Report:
    """Do the unfinished work of a job. Outputs that this job has completed before are kept.

    `begun`: when the job began, by `time.perf_counter`. `force`: replace existing outputs of other
    jobs; without it, one of them is an ApplyError. The other arguments are as for `apply`.
    """
    start, key, folder = time.perf_counter() - begun, job.key(), Path(job.folder)
    unfinished = [output for output in job.outputs if _read_job_key(output.path) != key]
    for output in unfinished:
        if os.path.lexists(output.path) and not force:
            raise ApplyError(f"{output.path} is there already: --force replaces it")
    parts = _Parts(job, unfinished, progress, _PartHistograms() if histograms else None)
    if unfinished or folder.exists():
        with _lock_folder(folder):
            _prepare_folder(job, key, unfinished)
            _write_outputs(unfinished, parts, execute, force)
    rows = sum(output.rows for output in job.outputs)
    counts, profile = parts.spent.counts, job.plan.profile
    return Report(
        tuple(output.path for output in job.outputs),
        written=tuple(output.path for output in unfinished),
        rows=rows,
        found=rows - parts.spent.rows,
        start=start,
        seconds=time.perf_counter() - begun,
        spent=replace(parts.spent, counts=None),
        histograms=parts.counted.histograms if parts.counted else {},
        counts=counts,
        moved=() if counts is None or profile is None else tuple(measure_drift(profile, counts)),
    )


def _write_outputs(outputs: Sequence[Output], parts: _Parts, execute: Execute, force: bool) -> None:
    """Score the pieces whose parts are missing, and write the outputs in their order. A part is
    removed once its output is written; after a FormatError, all parts are removed."""
    job = parts.job
    folder = Path(job.folder)
    try:
        missing = parts.find_missing()
        # If this ends early, closing the generator cancels the pieces that are not yet scored.
        with contextlib.closing(cast(Any, execute(job.plan, missing))) as parts.results:
            for output in outputs:
                write(Path(output.path), parts.rows(output, job.key()), folder, over=force)
                for piece in output.pieces:
                    Path(piece.part).unlink()
    except FormatError:  # the same job would fail again, so its parts are of no use
        for part in folder.glob("*.arrow"):
            part.unlink()
        raise


def count_files(
    ref: str | Path,
    inputs: Sequence[Path],
    *,
    columns: Mapping[str, str],
    fill: Mapping[str, float],
    tree: str | None,
    mode: Mode,
    registry: Registry | str | None,
) -> tuple[Profile, Counts]:
    """Run the model on the rows of files, and count the values of all columns. No answers are
    written. Returns the version's profile, and the counts. Arguments and errors are as for `apply`.
    """
    nowhere = Path(gettempdir()) / f"{os.urandom(8).hex()}.parquet"
    opening = Opening(ref, mode=mode, registry=registry, threads=1, watch=0)
    job = prepare(
        opening, Wanted(inputs, nowhere, columns=columns, fill=fill, tree=tree, watch=True)
    )
    assert job.plan.profile is not None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counts = add_counts([*pool.map(lambda piece: count_values(job.plan, piece), job.pieces)])
    return job.plan.profile, counts


def _read_job_key(path: str) -> str | None:
    """Read from a file the key of the job that wrote it. Returns None if there is no such file, or
    if it holds no key."""
    try:
        return read_about(Path(path)).job
    except SoaPipelineError:
        return None


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a job if necessary, and lock it during the `with` block.

    At the end, remove the folder if it holds no parts, and its parent too if that was made here and
    is empty. ApplyError if another process holds the lock.
    """
    parent_existed = folder.parent.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ApplyError(
            f"another job is writing there ({folder}): wait for it, or write elsewhere, --out"
        ) from None
    try:
        yield
    finally:
        if not any(folder.glob("*.arrow")):
            shutil.rmtree(folder, ignore_errors=True)
            if not parent_existed:
                with contextlib.suppress(OSError):  # it may hold an output
                    folder.parent.rmdir()
        lock.release()


def _prepare_folder(job: Job, key: str, unfinished: Sequence[Output]) -> None:
    """Write the record of a job into its folder, and remove files that it does not need for the
    unfinished outputs.

    ApplyError if the folder has the record of a different job; the message says what changed.
    """
    plan, path = job.plan, Path(job.folder) / _RECORD
    record = {
        "version": f"{plan.session.opening.ref} ({plan.session.digest[:12]})",
        "files": [asdict(piece.input) for piece in job.pieces if not piece.start],
        "settings": {"columns": dict(plan.columns), "keep": [*plan.keep], "key": key},
    }
    if path.exists():
        try:
            earlier = as_record(dict[str, Any], parse_json(read_plain(path)))
        except ValueError:  # it is damaged: treat it as the record of a different job
            earlier = {}
        if changed := [name for name in record if earlier.get(name) != record[name]]:
            before = f" (it was {earlier.get('version')})" if changed[0] == "version" else ""
            raise ApplyError(
                f"a job that was cut short left its parts in {job.folder}, and the {changed[0]} "
                f"changed since{before}: run it as it was, or remove that folder to begin anew"
            )
    write_whole(path, json.dumps(record, indent=1))
    needed = {piece.part for output in unfinished for piece in output.pieces}
    for file in Path(job.folder).iterdir():  # left by a job that was killed
        if str(file) not in needed and file.name not in (_RECORD, _LOCK):
            file.unlink(missing_ok=True)


class _PartHistograms:
    """Histograms of columns over all parts. A part that is read twice is counted once."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._parts: set[str] = set()

    def add(self, part: str, table: Any, names: Iterable[str]) -> None:
        """Count the values of the columns `names` in `table`, which was read from the file `part`.
        Does nothing if that part was counted before."""
        if part in self._parts or not len(table):
            return
        self._parts.add(part)
        for name in names:
            for batch in table[name].chunks:
                values = column_of(name, batch).values.ravel()
                if len(values):
                    histogram = self.histograms.get(name) or Histogram.over(values)
                    self.histograms[name] = histogram.plus(values)


class _Parts:
    """The parts of a job. They are read in order, and become available while pieces are scored."""

    def __init__(
        self,
        job: Job,
        unfinished: Sequence[Output],
        progress: Progress | None,
        counted: _PartHistograms | None = None,
    ) -> None:
        """`unfinished`: the outputs whose parts are read. `counted`: histograms to which the values
        of the parts are added; None: they are not counted."""
        self.job, self._progress, self.counted = job, progress, counted
        self._pieces = [piece for output in unfinished for piece in output.pieces]
        self._complete: set[str] = set()
        self._rows = self._done = sum(output.rows for output in job.outputs)
        self.results: Iterator[tuple[Piece, Scored]] = iter(())
        """Yields the missing pieces once their parts are complete: the caller sets it."""
        self.spent = Scored(0, 0.0, 0.0, 0.0)

    def find_missing(self) -> list[Piece]:
        """Look which parts are complete already, report the progress, and return the pieces whose
        parts are missing."""
        self._complete = {piece.part for piece in self._pieces if _is_complete(piece)}
        missing = [piece for piece in self._pieces if piece.part not in self._complete]
        self._advance(-sum(piece.rows for piece in missing))  # until now, all rows counted as done
        return missing

    def _advance(self, rows: int) -> None:
        """Add `rows`, which may be negative, to the rows that are done, and report the progress."""
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, self._rows)

    def _wait_for_table(self, piece: Piece) -> Any:
        """Wait until the part of a piece is complete, and return it as a table, whose memory is the
        mapped file. ApplyError if it does not have the rows of the piece."""
        import pyarrow as pa

        while piece.part not in self._complete:
            other, scored = next(self.results)
            self._complete.add(other.part)
            self.spent += scored
            self._advance(other.rows)
        table = pa.ipc.open_file(pa.memory_map(piece.part)).read_all()
        if len(table) != piece.rows:
            raise ApplyError(f"{piece.part} has {len(table)} rows, not {piece.rows}: run again")
        return table

    def rows(self, output: Output, key: str) -> Rows:
        """Return the rows of an output for `write`. They are read from its parts, which may still
        be scored. `key`: the key of the job. FormatError if the parts have different columns."""
        # The keys of the inner dicts are the different values, in the order in which they appear.
        origins: dict[str, dict[str, None]] = {"target": {}, "engine": {}, "host": {}}
        schema = self._wait_for_table(output.pieces[0]).schema.remove_metadata()

        def tables() -> Iterator[Any]:
            for piece in output.pieces:
                table = self._wait_for_table(piece)
                notes = parse_json(table.schema.metadata[ABOUT.encode()])
                for name, values in origins.items():
                    values[notes[name]] = None
                if not table.schema.equals(schema):
                    raise FormatError(
                        f"{piece.input.path}: its columns are {_list_columns(table.schema)}; "
                        f"those of {output.pieces[0].input.path} are "
                        f"{_list_columns(schema)}: write to a folder"
                    )
                if self.counted is not None:
                    self.counted.add(piece.part, table, self.job.plan.outputs.values())
                yield table.replace_schema_metadata(None)

        def about() -> str:
            if not origins["host"]:
                for _ in tables():  # the format needs the text before the tables
                    pass
            return self._make_about(output, key, origins)

        file = output.pieces[0].input
        tree = file.tree or "Events"
        return Rows(schema, output.rows, tables, about, tree, file.ntuple, self.job.counters)

    def _make_about(self, output: Output, key: str, origins: Mapping[str, Iterable[str]]) -> str:
        """Make the record of origin of an output, as JSON. `origins`: the targets, engines and
        hosts that its parts name."""
        plan = self.job.plan
        record = About(
            **self.job.about,
            digest=plan.session.digest,
            targets=tuple(origins["target"]),
            engines=tuple(origins["engine"]),
            hosts=tuple(origins["host"]),
            software=f"soa-pipeline {installed('soa-pipeline')}",
            created=now(),
            by=user_at_host(),
            rows=output.rows,
            columns=plan.columns,
            outputs=plan.outputs,
            keep=plan.keep,
            inputs=tuple(piece.input for piece in output.pieces if not piece.start),
            job=key,
        )
        return json.dumps(as_data(record))


def _list_columns(schema: Any) -> str:
    """List the columns of a schema with their types, as text for a message."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _is_complete(piece: Piece) -> bool:
    """True if the part of a piece exists and has all its rows. Some may be lost if the machine
    crashed after the part was written."""
    import pyarrow as pa

    try:
        with pa.memory_map(piece.part) as file:
            batches = pa.ipc.open_file(file)
            counts = (batches.get_batch(i).num_rows for i in range(batches.num_record_batches))
            return bool(sum(counts) == piece.rows)
    except (OSError, pa.ArrowInvalid):
        return False
