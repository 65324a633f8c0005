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
from pipeline.init.input_columns import Ask, Feed, check_cuts
from pipeline.init.model import Model
from pipeline.init.trial import (
    Option,
    Outcome,
    Search,
    can_be_exported,
    ignores_item_order,
    outcome_of,
    rivals,
    same_answers,
    search,
    why_not,
    with_more_items,
)

_ITEMS = (
    r"items?|particles?|constituents?|hits?|tracks?|seq\w*|time\w*|steps?|jets|points?|nodes?|L|P|T"
)
_FEATURES = r"features?|channels?|feat\w*|vars?|variables?|C|D|F|E"
_AXIS = re.compile(rf"\b(?:(?P<items>{_ITEMS})|(?P<features>{_FEATURES}))\b")
_BRACKETED = re.compile(r"[(\[\"']([^()\[\]\"']*)[)\]\"']")
_SHOWN = 6  # attempts in a message


@dataclass(frozen=True)
class Fitted:
    """What was chosen: the feeds with the options that forward accepts, and what it did with them.

    `length`: the number of items of a jagged row, 0 if no row is jagged. `said`: a sentence about
    each input, with what it gets and why.
    """

    feeds: list[Feed]
    outcome: Outcome
    length: int
    said: list[str]


def fitted(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> Fitted:
    """Choose a combination of options that forward accepts. Raises InitError.

    The number of items of a jagged row is `length`, else that of the user's axes, else weaver's,
    else the user's answer. Lists of equal length become vectors. They become jagged rows if there
    is a `length` or a mask, or if forward accepts them only as jagged rows.
    """
    ways = [list(feeds)]
    if not length and not any(feed.mask for feed in feeds):
        vectors = [feed.vectors() for feed in feeds]
        changed = any(after is not feed for after, feed in zip(vectors, feeds, strict=True))
        ways = [vectors, list(feeds)] if changed else [vectors]
    for feed in ways[0]:
        check_cuts(feed)
    failed: list[tuple[list[Feed], Outcome]] = []
    for way in ways:
        if any(len({c.cut for c in feed.columns}) > 1 for feed in way):
            continue  # vectors and jagged columns in one input do not fit together
        size = _length(model, way, length, ask)
        searched = _search_at(model, way, size)
        if searched.best is not None:
            decision = _decided(model, way, searched.best, size)
            options = zip(way, decision.outcome.options, strict=True)
            chosen = [replace(feed, option=option) for feed, option in options]
            said = [_sentence(feed, decision.why) for feed in chosen]
            return Fitted(chosen, decision.outcome, size, said)
        failed += [(way, outcome) for outcome in searched.failed]
    raise InitError(_nothing_runs(failed))


def _search_at(model: Model, feeds: Sequence[Feed], size: int) -> Search:
    """What runs at `size` items; else the attempts that failed."""
    sizes = [size]
    if any(feed.jagged for feed in feeds) and not any(feed.asked_length for feed in feeds):
        # One item more first: if there are `size` columns too, only this shows which axis is which.
        sizes = [size + 1, size]
    failed: list[Outcome] = []
    for probe in sizes:
        choices = _choices(model, feeds, probe)
        searched = search(model, choices)
        if searched.best is None:
            failed = searched.failed
            continue
        # The same options at `size`: they are in the same places.
        chosen = zip(_choices(model, feeds, size), choices, searched.best.options, strict=True)
        options = [at_size[at_probe.index(best)] for at_size, at_probe, best in chosen]
        outcome = outcome_of(model, options)
        if not outcome.error:
            return Search(outcome, [])
        failed = [outcome]
    return Search(None, failed)


def _choices(model: Model, feeds: Sequence[Feed], size: int) -> list[list[Option]]:
    """The ways to give each input at `size` items. Raises InitError for one that has none."""
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
    """The combination that is taken, and why."""

    outcome: Outcome
    why: str


def _decided(model: Model, feeds: Sequence[Feed], first: Outcome, size: int) -> _Decision:
    """Decide between the first combination that runs and those in another order that run too.

    Evidence that fits exactly one of them decides, the strongest first. Raises InitError if nothing
    tells them apart.
    """
    if all(feed.asked.axes for feed in feeds):
        return _Decision(first, "as --input says")
    others = list(rivals(model, first, _choices(model, feeds, size)))
    if not others:
        return _Decision(first, "it runs so")
    differing = [each for each in others if not same_answers(each, first)]
    if not differing:
        return _Decision(first, "the answers are the same in the other order")
    possible = [first, *differing]
    if isinstance(model.module, torch.jit.ScriptModule):
        possible = [each for each in possible if can_be_exported(model, each)] or possible
        if len(possible) == 1:
            return _Decision(possible[0], "torch exports no other order")
    longer = [each for each in possible if not why_not(model, with_more_items(each), 5)]
    if len(longer) == 1:
        return _Decision(longer[0], "so it takes any number of items")
    documented = _documented_order(model)
    agreeing = [each for each in possible if documented in {o.meaning for o in each.options}]
    if len(agreeing) == 1:
        return _Decision(agreeing[0], "as its documentation says")
    free = [each for each in possible if ignores_item_order(model, each)]
    if len(free) == 1:
        return _Decision(free[0], "so the order of the items does not matter")
    raise InitError(_question(feeds, *possible[:2]))


def _documented_order(model: Model) -> tuple[str, ...]:
    """The order of items and features in the docstring or type hints of forward; () if none."""
    docstrings = type(model.module).__doc__, getattr(model.module.forward, "__doc__", "")
    for text in (*docstrings, _hints(model)):
        for shape in _BRACKETED.findall(text or ""):
            axes = tuple(str(word.lastgroup) for word in _AXIS.finditer(shape))
            if sorted(axes) == ["features", "items"]:
                return axes
    return ()


def _hints(model: Model) -> str:
    """The signature of forward with its type hints, as text; "" if it has none to read."""
    try:
        return str(inspect.signature(model.module.forward))
    except (TypeError, ValueError):
        return ""


def _question(feeds: Sequence[Feed], one: Outcome, other: Outcome) -> str:
    """The question that the user must answer: which of two orders of axes is meant."""
    inputs = zip(feeds, one.options, other.options, strict=True)
    feed, first, second = next(each for each in inputs if each[1].meaning != each[2].meaning)
    name, columns = feed.port.name, ",".join(column.name for column in feed.columns)
    this, that = (f"({', '.join(option.named)})" for option in (first, second))
    return (
        f"forward runs on {name} as {this} and as {that}, with other answers, and nothing says "
        f"which one it was trained with: give --input '{name}={this}: {columns}' or "
        f"--input '{name}={that}: {columns}'"
    )


def _sentence(feed: Feed, why: str) -> str:
    """What an input gets: its shape, and the meaning of its axes."""
    option, name = feed.option, feed.port.name
    text = f"{name} is ({', '.join(option.sizes)}) {option.dtype}"
    letters = {"items": "i", "features": "j"}
    if {*option.meaning} == {"items", "features"} and not option.order.flatten:
        index = ", ".join(letters.get(axis, ":") for axis in option.named)
        text += f": {name}[{index}] is item i, feature j"
    elif option.named != ("n", "features"):
        text += f": its axes are {', '.join(option.named)}"
    if feed.mask:
        text += ", 1 where there is an item"
    elif not (option.dtype.startswith("float") or feed.trained or feed.whole):
        text += ", which cuts off the fractions of its columns"
    return f"{text} ({why})"


def _nothing_runs(failed: Sequence[tuple[list[Feed], Outcome]]) -> str:
    """The shapes that were tried, with the line of forward that failed, and what to do."""
    errors: dict[str, str] = {}
    for feeds, outcome in failed:
        errors.setdefault(_inputs_of(feeds, outcome.options), outcome.error)
    listed = [f"{shapes} ({error})" for shapes, error in [*errors.items()][:_SHOWN]]
    feeds = failed[0][0]
    feed = next((each for each in feeds if not each.mask), feeds[0])
    name, columns = feed.port.name, ",".join(column.name for column in feed.columns)
    vectors = any(column.values.ndim > 1 for column in feed.columns)
    has_items = vectors or feed.jagged or len(feed.option.axes) > 2
    axes = "n, items, features" if has_items else "n, features"
    return (
        f"forward does not run on {'; nor on '.join(listed)}. --input NAME=COLUMN,… names the "
        f"columns of an input, and --input '{name}=({axes}): {columns}' also its axes"
    )


def _inputs_of(feeds: Sequence[Feed], options: Sequence[Option]) -> str:
    """The inputs of an attempt as text, with their shapes and first columns."""

    def input_of(feed: Feed, option: Option) -> str:
        names = [column.name for column in feed.columns]
        more = ", …" if len(names) > 4 else ""
        columns = "" if feed.mask else f" of {', '.join(names[:4])}{more}"
        dtype = "" if option.dtype.startswith("float") else f" {option.dtype}"
        return f"{feed.port.name} ({', '.join(option.sizes)}){dtype}{columns}"

    return ", ".join(map(input_of, feeds, options))


def _length(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> int:
    """How many items of a jagged row the model gets; 0 if no input is jagged. Raises InitError."""
    offsets: list[Any] = [c.offsets for f in feeds for c in f.columns if c.offsets is not None]
    trained = max((feed.trained.length for feed in feeds if feed.trained), default=0)
    size = length or max(feed.asked_length for feed in feeds) or trained
    if not offsets or size:
        return size
    if not any(feed.mask or feed.asked.axes for feed in feeds):
        flat = [feed.flat() for feed in feeds]
        searched = search(model, [feed.options(model.dtype, 1)[:1] for feed in flat])
        if searched.best is not None:
            raise InitError(
                f"forward takes {_inputs_of(flat, searched.best.options)}, and the columns are "
                "jagged: --flatten makes a row of each item; or --length N, if the model takes "
                "whole rows"
            )
    largest = max(int(np.diff(each).max(initial=1)) for each in offsets)
    answer = ask("--length", "how many items of a row the model sees at most", str(largest))
    if not answer.isdecimal() or not int(answer):
        raise InitError(f"--length: found {answer!r}; expected a whole number")
    return int(answer)
