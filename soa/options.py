"""Options of functions that take `**options`: `help` shows them, and others are refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from soa.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")


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
    import difflib

    nearest = difflib.get_close_matches(name, known, 1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"it has: {', '.join(known)}"
    return f"{function} has no option {name!r}: {advice}"
