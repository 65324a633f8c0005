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

from engines.processes import run_in_fork
from pipeline.applying import Array, FileColumn, Source, open_source
from pipeline.config import SCHEMA_FILE, load_config, reference_inputs, source_of
from pipeline.errors import ConfigError, InitError
from pipeline.init.commented import LONG, OneLine, write_config
from pipeline.init.input_columns import Ask, Feed, choose_feeds, expand_words, parse_input_option
from pipeline.init.model import Model, read_model
from pipeline.init.orders import Fitted, fit_options
from pipeline.init.trial import Outcome, find_error
from pipeline.init.weaver import read_weaver
from soa.files import write_whole
from soa.signature import Signature
from soa.text import number, to_identifier
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

    `independent`: take the rows as independent of each other, without an export that would show it
    on the graph. The capture that follows finds out if this is wrong.
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
_LEAST_ITEMS = 64  # bound of the items of a call, if the rows of the file have fewer

_Part = dict[str, FileColumn]
"""The columns of a collection that a model reads, by their names in the config."""
_Notes = dict[tuple[str | int, ...], str]
"""Comments on lines of the config, by the path of the key."""


@dataclass(frozen=True)
class Written:
    """What `init` wrote. `files`: their paths. `said`: sentences about what was chosen. `config`:
    the content of the config. `columns`: for each input collection, the columns' names in the data,
    by their names in the config.
    """

    files: list[Path]
    said: list[str]
    config: dict[str, Any]
    columns: dict[str, dict[str, str]]


def init(request: Request, ask: Ask) -> Written:
    """Write the config and, in the same folder, its JSON schema and the first rows of the data,
    which are the reference. The model runs in a child process. `ask`: see `Ask`.

    The config is written last: if it exists, all files exist. An existing config or file of rows is
    replaced only with `force`. Raises InitError, and the errors of reading a model or a config.
    """
    out, folder = request.out, request.out.parent
    stored = folder / ("reference.npz" if out.stem == "config" else f"{out.stem}.reference.npz")
    for path in (out, stored):
        if path.exists() and not request.force:
            raise InitError(f"{path} is there already: --force replaces it, --out writes elsewhere")
    return run_in_fork("the model", lambda ask_parent: _run_init(request, ask_parent, stored), ask)


def _run_init(request: Request, ask: Ask, stored: Path) -> Written:
    """Does the work of `init`. This runs in a child process, since the model runs here."""
    model = read_model(request.model, request.out.parent, request.weights, request.kwargs)
    data = open_source(request.data, request.tree) if request.data else None
    return write_config_for(model, data, request, ask, stored)


def write_config_for(
    model: Model, data: Source | None, request: Request, ask: Ask, stored: Path
) -> Written:
    """Choose what the config says, from a model, its data and the user's answers, and write all
    files. `stored`: the file that gets the rows of the data."""
    choices = make_choices(model, data, request, ask)
    name = request.name or ask("--name", "the name to register it by", _suggest_name(request))
    config = _make_config(choices, name)
    if request.kwargs:
        config["model"] = {**config["model"], "kwargs": OneLine(request.kwargs)}
    config["reference"] = {"file": stored.name} if data is not None else {"seed": 1}
    if request.engines:
        config["engines"] = list(request.engines)
    notes = _make_notes(request, choices)
    arrays = _collect_arrays(choices.parts) if data is not None else {}
    files = _write_checked(request, stored, choices, config, notes, arrays)
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
    """Write the config that `first` describes to `path`, with another `model:` and another file of
    rows, whose paths are relative to the folder of `path`."""
    config = {**first.config, "model": dict(model), "reference": {"file": rows}}
    write_whole(path.parent / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))  # trusted
    write_config(path, _HEAD, config, {})


def _make_config(choices: Choices, name: str) -> dict[str, Any]:
    """Returns the content of the config, with a bounded number of rows and still without
    `reference`. `name`: the model's."""
    return {
        "name": name,
        "model": choices.model.entry,
        "collections": {
            **_make_collections(choices),
            "outputs": {"storage": "columns", "columns": choices.outputs.columns},
        },
        "inputs": [_make_block(feed, choices.parts) for feed in choices.fitted.feeds],
        "outputs": choices.outputs.blocks,
        "rows": _make_row_ranges(choices),
    }


@dataclass(frozen=True)
class Choices:
    """All that was found out or asked about the model and its data. `parts`: the columns of each
    input collection."""

    model: Model
    fitted: Fitted
    outputs: _Outputs
    range: _Range
    parts: dict[str, _Part]

    @property
    def typical(self) -> list[int]:
        """The numbers of rows for which the engines are timed: 10 and 1000, as far as allowed."""
        least, most = self.range.least, self.range.most
        return [n for n in (10, 1000) if least <= n <= most] or [most]


def make_choices(model: Model, data: Source | None, request: Request, ask: Ask) -> Choices:
    """Choose what each input and output is and how many rows a call may have, from the model, the
    data and the options; ask the user about the rest. Runs the model."""
    in_data = [*data.columns] if data else []
    weaver, labels = read_weaver(request.weaver, in_data) if request.weaver else ({}, [])
    texts = _parse_pairs("--input", request.inputs)
    asked_of = {name: parse_input_option(f"--input {name}", text) for name, text in texts.items()}
    feeds = choose_feeds(model, data, asked_of, weaver, request.flatten, request.length, ask)
    if not model.ports:
        model = replace(model, ports=tuple(feed.port for feed in feeds))
    accepted = fit_options(model, feeds, request.length, ask)
    output_texts = _parse_pairs("--output", request.outputs).items()
    words_of = {name: text.split(",") for name, text in output_texts}
    outputs = _choose_outputs(accepted.outcome, words_of, labels, ask)
    parts = _group_columns(accepted.feeds, request.flatten)
    return Choices(model, accepted, outputs, _find_range(model, accepted, request.rows), parts)


def _make_collections(choices: Choices) -> dict[str, Any]:
    """Returns the input collections of the config."""
    collections: dict[str, Any] = {}
    for name, part in choices.parts.items():
        arrays = {own: column.values for own, column in part.items()}
        columns = [_make_column(own, str(x.dtype), x.shape[1:]) for own, x in arrays.items()]
        jagged = _offsets(part) is not None
        rows = f"n_{name}" if jagged else "n"
        collections[name] = {"storage": "columns", "rows": rows, "columns": columns}
        if jagged:
            collections[name]["jagged"] = {"rows": "n", "length": choices.fitted.length}
    return collections


def _make_row_ranges(choices: Choices) -> dict[str, Any]:
    """Returns `rows:` of the config: the range of the rows of a call, and for each jagged
    collection the range of the items of all rows together."""
    least, most, typical = choices.range.least, choices.range.most, choices.typical
    ranges: dict[str, Any] = {"n": {"min": least, "max": most, "typical": typical}}
    for name, part in choices.parts.items():
        offsets = _offsets(part)
        if offsets is not None:
            counts = np.diff(offsets)
            usual = [math.ceil(n * float(counts.mean())) for n in typical]
            most_items = max(_LEAST_ITEMS, most * int(counts.max()))
            ranges[f"n_{name}"] = {"max": most_items, "typical": usual}
    return ranges


def _make_notes(request: Request, choices: Choices) -> _Notes:
    """Returns the comments of the config that say why a value was chosen, what the data holds, and
    which names the user may change."""
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
                span = _describe_span(column.values)
                notes["collections", name, "columns", i] = f"{span} in {source}"
        offsets = _offsets(part)
        if offsets is not None:
            most = np.diff(offsets).max()
            about = f"the model gets at most `length` items of a row; rows here have up to {most}"
            notes["collections", name, "jagged"] = about
            notes["rows", f"n_{name}"] = "the number of items in a call, over all rows"
    return notes


def _offsets(part: _Part) -> Array | None:
    """Returns the offsets of the items of each row; all columns of a collection have the same ones.
    None if the collection is not jagged."""
    return next(iter(part.values())).offsets


def _write_checked(
    request: Request,
    stored: Path,
    choices: Choices,
    config: dict[str, Any],
    notes: _Notes,
    arrays: dict[str, Array],
) -> list[Path]:
    """Write the files under temporary names, load them and run the model, and move them to their
    places. Returns the files. Bounds the rows in `config` and `notes` by what the trial shows.

    `stored`, `arrays`: the file of the reference rows and its content, which is empty without data.
    """
    out, folder = request.out, request.out.parent
    partial = folder / f".{os.urandom(4).hex()}.partial.yaml"
    rows_file = partial.with_suffix(".npz")
    folder.mkdir(parents=True, exist_ok=True)
    reference = {"file": rows_file.name} if arrays else config["reference"]
    try:
        if arrays:
            np.savez_compressed(rows_file, allow_pickle=False, **arrays)
        write_config(partial, _HEAD, config | {"reference": reference}, notes)
        trial = _try_config(partial, out.name, choices.model)
        if choices.range.free and trial.signature.tile_kinds is not None:
            seen = (trial.model, trial.signature, trial.inputs)
            why = "" if request.independent else why_rows_may_mix(*seen)
            _set_bound(config, notes, choices.range, why, arrays)
        write_whole(folder / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))  # trusted
        write_config(partial, _HEAD, config, notes)
        if arrays:
            rows_file.replace(stored)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
        rows_file.unlink(missing_ok=True)
    return [out, folder / SCHEMA_FILE.name, *([stored] if arrays else [])]


def _set_bound(
    config: dict[str, Any], notes: _Notes, bounds: _Range, why: str, arrays: Mapping[str, Array]
) -> None:
    """Make the number of rows unbounded in `config` and `notes` if the rows are independent, else
    bound it.

    `why`: why an answer may depend on other rows; "" if it does not. `arrays`: see
    `_write_checked`.
    """
    if not why:
        config["rows"]["n"]["unbounded"] = True
        notes["rows", "n", "unbounded"] = (
            "shown on the graph: each row's answer comes from this row alone; any n runs in tiles"
        )
        return
    if bounds.most == _TILE:  # the model itself does not bound it
        rows = max(map(len, arrays.values()), default=0)
        config["rows"]["n"]["max"] = max(_TILE, rows)
    notes["rows", "n", "max"] = f"{bounds.why_most}; bounded, since {why}"


@dataclass(frozen=True)
class _Trial:
    """A config was loaded and its model ran. `model`: as it is called with the blocks of the
    signature. `inputs`: those of the reference."""

    model: torch.nn.Module
    signature: Signature
    inputs: Arrays


def _try_config(path: Path, name: str, model: Model) -> _Trial:
    """Load a config, and run the model on the first rows of its reference, as `pipeline run` does.

    Raises ConfigError, whose text calls the temporary file `name`, and the errors of a model that
    does not run.
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


def _parse_pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Splits the values `NAME=COLUMN,COLUMN` of the option `flag`. Returns what follows the `=`, by
    name. Raises InitError."""
    pairs = [text.partition("=") for text in texts]
    for name, _, columns in pairs:
        if not name or not columns:
            raise InitError(f"{flag} {name}: expected NAME=COLUMN,COLUMN")
    return {name.strip(): columns for name, _, columns in pairs}


def _suggest_name(request: Request) -> str:
    """Returns a name to register the model by: that of its file, or that of the config's folder if
    the file's name, as model.py, tells nothing."""
    stem = Path(request.model.rpartition(":")[0] or request.model).stem
    if stem in ("model", "net", "network"):
        stem = request.out.resolve().parent.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-") or "model"


def _describe_span(values: Array) -> str:
    """Returns the smallest and the largest value of a column, and how many are NaN, as text."""
    present = values[~np.isnan(values)]
    span = "no value"
    if present.size:
        span = f"{number(float(present.min()), 6)} to {number(float(present.max()), 6)}"
    missing = values.size - present.size
    return f"{span}, {missing} of {values.size} are NaN," if missing else span


def _group_columns(feeds: Sequence[Feed], flatten: bool) -> dict[str, _Part]:
    """Groups the columns into collections, and returns these by name. Columns with the same number
    of items in every row share a collection; so do all columns without items.

    A collection of items is called after the common beginning of its columns: `Jet` for `Jet_pt`.
    """
    groups: dict[bytes | None, _Part] = {}
    for column in [column for feed in feeds for column in feed.columns]:
        groups.setdefault(column.cut, {})[column.name] = column
    parts: dict[str, _Part] = {}
    for cut, group in groups.items():
        beginnings = {re.split(r"[._/]", name)[0] for name in group}
        has_items = cut is not None or flatten
        name = "items" if has_items else "events"
        name = to_identifier(beginnings.pop() if has_items and len(beginnings) == 1 else name)
        while name in parts or name == "outputs":
            name += "_"
        short = [name.rpartition(".")[2] for name in group]
        names = short if len({*short}) == len(short) else group
        parts[name] = part = dict[str, FileColumn]()
        for own, column in zip(map(to_identifier, names), group.values(), strict=True):
            while own in part:
                own += "_"
            part[own] = column
    return parts


def _make_column(name: str, dtype: str, extents: Sequence[int]) -> OneLine:
    """Returns a column as the config has it. `extents`: the shape of a row, () for one number."""
    eigen = {"eigen": [*extents]} if extents else {}
    return OneLine({"name": name, "dtype": dtype, **eigen})


def _make_block(feed: Feed, parts: Mapping[str, _Part]) -> dict[str, Any]:
    """Returns an input block as the config has it. `parts`: the columns of each collection."""
    option = feed.option
    # By collection: the names that its columns have in the config, by their names in the file.
    own_names_of = {
        home: {column.name: own for own, column in part.items()} for home, part in parts.items()
    }
    home = next(home for home, own in own_names_of.items() if feed.columns[0].name in own)
    block: dict[str, Any] = {"name": to_identifier(feed.port.name), "collection": home}
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
    """The columns of the collection `outputs`, and the output blocks, as the config has them."""

    columns: list[OneLine]
    blocks: list[dict[str, Any]]


def _choose_outputs(
    outcome: Outcome, words_of: Mapping[str, Sequence[str]], labels: Sequence[str], ask: Ask
) -> _Outputs:
    """Choose the names of the outputs and of their columns. `words_of`: the names of columns that
    the user gave, by output, as names or ranges. `labels`: those of weaver. Raises InitError."""
    names = [output.name for output in outcome.outputs]
    if len(words_of) == len(names) and not {*words_of} & {*names}:
        names = [*words_of]
    outputs = _Outputs([], [])
    for name, output in zip(names, outcome.outputs, strict=True):
        count, *inner = list(output.value.shape)[1:] or [1]  # columns, and the shape in each
        words = words_of.get(name) or _ask_names(name, count, labels, ask)
        columns = [to_identifier(word) for word in expand_words(f"--output {name}", words, ())]
        if len(columns) != count:
            raise InitError(f"--output {name}: found {len(columns)} names for {count} columns")
        dtype = str(output.value.dtype).removeprefix("torch.")
        shape = [math.prod(inner)] if inner else []
        outputs.columns.extend(_make_column(column, dtype, shape) for column in columns)
        block: dict[str, Any] = {
            "name": to_identifier(name), "collection": "outputs", "columns": columns,
        }  # fmt: skip
        if output.order.permute:
            block["permute"] = [*output.order.permute]
        if inner:
            block["shape"] = [count, *inner]
        elif count > 1 and _are_shares(output.value):
            block["classifier"] = True
        outputs.blocks.append(block)
    return outputs


def _ask_names(name: str, count: int, labels: Sequence[str], ask: Ask) -> list[str]:
    """Ask the user for the names of the columns of an output. The default are the labels, if there
    are as many, else numbered names."""
    stem = f"{name}_" if name[-1:].isdigit() else name  # output0 has output0_0, output0_1, …
    default = f"{stem}0 .. {stem}{count - 1}" if count > 1 else name
    if len(labels) == count:
        default = ",".join(labels)
    columns = f"names for the {count} columns" if count > 1 else "a name for the column"
    question = f"{columns} of {name}"
    return ask(f"--output {name}=COLUMN,…", question, default).split(",")


def _are_shares(values: torch.Tensor) -> bool:
    """Whether the values of each row are shares of 1, as those of a classifier are."""
    return bool((values >= 0).all() and (values.sum(1) - 1).abs().max() < 1e-4)


@dataclass(frozen=True)
class _Range:
    """The fewest and the most rows of a call, each with the reason. `free`: the rows are
    independent, and neither the user nor the model bounds them."""

    least: int
    why_least: str
    most: int
    why_most: str
    free: bool


def _find_range(model: Model, accepted: Fitted, wanted: int | None) -> _Range:
    """Find the fewest and the most rows of a call. The most are `wanted`, if the user says it; else
    those of a tile if each row's answer depends on this row alone, else those of the file; and
    fewer if the model does not run on so many."""
    options, independent = accepted.outcome.options, accepted.outcome.independent
    least, why_least = 0, "the fewest rows of a call"
    while least < 2 and (refused := find_error(model, options, least)):
        why_least, least = f"forward does not run on {least} rows: {refused}", least + 1
    if wanted:
        return _Range(least, why_least, wanted, "the most rows of a call, by --rows", free=False)
    rows = max((c.rows for feed in accepted.feeds for c in feed.columns), default=0)
    most = _TILE if independent or not rows else max(2, rows)
    if any(feed.jagged for feed in accepted.feeds):  # several row dimensions: no tiles
        most = max(most, rows)
    why_most = "the rows of the file, since rows see each other; --rows N for others"
    if independent:
        why_most = "the rows of a tile, and of the reference"
    while most > 2 and (refused := find_error(model, options, most + 1)):
        why_most = f"not {most + 1}, on which it fails: {refused}"
        most //= 2
    return _Range(least, why_least, most, why_most, free=independent)


def _collect_arrays(parts: Mapping[str, _Part]) -> dict[str, Array]:
    """Returns the first rows of the data by the names that arrays have in a reference file, such as
    `jets/pt`."""
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
