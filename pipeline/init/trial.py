"""Runs a model on random rows: with which order of axes, which dtypes, and what it returns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice, product
from typing import Any

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from pipeline.init.model import Model
from soa.dtypes import torch_dtype
from stages.model import Arrangement, Order, as_exportable, where_raised

_MOST = 4000  # combinations that are tried at most
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_AS_IS = Order()


@dataclass(frozen=True)
class Option:
    """A way to give one input: `shape` is a row of the block, whose axes are called `axes` (the
    rows are `n`); `order` makes the model's tensor of it."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    order: Order = _AS_IS
    dtype: str = "float32"

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the axes of the model's tensor."""
        names = self._in_order(self.axes)
        return (names[0], "*".join(names[1:])) if self.order.flatten else names

    @property
    def sizes(self) -> tuple[str, ...]:
        """The axes of the model's tensor as numbers, with n for the rows."""
        sizes = self._in_order(("n", *map(str, self.shape)))
        return (sizes[0], str(math.prod(self.shape))) if self.order.flatten else sizes

    @property
    def meaning(self) -> tuple[str, ...]:
        """Which of items and features comes first; two options of one meaning hold the same
        numbers in the same order."""
        words = "*".join(self.named).split("*")
        return tuple(word for word in words if word in ("items", "features"))

    @property
    def rows_axis(self) -> int:
        """The axis of the rows in the model's tensor."""
        return self.named.index("n")

    def _in_order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of the block, in the order of the model's tensor."""
        return tuple(axes[i] for i in self.order.permute) or axes


@dataclass(frozen=True)
class Output:
    """An output of a model: its value with the rows first, and the order that put them there."""

    name: str
    value: torch.Tensor
    order: Order


@dataclass(frozen=True)
class Outcome:
    """What a model did with a combination of options. `error`: why it does not run, else ""."""

    options: tuple[Option, ...]
    error: str = ""
    outputs: tuple[Output, ...] = ()
    independent: bool = False
    """Whether the other rows stayed the same when one row was changed."""

    @property
    def is_number(self) -> bool:
        """Whether no answer to the random rows is NaN. A trace checks no sizes: with the wrong axes
        it may read other memory."""
        return not any(each.value.isnan().any() for each in self.outputs)


def rows_of_trial(options: Sequence[Option]) -> int:
    """A number of rows that is no other size of these inputs."""
    taken = {size for option in options for size in option.shape}
    return next((n for n in _PRIMES if n not in taken), 47)


def draw(options: Sequence[Option], n: int, seed: int = 1) -> list[torch.Tensor]:
    """Random blocks of n rows in [0, 1); integers are 0."""
    generator = torch.Generator().manual_seed(seed)
    uniform = [torch.rand((n, *option.shape), generator=generator) for option in options]
    return [
        (x > 0.3 if option.dtype == "bool" else x).to(torch_dtype(option.dtype))
        for x, option in zip(uniform, options, strict=True)
    ]


def call(model: Model, options: Sequence[Option], blocks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The outputs of the model by name, as it returns them.

    The names are the keys of a dict, the fields of a named tuple, or those of ONNX; else `output`,
    or `output0` and so on.
    """
    ports = tuple(port.name for port in model.ports)[: len(options)]
    arrangement = Arrangement(tuple(o.order for o in options), (), model.takes, ports)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = arrangement.call(model.module, blocks)
    if isinstance(returned, Mapping):
        return dict(returned)
    if not isinstance(returned, tuple | list):
        return {"output": returned}
    names: Sequence[str] = [f"output{i}" for i in range(len(returned))]
    if session := getattr(model.module, "session", None):  # ONNX Runtime's
        names = [node.name for node in session.get_outputs()]
    elif len(names) == 1:
        names = ["output"]
    return dict(zip(getattr(returned, "_fields", names), returned, strict=True))


def why_not(model: Model, options: Sequence[Option], n: int) -> str:
    """The error of the model on n rows, as text; empty if it runs."""
    try:
        call(model, options, draw(options, n))
    except Exception as error:
        return f"{first_line(error)} ({where_raised(error)})"
    return ""


def outcome_of(model: Model, options: Sequence[Option]) -> Outcome:
    """Run the model on such inputs, then again, and with the first row changed."""
    n, options = rows_of_trial(options), tuple(options)
    try:
        returned = call(model, options, draw(options, n))
        outputs = tuple(_rows_first(name, value, n) for name, value in returned.items())
        repeated = call(model, options, draw(options, n))
        if not all(_same(each.value, each.order.of(repeated[each.name])) for each in outputs):
            return Outcome(options, "it gives two answers to the same rows: model.eval(), no state")
        drawn = zip(draw(options, n), draw(options, n, seed=2), strict=True)
        first_changed = [torch.cat([other[:1], block[1:]]) for block, other in drawn]
        returned = call(model, options, first_changed)
        independent = all(
            _same(each.value[1:], each.order.of(returned[each.name])[1:]) for each in outputs
        )
    except Exception as error:
        return Outcome(options, f"{first_line(error)} ({where_raised(error)})")
    return Outcome(options, "", outputs, independent)


def _rows_first(name: str, value: Any, n: int) -> Output:
    """An output of `n` rows. ValueError if it has no axis of that size.

    `n` is no other size of the inputs (`rows_of_trial`), so that axis has the rows.
    """
    shape: list[Any] = [type(value).__name__]
    if isinstance(value, torch.Tensor):
        shape = [*value.shape]
    if n not in shape:
        raise ValueError(
            f"output {name} of {n} rows is {shape}: it has to be a tensor, a row for each"
        )
    rows_axis = shape.index(n)
    other_axes = (i for i in range(len(shape)) if i != rows_axis)
    order = Order((rows_axis, *other_axes) if rows_axis else ())
    return Output(name, order.of(value), order)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two answers are the same but for rounding: a batch of another content may be
    computed in another order."""
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)


@dataclass(frozen=True)
class Search:
    """`best`: the combination to take, None if none runs. `failed`: those that do not run, the
    likely ones first."""

    best: Outcome | None
    failed: list[Outcome]


def search(model: Model, choices: Sequence[Sequence[Option]]) -> Search:
    """Find the first combination that runs and whose rows are independent, else the first that
    runs. One that gives NaN comes last.

    If the model runs with the rows first, but mixes them, it may take them second. Only layers that
    are made so are evidence for it: else `softmax(x, 0)` would become a softmax over features. It
    keeps its dtypes: a trial with integers, which are all 0, shows no mixing.
    """
    failed: list[Outcome] = []
    mixing: Outcome | None = None
    not_a_number: Outcome | None = None
    for options in _likely_first(choices):
        if mixing is not None and not _may_replace(mixing, options, model):
            continue
        outcome = outcome_of(model, options)
        if outcome.error:
            failed.append(outcome)
        elif not outcome.is_number:
            not_a_number = not_a_number or outcome
        elif outcome.independent:
            return Search(outcome, failed)
        else:
            mixing = mixing or outcome
    return Search(mixing or not_a_number, failed)


def _likely_first(choices: Sequence[Sequence[Option]]) -> list[list[Option]]:
    """Combinations of an option for each input, no more than `_MOST`. The options of an input are
    in the order of likelihood."""
    places = product(*(range(len(options)) for options in choices))
    likely = sorted(islice(places, 100_000), key=lambda each: (sum(each), each))[:_MOST]
    return [[options[i] for options, i in zip(choices, place, strict=True)] for place in likely]


def _may_replace(mixing: Outcome, options: Sequence[Option], model: Model) -> bool:
    """Whether these options may be right although others, which run first, mix the rows."""
    if [option.dtype for option in options] != [option.dtype for option in mixing.options]:
        return False
    return not any(option.rows_axis for option in options) or _made_for_rows_second(model)


def _made_for_rows_second(model: Model) -> bool:
    """Whether a layer of the model takes sequences as (items, rows, features)."""
    return any(getattr(layer, "batch_first", None) is False for layer in model.module.modules())


def rivals(model: Model, first: Outcome, choices: Sequence[Sequence[Option]]) -> Iterator[Outcome]:
    """Combinations that run too, in which one input has another order of items and features."""
    for i, (chosen, options) in enumerate(zip(first.options, choices, strict=True)):
        seen: set[tuple[str, ...]] = {chosen.meaning}
        for option in options:
            alike = option.dtype == chosen.dtype and option.rows_axis == chosen.rows_axis
            if not alike or option.meaning in seen or len(option.meaning) < 2:
                continue
            outcome = outcome_of(model, [*first.options[:i], option, *first.options[i + 1 :]])
            worse = (first.is_number and not outcome.is_number) or (
                first.independent and not outcome.independent
            )
            if not outcome.error and not worse:
                seen.add(option.meaning)
                yield outcome


def can_be_exported(model: Model, outcome: Outcome) -> bool:
    """Whether torch exports the model with these options. Operators of TorchScript may read other
    memory if a size is wrong; an export checks each size."""
    options = outcome.options
    arguments = [
        option.order.of(block)
        for option, block in zip(options, draw(options, rows_of_trial(options)), strict=True)
    ]
    try:
        with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            module = as_exportable(model.module, arguments)
            torch.export.export(module, tuple(arguments), strict=False).run_decompositions({})
    except Exception:  # torch raises many types
        return False
    return True


def with_more_items(outcome: Outcome) -> list[Option]:
    """The same options with one item more in each input that has items."""

    def longer(option: Option) -> Option:
        shape = tuple(
            size + 1 if name == "items" else size
            for name, size in zip(option.axes[1:], option.shape, strict=True)
        )
        return replace(option, shape=shape)

    return [longer(option) for option in outcome.options]


def ignores_item_order(model: Model, outcome: Outcome) -> bool:
    """Whether the answers stay the same if the items of each row change places."""
    options = outcome.options
    n = rows_of_trial(options)
    reversed_items = [
        x.flip(option.axes.index("items")) if "items" in option.axes else x
        for x, option in zip(draw(options, n), options, strict=True)
    ]
    before = call(model, options, draw(options, n))  # drawn anew: a model may change its input
    after = call(model, options, reversed_items)
    return all(_same(value, after[name]) for name, value in before.items())


def same_answers(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes have the same answers to the same blocks."""
    values = {each.name: each.value for each in b.outputs}
    return all(
        values[each.name].shape == each.value.shape and _same(each.value, values[each.name])
        for each in a.outputs
    )
