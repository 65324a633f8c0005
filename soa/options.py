"""The arguments of public functions: each is checked at the door, before anything is done with it.

`takes` refuses a value of the wrong kind, `known_options` an option that does not exist.
"""

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
    """The values that an argument may have.

    `words` names them in a message; `holds` tells whether a value is one of them.
    """

    words: str
    holds: Callable[[Any], bool]

    @property
    def or_none(self) -> Accepted:
        """The same values, and None."""
        return Accepted(f"{self.words}, or None", lambda value: value is None or self.holds(value))

    def list_of(self, words: str) -> Accepted:
        """Return an `Accepted` for a sequence or a set of such values, but not for a text."""
        return Accepted(
            words,
            lambda value: (
                isinstance(value, Sequence | set | frozenset)
                and not isinstance(value, str | bytes)
                and all(map(self.holds, value))
            ),
        )


def of_type(words: str, *types: type) -> Accepted:
    """Return an `Accepted` for the instances of these types, which a message names by `words`."""
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
    """Return an `Accepted` for whole numbers that are not less than `least`."""
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
    """Return a decorator for a public function, which then checks its arguments at each call.

    `kinds` says by name what each argument may be; other arguments are not checked. A wrong one
    raises `error`, whose text is one line.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in chain(zip(names, args, strict=False), kwargs.items()):
                kind = kinds.get(name)
                if kind is not None and not kind.holds(value):
                    raise error(_kind_message(function.__qualname__, name, value, kind))
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def check_fields(
    error: type[SoaPipelineError], where: str, record: object, kinds: Mapping[str, Accepted]
) -> None:
    """Check fields of a dataclass, as `takes` checks arguments.

    `where` is the function that the user called, for the message.
    """
    for name, kind in kinds.items():
        if not kind.holds(value := getattr(record, name)):
            raise error(_kind_message(where, name, value, kind))


def _kind_message(where: str, name: str, value: object, kind: Accepted) -> str:
    """Return the message about an argument of the wrong kind: what was found, and what to give."""
    found = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
    return f"{where.removesuffix('.__init__')}: {name} is {found}; give {kind.words}"


def known_options(record: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose `**options` are fields of the dataclass `record`.

    An option that does not exist then raises OptionError, which names the nearest one. The
    signature of the decorated function lists the fields.
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
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known.keys():
                raise OptionError(_unknown_option_message(function.__name__, name, list(known)))
            return function(*args, **kwargs)

        check_and_call.__signature__ = signature.replace(parameters=list(known.values()))  # type: ignore[attr-defined]
        return check_and_call

    return decorate


def _unknown_option_message(function: str, name: str, known: list[str]) -> str:
    """Return the message about an option that a function does not have."""
    advice = nearest_hint(name, known).removeprefix("; ") or f"it has: {', '.join(known)}"
    return f"{function} has no option {name!r}: {advice}"


def find_repeated(names: Iterable[R]) -> list[R]:
    """Return the names that occur more than once, each once."""
    return [name for name, times in Counter(names).items() if times > 1]


def nearest_hint(name: object, known: Iterable[object]) -> str:
    """Return the end of a message about a name that does not exist: `; did you mean 'pt'?`.

    It is empty if no known name is near. A name is near if it differs in capitals or a few letters,
    or if it is the only one that ends in the wrong name (`jet_pt` for `pt`).
    """
    import difflib

    wanted = str(name).lower()
    by_lower = {str(other).lower(): str(other) for other in known}
    close = difflib.get_close_matches(wanted, by_lower, n=1)
    if not close:
        ends = tuple(f"{mark}{wanted}" for mark in "_./")
        close = [lower for lower in by_lower if lower.endswith(ends)]
    return f"; did you mean {by_lower[close[0]]!r}?" if len(close) == 1 else ""
