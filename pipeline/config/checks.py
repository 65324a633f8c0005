"""Checks that the parts of a config agree with each other, and that the named files exist."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engines.target import Target
from pipeline.config.expressions import check_preprocess
from pipeline.config.mistakes import not_among, quote
from pipeline.config.schema import SOURCES, BlockConfig, Config
from pipeline.config.yaml_lines import Key, Problem
from soa.block import plan_block
from soa.errors import SoaPipelineError
from soa.signature import offsets_of

T = TypeVar("T")


def check_config(config: Config) -> list[Problem]:
    """Returns every contradiction between the parts of a config as a problem: a key and a text.

    `soa` checks layouts, blocks and signatures; an error that it raises becomes a problem, too.
    """
    problems = [
        *_check_columns(config),
        *_check_row_dimensions(config),
        *_check_tf32(config),
        *_check_limits(config),
        *_check_metric_outputs(config),
    ]

    def attempt(key: Key, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call `function`. If it raises an error, add a problem at `key` and return None."""
        try:
            return function(*arguments)
        except SoaPipelineError as error:
            problems.append((key, str(error)))
            return None

    for dim, rows in config.rows.items():
        attempt(("rows", dim), rows.range)
    collections = config.collections.items()
    layouts = {name: attempt(("collections", name), part.layout) for name, part in collections}
    for key, block in _keyed_blocks(config):
        layout = layouts.get(block.collection)
        if layout is None or not set(block.columns) <= layout.by_name.keys():
            continue
        problems += _check_padding(config, key, block)
        if not block.columns:  # a mask
            continue
        plan = attempt(key, plan_block, config.block(block), layout)
        if plan and getattr(block, "classifier", False) and len(plan.components) < 2:
            text = "found true; a classifier has two or more columns"
            problems.append(((*key, "classifier"), text))
        if preprocess := getattr(block, "preprocess", None):
            key = (*key, "preprocess")
            bound, members = config.block(block), config.members(block)
            problems += check_preprocess(key, preprocess, bound, members)
    if not problems:
        attempt((), config.signature)
    return [*problems, *_check_files(config)]


def _check_files(config: Config) -> Iterator[Problem]:
    """Yields a problem for each named file that does not exist, and for each callable that is
    neither `file.py:name` nor `module:name`."""
    model, reference, metrics = config.model, config.reference, config.gates.metrics
    named: list[tuple[Key, str | None]] = [
        *((("model", key), getattr(model, key)) for key in (*SOURCES, "weights")),
        (("reference", "file"), reference.file),
        (("reference", "factory"), reference.factory),
    ]
    if metrics is not None:
        metrics_key, functions = ("gates", "metrics"), metrics.own_functions.items()
        named += [((*metrics_key, "data"), metrics.data)]
        named += [((*metrics_key, "functions", name, "function"), own) for name, own in functions]
    for key, written in named:
        if written is not None:
            resolve = config.factory if key[-1] in ("factory", "function") else config.file
            try:
                resolve(written)
            except ValueError as error:
                yield key, str(error)


def _keyed_blocks(config: Config) -> list[tuple[Key, BlockConfig]]:
    """Returns every input and output block, each with its key."""
    return [
        *((("inputs", i), block) for i, block in enumerate(config.inputs)),
        *((("outputs", i), block) for i, block in enumerate(config.outputs)),
    ]


def _check_columns(config: Config) -> Iterator[Problem]:
    """Yields a problem for each name of a collection or column that the config does not define."""
    columns_of = {name: [c.name for c in part.columns] for name, part in config.collections.items()}
    for key in config.apply.columns:
        collection, _, column = key.partition("/")
        if collection not in columns_of or column not in ("*", *columns_of[collection]):
            yield ("apply", "columns", key), "there is no such column; write collection/column"
    for block_key, block in _keyed_blocks(config):
        if block.collection not in columns_of:
            yield (*block_key, "collection"), not_among(block.collection, columns_of)
            continue
        defined = columns_of[block.collection]
        for i, name in enumerate(block.columns):
            if name not in defined:
                yield (*block_key, "columns", i), not_among(name, defined)
    inputs = {block.collection for block in config.inputs} & columns_of.keys()
    input_columns = [column for collection in sorted(inputs) for column in columns_of[collection]]
    for name in config.reference.ranges:
        if name not in input_columns:
            text = f"not a column of an input collection: {not_among(name, input_columns)}"
            yield ("reference", "ranges", name), text


def _check_row_dimensions(config: Config) -> Iterator[Problem]:
    """Yields a problem for each row dimension of a collection that has no range in `rows`, for each
    range that no collection uses, and for a collection that is called like the offsets of another.
    """
    used: set[str] = set()
    for name, collection in config.collections.items():
        collection_key: Key = ("collections", name)
        dims: dict[Key, str] = {(*collection_key, "rows"): collection.rows}
        if collection.jagged:
            dims[*collection_key, "jagged", "rows"] = collection.jagged.rows
            if offsets_of(name) in config.collections:
                text = f"its offsets are {offsets_of(name)!r}, also a collection's name: rename one"
                yield collection_key, text
        for key, dim in dims.items():
            if dim not in config.rows:
                yield key, f"'rows' has no range for it: {not_among(dim, config.rows)}"
            used.add(dim)
    for dim in config.rows.keys() - used:
        yield ("rows", dim), f"no collection has these rows: {not_among(dim, sorted(used))}"


def _check_padding(config: Config, key: Key, block: BlockConfig) -> Iterator[Problem]:
    """Yields a problem if a block has `pad` or `mask` although its rows are not jagged, or if its
    shape is not that of the padded rows. `key`: that of the block."""
    jagged, mask = config.jagged(block), getattr(block, "mask", False)
    if jagged is None:
        if mask or getattr(block, "pad", None) is not None:
            text = f"collection {block.collection!r} is not jagged: nothing is padded"
            yield (*key, "mask" if mask else "pad"), text
        return
    if block.shape is None:
        return
    if mask:
        fits, allowed = math.prod(block.shape) == jagged.length, f"{jagged.length} places"
    else:
        features = _count_item_features(config, block)
        shapes: list[tuple[int, ...]] = [(jagged.length, features)]
        if features == 1:
            shapes.append((jagged.length,))
        listed = " or ".join(str([*shape]) for shape in shapes)
        fits, allowed = block.shape in shapes, f"{listed}, or none: then items come last"
    if not fits:
        yield (*key, "shape"), f"found {list(block.shape)}; expected {allowed}"


def _count_item_features(config: Config, block: BlockConfig) -> int:
    """Returns how many numbers the model gets of each item of a jagged block."""
    extents = [math.prod(member.eigen or ()) for member in config.members(block)]
    preprocess = getattr(block, "preprocess", None)
    # The columns of a preprocessed block are numbers, or vectors of one shape.
    return len(preprocess.features) * max(extents) if preprocess else sum(extents)


def _check_tf32(config: Config) -> Iterator[Problem]:
    """Yields a problem for each target that has no TF32, if the config asks for TF32."""
    if config.precision != "tf32":
        return
    required = enumerate(config.gates.required_targets or ())
    targets: list[tuple[Key, str]] = [
        *((("targets", i), name) for i, name in enumerate(config.targets)),
        *((("gates", "required_targets", i), name) for i, name in required),
    ]
    for key, name in targets:
        if not Target.parse(name).has_tf32:
            text = "only CUDA GPUs have it, from cuda/sm_80 on"
            yield key, f"found {quote(name)} with precision: tf32; {text}"


def _check_limits(config: Config) -> Iterator[Problem]:
    """Yields a problem for each limit of a gate that names an unknown row dimension, lacks one, or
    has a number of rows outside the dimension's range."""
    for gate in ("latency_p99_us", "memory_mb"):
        for i, limit in enumerate(getattr(config.gates, gate) or ()):
            key = ("gates", gate, i, "rows")
            for dim, n in limit.rows.items():
                rows = config.rows.get(dim)
                if rows is None:
                    yield (*key, dim), not_among(dim, config.rows)
                elif not rows.min <= n <= rows.max:
                    yield (*key, dim), f"found {n}; {dim} has {rows.min} to {rows.max}"
            for dim in config.rows.keys() - limit.rows.keys():
                yield key, f"the rows of {dim!r} are missing"


def _check_metric_outputs(config: Config) -> Iterator[Problem]:
    """Yields a problem for each metric of an output that the config does not define.

    A metric names an output block, or a column of one. If several output columns have the same
    name, it is written with the collection in front: `jets/p_b`.
    """
    if config.gates.metrics is None:
        return
    columns = [(block.collection, name) for block in config.outputs for name in block.columns]
    count_of = Counter(name for _, name in columns)
    outputs = [block.name for block in config.outputs]
    outputs += [name if count_of[name] == 1 else f"{part}/{name}" for part, name in columns]
    for name, metric in config.gates.metrics.functions.items():
        if metric.output not in outputs:
            key: Key = ("gates", "metrics", "functions", name, "output")
            yield key, not_among(metric.output, outputs)
