"""Turn data that others may have written into records, and records into data.

A record is a dataclass. `as_record` checks values against its annotations, and converts only a list
to a tuple, an int to a float, and an ISO 8601 text to a time. The text "5" is not accepted as the
number 5.

Every process that loads a model reads records, so this file imports little. pydantic, which reads
the configs of users, would take half of the start time of such a process.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)  # fmt: skip

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_LEVELS = 200
"""The deepest nesting of JSON that is read. An empty list or object is not counted as a level."""

T = TypeVar("T")
Reader = Callable[[Any], Any]


class Misfit(ValueError):
    """A value that does not fit its annotation. The text begins with the place of the value."""

    def __init__(self, reason: str, *path: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = [str(part) for part in path]

    def __str__(self) -> str:
        return f"{'.'.join(self.path) or '(top level)'}: {self.reason}"


class Record:
    """Base of records: frozen dataclasses whose values are checked at every construction.

    `__closed__`: if true, data with a key that is no field of the record is refused.
    """

    __closed__ = True

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(record: object) -> None:
    """Raise ValueError if a field of a dataclass does not fit its annotation. A value that is
    converted, as a list to a tuple, replaces the field's."""
    kind: Any = type(record)
    for name, read in _record_fields(kind).items():
        object.__setattr__(record, name, _at(name, read, getattr(record, name)))


# -- conditions that an annotation can add to a type: Annotated[T, …] ------------------------------


@dataclass(frozen=True)
class Within:
    """A number from `least` to `most`. NaN is refused."""

    least: float
    most: float | None = None

    def __call__(self, value: float) -> float:
        if not value >= self.least:
            raise ValueError(f"at least {self.least} is needed, found {value}")
        if self.most is not None and not value <= self.most:
            raise ValueError(f"at most {self.most} is allowed, found {value}")
        return value


@dataclass(frozen=True)
class Matching:
    """A text that matches the regular expression as a whole; `what` describes the text in words."""

    pattern: str
    what: str

    def __call__(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"{_short(text)} is not {self.what}")
        return text


@dataclass(frozen=True)
class Before:
    """Change a value before it is checked. `also` is a type that the change accepts in addition."""

    change: Reader
    also: Any


# -- to and from data ------------------------------------------------------------------------------


def parse_json(content: bytes | str) -> Any:
    """Read JSON data, nested no deeper than 200; ValueError if the content is no such data.

    NaN, Infinity and -Infinity are numbers. If a key is repeated, its last value counts. A text
    must be valid UTF-8: half of a surrogate pair is refused.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        data = json.loads(text)
        if "\\u" in text or isinstance(content, str):  # else decode() has refused surrogates
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_LEVELS}") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    if text.count("[") + text.count("{") > MOST_LEVELS and _is_too_deep(data):
        raise ValueError(f"nested deeper than {MOST_LEVELS}")
    return data


def _is_too_deep(data: Any) -> bool:
    """Whether JSON data is nested deeper than `MOST_LEVELS`. Goes down level by level, because deep
    data would exhaust the stack of a recursive function."""
    level = [data]
    for _ in range(MOST_LEVELS + 1):
        level = [inner for value in level for inner in _directly_inside(value)]
    return bool(level)


def _directly_inside(value: Any) -> Iterable[Any]:
    """The values of an object, or the entries of a list; of anything else, none."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_record(kind: type[T], content: bytes | str) -> T:
    """Parse JSON, then convert it as `as_record` does."""
    return as_record(kind, parse_json(content))


def as_record(kind: type[T], data: Any) -> T:
    """`data` as a dataclass, or as any other type that JSON can express, by its annotation.

    Raises ValueError: one line that names the first value that does not fit `kind`.
    """
    record: T = reader(kind)(data)  # type: ignore[arg-type]  # a type has a hash
    return record


@overload
def as_data(value: DataclassInstance) -> dict[str, Any]: ...
@overload
def as_data(value: Any) -> Any: ...
def as_data(value: Any) -> Any:
    """A value that `as_record` reads, as data for JSON: a dataclass with its fields in order."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: as_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(inner) for inner in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value


# -- readers ---------------------------------------------------------------------------------------


@cache
def reader(kind: Any) -> Reader:
    """A function that checks a value against an annotation and returns what to keep; raises
    Misfit."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if is_dataclass(kind):
        return _dataclass(kind)
    make = _COMPOUND.get(get_origin(kind))
    if make is None:
        raise TypeError(f"no record can have a value of {kind}")
    return make(*get_args(kind))


def _at(key: object, read: Reader, value: Any) -> Any:
    """Read the value at a key; a Misfit gets the key in its path."""
    try:
        return read(value)
    except Misfit as misfit:
        misfit.path.insert(0, str(key))
        raise


def _short(value: object) -> str:
    """The value as text, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _described(value: object) -> str:
    """The words for a value in a message: null, an object, a list, or the value itself."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else _short(value)


def _exactly(kind: type, what: str) -> Reader:
    """Reads a value of this type, named `what` in words; true and false are no whole numbers."""

    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Misfit(f"{what} is needed, found {_described(value)}")
        return value

    return read


def _float(value: Any) -> float:
    """Read a number; a whole number is converted."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Misfit(f"a number is needed, found {_described(value)}")
    try:
        return float(value)
    except OverflowError:
        raise Misfit("the number is too large") from None


def _time(value: Any) -> datetime:
    """Read a time. It must say its time zone."""
    try:
        time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise Misfit(f"a time in ISO 8601 format is needed, found {_described(value)}") from None
    if time.tzinfo is None:
        raise Misfit(f"{_short(value)} has no time zone")
    return time


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_SIMPLE[str](value))


def _literal(*choices: object) -> Reader:
    """Reads one of the values of a Literal."""
    known = {(type(choice), choice): choice for choice in choices}

    def read(value: Any) -> Any:
        if isinstance(value, str | int | None) and (type(value), value) in known:
            return value
        raise Misfit(f"one of {', '.join(map(repr, choices))} is needed, found {_described(value)}")

    return read


def _union(*kinds: Any) -> Reader:
    """Reads a value by the first of several annotations that it fits."""
    reads = [reader(kind) for kind in kinds if kind is not type(None)]
    optional = len(reads) < len(kinds)

    def read(value: Any) -> Any:
        if optional and value is None:
            return None
        for read_as in reads[:-1]:
            try:
                return read_as(value)
            except Misfit:
                continue
        return reads[-1](value)  # its error is reported

    return read


def _annotated(kind: Any, *additions: Any) -> Reader:
    """Reads a value with the changes (`Before`) and conditions that its annotation adds."""
    changes = [addition.change for addition in additions if isinstance(addition, Before)]
    conditions = [addition for addition in additions if not isinstance(addition, Before)]
    read_kind = reader(kind)

    def read(value: Any) -> Any:
        for change in changes:
            value = change(value)
        value = read_kind(value)
        try:
            for condition in conditions:
                value = condition(value)
        except Misfit:
            raise
        except ValueError as error:
            raise Misfit(str(error)) from None
        return value

    return read


def _require_list(values: Any) -> Sequence[Any]:
    """The values themselves. Raises Misfit if they are no list or tuple."""
    if not isinstance(values, list | tuple):
        raise Misfit(f"a list is needed, found {_described(values)}")
    return values


def _list(kind: Any) -> Reader:
    """Reads a list; a Misfit says the place of its value in the list."""
    read = reader(kind)
    return lambda values: [_at(i, read, value) for i, value in enumerate(_require_list(values))]


def _tuple(*kinds: Any) -> Reader:
    """Reads a list as a tuple: of any length, or with an annotation for each entry."""
    if kinds[-1] is Ellipsis:
        read_list = _list(kinds[0])
        return lambda values: tuple(read_list(values))
    reads = [reader(kind) for kind in kinds]

    def read(values: Any) -> tuple[Any, ...]:
        if len(_require_list(values)) != len(reads):
            raise Misfit(f"a list of {len(reads)} is needed, found {len(values)}")
        pairs = zip(reads, values, strict=True)
        return tuple(_at(i, read_entry, value) for i, (read_entry, value) in enumerate(pairs))

    return read


def _mapping(of_keys: Any, of_values: Any) -> Reader:
    """Reads an object, its keys and its values."""
    read_key, read_value = reader(of_keys), reader(of_values)

    def read(data: Any) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise Misfit(f"an object is needed, found {_described(data)}")
        return {_at(k, read_key, k): _at(k, read_value, value) for k, value in data.items()}

    return read


@cache
def _record_fields(kind: Any) -> dict[str, Reader]:
    """By field that the constructor takes: the reader of its annotation."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: reader(hints[field.name]) for field in fields(kind) if field.init}


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _dataclass(kind: Any) -> Reader:
    """Reads an object as a dataclass; fields without a default must be there."""
    reads = _record_fields(kind)
    needed = [field.name for field in fields(kind) if field.init and _has_no_default(field)]
    closed = getattr(kind, "__closed__", False)

    def read(data: Any) -> Any:
        if isinstance(data, kind):
            return data
        if not isinstance(data, Mapping):
            raise Misfit(f"an object is needed, found {_described(data)}")
        if closed and (unknown := [key for key in data if key not in reads]):
            raise Misfit("there is no such field", unknown[0])
        if lacking := [name for name in needed if name not in data]:
            raise Misfit("is missing", lacking[0])
        present = [name for name in reads if name in data]
        values = {name: _at(name, reads[name], data[name]) for name in present}
        try:
            return kind(**values)
        except Misfit:
            raise
        except ValueError as error:
            raise Misfit(str(error)) from error

    return read


_SIMPLE: dict[Any, Reader] = {
    Any: lambda value: value,
    type(None): _exactly(type(None), "null"),
    bool: _exactly(bool, "true or false"),
    int: _exactly(int, "a whole number"),
    float: _float,
    str: _exactly(str, "a text"),
    datetime: _time,
    Path: _path,
}
_COMPOUND: dict[Any, Callable[..., Reader]] = {
    Annotated: _annotated,
    Literal: _literal,
    Union: _union,
    types.UnionType: _union,
    list: _list,
    Sequence: _list,
    tuple: _tuple,
    dict: _mapping,
    Mapping: _mapping,
}
