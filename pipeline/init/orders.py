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
    rivals,
    same_answers,
    search,
    tried,
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
    """The feeds with the options that forward accepts, what it did with them, the number of items
    of a jagged row, and a sentence about each input: what it gets, and why."""

    feeds: list[Feed]
    outcome: Outcome
    length: int
    said: list[str]


def fitted(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> Fitted:
    """Choose a combination of options that forward accepts. Raises InitError.

    The number of items of a jagged row is `length`, else weaver's, else the user's answer. Lists of
    equal length become vectors. They become jagged rows if there is a `length` or a mask, or if
    forward accepts them only as jagged rows.
    """
    kinds = [list(feeds)]
    if not length and not any(feed.mask for feed in feeds):
        vectors = [feed.vectors() for feed in feeds]
        changed = any(v is not f for v, f in zip(vectors, feeds, strict=True))
        kinds = [vectors, list(feeds)] if changed else [vectors]
    for feed in kinds[0]:
        check_cuts(feed)
    failed: list[tuple[list[Feed], Outcome]] = []
    for kind in kinds:
        if any(len({c.cut for c in feed.columns}) > 1 for feed in kind):
            continue  # vectors and jagged columns in one input do not fit together
        size = _length(model, kind, length, ask)
        searched = _search_at(model, kind, size)
        if searched.best is not None:
            decision = _decided(model, kind, searched.best, size)
            options = zip(kind, decision.outcome.options, strict=True)
            chosen = [replace(feed, option=option) for feed, option in options]
            said = [_said(feed, decision.why) for feed in chosen]
            return Fitted(chosen, decision.outcome, size, said)
        failed += [(kind, each) for each in searched.failed]
    raise InitError(_nothing_runs(failed))


def _search_at(model: Model, feeds: Sequence[Feed], size: int) -> Search:
    """What runs at `size` items; else the attempts that failed."""
    failed: list[Outcome] = []
    # One item more first: if there are `size` columns too, only this shows which axis is which.
    for probe in (size + 1, size) if any(feed.jagged for feed in feeds) else (size,):
        choices = _choices(model, feeds, probe)
        searched = search(model, choices)
        if searched.best is not None:
            places = [each.index(o) for each, o in zip(choices, searched.best.options, strict=True)]
            at_size = zip(_choices(model, feeds, size), places, strict=True)
            outcome = tried(model, [each[i] for each, i in at_size])
            if not outcome.error:
                return Search(outcome, [])
            failed = [outcome]
        else:
            failed = searched.failed
    return Search(None, failed)


def _choices(model: Model, feeds: Sequence[Feed], size: int) -> list[list[Option]]:
    """The ways to give each input at `size` items. Raises InitError for one that has none."""
    choices = [feed.options(model.dtype, size) for feed in feeds]
    for feed, each in zip(feeds, choices, strict=True):
        if not each:
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
    Raises InitError if nothing tells them apart."""
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
    try:
        return str(inspect.signature(model.module.forward))
    except (TypeError, ValueError):
        return ""


def _question(feeds: Sequence[Feed], one: Outcome, other: Outcome) -> str:
    """The question that the user must answer: which of two orders of axes is meant."""
    ways = zip(feeds, one.options, other.options, strict=True)
    feed, first, second = next(way for way in ways if way[1].meaning != way[2].meaning)
    name, columns = feed.port.name, ",".join(column.name for column in feed.columns)
    a, b = (f"({', '.join(option.named)})" for option in (first, second))
    return (
        f"forward runs on {name} as {a} and as {b}, with other answers, and nothing says which one "
        f"it was trained with: give --input '{name}={a}: {columns}' or "
        f"--input '{name}={b}: {columns}'"
    )


def _said(feed: Feed, why: str) -> str:
    """What an input gets: its shape, and the meaning of its axes."""
    option, name = feed.option, feed.port.name
    text = f"{name} is ({', '.join(option.sizes)}) {option.dtype}"
    letters = dict(zip(("items", "features"), "ij", strict=True))
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
        errors.setdefault(_shown(feeds, outcome.options), outcome.error)
    listed = [f"{shapes} ({error})" for shapes, error in [*errors.items()][:_SHOWN]]
    feed = next((f for f in failed[0][0] if not f.mask), failed[0][0][0])
    name, columns = feed.port.name, ",".join(column.name for column in feed.columns)
    axes = "n, items, features" if len(feed.option.axes) > 2 or feed.jagged else "n, features"
    if any(column.values.ndim > 1 for column in feed.columns):
        axes = "n, items, features"
    return (
        f"forward does not run on {'; nor on '.join(listed)}. --input NAME=COLUMN,… names the "
        f"columns of an input, and --input '{name}=({axes}): {columns}' also its axes"
    )


def _shown(feeds: Sequence[Feed], options: Sequence[Option]) -> str:
    """The inputs of an attempt, with their shapes and first columns."""

    def one(feed: Feed, option: Option) -> str:
        names = [column.name for column in feed.columns]
        more = ", …" if len(names) > 4 else ""
        taken = "" if feed.mask else f" of {', '.join(names[:4])}{more}"
        kind = "" if option.dtype.startswith("float") else f" {option.dtype}"
        return f"{feed.port.name} ({', '.join(option.sizes)}){kind}{taken}"

    return ", ".join(one(f, option) for f, option in zip(feeds, options, strict=True))


def _length(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> int:
    """How many items of a jagged row the model gets; 0 if no input is jagged. Raises InitError."""
    offsets: list[Any] = [c.offsets for f in feeds for c in f.columns if c.offsets is not None]
    size = length or max((f.trained.length for f in feeds if f.trained), default=0)
    if not offsets or size:
        return size
    if not any(feed.mask or feed.asked.axes for feed in feeds):
        flat = [feed.flat() for feed in feeds]
        searched = search(model, [feed.options(model.dtype, 1)[:1] for feed in flat])
        if searched.best is not None:
            raise InitError(
                f"forward takes {_shown(flat, searched.best.options)}, and the columns are "
                "jagged: --flatten makes a row of each item; or --length N, if the model takes "
                "whole rows"
            )
    largest = max(int(np.diff(each).max(initial=1)) for each in offsets)
    answer = ask("--length", "how many items of a row the model sees at most", str(largest))
    if not answer.isdecimal() or not int(answer):
        raise InitError(f"--length: found {answer!r}; expected a whole number")
    return int(answer)
