"""Turns the arguments of `apply` into a job: finds the version, inspects each file, writes none."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.applying.columns import Array, count_items, is_jagged
from pipeline.applying.job import Job, Output, Piece, Plan, blocks_by_column, cut_file, size_batches
from pipeline.applying.origin_record import Input
from pipeline.applying.outputs import WRITERS, Rows, require_storable
from pipeline.applying.score_piece import Scorer, find_row_dimension
from pipeline.applying.sources import READERS, Source, open_source
from pipeline.config import BuiltFrom, expand_names
from pipeline.errors import ApplyError, DataError
from registry.history import PRODUCTION
from runtime.errors import BindError
from runtime.loader import Reopening, find_device, open_session
from runtime.opening import Opened, Opening, open_version
from runtime.watch import has_profile, read_profile
from soa.errors import CollectionError, needs_extra
from soa.options import find_repeated, nearest_hint
from soa.signature import Signature, offsets_of

FOLDER = ".pipeline-apply"
"""The parts of an unfinished job are in a folder next to its outputs. It has this name, or one that
ends in it."""
_TRIED_ROWS = 256  # so many rows at most are tried before a job begins


@dataclass(frozen=True)
class Wanted:
    """The arguments of `apply` that say what a job does; `apply` explains them.

    `watch` says whether the values of the columns are counted. None means: if the version holds a
    profile, the distributions in its reference, to compare them with.
    """

    inputs: Sequence[Path]
    out: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] = ()
    fill: Mapping[str, float] = field(default_factory=dict)
    tree: str | None = None
    suffix: str | None = None
    watch: bool | None = False


@dataclass(frozen=True)
class _Inspected:
    """An input file, and the rows at which it is cut into pieces, as from `cut_file`."""

    input: Input
    cut_at: list[int]


def prepare(opening: Opening, wanted: Wanted) -> Job:
    """Make the job for these arguments. Its first rows are tried, but nothing is written.

    Raises ApplyError or DataError if the job cannot be done, or the errors of opening a version.
    """
    _require_pyarrow()
    paths = _find_distinct_files(wanted.inputs)
    opened = open_version(opening)
    find_row_dimension(opened.signature)  # raises if the model cannot run on files
    with open_source(paths[0], wanted.tree) as source:
        plan = _make_plan(opened, source, wanted)
    files = [_inspect(path, wanted.tree, plan) for path in paths]
    outputs, folder = _plan_outputs(plan.key(), wanted.out.absolute(), wanted.suffix, files)
    counters = _try_first_rows(plan, opened, [file.input for file in files], outputs)
    return Job(plan, outputs, str(folder), _describe_version(opened), counters)


def _require_pyarrow() -> None:
    """Raise ApplyError if pyarrow cannot be imported."""
    with needs_extra("data", ApplyError):
        import pyarrow as pyarrow


def _find_distinct_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the absolute paths of all files that the inputs mean. ApplyError if there are no
    inputs, or if a file is named twice."""
    if not inputs:
        raise ApplyError("no file to score: name some")
    files = [file.absolute() for path in inputs for file in _find_files(path)]
    if twice := find_repeated(files):
        raise ApplyError(f"{twice[0]} is named twice")
    return files


def _inspect(path: Path, tree: str | None, plan: Plan) -> _Inspected:
    """Open an input file, count its rows, and choose where to cut it. `tree`: as for `open_source`.
    DataError if it lacks a column of the plan."""
    with open_source(path, tree) as source:
        source.require(plan.names)
        edges, status = source.edges(plan.names), path.stat()
        size, mtime_ns = status.st_size, status.st_mtime_ns
        file = Input(str(path), source.tree, source.ntuple, edges[-1], size, mtime_ns)
        return _Inspected(file, [*cut_file(edges, plan.batch, source.seeks)])


def _find_files(path: Path) -> Sequence[Path]:
    """Find the files that a path means: itself, the readable files in a folder, or those that match
    a pattern. ApplyError if a folder or a pattern gives none."""
    if path.is_dir():
        readable = [file for file in sorted(path.iterdir()) if file.suffix in READERS]
        if not readable:
            raise ApplyError(f"{path} has no file with one of {', '.join(READERS)}")
        return readable
    if path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    matching = sorted(glob.glob(str(path), recursive=True))
    if not matching:
        raise ApplyError(f"no file matches {path}")
    return [*map(Path, matching)]


def _make_plan(opened: Opened, source: Source, wanted: Wanted) -> Plan:
    """Make the plan of a job. `source`: its first file; the others must have the same columns."""
    kept = _find_kept_columns(source, wanted.keep)
    named = {**BuiltFrom(opened.bundle.manifest).apply.columns, **wanted.columns}
    read = match_columns(opened.signature, source, named)
    fill = _resolve_fill(wanted.fill, read)
    session = open_session(opened, find_device("cpu"))
    reopening = session.reopening
    assert isinstance(reopening, Reopening)
    reopening.share(session)  # this process opens the version only once
    watched = has_profile(opened.bundle) if wanted.watch is None else wanted.watch
    return Plan(
        reopening,
        read,
        outputs=_name_outputs(opened.signature, kept),
        keep=tuple(dict.fromkeys(kept)),
        batch=size_batches(opened.signature, len(kept)),
        missing=BuiltFrom(opened.bundle.manifest).missing,
        fill=fill,
        profile=read_profile(opened.bundle) if watched else None,
    )


def _find_kept_columns(source: Source, keep: Sequence[str]) -> list[str]:
    """Return the columns of a file that `keep` names, or matches with its patterns. ApplyError if a
    word of it gives none."""
    kept: list[str] = []
    for word in keep:
        try:
            kept += [word] if word in source else expand_names(word, source.columns)
        except ValueError as error:
            raise ApplyError(f"--keep {word} in {source.path}: {error}") from None
    return kept


def _resolve_fill(fill: Mapping[str, float], read: Mapping[str, str]) -> dict[str, float]:
    """Return the fill values by column of the files. `fill`: values by column of the files or of
    the model. `read`: by column of the model, the column of the files. ApplyError for a column that
    the model does not read."""
    by_file_column = {read.get(name, name): value for name, value in fill.items()}
    for name in by_file_column:
        if name not in read.values():
            names = ", ".join(dict.fromkeys(read.values()))
            hint = nearest_hint(name, read.values())
            raise ApplyError(f"--fill {name}: the model reads {names}{hint}")
    return by_file_column


def match_columns(signature: Signature, source: Source, named: Mapping[str, str]) -> dict[str, str]:
    """Find the column of a file for each column that the model reads, by `collection/column`.

    It is the one that the user names in `named`. Else the names jets.pt, jets/pt, jets_pt and pt
    are tried for jets/pt. DataError if the file has none of them. ApplyError if `named` has a
    column that the model does not read, or if the same column would be guessed for two.
    """
    matches: dict[str, str] = {}
    offsets = {offsets_of(name) for name in signature.jagged}
    blocks = blocks_by_column(signature.inputs).items()
    keys = [key for key, bound in blocks if bound.block.collection not in offsets]
    for key in named:
        if key not in keys and key.partition("/")[1:] != ("/", "*"):
            raise ApplyError(f"--columns {key}: the model reads {', '.join(keys)}")
    guessed: dict[str, str] = {}  # the key, by column of the file
    for key in keys:
        collection, _, name = key.partition("/")
        by_user = _find_named_column(named, key)
        guesses = [*(f"{collection}{separator}{name}" for separator in "./_"), name]
        tried = [by_user] if by_user else guesses
        match = next((column for column in tried if column in source), None)
        if match is None:
            raise DataError(
                f"{source.path} has no {tried[-1]!r}; it has {source.listed}{source.advice}: say "
                f"which column it is, --columns {key}=NAME or `apply: columns:` in the config"
                f"{nearest_hint(tried[-1], source.columns)}"
            )
        matches[key] = match
        if by_user:
            continue
        if match in guessed:
            raise ApplyError(
                f"{guessed[match]} and {key} would both be {match!r} of {source.path}: say "
                f"which each is, --columns {key}=NAME"
            )
        guessed[match] = key
    return matches


def _find_named_column(named: Mapping[str, str], key: str) -> str | None:
    """Return the column of the file that the user names for the model's column `key`, as jets/pt.

    `named` has the column under this key, or a pattern under its collection: `{"jets/*": "Jet_*"}`
    gives Jet_pt. Returns None if it has neither.
    """
    if named.get(key):
        return named[key]
    collection, _, name = key.partition("/")
    pattern = named.get(f"{collection}/*")
    return pattern.replace("*", name) if pattern else None


def _name_outputs(signature: Signature, keep: Sequence[str]) -> dict[str, str]:
    """Name the columns that the model writes, by `collection/column`. The name in the outputs is
    `column`, or `collection_column` if two collections have a column of that name. ApplyError if a
    kept column has that name too, or if no file format has the column's dtype."""
    written = [
        (bound.block.collection, name)
        for bound in signature.outputs
        for name in bound.block.columns
    ]
    columns = [name for _, name in written]
    for collection, name in written:
        if signature.layouts[collection][name].dtype == "bfloat16":
            raise ApplyError(f"{collection}/{name} is bfloat16, which no format of files has")
    names = {
        f"{collection}/{name}": name if columns.count(name) == 1 else f"{collection}_{name}"
        for collection, name in written
    }
    if duplicates := [name for name in names.values() if name in keep]:
        raise ApplyError(f"{duplicates[0]!r} is an output of the model too: leave it out of --keep")
    return names


def _try_first_rows(
    plan: Plan, opened: Opened, files: Sequence[Input], outputs: Sequence[Output]
) -> dict[str, str]:
    """Run the first rows at once and in two parts, and compare the answers. Then try to store them
    in the formats of the outputs. Returns the `counters` of the job, from the same rows.

    Raises ApplyError if the answer for a row depends on other rows, and FormatError if a format
    cannot store the rows. This is a trial, not a proof: docs/howto/apply.md.
    """
    file = next((file for file in files if file.rows), files[0])
    scorer, path = Scorer(plan.session(), plan), Path(file.path)
    with open_source(path, file.tree) as source:
        source.cast(scorer.dtypes)
        batch = source.head(plan.names, min(_TRIED_ROWS, plan.batch))
        n = len(next(iter(batch.values())))
        cut_at = [0, n // 3, n]  # two parts of different size
        try:
            table = scorer.make_table(batch, {"model": 0.0, "encoding": 0.0})
            at_once = scorer.compute_answers(batch)
            parts = [
                {name: column[low:high] for name, column in batch.items()}
                for low, high in pairwise(cut_at)
            ]
            in_parts = [scorer.compute_answers(part).columns for part in parts]
        except (CollectionError, BindError, ValueError) as error:
            raise DataError(f"{path}, rows 0 to {n}: {error}") from error
        counters = _choose_counters(plan, source, batch, at_once.offsets is not None)
    if at_once.offsets is not None:  # there is an answer for each item: cut where a row's begin
        cut_at = at_once.offsets[cut_at].tolist()
    _require_independent_rows(opened, at_once.columns, zip(in_parts, pairwise(cut_at), strict=True))
    _require_formats(table, counters, outputs)
    return counters


def _require_formats(table: Any, counters: Mapping[str, str], outputs: Sequence[Output]) -> None:
    """Raise FormatError if the format of an output cannot store rows like those of `table`. One
    output of each format is tried; a TTree and an RNTuple are two formats."""
    first_of: dict[tuple[str, bool], Output] = {}
    for output in outputs:
        first_of.setdefault((Path(output.path).suffix, output.pieces[0].input.ntuple), output)
    for output in first_of.values():
        file = output.pieces[0].input
        tree = file.tree or "Events"
        rows = Rows(
            table.schema, len(table), lambda: [table], lambda: "{}", tree, file.ntuple, counters
        )
        require_storable(Path(output.path), rows)


def _require_independent_rows(
    opened: Opened,
    at_once: Mapping[str, Array],
    in_parts: Iterable[tuple[Mapping[str, Array], tuple[int, int]]],
) -> None:
    """Raise ApplyError if answers for the same rows differ by more than the version's tolerances.

    `at_once`: the answers for all rows, by `collection/column`. `in_parts`: for each part, its
    answers, and the range of rows in `at_once` to compare them with.
    """
    limits = opened.bundle.manifest.tolerances
    blocks = blocks_by_column(opened.signature.outputs)
    limit_of = {key: limits[bound.name] for key, bound in blocks.items()}
    for answers, (low, high) in in_parts:
        for key, limit in limit_of.items():
            expected = at_once[key][low:high]
            agree = np.isclose(answers[key], expected, limit.rtol, limit.atol, equal_nan=True)
            if np.count_nonzero(~agree) > limit.max_outside * agree.size:
                raise ApplyError(
                    f"{opened.label}: {key.partition('/')[2]!r} of a row depends on the rows "
                    "beside it, but files are cut at any row: bind such events one by one "
                    "(docs/howto/runtime.md)"
                )


def _choose_counters(
    plan: Plan, source: Source, batch: Mapping[str, Any], jagged_answers: bool
) -> dict[str, str]:
    """Choose the TTree branch that counts the items of a row, by jagged column of the outputs.

    Columns with the same items share a branch, as Jet_pt and Jet_eta share nJet in NanoAOD, unless
    `batch` shows that their counts differ. `jagged_answers`: the answers are jagged; they have the
    same items as the columns that the model reads. A column without a branch is left out.
    """
    counts = {name: count_items(column) for name, column in batch.items() if is_jagged(column)}
    counter_of = {name: source.counter(name) for name in counts}
    branches: dict[str, str] = {}
    if jagged_answers:
        counters = (counter_of[name] for name in plan.columns.values())
        collection = next(iter(plan.columns)).partition("/")[0]
        shared = next((counter for counter in counters if counter), f"n{collection}")
        counter_of |= dict.fromkeys(plan.columns.values(), shared)
        branches |= dict.fromkeys(plan.outputs.values(), shared)
    counts_in: dict[str, Any] = {}  # by counter: the column of that name, else the first counts
    for name, counter in counter_of.items():
        if counter is not None:
            known = counts_in.setdefault(counter, batch.get(counter, counts[name]))
            if np.array_equal(known, counts[name]):
                branches[name] = counter
    return branches


def _plan_outputs(
    key: str, out: Path, suffix: str | None, files: Sequence[_Inspected]
) -> tuple[tuple[Output, ...], Path]:
    """Plan which files are written, from which pieces. Returns them, and the folder for the parts.

    `key`: the key of the plan. `out` and `suffix`: as for `apply`. ApplyError if `out` fits no
    output, if two outputs would be one file, or if an output would replace its input.
    """
    single = out.suffix in WRITERS and not out.is_dir()
    if not single and not out.is_dir() and (out.suffix or out.exists()):
        raise ApplyError(f"--out {out}: a folder, or a file with one of {', '.join(WRITERS)}")
    folder = out.with_name(f".{out.name}{FOLDER}") if single else out / FOLDER
    pieces_of: dict[Path, list[Piece]] = {}
    for i, inspected in enumerate(files):
        file, cut_at = inspected.input, inspected.cut_at
        source = Path(file.path)
        own_suffix = source.suffix if source.suffix in WRITERS else ".parquet"  # CSV is only read
        path = out if single else out / f"{source.stem}{suffix or own_suffix}"
        if path in pieces_of and not single:
            raise ApplyError(f"two files would become {path}: give one of them another name")
        if path.is_dir():
            raise ApplyError(
                f"{path} is a folder: give the file another name, or --out another place"
            )
        if path.resolve() == source.resolve():
            raise ApplyError(f"{path} would replace what is read: write elsewhere, --out")
        # The mark keeps the parts of different jobs apart: a late worker of an earlier job writes a
        # file of another name.
        mark = hashlib.sha256(f"{key}{file}".encode()).hexdigest()[:8]
        pieces_of.setdefault(path, []).extend(
            Piece(file, start, stop, str(folder / f"{i:05}-{start:012}-{mark}.arrow"))
            for start, stop in pairwise(cut_at if len(cut_at) > 1 else [0, 0])
        )
    return tuple(Output(str(path), tuple(pieces)) for path, pieces in pieces_of.items()), folder


def _describe_version(opened: Opened) -> dict[str, Any]:
    """Return the fields of `About` that describe the version."""
    version = opened.version
    promotion = version.promotion(PRODUCTION) if version else None
    return {
        "model": opened.name,
        "version": opened.number,
        "registry": None if version is None else opened.opening.store().shown,
        "mode": opened.opening.mode,
        "promotion": promotion,
    }
