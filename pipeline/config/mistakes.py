"""The types of the values in a config, and pydantic's errors in the words of our messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from pydantic_core import ErrorDetails

from engines.errors import TargetError
from engines.target import Target
from pipeline.config.yaml_lines import Document, Key, Problem
from soa.layout import IDENTIFIER
from soa.options import nearest_hint

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}


def validate(document: Document, model: type[M], whole: str) -> M:
    """Converts a document to the pydantic model `model`. If it has mistakes, raises a ConfigError
    that lists all of them. `whole`: the word for the document in mistakes that have no key."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = (
            _describe_error(details, model, document.data)
            for details in error.errors(include_url=False)
            # If entries are wrong, pydantic also says "too short", since it counts only the others.
            if details["type"] != "too_short" or not details["input"]
        )
        # Each problem once: pydantic says of an empty pair twice that an entry is missing.
        document.refuse(dict.fromkeys(problems), whole)
        raise  # not reached: a ValidationError has at least one problem


def _describe_error(error: ErrorDetails, root: type[BaseModel], data: Any) -> Problem:
    """Converts pydantic's description of a mistake to a problem: the key, and our words for it.
    `root`: the model that the document `data` was to become."""
    at, kind, found = error["loc"], error["type"], error["input"]
    if at[-1:] == ("[key]",):  # pydantic's mark for a mistake in the key itself
        at = at[:-1]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        name, allowed = str(at[-1]), _list_keys(root, at[:-1])
        return at, f"unknown key; allowed: {', '.join(allowed)}{nearest_hint(name, allowed)}"
    if kind == "missing" and isinstance(at[-1], str):
        return at[:-1], f"the key {at[-1]!r} is missing"
    if kind == "missing":  # in a pair: no other list has a fixed length
        at = at[:-1]
        return at, f"found {_count_entries(data, at)}; expected 2"
    if kind == "too_long":
        return at, f"found {_count_entries(data, at)}; expected at most {context['max_length']}"
    if kind == "too_short":  # every minimum here is 1
        return at, "found no entry; expected at least 1"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return at, not_among(found, choices)
    if kind == "value_error":
        return at, str(context["error"])
    if kind in _EXPECTED:
        return at, f"found {quote(found)}; expected {_EXPECTED[kind]}{_advise_quotes(kind, found)}"
    return at, f"found {quote(found)}; {error['msg'].replace('Input should', 'it should')}"


_LONGEST_SHOWN = 60  # characters of a value in a message
_NUMBERS = {"int_type": r"[-+]?\d+", "float_type": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"}


def _advise_quotes(kind: str, found: object) -> str:
    """Returns advice if the value would be right with quotes, or without; "" for other values.
    `kind`: pydantic's type of the error."""
    if kind == "string_type" and isinstance(found, bool | int | float):
        return " (quote it)"
    number = _NUMBERS.get(kind)
    if number is not None and isinstance(found, str) and re.fullmatch(number, found):
        return " (without quotes)"
    return ""


def not_among(found: object, allowed: Iterable[str]) -> str:
    """Returns the text of a problem with a value that is not in a list of allowed words:
    `found 'flot32'; allowed: float32, float64; did you mean 'float32'?`"""
    allowed = list(allowed)
    hint = nearest_hint(found, allowed) if isinstance(found, str) else ""
    return f"found {quote(found)}; allowed: {', '.join(allowed) or 'none'}{hint}"


def quote(value: object) -> str:
    """Returns a value as one short line of a message: `'flot32'`, `1.5`, `a list`."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            text = repr(value)
        case _:
            text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _count_entries(data: Any, at: Key) -> str:
    """Returns the number of entries of the list at a key path as text: `1 entry`, `3 entries`."""
    entries = data
    for part in at:
        entries = entries[part]
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def _list_keys(root: type[BaseModel], at: Key) -> list[str]:
    """Returns the keys of the pydantic model at a key path that starts at the model `root`. The
    path leads through models, mappings (`dict[str, T]`) and lists (`tuple[T, ...]`)."""
    annotation: Any = root
    for part in at:
        plain = _unwrap(annotation)
        arguments = get_args(plain)
        if get_origin(plain) is dict:
            annotation = arguments[1]
        elif get_origin(plain) is tuple:
            annotation = arguments[0]
        else:
            annotation = plain.model_fields[part].annotation
    return list(_unwrap(annotation).model_fields)


def _unwrap(annotation: Any) -> Any:
    """Returns the type without `Annotated` and `| None`: `Annotated[str, …] | None` -> `str`."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next(a for a in get_args(annotation) if a is not NoneType)
    return annotation


# Each validator returns its argument, or raises a ValueError, which becomes a mistake.


def _check_identifier(name: str) -> str:
    """Refuse a name that is no identifier."""
    if not IDENTIFIER.fullmatch(name):
        raise ValueError(
            f"found {quote(name)}; allowed: letters, digits and '_', not a digit first"
        )
    return name


def _check_target(name: str) -> str:
    """Refuse a name that is not the name of a target."""
    try:
        Target.parse(name)
    except TargetError as error:
        raise ValueError(str(error)) from None
    return name


def check_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse names of which one occurs twice."""
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"found {repeated[0]!r} a second time; each name once")
    return names


def _check_order(pair: tuple[float, float]) -> tuple[float, float]:
    """Refuse a pair whose first number is above its second."""
    if pair[0] > pair[1]:
        raise ValueError(f"found {list(pair)}; expected [low, high]")
    return pair


Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[str, AfterValidator(_check_identifier)]
TargetName = Annotated[str, AfterValidator(_check_target)]
# `strict` of `Part` would refuse a YAML list for a tuple. The entries are still strict.
Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]
Shape = Listed[PositiveInt]
RowShape = Annotated[tuple[PositiveInt, ...], Field(strict=False)]
"""The shape of a row; () if it is one number."""
Pair = Annotated[tuple[Number, Number], Field(strict=False), AfterValidator(_check_order)]


class Part(BaseModel):
    """The base of all parts of a config. It is strict: `"64"` and `true` are not numbers, and an
    unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
