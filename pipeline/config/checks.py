"""What one part of a config says about another, and about the files it names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engines.target import Target
from pipeline.config.expressions import check_preprocess
from pipeline.config.wording import not_among, shown
from pipeline.config.yaml_lines import Key, Problem
from soa.block import plan_block
from soa.errors import SoaPipelineError

if TYPE_CHECKING:
    from pipeline.config.schema import BlockConfig, Config

T = TypeVar("T")
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
    """Every contradiction between the parts of a config, with the key where it shows.

    The rules of layouts, blocks and signatures are those of `soa`: what it refuses is placed here.
    """
    problems = [*_unknown_names(config), *_without_tf32(config)]

    def tried(at: Key, make: Callable[..., T], *given: Any) -> T | None:
        """None where it is refused, which is then among the problems."""
        try:
            return make(*given)
        except SoaPipelineError as error:
            problems.append((at, str(error)))
            return None

    for dim, rows in config.rows.items():
        tried(("rows", dim), rows.range)
    layouts = {n: tried(("collections", n), c.layout) for n, c in config.collections.items()}
    for at, block in _blocks(config):
        layout = layouts.get(block.collection)
        if layout is None or not set(block.columns) <= layout.by_name.keys():
            continue
        plan = tried(at, plan_block, block.block(), layout)
        if plan and getattr(block, "classifier", False) and len(plan.components) < 2:
            text = "found true; a classifier has two or more columns"
            problems.append(((*at, "classifier"), text))
        if preprocess := getattr(block, "preprocess", None):
            at = (*at, "preprocess")
            problems += check_preprocess(at, preprocess, block, config.members(block))
    if not problems:
        tried((), config.signature)
    return problems


def _blocks(config: Config) -> list[tuple[Key, BlockConfig]]:
    return [
        *((("inputs", i), block) for i, block in enumerate(config.inputs)),
        *((("outputs", i), block) for i, block in enumerate(config.outputs)),
    ]


def _unknown_names(config: Config) -> Iterator[Problem]:
    """Names of collections, columns and rows that are not there."""
    for at, block in _blocks(config):
        if (collection := config.collections.get(block.collection)) is None:
            yield (*at, "collection"), not_among(block.collection, config.collections)
            continue
        have = [c.name for c in collection.columns]
        for i, name in enumerate(block.columns):
            if name not in have:
                yield (*at, "columns", i), not_among(name, have)
    for name, collection in config.collections.items():
        if collection.rows not in config.rows:
            text = f"'rows' has no range for it: {not_among(collection.rows, config.rows)}"
            yield ("collections", name, "rows"), text
    used = {collection.rows for collection in config.collections.values()}
    for dim in config.rows.keys() - used:
        yield ("rows", dim), f"no collection has these rows: {not_among(dim, sorted(used))}"
    inputs = {block.collection for block in config.inputs} & config.collections.keys()
    columns = [c.name for name in sorted(inputs) for c in config.collections[name].columns]
    for name in config.reference.ranges:
        if name not in columns:
            text = f"not a column of an input collection: {not_among(name, columns)}"
            yield ("reference", "ranges", name), text


def _without_tf32(config: Config) -> Iterator[Problem]:
    if config.precision == "tf32":
        required = enumerate(config.gates.required_targets or ())
        targets: list[tuple[Key, str]] = [
            *((("targets", i), name) for i, name in enumerate(config.targets)),
            *((("gates", "required_targets", i), name) for i, name in required),
        ]
        for at, name in targets:
            if not Target.parse(name).has_tf32:
                text = "only CUDA GPUs have it, from cuda/sm_80 on"
                yield at, f"found {shown(name)} with precision: tf32; {text}"
