"""From a model and a file of rows to a config that `pipeline run` accepts."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import SCHEMA_FILE, load_config, names_in, reference_inputs, source_of
from pipeline.errors import ConfigError, InitError
from pipeline.init.commented import text_of
from pipeline.init.data import Array, FileColumn, open_data
from pipeline.init.feeds import Ask, Feed, choose, expanded, fitted
from pipeline.init.model import ROWS, Model, Option, answers, read_model, why_not
from pipeline.init.weaver import read_weaver
from soa.files import write_whole
from stages.model import build_model
from stages.reference import eager_outputs, row_major_inputs

_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA_FILE.name}
# Written by `pipeline init`; docs/config.md has every key.
"""


@dataclass(frozen=True)
class Request:
    """What to write a config of; `inputs` and `outputs` are NAME=COLUMN,COLUMN."""

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


_Part = dict[str, FileColumn]
"""The columns of a collection that a model reads, by the names that they get."""


def init(request: Request, ask: Ask) -> list[Path]:
    """Write the config, its JSON schema and, of data, the rows of the reference beside it.

    The config comes last, so where one is there all is; neither it nor the rows are replaced
    without `force`. Raises InitError, and whatever a model or a config is refused by.
    """
    out, folder = request.out, request.out.parent
    stored = "reference.npz" if out.stem == "config" else f"{out.stem}.reference.npz"
    for path in (out, folder / stored):
        if path.exists() and not request.force:
            raise InitError(f"{path} is there already: --force replaces it, --out writes elsewhere")
    model = read_model(request.model, folder, request.weights, request.kwargs)
    data = open_data(request.data, request.tree) if request.data else None
    have = data.readers if data else ()
    weaver, labels = read_weaver(request.weaver, have) if request.weaver else ({}, [])
    given = _pairs("--input", request.inputs)
    feeds = choose(model, data, given, weaver, request.flatten, ask)
    feeds = fitted(model, feeds, request.length, ask)
    options = [feed.option for feed in feeds]
    parts = _parts(feeds, request.flatten)
    source = request.data.name if request.data else "an input: name them as you like"
    columns, outputs = _outputs(model, options, _pairs("--output", request.outputs), labels, ask)
    least, most = _rows(model, options, request.rows)
    typical = [n for n in (10, 1000) if least <= n <= most] or [most]
    rows = {"n": {"min": least, "max": most, "typical": typical}}
    collections: dict[str, Any] = {}
    notes: dict[tuple[str | int, ...], str] = {
        ("inputs", i, "name"): f"the model gets ({', '.join(['n', *map(str, feed.option[0])])})"
        for i, feed in enumerate(feeds)
    }
    notes["collections", "outputs"] = "what the model writes: name them as you like"
    notes["rows", "n"] = "the race of the engines is at the typical ones: write your own"
    for name, part in parts.items():
        declared = _declared(part)
        notes["collections", name] = f"columns of {source}"
        collections[name] = {"columns": declared, "storage": "columns", "rows": "n"}
        for i, entry in enumerate(declared if data else ()):
            if entry["name"] in part:
                values = part[entry["name"]].values
                said = f"{values.min():.6g} to {values.max():.6g} in {source}"
                notes["collections", name, "columns", i] = said
        if (offsets := _offsets(part)) is not None:
            length = next(feed.length for feed in feeds if feed.jagged)
            counts = np.diff(offsets) if data else np.array([length])
            items = f"n_{name}"
            collections[name] |= {"rows": items, "jagged": {"rows": "n", "length": length}}
            said = f"the model sees so many items of each row; here are up to {counts.max()}"
            notes["collections", name, "jagged"] = said
            notes["rows", items] = "items of all rows of a call together"
            usual = [math.ceil(n * float(counts.mean())) for n in typical]
            rows[items] = {"max": max(64, most * int(counts.max())), "typical": usual}
    config = {
        "name": request.name or ask("--name", "the name to register it by", _name(request)),
        "model": model.said,
        "collections": {**collections, "outputs": {"columns": columns}},
        "inputs": [_block(feed, parts) for feed in feeds],
        "outputs": outputs,
        "rows": rows,
        "reference": {"file": stored} if data else {"seed": 1},
        **({"engines": list(request.engines)} if request.engines else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{os.urandom(4).hex()}.partial.yaml"
    rows_file = new.with_suffix(".npz")
    text = _HEAD + text_of(config, notes)
    try:
        if data:
            np.savez_compressed(rows_file, allow_pickle=False, **_arrays(parts, most))
        new.write_text(text.replace(stored, rows_file.name), encoding="utf-8")
        try:
            _check(new)
        except ConfigError as error:
            raise ConfigError(
                *(one.replace(new.name, out.name) for one in error.problems)
            ) from error
        new.write_text(text, encoding="utf-8")
        write_whole(folder / SCHEMA_FILE.name, SCHEMA_FILE.read_text(encoding="utf-8"))
        if data:
            rows_file.replace(folder / stored)
        new.replace(out)
    finally:
        new.unlink(missing_ok=True)
        rows_file.unlink(missing_ok=True)
    return [out, folder / SCHEMA_FILE.name, *([folder / stored] if data else [])]


def _check(path: Path) -> None:
    """The model runs on the first rows of its reference, as `pipeline run` has it."""
    config = load_config(path)
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


def _short(names: Sequence[str]) -> list[str]:
    """As one range, where they are one."""
    with suppress(ValueError):
        if len(names) > 2 and names_in(f"{names[0]} .. {names[-1]}") == [*names]:
            return [f"{names[0]} .. {names[-1]}"]
    return [*names]


def _offsets(part: _Part) -> Array | None:
    return next(iter(part.values())).offsets


def _parts(feeds: Sequence[Feed], flatten: bool) -> dict[str, _Part]:
    """A collection for all columns that are cut into rows alike."""
    groups: dict[bytes | None, _Part] = {}
    for column in [column for feed in feeds for column in feed.columns]:
        cut = None if column.offsets is None else column.offsets.tobytes()
        groups.setdefault(cut, {})[column.name] = column
    found: dict[str, _Part] = {}
    for cut, group in groups.items():
        heads = {re.split(r"[._/]", each)[0] for each in group}
        name = "events" if cut is None and not flatten else "items"
        name = heads.pop() if name == "items" and len(heads) == 1 else name
        while _identifier(name) in found:
            name += "_"
        last = [each.rpartition(".")[2] for each in group]
        names = map(_identifier, last if len({*last}) == len(last) else group)
        found[_identifier(name)] = dict(zip(names, group.values(), strict=True))
    return found


def _declared(part: _Part) -> list[dict[str, Any]]:
    kinds = groupby(part, lambda name: (str(part[name].values.dtype), part[name].values.shape[1:]))
    return [
        {"name": name, "dtype": dtype, **({"eigen": [*shape]} if shape else {})}
        for (dtype, shape), names in kinds
        for name in _short([*names])
    ]


def _block(feed: Feed, parts: Mapping[str, _Part]) -> dict[str, Any]:
    wanted = {column.name for column in feed.columns}
    homes = [n for n, part in parts.items() if wanted & {column.name for column in part.values()}
             or (feed.mask and _offsets(part) is not None)]  # fmt: skip
    if len(homes) != 1:
        said = " and ".join(homes) or "no jagged collection"
        raise InitError(
            f"{feed.port.name} would be of {said}; an input is of one: give its columns"
        )
    own = {column.name: name for name, column in parts[homes[0]].items()}
    shape, dtype = feed.option
    block: dict[str, Any] = {"name": _identifier(feed.port.name), "collection": homes[0]}
    block |= (
        {"mask": True} if feed.mask else {"columns": _short([own[c.name] for c in feed.columns])}
    )
    if {str(column.values.dtype) for column in feed.columns} != {dtype}:
        block["dtype"] = dtype
    if shape != feed.usual:
        block["shape"] = [*shape]
    if feed.trained:
        exists = {"exists": feed.trained.exists} if feed.trained.exists else {}
        block["preprocess"] = {"features": [*feed.trained.features], **exists}
    return block


def _outputs(
    model: Model,
    options: Sequence[Option],
    given: Mapping[str, Sequence[str]],
    labels: Sequence[str],
    ask: Ask,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The columns that the model writes, and the blocks."""
    found = answers(model.module, options, ROWS)
    names = [*given] if len(given) == len(found) and not {*given} & {*found} else [*found]
    columns, blocks = [], []
    for name, value in zip(names, found.values(), strict=True):
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (ROWS,):
            kind = (
                f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
            )
            raise InitError(
                f"output {name} of {ROWS} rows is {kind}: it has to be a tensor with a row for each"
            )
        count, *inner = value.shape[1:] or (1,)
        default = (
            [name]
            if count == 1
            else labels
            if len(labels) == count
            else [f"{name}0 .. {name}{count - 1}"]
        )
        words = given.get(name) or ask(
            f"--output {name}=COLUMN,…",
            f"names for the {count} columns of {name}",
            ",".join(default),
        ).split(",")
        its = [_identifier(each) for each in expanded(f"--output {name}", words, ())]
        if len(its) != count:
            raise InitError(f"--output {name}: found {len(its)} names for {count} columns")
        dtype = str(value.dtype).removeprefix("torch.")
        eigen = {"eigen": [math.prod(inner)]} if inner else {}
        columns += [{"name": each, "dtype": dtype, **eigen} for each in _short(its)]
        block: dict[str, Any] = {
            "name": _identifier(name),
            "collection": "outputs",
            "columns": _short(its),
        }
        if inner:
            block["shape"] = [count, *inner]
        elif count > 1 and bool((value >= 0).all() and (value.sum(1) - 1).abs().max() < 1e-4):
            block["classifier"] = True
        blocks.append(block)
    return columns, blocks


def _rows(model: Model, options: Sequence[Option], most: int | None) -> tuple[int, int]:
    """The fewest rows that it takes, and the most that it answers in about a second."""
    least = next((n for n in (0, 1) if not why_not(model.module, options, n)), 2)
    found = 2
    for size in (16, 64, 256, 1024, 4096) if most is None else ():
        begun = time.monotonic()
        if why_not(model.module, options, size):
            break
        found = size
        if time.monotonic() - begun > 0.25:
            break
    return least, most or found


def _arrays(parts: Mapping[str, _Part], most: int) -> dict[str, Array]:
    """The first rows of the file, by the names that a reference's file has."""
    found: dict[str, Array] = {}
    for name, part in parts.items():
        end = most
        if (offsets := _offsets(part)) is not None:
            cut = offsets[: most + 1].astype(np.int64)
            found |= {f"{name}_offsets/begin": cut[:-1], f"{name}_offsets/end": cut[1:]}
            end = cut[-1]
        found |= {f"{name}/{own}": column.values[:end] for own, column in part.items()}
    return found
