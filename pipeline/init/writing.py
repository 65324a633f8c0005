"""Writes a config that `pipeline run` accepts, from a model and a file of rows."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.processes import in_fork
from pipeline.applying import Array, FileColumn, open_source
from pipeline.config import SCHEMA_FILE, load_config, reference_inputs, source_of
from pipeline.errors import ConfigError, InitError
from pipeline.init.commented import OneLine, write_config
from pipeline.init.input_columns import Ask, Feed, choose, expanded, fitted
from pipeline.init.model import ROWS, Model, Option, answers, read_model, why_not
from pipeline.init.weaver import read_weaver
from soa.files import write_whole
from soa.text import number
from stages.model import build_model
from stages.reference import eager_outputs, row_major_inputs

_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE.name}
# Written by `pipeline init`; docs/reference/config.md has every key.
"""


@dataclass(frozen=True)
class Request:
    """The arguments of `pipeline init`; `inputs` and `outputs` are NAME=COLUMN,COLUMN."""

    model: str
    data: Path | None = None
    out: Path = Path("config.yaml")
    name: str | None = None
    weights: Path | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weaver: Path | None = None
    tree: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    flatten: bool = False
    length: int | None = None
    rows: int | None = None
    engines: tuple[str, ...] = ()
    force: bool = False


_MOST_ROWS, _SECONDS = 4096, 0.25  # limits of the trial that finds the most rows of a call

_Part = dict[str, FileColumn]
"""The columns of a collection that a model reads, by their names in the config."""
_Notes = dict[tuple[str | int, ...], str]
"""Comments on lines of the config, by the path of the key."""


def init(request: Request, ask: Ask) -> list[Path]:
    """Write the config and, in the same folder, its JSON schema and the reference rows from `data`.

    The config is written last: if it exists, all files exist. An existing config or file of rows is
    replaced only with `force`. Raises InitError, and the errors of reading a model or a config.
    """
    out, folder = request.out, request.out.parent
    stored = folder / ("reference.npz" if out.stem == "config" else f"{out.stem}.reference.npz")
    for path in (out, stored):
        if path.exists() and not request.force:
            raise InitError(f"{path} is there already: --force replaces it, --out writes elsewhere")
    return in_fork("the model", lambda asked: _made(request, asked, stored), ask)


def _made(request: Request, ask: Ask, stored: Path) -> list[Path]:
    """`init` in a child, since the model runs here."""
    out = request.out
    found = _found(request, ask)
    columns, outputs = found.outputs
    name = request.name or ask("--name", "the name to register it by", _name(request))
    kwargs = {"kwargs": OneLine(request.kwargs)} if request.kwargs else {}
    config = {
        "name": name,
        "model": {**found.model.said, **kwargs},
        "collections": {
            **_collections(found),
            "outputs": {"storage": "columns", "columns": columns},
        },
        "inputs": [_block(feed, found.parts) for feed in found.feeds],
        "outputs": outputs,
        "rows": _row_ranges(found),
        "reference": {"file": stored.name} if request.data else {"seed": 1},
        **({"engines": list(request.engines)} if request.engines else {}),
    }
    rows = _arrays(found.parts, found.range.most) if request.data else {}
    return _write(out, stored, config, _notes(request, found), rows)


@dataclass(frozen=True)
class _Found:
    """The answers to all questions about the model and its data."""

    model: Model
    feeds: list[Feed]
    length: int
    """How many items of a jagged row the model gets."""
    outputs: tuple[list[OneLine], list[dict[str, Any]]]
    """The columns of the collection of outputs, and the output blocks."""
    range: _Range
    parts: dict[str, _Part]

    @property
    def typical(self) -> list[int]:
        least, most = self.range.least, self.range.most
        return [n for n in (10, 1000) if least <= n <= most] or [most]


def _found(request: Request, ask: Ask) -> _Found:
    """Look at the model and the data, and ask the user about the rest."""
    model = read_model(request.model, request.out.parent, request.weights, request.kwargs)
    data = open_source(request.data, request.tree) if request.data else None
    have = [*data.columns] if data else []
    weaver, labels = read_weaver(request.weaver, have) if request.weaver else ({}, [])
    given = _pairs("--input", request.inputs)
    feeds = choose(model, data, given, weaver, request.flatten, request.length, ask)
    named = {feed.port.name for feed in feeds if not feed.mask} <= given.keys()
    feeds, length = fitted(model, feeds, request.length, named, ask)
    options = [feed.option for feed in feeds]
    outputs = _outputs(model, options, _pairs("--output", request.outputs), labels, ask)
    tried = _rows(model, options, request.rows)
    return _Found(model, feeds, length, outputs, tried, _parts(feeds, request.flatten))


def _collections(found: _Found) -> dict[str, Any]:
    """The input collections of the config."""
    collections: dict[str, Any] = {}
    for name, part in found.parts.items():
        columns = [_column(own, str(c.values.dtype), c.values.shape[1:]) for own, c in part.items()]
        jagged = _offsets(part) is not None
        rows = f"n_{name}" if jagged else "n"
        collections[name] = {"storage": "columns", "rows": rows, "columns": columns}
        if jagged:
            collections[name]["jagged"] = {"rows": "n", "length": found.length}
    return collections


def _row_ranges(found: _Found) -> dict[str, Any]:
    """The `rows:` of the config: the rows of a call, and the items of all its jagged rows."""
    least, most, typical = found.range.least, found.range.most, found.typical
    ranges: dict[str, Any] = {"n": {"min": least, "max": most, "typical": typical}}
    for name, part in found.parts.items():
        offsets = _offsets(part)
        if offsets is not None:
            counts = np.diff(offsets)
            usual = [math.ceil(n * float(counts.mean())) for n in typical]
            ranges[f"n_{name}"] = {"max": max(64, most * int(counts.max())), "typical": usual}
    return ranges


def _notes(request: Request, found: _Found) -> _Notes:
    """The comments of the config on the values that were found."""
    source = request.data.name if request.data else "an input: name them as you like"
    notes: _Notes = {
        ("collections", "outputs"): "what the model writes: name them as you like",
        ("rows", "n"): "engines are timed with the typical numbers of rows: write your own",
        ("rows", "n", "min"): found.range.why_least,
        ("rows", "n", "max"): found.range.why_most,
    }
    for i, feed in enumerate(found.feeds):
        shape = ", ".join(["n", *map(str, feed.option[0])])
        notes["inputs", i, "name"] = f"the model gets ({shape})"
    for name, part in found.parts.items():
        notes["collections", name] = f"columns of {source}"
        for i, each in enumerate(part.values() if request.data else ()):
            notes["collections", name, "columns", i] = f"{_span(each.values)} in {source}"
        offsets = _offsets(part)
        if offsets is not None:
            most = np.diff(offsets).max()
            said = f"the model gets at most `length` items of a row; rows here have up to {most}"
            notes["collections", name, "jagged"] = said
            notes["rows", f"n_{name}"] = "the number of items in a call, over all rows"
    return notes


def _offsets(part: _Part) -> Array | None:
    """The offsets of a collection of jagged rows; all its columns have the same ones."""
    return next(iter(part.values())).offsets


def _write(
    out: Path, stored: Path, config: dict[str, Any], notes: _Notes, rows: dict[str, Array]
) -> list[Path]:
    """Write the files under other names, check them, and move them into their places."""
    folder = out.parent
    new = folder / f".{os.urandom(4).hex()}.partial.yaml"
    rows_file = new.with_suffix(".npz")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tried = config
        if rows:
            np.savez_compressed(rows_file, allow_pickle=False, **rows)
            tried = config | {"reference": {"file": rows_file.name}}
        write_config(new, _HEAD, tried, notes)
        _check(new, out.name)
        write_whole(folder / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))
        if rows:
            rows_file.replace(stored)
            write_config(new, _HEAD, config, notes)
        new.replace(out)
    finally:
        new.unlink(missing_ok=True)
        rows_file.unlink(missing_ok=True)
    return [out, folder / SCHEMA_FILE.name, *([stored] if rows else [])]


def _check(path: Path, name: str) -> None:
    """Load the config, and run the model on the first rows of its reference like `pipeline run`. In
    a ConfigError the file is called `name`."""
    try:
        config = load_config(path)
    except ConfigError as error:
        raise ConfigError(*(one.replace(path.name, name) for one in error.problems)) from error
    signature = config.signature()
    case = {dim: min(ROWS, rows.max) for dim, rows in signature.ranges.items()}
    inputs = row_major_inputs(signature, reference_inputs(config, signature), case)
    eager_outputs(build_model(source_of(config)), signature, inputs, case)


def _pairs(flag: str, given: Sequence[str]) -> dict[str, list[str]]:
    pairs = [each.partition("=") for each in given]
    if wrong := [name for name, _, columns in pairs if not name or not columns]:
        raise InitError(f"{flag} {wrong[0]}: expected NAME=COLUMN,COLUMN")
    return {name.strip(): columns.split(",") for name, _, columns in pairs}


def _name(request: Request) -> str:
    stem = Path(request.model.rpartition(":")[0] or request.model).stem
    if stem in ("model", "net", "network"):
        stem = request.out.resolve().parent.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-") or "model"


def _identifier(text: str) -> str:
    return re.sub(r"^(?=[0-9])|\W", "_", text, flags=re.ASCII)


def _span(values: Array) -> str:
    """The smallest and the largest value of a column, and how many are NaN, as text."""
    there = values[~np.isnan(values)]
    span = (
        f"{number(float(there.min()), 6)} to {number(float(there.max()), 6)}"
        if there.size
        else "no value"
    )
    missing = values.size - there.size
    return f"{span}, {missing} of {values.size} are NaN," if missing else span


def _parts(feeds: Sequence[Feed], flatten: bool) -> dict[str, _Part]:
    """Group the columns into collections. Columns with the same items per row share one."""
    groups: dict[bytes | None, _Part] = {}
    for column in [column for feed in feeds for column in feed.columns]:
        groups.setdefault(column.cut, {})[column.name] = column
    found: dict[str, _Part] = {}
    for cut, group in groups.items():
        heads = {re.split(r"[._/]", each)[0] for each in group}
        name = "events" if cut is None and not flatten else "items"
        name = _identifier(heads.pop() if name == "items" and len(heads) == 1 else name)
        while name in found or name == "outputs":
            name += "_"
        last = [each.rpartition(".")[2] for each in group]
        names = map(_identifier, last if len({*last}) == len(last) else group)
        found[name] = dict(zip(names, group.values(), strict=True))
    return found


def _column(name: str, dtype: str, extents: Sequence[int]) -> OneLine:
    eigen = {"eigen": [*extents]} if extents else {}
    return OneLine({"name": name, "dtype": dtype, **eigen})


def _block(feed: Feed, parts: Mapping[str, _Part]) -> dict[str, Any]:
    homes = ((home, {c.name: own for own, c in part.items()}) for home, part in parts.items())
    home, own = next(pair for pair in homes if feed.columns[0].name in pair[1])
    shape, dtype = feed.option
    block: dict[str, Any] = {"name": _identifier(feed.port.name), "collection": home}
    names = [own[column.name] for column in feed.columns]
    block |= {"mask": True} if feed.mask else {"columns": names}
    if feed.mask or {str(column.values.dtype) for column in feed.columns} != {dtype}:
        block["dtype"] = dtype
    if feed.trained:
        exists = {"exists": feed.trained.exists} if feed.trained.exists else {}
        block["preprocess"] = {"features": [*map(OneLine, feed.trained.features)], **exists}
    if feed.shaped:
        block["shape"] = [*shape]
    return block


def _outputs(
    model: Model,
    options: Sequence[Option],
    given: Mapping[str, Sequence[str]],
    labels: Sequence[str],
    ask: Ask,
) -> tuple[list[OneLine], list[dict[str, Any]]]:
    """The columns that the model writes, and the output blocks of the config."""
    found = answers(model.module, options, ROWS)
    names = [*given] if len(given) == len(found) and not {*given} & {*found} else [*found]
    columns, blocks = [], []
    for name, value in zip(names, found.values(), strict=True):
        shape = list(value.shape) if isinstance(value, torch.Tensor) else [type(value).__name__]
        if shape[0] != ROWS:
            raise InitError(
                f"output {name} of {ROWS} rows is {shape}: it has to be a tensor, a row for each"
            )
        count, *inner = shape[1:] or [1]
        default = f"{name}0 .. {name}{count - 1}" if count > 1 else name
        default = ",".join(labels) if len(labels) == count else default
        question = f"names for the {count} columns of {name}"
        words = given.get(name) or ask(f"--output {name}=COLUMN,…", question, default).split(",")
        its = [_identifier(each) for each in expanded(f"--output {name}", words, ())]
        if len(its) != count:
            raise InitError(f"--output {name}: found {len(its)} names for {count} columns")
        dtype = str(value.dtype).removeprefix("torch.")
        columns += [_column(each, dtype, [math.prod(inner)] * bool(inner)) for each in its]
        block: dict[str, Any] = {"name": _identifier(name), "collection": "outputs"}
        block["columns"] = its
        if inner:
            block["shape"] = [count, *inner]
        elif count > 1 and bool((value >= 0).all() and (value.sum(1) - 1).abs().max() < 1e-4):
            block["classifier"] = True
        blocks.append(block)
    return columns, blocks


@dataclass(frozen=True)
class _Range:
    """The fewest and the most rows of a call, each with the reason."""

    least: int
    why_least: str
    most: int
    why_most: str


def _rows(model: Model, options: Sequence[Option], asked: int | None) -> _Range:
    """Find the range of rows by trial. The most rows are `asked`, else as many as the model can
    compute in about `_SECONDS`, up to `_MOST_ROWS`."""
    least, why_least = 0, "the fewest rows of a call"
    while least < 2 and (refused := why_not(model.module, options, least)):
        why_least, least = f"forward does not run on {least} rows: {refused}", least + 1
    if asked:
        return _Range(least, why_least, asked, "the most rows of a call, by --rows")
    most, begun, spent = 4, time.monotonic(), 0.0
    while most < _MOST_ROWS and spent < _SECONDS:
        if refused := why_not(model.module, options, 4 * most):
            return _Range(least, why_least, most, f"not {4 * most}, on which it fails: {refused}")
        most, spent = 4 * most, time.monotonic() - begun
    why = f"forward took {spent:.1f} s up to here" if spent >= _SECONDS else "no more were tried"
    return _Range(least, why_least, most, f"the most rows of a call: {why}; --rows N for others")


def _arrays(parts: Mapping[str, _Part], most: int) -> dict[str, Array]:
    """The first rows of the file, by the names that arrays have in a reference file."""
    found: dict[str, Array] = {}
    for name, part in parts.items():
        end = most
        if (offsets := next(iter(part.values())).offsets) is not None:
            cut = offsets[: most + 1].astype(np.int64)
            found |= {f"{name}_offsets/begin": cut[:-1], f"{name}_offsets/end": cut[1:]}
            end = cut[-1]
        found |= {f"{name}/{own}": column.values[:end] for own, column in part.items()}
    return found
