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
"""Checks a value, converts it if need be, and returns it; raises Misfit if it does not fit."""


class Misfit(ValueError):
    """A value that does not fit its annotation. The text says where: `rows.max: is missing`."""

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
    """Check each field of a dataclass against its annotation, and convert it where this is needed.

    A converted value, such as a tuple instead of a list, replaces the field's value. Raises
    ValueError for a value that does not fit.
    """
    kind: Any = type(record)
    for name, read in _field_readers(kind).items():
        object.__setattr__(record, name, _read_at(name, read, getattr(record, name)))


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
    """A text that matches `pattern` as a whole. `what` names such a text in a message: "a name"."""

    pattern: str
    what: str

    def __call__(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"{_cut_repr(text)} is not {self.what}")
        return text


@dataclass(frozen=True)
class Before:
    """Change a value before it is checked. `also` is another type of value that `change` takes."""

    change: Reader
    also: Any


# -- to and from data ------------------------------------------------------------------------------


def parse_json(content: bytes | str) -> Any:
    """Read JSON data.

    NaN, Infinity and -Infinity are numbers. If a key is repeated, its last value counts. Raises
    ValueError for anything else than JSON in UTF-8, for data nested deeper than `MOST_LEVELS`, and
    for half of a surrogate pair.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        data = json.loads(text)
        if "\\u" in text or isinstance(content, str):  # else decode() has refused surrogates
            json.dumps(data, ensure_ascii=False).encode()  # raises for a surrogate
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_LEVELS}") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    if text.count("[") + text.count("{") > MOST_LEVELS and _is_too_deep(data):
        raise ValueError(f"nested deeper than {MOST_LEVELS}")
    return data


def _is_too_deep(data: Any) -> bool:
    """Return whether JSON data is nested deeper than `MOST_LEVELS`.

    This goes down level by level, since deep data would exhaust the stack of a recursive function.
    """
    level = [data]
    for _ in range(MOST_LEVELS + 1):
        level = [inner for value in level for inner in _directly_inside(value)]
    return bool(level)


def _directly_inside(value: Any) -> Iterable[Any]:
    """Return the values of an object or the entries of a list; nothing for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_record(kind: type[T], content: bytes | str) -> T:
    """Read JSON with `parse_json` and convert it with `as_record`."""
    return as_record(kind, parse_json(content))


def as_record(kind: type[T], data: Any) -> T:
    """Convert JSON data to `kind`: a dataclass, or any other annotation that a record may have.

    Raises ValueError if it does not fit; its one line names the first value that does not.
    """
    record: T = reader(kind)(data)  # type: ignore[arg-type]  # a type has a hash
    return record


@overload
def as_data(value: DataclassInstance) -> dict[str, Any]: ...
@overload
def as_data(value: Any) -> Any: ...
def as_data(value: Any) -> Any:
    """Convert a value to data for JSON, from which `as_record` makes it again.

    A dataclass becomes a dict with its fields in order.
    """
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
    """Return the function that checks a value against the annotation `kind` and converts it.

    Raises TypeError for an annotation that no record may have.
    """
    if kind in _SIMPLE_READERS:
        return _SIMPLE_READERS[kind]
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    make = _READER_MAKERS.get(get_origin(kind))
    if make is None:
        raise TypeError(f"no record can have a value of {kind}")
    return make(*get_args(kind))


def _read_at(key: object, read: Reader, value: Any) -> Any:
    """Read the value at a key. If it does not fit, the key is put in front of the Misfit's path."""
    try:
        return read(value)
    except Misfit as misfit:
        misfit.path.insert(0, str(key))
        raise


def _cut_repr(value: object) -> str:
    """Return the value as Python writes it, cut after 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _describe(value: object) -> str:
    """Return how a message names a value: null, an object, a list, or the value itself."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else _cut_repr(value)


def _exact_reader(kind: type, what: str) -> Reader:
    """Return a reader of values of one type, which messages call `what`; a bool is no int."""

    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Misfit(f"{what} is needed, found {_describe(value)}")
        return value

    return read


def _read_float(value: Any) -> float:
    """Read a number as a float. Raises Misfit if it is too large for one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Misfit(f"a number is needed, found {_describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise Misfit("the number is too large") from None


def _read_time(value: Any) -> datetime:
    """Read a time, or a text in ISO 8601 format. Raises Misfit if it does not say its time zone."""
    try:
        time = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise Misfit(f"a time in ISO 8601 format is needed, found {_describe(value)}") from None
    if time.tzinfo is None:
        raise Misfit(f"{_cut_repr(value)} has no time zone")
    return time


def _read_path(value: Any) -> Path:
    """Read a path, or a text that becomes one."""
    return value if isinstance(value, Path) else Path(_SIMPLE_READERS[str](value))


def _literal_reader(*choices: object) -> Reader:
    """Return a reader of a Literal. A choice must have the same type, too: true is not 1."""
    known = {(type(choice), choice): choice for choice in choices}

    def read(value: Any) -> Any:
        if isinstance(value, str | int | None) and (type(value), value) in known:
            return value
        raise Misfit(f"one of {', '.join(map(repr, choices))} is needed, found {_describe(value)}")

    return read


def _union_reader(*kinds: Any) -> Reader:
    """Return a reader that reads a value by the first of several annotations that it fits."""
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


def _annotated_reader(kind: Any, *additions: Any) -> Reader:
    """Return a reader for `Annotated[kind, *additions]`.

    It applies the changes (`Before`), reads the value as `kind`, and then checks the conditions.
    """
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
    """Return the values themselves; raise Misfit if they are no list or tuple."""
    if not isinstance(values, list | tuple):
        raise Misfit(f"a list is needed, found {_describe(values)}")
    return values


def _list_reader(kind: Any) -> Reader:
    """Return a reader of lists whose entries are all of one kind."""
    read = reader(kind)
    return lambda data: [_read_at(i, read, value) for i, value in enumerate(_require_list(data))]


def _tuple_reader(*kinds: Any) -> Reader:
    """Return a reader of lists as tuples: `(kind, ...)` of any length, else one kind an entry."""
    if kinds[-1] is Ellipsis:
        read_list = _list_reader(kinds[0])
        return lambda values: tuple(read_list(values))
    reads = [reader(kind) for kind in kinds]

    def read(values: Any) -> tuple[Any, ...]:
        if len(_require_list(values)) != len(reads):
            raise Misfit(f"a list of {len(reads)} is needed, found {len(values)}")
        pairs = zip(reads, values, strict=True)
        return tuple(_read_at(i, read_entry, value) for i, (read_entry, value) in enumerate(pairs))

    return read


def _mapping_reader(of_keys: Any, of_values: Any) -> Reader:
    """Return a reader of objects, as dicts with keys and values of these kinds."""
    read_key, read_value = reader(of_keys), reader(of_values)

    def read(data: Any) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise Misfit(f"an object is needed, found {_describe(data)}")
        return {_read_at(k, read_key, k): _read_at(k, read_value, item) for k, item in data.items()}

    return read


@cache
def _field_readers(kind: Any) -> dict[str, Reader]:
    """Return the reader of each field that the constructor of a dataclass takes, by its name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: reader(hints[field.name]) for field in fields(kind) if field.init}


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _dataclass_reader(kind: Any) -> Reader:
    """Return a reader that makes a dataclass of an object, by the names of its fields.

    A field without a default must not be missing. A class with `__closed__` refuses other keys.
    """
    reads = _field_readers(kind)
    needed = [field.name for field in fields(kind) if field.init and _has_no_default(field)]
    closed = getattr(kind, "__closed__", False)

    def read(data: Any) -> Any:
        if isinstance(data, kind):
            return data
        if not isinstance(data, Mapping):
            raise Misfit(f"an object is needed, found {_describe(data)}")
        if closed and (unknown := [key for key in data if key not in reads]):
            raise Misfit("there is no such field", unknown[0])
        if lacking := [name for name in needed if name not in data]:
            raise Misfit("is missing", lacking[0])
        present = [name for name in reads if name in data]
        values = {name: _read_at(name, reads[name], data[name]) for name in present}
        try:
            return kind(**values)
        except Misfit:
            raise
        except ValueError as error:
            raise Misfit(str(error)) from error

    return read


_SIMPLE_READERS: dict[Any, Reader] = {
    Any: lambda value: value,
    type(None): _exact_reader(type(None), "null"),
    bool: _exact_reader(bool, "true or false"),
    int: _exact_reader(int, "a whole number"),
    float: _read_float,
    str: _exact_reader(str, "a text"),
    datetime: _read_time,
    Path: _read_path,
}
_READER_MAKERS: dict[Any, Callable[..., Reader]] = {
    Annotated: _annotated_reader,
    Literal: _literal_reader,
    Union: _union_reader,
    types.UnionType: _union_reader,
    list: _list_reader,
    Sequence: _list_reader,
    tuple: _tuple_reader,
    dict: _mapping_reader,
    Mapping: _mapping_reader,
}
