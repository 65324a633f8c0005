"""From what a user asks for to a job: the version is pinned, every file looked at, nothing written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.applying.plan import Input, Job, Output, Piece, Plan
from pipeline.applying.score import Scorer, pinned, row_dimension, session_of
from pipeline.config import BuiltFrom, names_in
from pipeline.errors import ApplyError, DataError
from pipeline.files import WRITERS, Source, open_source
from registry.history import PRODUCTION
from registry.store import Registry
from runtime.errors import BindError
from runtime.opening import Mode, Opened, Opening, open_version
from soa.dtypes import itemsize
from soa.errors import CollectionError
from soa.signature import Signature, offsets_of

FOLDER = ".pipeline-apply"
"""Beside the outputs, or its name ends in that: the parts of a job that is not done."""
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 100_000
_TRIED = 256


@dataclass(frozen=True)
class Request:
    """What `pipeline apply` is asked for; its help and docs/apply.md explain each."""

    ref: str | Path
    inputs: Sequence[Path]
    out: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] = ()
    tree: str | None = None
    suffix: str | None = None
    mode: Mode = "production"
    target: str | None = None
    registry: Registry | str | None = None


def prepare(request: Request) -> Job:
    """Raises ApplyError, DataError, and whatever refuses a version."""
    opened = open_version(
        Opening(request.ref, mode=request.mode, registry=request.registry, target=request.target)
    )
    signature = opened.signature
    row_dimension(signature)
    if not request.inputs:
        raise ApplyError("no file to score: name some")
    looked: list[tuple[Input, Sequence[int]]] = []
    for given in request.inputs:
        path = given.absolute()
        if str(path) in (each.path for each, _ in looked):
            raise ApplyError(f"{path} is named twice")
        with open_source(path, request.tree) as source:
            if not looked:
                columns = _columns(request, opened, source)
                keep = [k for word in request.keep for k in _named(word, source)]
                names = list(dict.fromkeys([*columns.values(), *keep]))
                batch = _batch(signature, len(keep))
            source.require(names)
            edges = source.edges(names)
            cuts = list(_cuts(edges, batch, source.seeks))
            now = path.stat()
            found = Input(
                str(path), source.tree, source.ntuple, edges[-1], now.st_size, now.st_mtime_ns
            )
            looked.append((found, cuts))
    model = pinned(opened)
    outputs = _outputs(signature, keep)
    plan = Plan(model, columns, outputs, tuple(dict.fromkeys(keep)), batch)
    _try(plan, opened, looked)
    files, folder = _files(request, looked)
    return Job(plan, files, str(folder), _about(opened, request))


def _named(word: str, source: Source) -> list[str]:
    try:
        return names_in(word, source.columns)
    except ValueError as error:
        raise ApplyError(f"--keep {word} in {source.path}: {error}") from None


def _columns(request: Request, opened: Opened, source: Source) -> dict[str, str]:
    """Of each column that the model reads, the column of the file."""
    signature = opened.signature
    found: dict[str, str] = {}
    offsets = {offsets_of(name) for name in signature.jagged}
    read = {
        f"{b.block.collection}/{name}": None
        for b in signature.inputs
        for name in b.block.columns
        if b.block.collection not in offsets
    }
    guessed: dict[str, str] = {}
    given = {**BuiltFrom(opened.bundle.manifest).apply.columns, **request.columns}
    for key in given:
        if key not in read and key.partition("/")[1:] != ("/", "*"):
            raise ApplyError(f"--columns {key}: the model reads {', '.join(read)}")
    for key in read:
        collection, _, name = key.partition("/")
        pattern = given.get(f"{collection}/*")
        said = given.get(key) or (pattern and pattern.replace("*", name))
        likely = [said] if said else [*(f"{collection}{dot}{name}" for dot in "./_"), name]
        there = [each for each in likely if each in source.columns]
        if not there:
            have = ", ".join(source.columns[:20]) + ", …" * (len(source.columns) > 20)
            raise DataError(
                f"{source.path} has no {likely[-1]!r}; it has {have or 'nothing'}: say which column "
                f"it is, --columns {key}=NAME"
            )
        found[key] = there[0]
        if not said and there[0] in guessed:
            raise ApplyError(
                f"{guessed[there[0]]} and {key} would both be {there[0]!r} of {source.path}: say "
                f"which each is, --columns {key}=NAME"
            )
        guessed |= {} if said else {there[0]: key}
    return found


def _outputs(signature: Signature, keep: Iterable[str]) -> dict[str, str]:
    """Of each column that the model writes, its name in the outputs."""
    every = [(b.block.collection, name) for b in signature.outputs for name in b.block.columns]
    columns = [name for _, name in every]
    for collection, name in every:
        if signature.layouts[collection][name].dtype == "bfloat16":
            raise ApplyError(f"{collection}/{name} is bfloat16, which no format of files has")
    found = {
        f"{collection}/{name}": name if columns.count(name) == 1 else f"{collection}_{name}"
        for collection, name in every
    }
    if both := [name for name in found.values() if name in set(keep)]:
        raise ApplyError(f"{both[0]!r} is an output of the model too: leave it out of --keep")
    return found


def _batch(signature: Signature, keep: int) -> int:
    """Rows that take about 16 MiB."""
    row = 8 * keep
    for name in signature.input_collections:
        items = signature.jagged.get(name, 1)
        row += sum(itemsize(c.dtype) * c.components for c in signature.layouts[name].columns) * items
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row))


def _cuts(edges: Sequence[int], rows: int, seeks: bool) -> Iterable[int]:
    """Where a file is cut into pieces of about so many rows: at its own edges, where it has some."""
    last = 0
    yield last
    for edge in edges[1:]:
        while seeks and edge - last >= 2 * rows:
            last += rows
            yield last
        if edge - last >= rows or edge == edges[-1]:
            last = edge
            yield last


def _try(plan: Plan, opened: Opened, files: Iterable[tuple[Input, Sequence[int]]]) -> None:
    """Run the first rows whole and in two parts: a model whose rows see each other is refused.

    That is a trial, not a proof: docs/apply.md.
    """
    some = next((each for each, _ in files if each.rows), None)
    if some is None:
        return
    names = list(dict.fromkeys([*plan.columns.values(), *plan.keep]))
    model, path = Scorer(session_of(plan.model), plan), Path(some.path)
    with open_source(path, some.tree) as source:
        batch = source.head(names, min(_TRIED, plan.batch))
    try:
        model.table(batch, {"model": 0.0, "encoding": 0.0})
        n = len(next(iter(batch.values())))
        whole, offsets = model.answers(batch)
        for low, high in ((0, n // 3), (n // 3, n)):
            part, _ = model.answers({name: each[low:high] for name, each in batch.items()})
            a, b = (low, high) if offsets is None else offsets[[low, high]]
            for bound in opened.signature.outputs:
                limit = opened.bundle.manifest.tolerances[bound.name]
                for column in bound.block.columns:
                    key = f"{bound.block.collection}/{column}"
                    agree = np.isclose(
                        part[key], whole[key][a:b], limit.rtol, limit.atol, equal_nan=True
                    )
                    if np.count_nonzero(~agree) > limit.max_outside * agree.size:
                        raise ApplyError(
                            f"{opened.label}: {column!r} of a row is another where other rows are "
                            "beside it, so that a file has no one answer: bind such events one by "
                            "one (docs/runtime.md)"
                        )
    except (CollectionError, BindError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _files(
    request: Request, looked: Sequence[tuple[Input, Sequence[int]]]
) -> tuple[tuple[Output, ...], Path]:
    """What is written, and where its parts lie until then."""
    out = request.out.absolute()
    one = out.suffix in WRITERS and not out.is_dir()
    if not one and ((out.exists() and not out.is_dir()) or out.suffix and not out.is_dir()):
        raise ApplyError(f"--out {out}: a folder, or a file with one of {', '.join(WRITERS)}")
    if request.suffix is not None and request.suffix not in WRITERS:
        raise ApplyError(f"--format {request.suffix}: one of {', '.join(WRITERS)}")
    folder = out.parent / f".{out.name}{FOLDER}" if one else out / FOLDER
    found: dict[Path, list[Piece]] = {}
    for i, (given, cuts) in enumerate(looked):
        path = out
        if not one:
            name = Path(given.path)
            path = out / f"{name.stem}{request.suffix or name.suffix}"
            if path in found:
                raise ApplyError(f"two files would become {path}: give them other names, or --out")
        pieces = found.setdefault(path, [])
        for start, stop in pairwise(cuts if cuts[1:] else [0, 0]):
            part = folder / f"{i:05}-{start:012}.arrow"
            pieces.append(Piece(given, start, stop, str(part)))
        if path == Path(given.path):
            raise ApplyError(f"{path} would replace what is read: write elsewhere, --out")
    return tuple(Output(str(path), tuple(pieces)) for path, pieces in found.items()), folder


def _about(opened: Opened, request: Request) -> dict[str, Any]:
    """Of the version, for those who ask an output later."""
    version = opened.version
    promotion = version.promotion(PRODUCTION) if version else None
    return {
        "model": opened.name,
        "version": opened.number,
        "registry": None if version is None else opened.opening.store().shown,
        "mode": request.mode,
        "promotion": None if promotion is None else asdict(promotion),
    }
