"""What one part of a config says about another, and about the files it names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import ENGINES
from engines.errors import TargetError
from engines.target import Target
from pipeline.config.expressions import check_preprocess
from pipeline.config.wording import did_you_mean, not_among, shown
from pipeline.config.yaml_lines import Key, Problem
from registry.reference import NAME_PATTERN

if TYPE_CHECKING:
    from pipeline.config.schema import BlockConfig, ColumnConfig, Config, OutputConfig

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Files:
    """What a config names, on this host: factories as `module:name` or `/path/file.py:name`."""

    factory: str | None = None
    program: Path | None = None
    torchscript: Path | None = None
    weights: Path | None = None
    reference_factory: str | None = None


def find_files(config: Config, folder: Path) -> tuple[Files, list[Problem]]:
    """Expand the variables in the config's paths, and resolve these from `folder`."""
    problems: list[Problem] = []

    def expanded(at: Key, written: str | None) -> str | None:
        """None also where that fails, which is then among the problems."""
        if written is None:
            return None
        unset = next(
            (m[1] for m in _VARIABLE.finditer(written) if m[2] is None and m[1] not in os.environ),
            None,
        )
        if unset is not None:
            text = f"the environment variable {unset} is not set; set it or write ${{{unset}:-...}}"
            problems.append((at, text))
            return None
        text = _VARIABLE.sub(lambda m: os.environ.get(m[1]) or m[2] or "", written)
        if "${" in text:
            problems.append((at, f"found {shown(written)}; write ${{NAME}} or ${{NAME:-default}}"))
            return None
        return text

    def file(at: Key, text: str | None) -> Path | None:
        if text is None:
            return None
        path = Path(os.path.normpath(folder / text))
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            problems.append((at, f"the file {path} {what}; paths start from the config's folder"))
        return path

    def factory(at: Key, text: str | None) -> str | None:
        if text is None:
            return None
        where, _, name = text.rpartition(":")
        module = all(_IDENTIFIER.fullmatch(part) for part in where.split("."))
        if not _IDENTIFIER.fullmatch(name) or not (where.endswith(".py") or module):
            problems.append((at, f"found {shown(text)}; write file.py:callable or module:callable"))
            return None
        return f"{file(at, where)}:{name}" if where.endswith(".py") else text

    model = config.model
    program, torchscript, weights = (
        file(("model", key), expanded(("model", key), getattr(model, key)))
        for key in ("program", "torchscript", "weights")
    )
    of_model, of_reference = (
        factory((part, "factory"), expanded((part, "factory"), given))
        for part, given in (("model", model.factory), ("reference", config.reference.factory))
    )
    return Files(of_model, program, torchscript, weights, of_reference), problems


def check_config(config: Config) -> list[Problem]:
    """Every contradiction within a config, with the key where it shows."""
    return [
        *_check_names(config),
        *_check_collections(config),
        *_check_blocks(config),
        *_check_rows(config),
        *_check_reference(config),
    ]


def _check_names(config: Config) -> Iterator[Problem]:
    if not re.fullmatch(NAME_PATTERN, config.name):
        yield (
            ("name",),
            f"found {shown(config.name)}; allowed: letters, digits, '_', '.' and '-', the "
            "last two not in front; at most 200",
        )
    for i, engine in enumerate(config.engines):
        if engine not in ENGINES:
            yield ("engines", i), not_among(engine, ENGINES)
    lists: list[tuple[Key, Sequence[str]]] = [(("targets",), config.targets)]
    if config.gates.required_targets is not None:
        lists.append((("gates", "required_targets"), config.gates.required_targets))
    for at, targets in lists:
        yield from _repeats(at, targets)
        for i, target in enumerate(targets):
            try:
                found = Target.parse(target)
            except TargetError as error:
                yield (*at, i), str(error)
                continue
            if config.precision == "tf32" and not found.has_tf32:
                yield (
                    (*at, i),
                    f"found {shown(target)} with precision: tf32; only CUDA GPUs have it, from "
                    "cuda/sm_80 on",
                )
    yield from _repeats(("engines",), config.engines)


def _check_collections(config: Config) -> Iterator[Problem]:
    used = {block.collection for block in (*config.inputs, *config.outputs)}
    for name, collection in config.collections.items():
        at: Key = ("collections", name)
        yield from _identifier(at, name)
        if name not in used:
            yield at, "no input or output uses this collection; use it or remove it"
        yield from _repeats((*at, "columns"), [c.name for c in collection.columns], "name")
        for i, column in enumerate(collection.columns):
            yield from _identifier((*at, "columns", i, "name"), column.name)
        widest = max(_itemsize(c) for c in collection.columns)
        alignment = collection.alignment
        if collection.storage == "columns":
            widest = 1  # each column is aligned to its own element at least
        if alignment & (alignment - 1) or alignment < widest:
            yield (
                (*at, "alignment"),
                f"found {alignment}; expected a power of two, at least the {widest} bytes of the "
                "widest column",
            )


def _check_blocks(config: Config) -> Iterator[Problem]:
    blocks: list[tuple[Key, BlockConfig]] = [
        *((("inputs", i), block) for i, block in enumerate(config.inputs)),
        *((("outputs", i), block) for i, block in enumerate(config.outputs)),
    ]
    seen: set[str] = set()
    for at, block in blocks:
        yield from _identifier((*at, "name"), block.name)
        if block.name in seen:
            yield (*at, "name"), f"found {block.name!r} a second time; each name once"
        seen.add(block.name)
        if block.collection not in config.collections:
            yield (*at, "collection"), not_among(block.collection, config.collections)
            continue
        columns = {c.name: c for c in config.collections[block.collection].columns}
        unknown = [i for i, name in enumerate(block.columns) if name not in columns]
        for i in unknown:
            yield (*at, "columns", i), not_among(block.columns[i], columns)
        yield from _repeats((*at, "columns"), block.columns)
        if not unknown:
            members = [columns[name] for name in block.columns]
            yield from _check_members(at, block, members)
            yield from check_preprocess((*at, "preprocess"), block, members)
    yield from _check_written(config)


def _check_members(at: Key, block: BlockConfig, members: list[ColumnConfig]) -> Iterator[Problem]:
    """The columns of one block, taken together as one tensor."""
    scalars = [m.name for m in members if m.scalar]
    if scalars and len(scalars) < len(members):
        yield (
            (*at, "columns"),
            f"found scalars ({', '.join(scalars)}) among columns; give them a block of their own",
        )
    dtypes = sorted({m.dtype for m in members})
    if len(dtypes) > 1 and block.dtype is None:
        yield (
            (*at, "columns"),
            f"found columns of {', '.join(dtypes)}; say with 'dtype' which of them the model takes",
        )
    components = sum(math.prod(m.eigen or ()) for m in members)
    if block.shape is not None and math.prod(block.shape) != components:
        yield (
            (*at, "shape"),
            f"found {list(block.shape)}, which is {math.prod(block.shape)} numbers; the columns "
            f"have {components}",
        )
    classifier: bool = getattr(block, "classifier", False)
    if classifier and components < 2:
        yield (*at, "classifier"), "found true; a classifier has two or more columns"


def _check_written(config: Config) -> Iterator[Problem]:
    """Every column is an input, or is written by one output, or neither."""
    read = {(b.collection, name) for b in config.inputs for name in b.columns}
    written: dict[tuple[str, str], OutputConfig] = {}
    for i, block in enumerate(config.outputs):
        for j, name in enumerate(block.columns):
            column, at = (block.collection, name), ("outputs", i, "columns", j)
            if column in read:
                yield at, f"found {name!r}, which is an input; a model never writes its inputs"
            elif written.setdefault(column, block) is not block:
                yield at, f"found {name!r}, which the output {written[column].name!r} writes too"


def _check_rows(config: Config) -> Iterator[Problem]:
    used = {collection.rows: name for name, collection in config.collections.items()}
    for name, collection in config.collections.items():
        at: Key = ("collections", name, "rows")
        if collection.rows not in config.rows:
            yield at, f"'rows' has no range for it: {not_among(collection.rows, config.rows)}"
    for dim, rows in config.rows.items():
        at = ("rows", dim)
        yield from _identifier(at, dim)
        if dim not in used:
            hint = did_you_mean(dim, used)
            yield at, f"no collection has these rows{hint}; found: {', '.join(used)}"
        if rows.min > rows.max:
            yield (*at, "min"), f"found {rows.min}, above max ({rows.max})"
        for i, n in enumerate(rows.typical):
            if not rows.min <= n <= rows.max:
                yield (
                    (*at, "typical", i),
                    f"found {n}; expected a value from min ({rows.min}) to max ({rows.max})",
                )


def _check_reference(config: Config) -> Iterator[Problem]:
    reference = config.reference
    if reference.factory is not None and reference.ranges:
        yield ("reference", "ranges"), "found ranges and a factory; a factory needs no ranges"
    inputs = {block.collection for block in config.inputs} & config.collections.keys()
    columns = [c.name for name in sorted(inputs) for c in config.collections[name].columns]
    for name, (low, high) in reference.ranges.items():
        at: Key = ("reference", "ranges", name)
        if name not in columns:
            yield at, f"not a column of an input collection: {not_among(name, columns)}"
        if low > high:
            yield at, f"found [{low}, {high}]; expected [low, high]"


def _identifier(at: Key, name: str) -> Iterator[Problem]:
    if not _IDENTIFIER.fullmatch(name):
        yield at, f"found {shown(name)}; allowed: letters, digits and '_', not a digit first"


def _repeats(at: Key, names: Iterable[str], *field: str) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            yield (*at, i, *field), f"found {name!r} a second time; each name once"
        seen.add(name)


def _itemsize(column: ColumnConfig) -> int:
    """Bytes of one element: the number in the dtype's name is its bits."""
    bits = re.search(r"\d+$", column.dtype)
    return int(bits[0]) // 8 if bits else 1
