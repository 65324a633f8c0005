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
    """The values that an argument may have. `words`: how a message names them. `holds`: whether a
    value is one of them."""

    words: str
    holds: Callable[[Any], bool]

    @property
    def or_none(self) -> Accepted:
        return Accepted(f"{self.words}, or None", lambda value: value is None or self.holds(value))

    def list_of(self, words: str) -> Accepted:
        """Several such values. A text is no list of its letters."""
        return Accepted(
            words,
            lambda value: (
                isinstance(value, Sequence | set | frozenset)
                and not isinstance(value, str | bytes)
                and all(map(self.holds, value))
            ),
        )


def of_type(words: str, *types: type) -> Accepted:
    """The instances of these types."""
    return Accepted(words, lambda value: isinstance(value, types))


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
    """The whole numbers from `least` on."""
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
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in chain(zip(names, args, strict=False), kwargs.items()):
                kind = kinds.get(name)
                if kind is not None and not kind.holds(value):
                    raise error(_advice(function.__qualname__, name, value, kind))
            return function(*args, **kwargs)

        return checked

    return decorate


def check_fields(
    error: type[SoaPipelineError], where: str, record: object, kinds: Mapping[str, Accepted]
) -> None:
    """The check of `takes` for the fields of a dataclass. `where`: the function of the user."""
    for name, kind in kinds.items():
        if not kind.holds(value := getattr(record, name)):
            raise error(_advice(where, name, value, kind))


def _advice(where: str, name: str, value: object, kind: Accepted) -> str:
    """The message about an argument of the wrong kind: where, what was found, what to give."""
    found = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
    return f"{where.removesuffix('.__init__')}: {name} is {found}; give {kind.words}"


def known_options(record: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose `**options` are fields of the dataclass `record`.

    An option that does not exist raises OptionError, which names the nearest one. The signature of
    the decorated function lists the fields.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }
        for name, field in inspect.signature(record).parameters.items():
            known.setdefault(name, field)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known.keys():
                raise OptionError(_unknown_option(function.__name__, name, list(known)))
            return function(*args, **kwargs)

        checked.__signature__ = signature.replace(parameters=list(known.values()))  # type: ignore[attr-defined]
        return checked

    return decorate


def _unknown_option(function: str, name: str, known: list[str]) -> str:
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

    wanted = str(name).lower()
    by_lower = {str(other).lower(): str(other) for other in known}
    close = difflib.get_close_matches(wanted, by_lower, 1)
    if not close:
        ends = tuple(f"{mark}{wanted}" for mark in "_./")
        close = [lower for lower in by_lower if lower.endswith(ends)]
    return f"; did you mean {by_lower[close[0]]!r}?" if len(close) == 1 else ""
