"""Chooses the order of the axes of each input by trying them, and says why."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pipeline.errors import InitError
from pipeline.init.input_columns import Ask, Feed, check_items_per_row
from pipeline.init.model import Model
from pipeline.init.trial import (
    Option,
    Outcome,
    Search,
    can_be_exported,
    depends_on_dtype,
    find_rivals,
    have_other_numbers,
    have_same_answers,
    ignores_item_order,
    search,
    takes_more_items,
    try_options,
)

_ITEMS = (
    r"items?|particles?|constituents?|hits?|tracks?|seq\w*|time\w*|steps?|jets|points?|nodes?|L|P|T"
)
_FEATURES = r"features?|channels?|feat\w*|vars?|variables?|C|D|F|E"
_AXIS = re.compile(rf"\b(?:(?P<items>{_ITEMS})|(?P<features>{_FEATURES}))\b")
_BRACKETED = re.compile(r"[(\[\"']([^()\[\]\"']*)[)\]\"']")
_SHOWN, _SHOWN_COLUMNS = 6, 4  # attempts in a message, and columns of each input in it


@dataclass(frozen=True)
class Fitted:
    """What was chosen. `feeds`: those of all inputs, with the options that forward accepts.
    `outcome`: what forward did with them. `length`: the number of items of a jagged row that the
    model gets; 0 if no row is jagged. `said`: a sentence about each input, with what it gets and
    why.
    """

    feeds: list[Feed]
    outcome: Outcome
    length: int
    said: list[str]


def fit_options(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> Fitted:
    """Choose the order of the axes and the dtype of each input, so that forward runs. Raises
    InitError if it never does, or if nothing tells which of two orders is right.

    The number of items of a jagged row is `length`, else that in the user's axes, else weaver's,
    else the user's answer. Lists of equal length are tried as vectors first. They stay jagged rows
    if there is a `length` or a mask, or if forward does not run on vectors.
    """
    variants = [list(feeds)]
    if not length and not any(feed.mask for feed in feeds):
        vectors = [feed.vectors() for feed in feeds]
        changed = any(after is not feed for after, feed in zip(vectors, feeds, strict=True))
        variants = [vectors, list(feeds)] if changed else [vectors]
    for feed in variants[0]:
        check_items_per_row(feed)
    failed: list[tuple[list[Feed], Outcome]] = []
    for variant in variants:
        if any(len({column.cut for column in feed.columns}) > 1 for feed in variant):
            continue  # vectors and jagged columns in one input do not fit together
        size = _choose_length(model, variant, length, ask)
        result = _search_at_length(model, variant, size)
        if result.best is not None:
            decision = _decide(model, variant, result.best, size)
            _check_lone_column(model, variant, decision.outcome)
            _check_dtypes(model, variant, decision.outcome)
            options = zip(variant, decision.outcome.options, strict=True)
            chosen = [replace(feed, option=option) for feed, option in options]
            said = [_explain_input(feed, decision.why) for feed in chosen]
            return Fitted(chosen, decision.outcome, size, said)
        failed += [(variant, outcome) for outcome in result.failed]
    raise InitError(_describe_failures(failed))


def _search_at_length(model: Model, feeds: Sequence[Feed], size: int) -> Search:
    """Search for options that run with `size` items in each jagged row. The result has either the
    best combination, or the attempts that failed."""
    sizes = [size]
    if any(feed.jagged for feed in feeds) and not any(feed.asked_length for feed in feeds):
        # One item more first: if there are `size` columns too, only this shows which axis is which.
        sizes = [size + 1, size]
    failed: list[Outcome] = []
    for probe in sizes:
        choices = _list_choices(model, feeds, probe)
        result = search(model, choices)
        if result.best is None:
            failed = result.failed
            continue
        # The same options at `size`: they have the same indices in the lists.
        chosen = zip(_list_choices(model, feeds, size), choices, result.best.options, strict=True)
        options = [at_size[at_probe.index(best)] for at_size, at_probe, best in chosen]
        outcome = try_options(model, options)
        if not outcome.error:
            return Search(outcome, [])
        failed = [outcome]
    return Search(None, failed)


def _list_choices(model: Model, feeds: Sequence[Feed], size: int) -> list[list[Option]]:
    """Returns the options of each input with `size` items in a jagged row. Raises InitError for an
    input that has none."""
    choices = [feed.options(model.dtype, size) for feed in feeds]
    for feed, options in zip(feeds, choices, strict=True):
        if not options:
            raise InitError(
                f"--input {feed.port.name}: its columns cannot be ({', '.join(feed.asked.axes)}): "
                "give the axes of the model's tensor, with n for the rows"
            )
    return choices


@dataclass(frozen=True)
class _Decision:
    """The combination that is taken; `why` is a clause for the sentences about the inputs."""

    outcome: Outcome
    why: str


def _decide(model: Model, feeds: Sequence[Feed], first: Outcome, size: int) -> _Decision:
    """Decide between the combination `first` and those that run with another order of axes.

    Several kinds of evidence are asked in turn, the strongest first. The first kind that speaks for
    exactly one combination decides. Raises InitError if none does. `size`: the number of items of a
    jagged row.
    """
    others = list(find_rivals(model, first, _list_choices(model, feeds, size)))
    if not others:
        says = all(feed.asked.axes for feed in feeds)
        return _Decision(first, "as --input says" if says else "it runs so")
    differing = [other for other in others if not have_same_answers(other, first)]
    if not differing:
        return _Decision(first, "the answers are the same in the other order")
    possible = [first, *differing]
    if isinstance(model.module, torch.jit.ScriptModule):
        possible = [o for o in possible if can_be_exported(model, o)] or possible
        if len(possible) == 1:
            return _Decision(possible[0], "torch exports no other order")
    longer = [o for o in possible if takes_more_items(model, o)]
    if len(longer) == 1:
        return _Decision(longer[0], "so it takes any number of items")
    documented = _find_documented_order(model)
    agreeing = [o for o in possible if documented in {option.meaning for option in o.options}]
    if len(agreeing) == 1:
        return _Decision(agreeing[0], "as its documentation says")
    symmetric = [o for o in possible if ignores_item_order(model, o)]
    if len(symmetric) == 1:
        return _Decision(symmetric[0], "so the order of the items does not matter")
    raise InitError(_ask_which_order(feeds, *possible[:2]))


def _check_dtypes(model: Model, feeds: Sequence[Feed], outcome: Outcome) -> None:
    """Raise InitError if forward takes an input in another likely dtype, too, and gives other
    answers then: integers wrap around, a float32 holds no whole number above 2^24, and a mask of
    numbers may be added."""
    for i, (feed, option) in enumerate(zip(feeds, outcome.options, strict=True)):
        for dtype, limits in feed.other_dtypes(option.dtype):
            if depends_on_dtype(model, outcome.options, i, dtype, limits):
                axes = f"({', '.join(option.named)})"
                raise InitError(
                    f"forward runs on {feed.port.name} as {dtype} and as {option.dtype}, with "
                    "other answers, and nothing says which one is meant: "
                    f"{_advise(feed, f'{axes} {dtype}', f'{axes} {option.dtype}')}"
                )


def _check_lone_column(model: Model, feeds: Sequence[Feed], outcome: Outcome) -> None:
    """Raise InitError if an input is one column, given as (n, 1), and forward also runs on it as
    (n,), with other answers: a sum along the last axis is then one of all rows."""
    for i, (feed, option) in enumerate(zip(feeds, outcome.options, strict=True)):
        if option.shape != (1,) or feed.asked.axes or feed.trained or feed.mask:
            continue
        plain = Option((), ("n",), dtype=option.dtype)
        other = try_options(model, [*outcome.options[:i], plain, *outcome.options[i + 1 :]])
        if not other.error and have_other_numbers(other, outcome):
            raise InitError(
                f"forward runs on {feed.port.name} as (n, 1) and as (n), with other answers, and "
                f"nothing says which one is meant: {_advise(feed, '(n, features)', '(n)')}"
            )


def _advise(feed: Feed, *forms: str) -> str:
    """Returns the end of a message: the options that give the columns of an input in each form."""
    columns = ",".join(column.name for column in feed.columns)
    return "give " + " or ".join(f"--input '{feed.port.name}={form}: {columns}'" for form in forms)


def _find_documented_order(model: Model) -> tuple[str, ...]:
    """Returns `items` and `features` in the order of a shape such as "(batch, particles, features)"
    in the docstrings of the model and of forward, or in forward's type hints; () if they have none.
    """
    docstrings = type(model.module).__doc__, getattr(model.module.forward, "__doc__", "")
    for text in (*docstrings, _describe_signature(model)):
        for shape in _BRACKETED.findall(text or ""):
            axes = tuple(str(word.lastgroup) for word in _AXIS.finditer(shape))
            if sorted(axes) == ["features", "items"]:
                return axes
    return ()


def _describe_signature(model: Model) -> str:
    """Returns the signature of forward with its type hints as text; "" if it cannot be read."""
    try:
        return str(inspect.signature(model.module.forward))
    except (TypeError, ValueError):
        return ""


def _ask_which_order(feeds: Sequence[Feed], one: Outcome, other: Outcome) -> str:
    """Returns the text of an error that asks which of two orders of axes is meant."""
    inputs = zip(feeds, one.options, other.options, strict=True)
    feed, first, second = next(entry for entry in inputs if entry[1].meaning != entry[2].meaning)
    name = feed.port.name
    this, that = (f"({', '.join(option.named)})" for option in (first, second))
    return (
        f"forward runs on {name} as {this} and as {that}, with other answers, and nothing says "
        f"which one it was trained with: {_advise(feed, this, that)}"
    )


def _explain_input(feed: Feed, why: str) -> str:
    """Returns a sentence about what an input gets: its shape, its dtype, the meaning of its axes,
    and `why` this was chosen."""
    option, name = feed.option, feed.port.name
    text = f"{name} is ({', '.join(option.sizes)}) {option.dtype}"
    letters = {"items": "i", "features": "j"}
    if {"items", "features"} <= {*option.named}:
        index = ", ".join(letters.get(axis, ":") for axis in option.named)
        text += f": {name}[{index}] is item i, feature j"
    elif option.named != ("n", "features"):
        text += f": its axes are {', '.join(option.named)}"
    if feed.mask:
        text += ", 1 where there is an item"
    elif not (option.dtype.startswith("float") or feed.trained or feed.whole):
        text += ", which cuts off the fractions of its columns"
    return f"{text} ({why})"


def _describe_failures(failed: Sequence[tuple[list[Feed], Outcome]]) -> str:
    """Returns the text of an error that lists the attempts, each with its shapes and with the line
    of forward that failed, and says what to do. `failed`: the feeds and the outcome of each."""
    errors: dict[str, str] = {}
    for feeds, outcome in failed:
        errors.setdefault(_list_shapes(feeds, outcome.options), outcome.error)
    listed = [f"{shapes} ({error})" for shapes, error in [*errors.items()][:_SHOWN]]
    feeds = failed[0][0]
    feed = next((feed for feed in feeds if not feed.mask), feeds[0])
    name, columns = feed.port.name, ",".join(column.name for column in feed.columns)
    vectors = any(column.values.ndim > 1 for column in feed.columns)
    has_items = vectors or feed.jagged or len(feed.option.axes) > 2
    axes = "n, items, features" if has_items else "n, features"
    return (
        f"forward does not run on {'; nor on '.join(listed)}. --input NAME=COLUMN,… names the "
        f"columns of an input, and --input '{name}=({axes}): {columns}' also its axes"
    )


def _list_shapes(feeds: Sequence[Feed], options: Sequence[Option]) -> str:
    """Returns the inputs of an attempt as text, with their shapes and the first columns of each."""

    def describe(feed: Feed, option: Option) -> str:
        names = [column.name for column in feed.columns]
        more = ", …" if len(names) > _SHOWN_COLUMNS else ""
        columns = "" if feed.mask else f" of {', '.join(names[:_SHOWN_COLUMNS])}{more}"
        dtype = "" if option.dtype.startswith("float") else f" {option.dtype}"
        return f"{feed.port.name} ({', '.join(option.sizes)}){dtype}{columns}"

    return ", ".join(map(describe, feeds, options))


def _choose_length(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> int:
    """Returns how many items of a jagged row the model gets; 0 if no input is jagged. The order of
    the sources is that of `fit_options`. Raises InitError, also if the model runs on single items:
    then the user must choose between `--flatten` and `--length`."""
    columns = [column for feed in feeds for column in feed.columns]
    offsets: list[Any] = [column.offsets for column in columns if column.offsets is not None]
    trained = max((feed.trained.length for feed in feeds if feed.trained), default=0)
    size = length or max(feed.asked_length for feed in feeds) or trained
    if not offsets or size:
        return size
    if not any(feed.mask or feed.asked.axes for feed in feeds):
        flat = [feed.flat() for feed in feeds]
        result = search(model, [feed.options(model.dtype, length=1)[:1] for feed in flat])
        if result.best is not None:
            raise InitError(
                f"forward takes {_list_shapes(flat, result.best.options)}, and the columns are "
                "jagged: --flatten makes a row of each item; or --length N, if the model takes "
                "whole rows"
            )
    largest = max(int(np.diff(ends).max(initial=1)) for ends in offsets)
    answer = ask("--length", "how many items of a row the model sees at most", str(largest))
    if not answer.isdecimal() or not int(answer):
        raise InitError(f"--length: found {answer!r}; expected a whole number")
    return int(answer)
