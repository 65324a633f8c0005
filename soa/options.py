"""The arguments of public functions: each is checked at the door, before anything is done with it.

`takes` refuses a value of the wrong kind, `known_options` an option that does not exist."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from soa.errors import OptionError, SoaPipelineError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Accepted:
    """The values that an argument may have. `said`: how a message names them."""

    said: str
    holds: Callable[[Any], bool]

    @property
    def or_none(self) -> Accepted:
        return Accepted(f"{self.said}, or None", lambda value: value is None or self.holds(value))

    def list_of(self, said: str) -> Accepted:
        """Several such values. A text is no list of its letters."""
        return Accepted(
            said,
            lambda value: (
                isinstance(value, Sequence | set | frozenset)
                and not isinstance(value, str | bytes)
                and all(map(self.holds, value))
            ),
        )


def of_type(said: str, *types: type) -> Accepted:
    return Accepted(said, lambda value: isinstance(value, types))


TEXT = of_type("text", str)
TEXTS = TEXT.list_of("a list of texts")
PATH = of_type("a path (text, or a pathlib.Path)", str, Path)
PATHS = Accepted(
    "a path, or a list of paths",
    lambda value: PATH.holds(value) or PATH.list_of("paths").holds(value),
)
REF = of_type("a version such as 'jets@production', or the path of its folder", str, Path)
COUNT = Accepted(
    "a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)
)


def at_least(least: int) -> Accepted:
    return Accepted(
        f"a whole number of at least {least}", lambda value: COUNT.holds(value) and value >= least
    )


AT_LEAST_ONE = at_least(1)
NUMBER = Accepted("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool))
BY_NAME = Accepted(
    "a dict, by name", lambda value: hasattr(value, "keys") and hasattr(value, "__getitem__")
)
FUNCTION = Accepted("a function", callable)
FLAG = of_type("True or False", bool)
DEVICE = Accepted(
    "a device such as 'cpu' or 'cuda:0'",
    lambda value: isinstance(value, str) or type(value).__module__ == "torch",
)


def takes(
    error: type[SoaPipelineError], **kinds: Accepted
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: `error` is raised, in one line, for an argument of the wrong
    kind. Arguments that `kinds` does not name are not checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        places = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in chain(zip(places, args, strict=False), kwargs.items()):
                kind = kinds.get(name)
                if kind is not None and not kind.holds(value):
                    raise error(_wrong(function.__qualname__, name, value, kind))
            return function(*args, **kwargs)

        return checked

    return decorate


def check_fields(
    error: type[SoaPipelineError], where: str, record: object, kinds: Mapping[str, Accepted]
) -> None:
    """The check of `takes` for the fields of a dataclass. `where`: the function of the user."""
    for name, kind in kinds.items():
        if not kind.holds(value := getattr(record, name)):
            raise error(_wrong(where, name, value, kind))


def _wrong(where: str, name: str, value: object, kind: Accepted) -> str:
    given = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
    return f"{where.removesuffix('.__init__')}: {name} is {given}; give {kind.said}"


def known_options(of: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose `**options` are fields of the dataclass `of`.

    An option that does not exist raises OptionError, which names the nearest one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function)
        every = {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        every |= {n: p for n, p in inspect.signature(of).parameters.items() if n not in every}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - every.keys():
                raise OptionError(_refusal(function.__name__, name, list(every)))
            return function(*args, **kwargs)

        checked.__signature__ = own.replace(parameters=list(every.values()))  # type: ignore[attr-defined]
        return checked

    return decorate


def _refusal(function: str, name: str, known: list[str]) -> str:
    advice = nearest(name, known).removeprefix("; ") or f"it has: {', '.join(known)}"
    return f"{function} has no option {name!r}: {advice}"


def repeated(names: Iterable[R]) -> list[R]:
    """The names that are there more than once."""
    return [name for name, times in Counter(names).items() if times > 1]


def nearest(name: object, known: Iterable[object]) -> str:
    """`; did you mean 'pt'?`: the end of a message about a name that does not exist; empty if no
    name is near. Near is a name with other capitals or a few other letters, or the only one that
    ends in this one (`jet_pt`)."""
    import difflib

    wanted, names = str(name).lower(), {str(each).lower(): str(each) for each in known}
    close = difflib.get_close_matches(wanted, names, 1)
    ends = tuple(f"{mark}{wanted}" for mark in "_./")
    longer = [low for low in names if low.endswith(ends)]
    if not close and len(longer) == 1:
        close = longer
    return f"; did you mean {names[close[0]]!r}?" if close else ""
