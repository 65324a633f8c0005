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

_MOST, _MOST_SORTED = 4000, 100_000  # combinations that are tried, and sorted before, at most
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_AS_IS = Order()


@dataclass(frozen=True)
class Option:
    """A way to give one input of the model. `shape`: the shape of a row of the block. `axes`: the
    names of the block's axes; that of the rows is called `n`. `order` makes the model's tensor of
    the block."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    order: Order = _AS_IS
    dtype: str = "float32"

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the axes of the model's tensor, such as `items*features` for joined ones."""
        names = self._reorder(self.axes)
        return (names[0], "*".join(names[1:])) if self.order.flatten else names

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes of the axes of the model's tensor, as text, with `n` for the rows."""
        sizes = self._reorder(("n", *map(str, self.shape)))
        return (sizes[0], str(math.prod(self.shape))) if self.order.flatten else sizes

    @property
    def meaning(self) -> tuple[str, ...]:
        """`items` and `features` in the order of the tensor's axes, without the other axes. With an
        equal meaning, two options give the model the same numbers of a row in the same order."""
        words = "*".join(self.named).split("*")
        return tuple(word for word in words if word in ("items", "features"))

    @property
    def rows_axis(self) -> int:
        """The axis of the rows in the model's tensor."""
        return self.named.index("n")

    def _reorder(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns `axes`, one value for each axis of the block, in the order in which the axes are
        in the model's tensor."""
        return tuple(axes[i] for i in self.order.permute) or axes


@dataclass(frozen=True)
class Output:
    """An output of a model. `value`: the tensor with the rows first; `order` put them there."""

    name: str
    value: torch.Tensor
    order: Order


@dataclass(frozen=True)
class Outcome:
    """What a model did when it got its inputs by these options, one for each input. `error`: why it
    does not run; "" if it does."""

    options: tuple[Option, ...]
    error: str = ""
    outputs: tuple[Output, ...] = ()
    independent: bool = False
    """Whether the answers for the other rows stayed the same when one row was changed."""

    @property
    def is_number(self) -> bool:
        """Whether no answer to the random rows is NaN. A TorchScript trace checks no sizes: with
        the wrong axes it may read memory that is not its own."""
        return not any(output.value.isnan().any() for output in self.outputs)


def rows_of_trial(options: Sequence[Option]) -> int:
    """Returns a number of rows that is not the size of another axis of these inputs, so that an
    axis of this size in an output is that of the rows."""
    taken = {size for option in options for size in option.shape}
    return next((n for n in _PRIMES if n not in taken), _PRIMES[-1])


def draw_blocks(options: Sequence[Option], n: int, seed: int = 1) -> list[torch.Tensor]:
    """Returns a random block of n rows for each option. Numbers are in [0, 1), integers are 0."""
    generator = torch.Generator().manual_seed(seed)
    uniform = [torch.rand((n, *option.shape), generator=generator) for option in options]
    return [
        (x > 0.3 if option.dtype == "bool" else x).to(torch_dtype(option.dtype))  # 70 % true
        for x, option in zip(uniform, options, strict=True)
    ]


def call(model: Model, options: Sequence[Option], blocks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Calls the model on blocks that are given by these options. Returns its outputs by name, as
    the model returns them.

    The names are the keys of a dict, the fields of a named tuple, or those in an ONNX file. Other
    outputs are called `output`, or `output0`, `output1`, … if there are several.
    """
    ports = tuple(port.name for port in model.ports)[: len(options)]
    arrangement = Arrangement(tuple(option.order for option in options), (), model.takes, ports)
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


def find_error(model: Model, options: Sequence[Option], n: int) -> str:
    """Runs the model on n random rows. Returns its error as text; "" if it runs."""
    try:
        call(model, options, draw_blocks(options, n))
    except Exception as error:
        return f"{first_line(error)} ({where_raised(error)})"
    return ""


def try_options(model: Model, options: Sequence[Option]) -> Outcome:
    """Runs the model three times on random inputs: twice on the same ones, which must give the same
    answers, and once with another first row, which shows whether rows are independent."""
    n, options = rows_of_trial(options), tuple(options)
    try:
        returned = call(model, options, draw_blocks(options, n))
        outputs = tuple(_put_rows_first(name, value, n) for name, value in returned.items())
        repeated = call(model, options, draw_blocks(options, n))
        if not all(_are_same(each.value, each.order.of(repeated[each.name])) for each in outputs):
            return Outcome(options, "it gives two answers to the same rows: model.eval(), no state")
        drawn = zip(draw_blocks(options, n), draw_blocks(options, n, seed=2), strict=True)
        first_changed = [torch.cat([other[:1], block[1:]]) for block, other in drawn]
        returned = call(model, options, first_changed)
        independent = all(
            _are_same(each.value[1:], each.order.of(returned[each.name])[1:]) for each in outputs
        )
    except Exception as error:
        return Outcome(options, f"{first_line(error)} ({where_raised(error)})")
    return Outcome(options, "", outputs, independent)


def _put_rows_first(name: str, value: Any, n: int) -> Output:
    """Returns an output of `n` rows, with the axis of the rows first. Raises ValueError if `value`
    is no tensor or has no axis of size n.

    Only the axis of the rows has the size n, since `rows_of_trial` chose it so.
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


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two answers are the same but for rounding: if other rows of a batch differ, sums may
    be computed in another order."""
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)


@dataclass(frozen=True)
class Search:
    """The result of `search`. `best`: the combination to take, None if none runs. `failed`: those
    that do not run, the likely ones first."""

    best: Outcome | None
    failed: list[Outcome]


def search(model: Model, choices: Sequence[Sequence[Option]]) -> Search:
    """Find the first combination of `choices`, which are the options of each input, that runs and
    whose rows are independent; else the first that runs. One that gives NaN is the last resort.

    If the model runs with the rows first, but mixes them, it may be made for rows on a later axis.
    Only a layer that is made so is evidence for it: else `softmax(x, 0)` would become a softmax
    over features. Nor do other dtypes replace a combination that mixes rows: a trial with integers,
    which are all 0, shows no mixing.
    """
    failed: list[Outcome] = []
    mixing: Outcome | None = None
    not_a_number: Outcome | None = None
    for options in _list_combinations(choices):
        if mixing is not None and not _may_be_better(mixing, options, model):
            continue
        outcome = try_options(model, options)
        if outcome.error:
            failed.append(outcome)
        elif not outcome.is_number:
            not_a_number = not_a_number or outcome
        elif outcome.independent:
            return Search(outcome, failed)
        else:
            mixing = mixing or outcome
    return Search(mixing or not_a_number, failed)


def _list_combinations(choices: Sequence[Sequence[Option]]) -> list[list[Option]]:
    """Returns combinations of an option for each input, the likely ones first, at most `_MOST`.

    The options of an input are in the order of likelihood, so a combination is as likely as the sum
    of their indices is small.
    """
    indices = product(*(range(len(options)) for options in choices))
    likely = sorted(islice(indices, _MOST_SORTED), key=lambda chosen: (sum(chosen), chosen))[:_MOST]
    return [[options[i] for options, i in zip(choices, chosen, strict=True)] for chosen in likely]


def _may_be_better(mixing: Outcome, options: Sequence[Option], model: Model) -> bool:
    """Whether `options` may be better than those of `mixing`, which run but mix the rows. They must
    have the same dtypes. If the rows are not first, a layer of the model must be made for this."""
    if [option.dtype for option in options] != [option.dtype for option in mixing.options]:
        return False
    return not any(option.rows_axis for option in options) or _takes_rows_second(model)


def _takes_rows_second(model: Model) -> bool:
    """Whether a layer of the model takes sequences as (items, rows, features), as torch's recurrent
    and attention layers do by default."""
    return any(getattr(layer, "batch_first", None) is False for layer in model.module.modules())


def find_rivals(
    model: Model, first: Outcome, choices: Sequence[Sequence[Option]]
) -> Iterator[Outcome]:
    """Yields combinations that differ from `first` in one input, which has another order of items
    and features, and that run as well. `choices`: the options of each input."""
    for i, (chosen, options) in enumerate(zip(first.options, choices, strict=True)):
        seen: set[tuple[str, ...]] = {chosen.meaning}
        for option in options:
            alike = option.dtype == chosen.dtype and option.rows_axis == chosen.rows_axis
            if not alike or option.meaning in seen or len(option.meaning) < 2:
                continue
            outcome = try_options(model, [*first.options[:i], option, *first.options[i + 1 :]])
            worse = (first.is_number and not outcome.is_number) or (
                first.independent and not outcome.independent
            )
            if not outcome.error and not worse:
                seen.add(option.meaning)
                yield outcome


def depends_on_dtype(
    model: Model, options: Sequence[Option], i: int, dtype: str, limits: tuple[float, float]
) -> bool:
    """Whether the model also runs with this dtype for input i, and gives other answers to the same
    numbers, which lie between `limits`."""
    blocks = draw_blocks(options, rows_of_trial(options))
    low, high = limits
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(blocks[i].shape, generator=generator, dtype=torch.float64)
    numbers = low + shares * (high - low)
    in_dtype = (numbers if dtype.startswith("float") else numbers.round()).to(torch_dtype(dtype))
    answers = []
    for block in (in_dtype, in_dtype.to(blocks[i].dtype)):
        try:
            answers.append(call(model, options, [*blocks[:i], block, *blocks[i + 1 :]]))
        except Exception:  # torch raises many types: the model does not take these numbers so
            return len(answers) == 1
    return not all(
        torch.allclose(value.double(), answers[1][name].double(), 1e-5, 1e-6, equal_nan=True)
        for name, value in answers[0].items()
    )


def can_be_exported(model: Model, outcome: Outcome) -> bool:
    """Whether torch exports the model with these options. An export checks each size; operators of
    TorchScript may not, and then read memory that is not theirs."""
    options = outcome.options
    blocks = draw_blocks(options, rows_of_trial(options))
    arguments = [option.order.of(block) for option, block in zip(options, blocks, strict=True)]
    try:
        with quiet_torch(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            module = as_exportable(model.module, arguments)
            torch.export.export(module, tuple(arguments), strict=False).run_decompositions({})
    except Exception:  # torch raises many types
        return False
    return True


def takes_more_items(model: Model, outcome: Outcome) -> bool:
    """Whether the model also runs with one item more in each input that has an axis of items. False
    if none has."""

    def longer(option: Option) -> Option:
        named_sizes = zip(option.axes[1:], option.shape, strict=True)
        shape = tuple(size + 1 if name == "items" else size for name, size in named_sizes)
        return replace(option, shape=shape)

    options = [longer(option) for option in outcome.options]
    return options != [*outcome.options] and not find_error(model, options, n=5)


def ignores_item_order(model: Model, outcome: Outcome) -> bool:
    """Whether the answers stay the same if the items of each row are reversed. False if no input
    has an axis of items."""
    options = outcome.options
    if not any("items" in option.axes for option in options):
        return False
    n = rows_of_trial(options)
    reversed_items = [
        x.flip(option.axes.index("items")) if "items" in option.axes else x
        for x, option in zip(draw_blocks(options, n), options, strict=True)
    ]
    before = call(model, options, draw_blocks(options, n))  # anew: a model may change its input
    after = call(model, options, reversed_items)
    return all(_are_same(value, after[name]) for name, value in before.items())


def have_same_answers(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes have the same answers to the same blocks."""
    values = {each.name: each.value for each in b.outputs}
    return all(
        values[each.name].shape == each.value.shape and _are_same(each.value, values[each.name])
        for each in a.outputs
    )


def have_other_numbers(a: Outcome, b: Outcome) -> bool:
    """Whether an output has as many elements in both outcomes, whatever the shape of its rows is,
    and other values."""
    pairs = [
        (x.value.flatten(), y.value.flatten()) for x, y in zip(a.outputs, b.outputs, strict=False)
    ]
    return any(len(x) == len(y) and not _are_same(x, y) for x, y in pairs)
