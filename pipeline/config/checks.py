"""Checks that the parts of a config agree with each other, and that the named files exist."""

from __future__ import annotations

import math
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
        *_gates(config),
    ]

    def tried(at: Key, make: Callable[..., T], *given: Any) -> T | None:
        """The result of `make`; None if it raised an error, which is then among the problems."""
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
        problems += _jagged(config, at, block)
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
    return [
        *((("inputs", i), block) for i, block in enumerate(config.inputs)),
        *((("outputs", i), block) for i, block in enumerate(config.outputs)),
    ]


def _unknown_columns(config: Config) -> Iterator[Problem]:
    """Names of collections and columns that the config does not define."""
    for key in config.apply.columns:
        name, _, column = key.partition("/")
        collection = config.collections.get(name)
        if collection is None or column not in ("*", *(c.name for c in collection.columns)):
            yield ("apply", "columns", key), "there is no such column; write collection/column"
    for at, block in _blocks(config):
        if (collection := config.collections.get(block.collection)) is None:
            yield (*at, "collection"), not_among(block.collection, config.collections)
            continue
        have = [c.name for c in collection.columns]
        for i, name in enumerate(block.columns):
            if name not in have:
                yield (*at, "columns", i), not_among(name, have)
    inputs = {block.collection for block in config.inputs} & config.collections.keys()
    columns = [c.name for name in sorted(inputs) for c in config.collections[name].columns]
    for name in config.reference.ranges:
        if name not in columns:
            text = f"not a column of an input collection: {not_among(name, columns)}"
            yield ("reference", "ranges", name), text


def _unknown_rows(config: Config) -> Iterator[Problem]:
    """Row dimensions without a range, and ranges for unknown row dimensions."""
    used: set[str] = set()
    for name, collection in config.collections.items():
        at: Key = ("collections", name)
        counted: dict[Key, str] = {(*at, "rows"): collection.rows}
        if collection.jagged:
            counted[*at, "jagged", "rows"] = collection.jagged.rows
            if offsets_of(name) in config.collections:
                text = f"its offsets are {offsets_of(name)!r}, also a collection's name: rename one"
                yield at, text
        for at, dim in counted.items():
            if dim not in config.rows:
                yield at, f"'rows' has no range for it: {not_among(dim, config.rows)}"
            used.add(dim)
    for dim in config.rows.keys() - used:
        yield ("rows", dim), f"no collection has these rows: {not_among(dim, sorted(used))}"


def _jagged(config: Config, at: Key, block: BlockConfig) -> Iterator[Problem]:
    """Mistakes about padding in a block: pad or mask without jagged rows, or a wrong shape."""
    jagged, preprocess = config.jagged(block), getattr(block, "preprocess", None)
    mask, pad = getattr(block, "mask", False), getattr(block, "pad", None)
    if jagged is None:
        if mask or pad is not None:
            text = f"collection {block.collection!r} is not jagged: nothing is padded"
            yield (*at, "mask" if mask else "pad"), text
    elif block.shape is not None:
        extents = [math.prod(member.eigen or ()) for member in config.members(block)]
        features = len(preprocess.features) * max(extents) if preprocess else sum(extents)
        wanted = [(jagged.length, features), *([(jagged.length,)] if features == 1 else [])]
        if mask:
            fits, allowed = math.prod(block.shape) == jagged.length, f"{jagged.length} places"
        else:
            listed = " or ".join(str([*each]) for each in wanted)
            fits, allowed = block.shape in wanted, f"{listed}, or none: then items come last"
        if not fits:
            yield (*at, "shape"), f"found {list(block.shape)}; expected {allowed}"


def _without_tf32(config: Config) -> Iterator[Problem]:
    """Targets that have no TF32, if the config asks for it."""
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


def _gates(config: Config) -> Iterator[Problem]:
    """Wrong row dimensions, numbers of rows, and outputs in the gates."""
    gates = config.gates
    for key in ("latency_p99_us", "memory_mb"):
        for i, limit in enumerate(getattr(gates, key) or ()):
            at = ("gates", key, i, "rows")
            for dim, n in limit.rows.items():
                rows = config.rows.get(dim)
                if rows is None:
                    yield (*at, dim), not_among(dim, config.rows)
                elif not rows.min <= n <= rows.max:
                    yield (*at, dim), f"found {n}; {dim} has {rows.min} to {rows.max}"
            for dim in config.rows.keys() - limit.rows.keys():
                yield at, f"the rows of {dim!r} are missing"
    if gates.metrics is None:
        return
    columns = [(b.collection, name) for b in config.outputs for name in b.columns]
    names = [name for _, name in columns]
    have = [b.name for b in config.outputs]
    have += [name if names.count(name) == 1 else f"{where}/{name}" for where, name in columns]
    for name, metric in gates.metrics.functions.items():
        if metric.output not in have:
            yield ("gates", "metrics", "functions", name, "output"), not_among(metric.output, have)
