"""Writes a config that `pipeline run` accepts, from a model and a file of rows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.processes import in_fork
from pipeline.applying import Array, FileColumn, Source, open_source
from pipeline.config import SCHEMA_FILE, load_config, reference_inputs, source_of
from pipeline.errors import ConfigError, InitError
from pipeline.init.commented import LONG, OneLine, write_config
from pipeline.init.input_columns import Ask, Feed, choose, expanded, read_asked
from pipeline.init.model import Model, read_model
from pipeline.init.orders import Fitted, fitted
from pipeline.init.trial import Outcome, why_not
from pipeline.init.weaver import read_weaver
from soa.files import write_whole
from soa.signature import Signature
from soa.text import identifier, number
from stages.capture import why_rows_may_mix
from stages.model import with_fronts
from stages.reference import Arrays, eager_outputs, row_major_inputs

_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE.name}
# Written by `pipeline init`; docs/reference/config.md has every key.
"""


@dataclass(frozen=True)
class Request:
    """The arguments of `pipeline init`; `inputs` and `outputs` are NAME=COLUMN,COLUMN.

    `independent`: take rows as independent without a look at the graph, which takes an export; the
    capture that follows finds out.
    """

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
    independent: bool = False


_TILE = 1024  # rows of a tile, and of the reference, if the number of rows is unbounded
_ROWS = 11  # rows of the trial of a config

_Part = dict[str, FileColumn]
"""The columns of a collection that a model reads, by their names in the config."""
_Notes = dict[tuple[str | int, ...], str]
"""Comments on lines of the config, by the path of the key."""


@dataclass(frozen=True)
class Written:
    """The files that `init` wrote, and what it chose, in sentences.

    `config`: the content of the config. `columns`: by input collection, the names of the data's
    columns by the names that they have in the config.
    """

    files: list[Path]
    said: list[str]
    config: dict[str, Any]
    columns: dict[str, dict[str, str]]


def init(request: Request, ask: Ask) -> Written:
    """Write the config and, in the same folder, its JSON schema and the reference rows from `data`.

    The config is written last: if it exists, all files exist. An existing config or file of rows is
    replaced only with `force`. Raises InitError, and the errors of reading a model or a config.
    """
    out, folder = request.out, request.out.parent
    stored = folder / ("reference.npz" if out.stem == "config" else f"{out.stem}.reference.npz")
    for path in (out, stored):
        if path.exists() and not request.force:
            raise InitError(f"{path} is there already: --force replaces it, --out writes elsewhere")
    return in_fork("the model", lambda ask_parent: _init_here(request, ask_parent, stored), ask)


def _init_here(request: Request, ask: Ask, stored: Path) -> Written:
    """`init` in a child, since the model runs here."""
    model = read_model(request.model, request.out.parent, request.weights, request.kwargs)
    data = open_source(request.data, request.tree) if request.data else None
    return written(model, data, request, ask, stored)


def written(model: Model, data: Source | None, request: Request, ask: Ask, stored: Path) -> Written:
    """Look at a model and its data, and write the config; `stored` gets the rows of the data."""
    choices = choices_for(model, data, request, ask)
    name = request.name or ask("--name", "the name to register it by", _name(request))
    config = _config(choices, name)
    if request.kwargs:
        config["model"] = {**config["model"], "kwargs": OneLine(request.kwargs)}
    config["reference"] = {"file": stored.name} if data is not None else {"seed": 1}
    if request.engines:
        config["engines"] = list(request.engines)
    notes = _notes(request, choices)
    arrays = _arrays(choices.parts) if data is not None else {}
    files = _write(request, stored, choices, config, notes, arrays)
    columns = {
        home: {own: column.name for own, column in part.items()}
        for home, part in choices.parts.items()
    }
    rows = config["rows"]["n"]
    about_rows = f"rows: at most {rows['max']}: {notes['rows', 'n', 'max']}"
    if rows.get("unbounded"):
        about_rows = "rows: any number, since each row's answer comes from this row alone"
    lines = [*choices.fitted.said, *model.notes, about_rows]
    return Written(files, lines, config, columns)


def rewrite(first: Written, path: Path, model: Mapping[str, Any], rows: str) -> None:
    """Write a config again, to `path`, with another model and another file of rows, which are named
    relative to its folder."""
    config = {**first.config, "model": dict(model), "reference": {"file": rows}}
    write_whole(path.parent / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))  # ours
    write_config(path, _HEAD, config, {})


def _config(choices: Choices, name: str) -> dict[str, Any]:
    """The config, without its reference, and with a bounded number of rows."""
    return {
        "name": name,
        "model": choices.model.entry,
        "collections": {
            **_collections(choices),
            "outputs": {"storage": "columns", "columns": choices.outputs.columns},
        },
        "inputs": [_block(feed, choices.parts) for feed in choices.feeds],
        "outputs": choices.outputs.blocks,
        "rows": _row_ranges(choices),
    }


@dataclass(frozen=True)
class Choices:
    """The answers to all questions about the model and its data."""

    model: Model
    fitted: Fitted
    outputs: _Outputs
    range: _Range
    parts: dict[str, _Part]

    @property
    def feeds(self) -> list[Feed]:
        return self.fitted.feeds

    @property
    def typical(self) -> list[int]:
        """The numbers of rows for which engines are timed."""
        least, most = self.range.least, self.range.most
        return [n for n in (10, 1000) if least <= n <= most] or [most]


def choices_for(model: Model, data: Source | None, request: Request, ask: Ask) -> Choices:
    """Look at the model and the data, and ask the user about the rest."""
    have = [*data.columns] if data else []
    weaver, labels = read_weaver(request.weaver, have) if request.weaver else ({}, [])
    texts = _pairs("--input", request.inputs)
    asked_of = {name: read_asked(f"--input {name}", text) for name, text in texts.items()}
    feeds = choose(model, data, asked_of, weaver, request.flatten, request.length, ask)
    if not model.ports:
        model = replace(model, ports=tuple(feed.port for feed in feeds))
    accepted = fitted(model, feeds, request.length, ask)
    words_of = {name: text.split(",") for name, text in _pairs("--output", request.outputs).items()}
    outputs = _outputs(accepted.outcome, words_of, labels, ask)
    parts = _parts(accepted.feeds, request.flatten)
    return Choices(model, accepted, outputs, _rows(model, accepted, request.rows), parts)


def _collections(choices: Choices) -> dict[str, Any]:
    """The input collections of the config."""
    collections: dict[str, Any] = {}
    for name, part in choices.parts.items():
        arrays = {own: column.values for own, column in part.items()}
        columns = [_column(own, str(a.dtype), a.shape[1:]) for own, a in arrays.items()]
        jagged = _offsets(part) is not None
        rows = f"n_{name}" if jagged else "n"
        collections[name] = {"storage": "columns", "rows": rows, "columns": columns}
        if jagged:
            collections[name]["jagged"] = {"rows": "n", "length": choices.fitted.length}
    return collections


def _row_ranges(choices: Choices) -> dict[str, Any]:
    """The `rows:` of the config: the rows of a call, and the items of all its jagged rows."""
    least, most, typical = choices.range.least, choices.range.most, choices.typical
    ranges: dict[str, Any] = {"n": {"min": least, "max": most, "typical": typical}}
    for name, part in choices.parts.items():
        offsets = _offsets(part)
        if offsets is not None:
            counts = np.diff(offsets)
            usual = [math.ceil(n * float(counts.mean())) for n in typical]
            ranges[f"n_{name}"] = {"max": max(64, most * int(counts.max())), "typical": usual}
    return ranges


def _notes(request: Request, choices: Choices) -> _Notes:
    """The comments of the config on the values that were found."""
    source = request.data.name if request.data else "an input: name them as you like"
    notes: _Notes = {
        ("collections", "outputs"): "what the model writes: name them as you like",
        ("rows", "n"): "engines are timed with the typical numbers of rows: write your own",
        ("rows", "n", "min"): choices.range.why_least,
        ("rows", "n", "max"): choices.range.why_most,
    }
    for i, sentence in enumerate(choices.fitted.said):
        notes["inputs", i, "name"] = sentence
    for name, part in choices.parts.items():
        notes["collections", name] = f"columns of {source}"
        if request.data and len(part) <= LONG:  # a longer list is written as ranges of names
            for i, column in enumerate(part.values()):
                notes["collections", name, "columns", i] = f"{_span(column.values)} in {source}"
        offsets = _offsets(part)
        if offsets is not None:
            most = np.diff(offsets).max()
            about = f"the model gets at most `length` items of a row; rows here have up to {most}"
            notes["collections", name, "jagged"] = about
            notes["rows", f"n_{name}"] = "the number of items in a call, over all rows"
    return notes


def _offsets(part: _Part) -> Array | None:
    """The offsets of a collection of jagged rows; all its columns have the same ones."""
    return next(iter(part.values())).offsets


def _write(
    request: Request,
    stored: Path,
    choices: Choices,
    config: dict[str, Any],
    notes: _Notes,
    arrays: dict[str, Array],
) -> list[Path]:
    """Write the files under other names, check them, and move them into their places. Changes the
    rows in `config` and `notes` by what the check finds. Returns the files.

    `arrays`: the rows of the reference; empty without a file of data.
    """
    out, folder = request.out, request.out.parent
    new = folder / f".{os.urandom(4).hex()}.partial.yaml"
    rows_file = new.with_suffix(".npz")
    folder.mkdir(parents=True, exist_ok=True)
    reference = {"file": rows_file.name} if arrays else config["reference"]
    try:
        if arrays:
            np.savez_compressed(rows_file, allow_pickle=False, **arrays)
        write_config(new, _HEAD, config | {"reference": reference}, notes)
        trial = _check(new, out.name, choices.model)
        if choices.range.free and trial.signature.tile_kinds is not None:
            seen = (trial.model, trial.signature, trial.inputs)
            why = "" if request.independent else why_rows_may_mix(*seen)
            _set_bound(config, notes, choices.range, why, arrays)
        write_whole(folder / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))  # ours
        write_config(new, _HEAD, config, notes)
        if arrays:
            rows_file.replace(stored)
        new.replace(out)
    finally:
        new.unlink(missing_ok=True)
        rows_file.unlink(missing_ok=True)
    return [out, folder / SCHEMA_FILE.name, *([stored] if arrays else [])]


_INDEPENDENT = (
    "shown on the graph: each row's answer comes from this row alone; any n runs in tiles"
)


def _set_bound(
    config: dict[str, Any], notes: _Notes, bounds: _Range, why: str, arrays: Mapping[str, Array]
) -> None:
    """Bound the number of rows in `config` and `notes`, or not if the rows are independent.

    `why`: why an answer may depend on other rows; "" if it does not. `arrays`: see `_write`.
    """
    if not why:
        config["rows"]["n"]["unbounded"] = True
        notes["rows", "n", "unbounded"] = _INDEPENDENT
        return
    if bounds.most == _TILE:  # the model itself does not bound it
        rows = max(map(len, arrays.values()), default=0)
        config["rows"]["n"]["max"] = max(_TILE, rows)
    notes["rows", "n", "max"] = f"{bounds.why_most}; bounded, since {why}"


@dataclass(frozen=True)
class _Trial:
    """A config that was loaded and whose model ran: the model as it is called with the blocks of
    the signature, and the inputs of the reference."""

    model: torch.nn.Module
    signature: Signature
    inputs: Arrays


def _check(path: Path, name: str, model: Model) -> _Trial:
    """Load a config, and run the model on the first rows of its reference like `pipeline run`.

    Raises ConfigError, in which the file is called `name`, and the errors of a model that does not
    run.
    """
    try:
        config = load_config(path)
    except ConfigError as error:
        renamed = (problem.replace(path.name, name) for problem in error.problems)
        raise ConfigError(*renamed) from error
    signature = config.signature()
    case = {dim: min(_ROWS, rows.max) for dim, rows in signature.ranges.items()}
    inputs = reference_inputs(config, signature)
    module = with_fronts(model.module, source_of(config))
    eager_outputs(module, signature, row_major_inputs(signature, inputs, case), case)
    return _Trial(module, signature, inputs)


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """The texts NAME=COLUMN,COLUMN of an option, by name. Raises InitError."""
    pairs = [text.partition("=") for text in texts]
    for name, _, columns in pairs:
        if not name or not columns:
            raise InitError(f"{flag} {name}: expected NAME=COLUMN,COLUMN")
    return {name.strip(): columns for name, _, columns in pairs}


def _name(request: Request) -> str:
    """A name for the model: that of its file, or of the folder if the file is called model.py."""
    stem = Path(request.model.rpartition(":")[0] or request.model).stem
    if stem in ("model", "net", "network"):
        stem = request.out.resolve().parent.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-") or "model"


def _span(values: Array) -> str:
    """The smallest and the largest value of a column, and how many are NaN, as text."""
    present = values[~np.isnan(values)]
    span = "no value"
    if present.size:
        span = f"{number(float(present.min()), 6)} to {number(float(present.max()), 6)}"
    missing = values.size - present.size
    return f"{span}, {missing} of {values.size} are NaN," if missing else span


def _parts(feeds: Sequence[Feed], flatten: bool) -> dict[str, _Part]:
    """Group the columns into collections. Columns with the same items per row share one.

    A collection of items is called after the common beginning of its columns, `Jet` of `Jet_pt`.
    """
    groups: dict[bytes | None, _Part] = {}
    for column in [column for feed in feeds for column in feed.columns]:
        groups.setdefault(column.cut, {})[column.name] = column
    parts: dict[str, _Part] = {}
    for cut, group in groups.items():
        heads = {re.split(r"[._/]", name)[0] for name in group}
        name = "events" if cut is None and not flatten else "items"
        name = identifier(heads.pop() if name == "items" and len(heads) == 1 else name)
        while name in parts or name == "outputs":
            name += "_"
        ends = [name.rpartition(".")[2] for name in group]
        names = map(identifier, ends if len({*ends}) == len(ends) else group)
        parts[name] = dict(zip(names, group.values(), strict=True))
    return parts


def _column(name: str, dtype: str, extents: Sequence[int]) -> OneLine:
    """A column of the config; `extents`: the shape of a row, () for one number."""
    eigen = {"eigen": [*extents]} if extents else {}
    return OneLine({"name": name, "dtype": dtype, **eigen})


def _block(feed: Feed, parts: Mapping[str, _Part]) -> dict[str, Any]:
    """An input block of the config."""
    option = feed.option
    # By collection: the names that its columns have in the config, by their names in the file.
    own_names_of = {
        home: {column.name: own for own, column in part.items()} for home, part in parts.items()
    }
    home = next(home for home, own in own_names_of.items() if feed.columns[0].name in own)
    block: dict[str, Any] = {"name": identifier(feed.port.name), "collection": home}
    names = [own_names_of[home][column.name] for column in feed.columns]
    block |= {"mask": True} if feed.mask else {"columns": names}
    if feed.mask or {str(column.values.dtype) for column in feed.columns} != {option.dtype}:
        block["dtype"] = option.dtype
    if feed.trained:
        exists = {"exists": feed.trained.exists} if feed.trained.exists else {}
        block["preprocess"] = {"features": [*map(OneLine, feed.trained.features)], **exists}
    if feed.shaped:
        block["shape"] = [*option.shape]
    if option.order.permute:
        block["permute"] = [*option.order.permute]
    if option.order.flatten:
        block["flatten"] = True
    return block


@dataclass(frozen=True)
class _Outputs:
    """The columns of the collection of outputs, and the output blocks, as the config has them."""

    columns: list[OneLine]
    blocks: list[dict[str, Any]]


def _outputs(
    outcome: Outcome, words_of: Mapping[str, Sequence[str]], labels: Sequence[str], ask: Ask
) -> _Outputs:
    """What the model writes. `words_of`: the names of columns that the user gave, by output."""
    names = [output.name for output in outcome.outputs]
    if len(words_of) == len(names) and not {*words_of} & {*names}:
        names = [*words_of]
    outputs = _Outputs([], [])
    for name, output in zip(names, outcome.outputs, strict=True):
        count, *inner = list(output.value.shape)[1:] or [1]
        words = words_of.get(name) or _asked_names(name, count, labels, ask)
        columns = [identifier(each) for each in expanded(f"--output {name}", words, ())]
        if len(columns) != count:
            raise InitError(f"--output {name}: found {len(columns)} names for {count} columns")
        dtype = str(output.value.dtype).removeprefix("torch.")
        shape = [math.prod(inner)] if inner else []
        outputs.columns.extend(_column(each, dtype, shape) for each in columns)
        block: dict[str, Any] = {
            "name": identifier(name), "collection": "outputs", "columns": columns,
        }  # fmt: skip
        if output.order.permute:
            block["permute"] = [*output.order.permute]
        if inner:
            block["shape"] = [count, *inner]
        elif count > 1 and _are_shares(output.value):
            block["classifier"] = True
        outputs.blocks.append(block)
    return outputs


def _asked_names(name: str, count: int, labels: Sequence[str], ask: Ask) -> list[str]:
    """The user's names for the columns of an output; by default the labels, if their number
    fits."""
    stem = f"{name}_" if name[-1:].isdigit() else name  # output0 has output0_0, output0_1, …
    default = f"{stem}0 .. {stem}{count - 1}" if count > 1 else name
    if len(labels) == count:
        default = ",".join(labels)
    question = f"names for the {count} columns of {name}"
    return ask(f"--output {name}=COLUMN,…", question, default).split(",")


def _are_shares(values: torch.Tensor) -> bool:
    """Whether the values of each row are shares of 1, as those of a classifier are."""
    return bool((values >= 0).all() and (values.sum(1) - 1).abs().max() < 1e-4)


@dataclass(frozen=True)
class _Range:
    """The fewest and the most rows of a call, each with the reason. `free`: neither the user nor
    the model bounds them."""

    least: int
    why_least: str
    most: int
    why_most: str
    free: bool


def _rows(model: Model, accepted: Fitted, wanted: int | None) -> _Range:
    """The range of rows: `wanted`, else a tile if the rows do not see each other, else as many as
    the file has; fewer if the model does not run on them."""
    options, independent = accepted.outcome.options, accepted.outcome.independent
    least, why_least = 0, "the fewest rows of a call"
    while least < 2 and (refused := why_not(model, options, least)):
        why_least, least = f"forward does not run on {least} rows: {refused}", least + 1
    if wanted:
        return _Range(least, why_least, wanted, "the most rows of a call, by --rows", False)
    rows = max((c.rows for feed in accepted.feeds for c in feed.columns), default=0)
    most = _TILE if independent or not rows else max(2, rows)
    if any(feed.jagged for feed in accepted.feeds):  # several row dimensions: no tiles
        most = max(most, rows)
    why_most = "the rows of the file, since rows see each other; --rows N for others"
    if independent:
        why_most = "the rows of a tile, and of the reference"
    while most > 2 and (refused := why_not(model, options, most + 1)):
        why_most = f"not {most + 1}, on which it fails: {refused}"
        most //= 2
    return _Range(least, why_least, most, why_most, free=independent)


def _arrays(parts: Mapping[str, _Part]) -> dict[str, Array]:
    """The first rows of the file, by the names that arrays have in a reference file."""
    arrays: dict[str, Array] = {}
    for name, part in parts.items():
        offsets = _offsets(part)
        if offsets is not None:
            offsets = offsets.astype(np.int64)
            arrays[f"{name}_offsets/begin"] = offsets[:-1]
            arrays[f"{name}_offsets/end"] = offsets[1:]
        for own_name, column in part.items():
            arrays[f"{name}/{own_name}"] = column.values
    return arrays
