"""Checks that the parts of a config agree with each other, and that the named files exist."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engines.target import Target
from pipeline.config.expressions import check_preprocess
from pipeline.config.mistakes import not_among, shown
from pipeline.config.schema import SOURCES, BlockConfig, Config
from pipeline.config.yaml_lines import Key, Problem
from soa.block import plan_block
from soa.errors import SoaPipelineError
from soa.signature import offsets_of

T = TypeVar("T")


def check_config(config: Config) -> list[Problem]:
    """Every contradiction between the parts of a config, each with its key.

    `soa` checks layouts, blocks and signatures; its errors become problems with a key.
    """
    problems = [
        *_unknown_columns(config),
        *_unknown_rows(config),
        *_without_tf32(config),
        *_limits(config),
        *_metrics(config),
    ]

    def tried(at: Key, make: Callable[..., T], *arguments: Any) -> T | None:
        """The result of `make`; None if it raised an error, which is then among the problems."""
        try:
            return make(*arguments)
        except SoaPipelineError as error:
            problems.append((at, str(error)))
            return None

    for dim, rows in config.rows.items():
        tried(("rows", dim), rows.range)
    collections = config.collections.items()
    layouts = {name: tried(("collections", name), each.layout) for name, each in collections}
    for at, block in _blocks(config):
        layout = layouts.get(block.collection)
        if layout is None or not set(block.columns) <= layout.by_name.keys():
            continue
        problems += _padding(config, at, block)
        if not block.columns:
            continue
        plan = tried(at, plan_block, config.block(block), layout)
        if plan and getattr(block, "classifier", False) and len(plan.components) < 2:
            text = "found true; a classifier has two or more columns"
            problems.append(((*at, "classifier"), text))
        if preprocess := getattr(block, "preprocess", None):
            at = (*at, "preprocess")
            problems += check_preprocess(at, preprocess, config.block(block), config.members(block))
    if not problems:
        tried((), config.signature)
    return [*problems, *_files(config)]


def _files(config: Config) -> Iterator[Problem]:
    """Files that are not there, and callables in another form than those of a factory."""
    model, reference, metrics = config.model, config.reference, config.gates.metrics
    named: list[tuple[Key, str | None]] = [
        *((("model", key), getattr(model, key)) for key in (*SOURCES, "weights")),
        (("reference", "file"), reference.file),
        (("reference", "factory"), reference.factory),
    ]
    if metrics is not None:
        callables = metrics.own_functions
        at = ("gates", "metrics", "functions")
        named += [(("gates", "metrics", "data"), metrics.data)]
        named += [((*at, name, "function"), function) for name, function in callables.items()]
    for key, written in named:
        if written is not None:
            find = config.factory if key[-1] in ("factory", "function") else config.file
            try:
                find(written)
            except ValueError as error:
                yield key, str(error)


def _blocks(config: Config) -> list[tuple[Key, BlockConfig]]:
    """Every block, with its key."""
    return [
        *((("inputs", i), block) for i, block in enumerate(config.inputs)),
        *((("outputs", i), block) for i, block in enumerate(config.outputs)),
    ]


def _unknown_columns(config: Config) -> Iterator[Problem]:
    """Names of collections and columns that the config does not define."""
    columns_of = {name: [c.name for c in part.columns] for name, part in config.collections.items()}
    for key in config.apply.columns:
        collection, _, column = key.partition("/")
        if collection not in columns_of or column not in ("*", *columns_of[collection]):
            yield ("apply", "columns", key), "there is no such column; write collection/column"
    for at, block in _blocks(config):
        if block.collection not in columns_of:
            yield (*at, "collection"), not_among(block.collection, columns_of)
            continue
        have = columns_of[block.collection]
        for i, name in enumerate(block.columns):
            if name not in have:
                yield (*at, "columns", i), not_among(name, have)
    inputs = {block.collection for block in config.inputs} & columns_of.keys()
    columns = [column for collection in sorted(inputs) for column in columns_of[collection]]
    for name in config.reference.ranges:
        if name not in columns:
            text = f"not a column of an input collection: {not_among(name, columns)}"
            yield ("reference", "ranges", name), text


def _unknown_rows(config: Config) -> Iterator[Problem]:
    """Row dimensions without a range, and ranges for unknown row dimensions."""
    used: set[str] = set()
    for name, collection in config.collections.items():
        at: Key = ("collections", name)
        dims: dict[Key, str] = {(*at, "rows"): collection.rows}
        if collection.jagged:
            dims[*at, "jagged", "rows"] = collection.jagged.rows
            if offsets_of(name) in config.collections:
                text = f"its offsets are {offsets_of(name)!r}, also a collection's name: rename one"
                yield at, text
        for key, dim in dims.items():
            if dim not in config.rows:
                yield key, f"'rows' has no range for it: {not_among(dim, config.rows)}"
            used.add(dim)
    for dim in config.rows.keys() - used:
        yield ("rows", dim), f"no collection has these rows: {not_among(dim, sorted(used))}"


def _padding(config: Config, at: Key, block: BlockConfig) -> Iterator[Problem]:
    """Mistakes about padding in a block: pad or mask without jagged rows, or a wrong shape."""
    jagged, mask = config.jagged(block), getattr(block, "mask", False)
    if jagged is None:
        if mask or getattr(block, "pad", None) is not None:
            text = f"collection {block.collection!r} is not jagged: nothing is padded"
            yield (*at, "mask" if mask else "pad"), text
        return
    if block.shape is None:
        return
    if mask:
        fits, allowed = math.prod(block.shape) == jagged.length, f"{jagged.length} places"
    else:
        features = _features_of_an_item(config, block)
        shapes: list[tuple[int, ...]] = [(jagged.length, features)]
        if features == 1:
            shapes.append((jagged.length,))
        listed = " or ".join(str([*shape]) for shape in shapes)
        fits, allowed = block.shape in shapes, f"{listed}, or none: then items come last"
    if not fits:
        yield (*at, "shape"), f"found {list(block.shape)}; expected {allowed}"


def _features_of_an_item(config: Config, block: BlockConfig) -> int:
    """How many numbers the model gets of each item of a jagged block."""
    extents = [math.prod(member.eigen or ()) for member in config.members(block)]
    preprocess = getattr(block, "preprocess", None)
    # The columns of a preprocessed block are numbers, or vectors of one shape.
    return len(preprocess.features) * max(extents) if preprocess else sum(extents)


def _without_tf32(config: Config) -> Iterator[Problem]:
    """Targets that have no TF32, if the config asks for it."""
    if config.precision != "tf32":
        return
    required = enumerate(config.gates.required_targets or ())
    targets: list[tuple[Key, str]] = [
        *((("targets", i), name) for i, name in enumerate(config.targets)),
        *((("gates", "required_targets", i), name) for i, name in required),
    ]
    for at, name in targets:
        if not Target.parse(name).has_tf32:
            text = "only CUDA GPUs have it, from cuda/sm_80 on"
            yield at, f"found {shown(name)} with precision: tf32; {text}"


def _limits(config: Config) -> Iterator[Problem]:
    """Wrong or missing row dimensions, and wrong numbers of rows, in the limits of the gates."""
    for key in ("latency_p99_us", "memory_mb"):
        for i, limit in enumerate(getattr(config.gates, key) or ()):
            at = ("gates", key, i, "rows")
            for dim, n in limit.rows.items():
                rows = config.rows.get(dim)
                if rows is None:
                    yield (*at, dim), not_among(dim, config.rows)
                elif not rows.min <= n <= rows.max:
                    yield (*at, dim), f"found {n}; {dim} has {rows.min} to {rows.max}"
            for dim in config.rows.keys() - limit.rows.keys():
                yield at, f"the rows of {dim!r} are missing"


def _metrics(config: Config) -> Iterator[Problem]:
    """Outputs that metrics name and the config does not define.

    An output is a block, or a column of one: with its collection in front if another output column
    has the same name.
    """
    if config.gates.metrics is None:
        return
    columns = [(block.collection, name) for block in config.outputs for name in block.columns]
    count_of = Counter(name for _, name in columns)
    have = [block.name for block in config.outputs]
    have += [name if count_of[name] == 1 else f"{where}/{name}" for where, name in columns]
    for name, metric in config.gates.metrics.functions.items():
        if metric.output not in have:
            yield ("gates", "metrics", "functions", name, "output"), not_among(metric.output, have)
