"""Finds out which columns each input of a model gets, and in which shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.errors import first_line
from pipeline.applying import FileColumn, Source, column_of
from pipeline.config import names_in
from pipeline.errors import DataError, InitError
from pipeline.init.model import Model, Option, Port, fitting, why_not
from pipeline.init.weaver import WeaverInput

Ask = Callable[[str, str, str | None], str]
"""`ask(flag, question, default)`: the user's answer, or the default. InitError without either."""
_MOST_ROWS = 4096  # read from a file


@dataclass(frozen=True)
class Feed:
    """The data of one input: columns, weaver's expressions in them, or the mask of jagged columns.

    `option`: the shape and dtype that forward accepted. `shaped`: whether the config must name the
    shape.
    """

    port: Port
    columns: tuple[FileColumn, ...]
    trained: WeaverInput | None = None
    mask: bool = False
    option: Option = ((), "")
    shaped: bool = False

    @property
    def jagged(self) -> bool:
        return any(column.offsets is not None for column in self.columns)

    def shapes(self, length: int) -> list[tuple[int, ...]]:
        """The possible shapes of one row, the likely ones first."""
        count = len(self.trained.features if self.trained else self.columns)
        if self.mask:
            return [(1, length), (length,), (length, 1)]
        if self.jagged:
            whole: list[tuple[int, ...]] = [(count, length), (length, count)]
            return [(length,), *whole] if count == 1 else whole
        extents = max((c.values.shape[1:] for c in self.columns), key=len, default=())
        if self.trained or not extents:
            return [(count, *extents)]
        flat = (sum(math.prod(c.values.shape[1:]) for c in self.columns),)
        if count == 1:
            return [extents, (1, *extents), flat]
        alike = len({c.values.shape[1:] for c in self.columns}) == 1
        return [(count, *extents), flat] if alike else [flat]

    def options(self, dtype: str, length: int) -> list[Option]:
        """The shapes and dtypes that forward may accept, the likely ones first."""
        dtypes = [self.port.dtype] if self.port.dtype else [dtype, "bool" if self.mask else "int64"]
        return [(shape, each) for each in dtypes for shape in self.shapes(length)]

    def fitted(self, option: Option, place: int, length: int) -> Feed:
        """The feed with the option that forward accepted; `place` is its index in `options`."""
        forms = self.shapes(length)
        if self.mask:
            shaped = True
        elif self.jagged:  # (columns, items) is the default: the config need not name it
            shaped = place % len(forms) != len(forms) - 2
        else:
            shaped = len(option[0]) > 1 and self.trained is None
        return replace(self, option=option, shaped=shaped)

    def flat(self) -> Feed:
        """The feed with one row for each item."""
        return replace(self, columns=tuple(FileColumn(c.name, c.values) for c in self.columns))

    def vectors(self) -> Feed:
        """The feed with lists of equal length as vectors. It stays as it is if weaver padded these
        lists to another length."""
        lists = [c for c in self.columns if c.vectors is not c]
        widths = {c.vectors.values.shape[1] for c in lists}
        padded = self.trained is not None and not widths <= {self.trained.length or max(widths)}
        if not lists or padded:
            return self
        return replace(self, columns=tuple(column.vectors for column in self.columns))


def choose(
    model: Model,
    data: Source | None,
    given: Mapping[str, Sequence[str]],
    weaver: Mapping[str, WeaverInput],
    flatten: bool,
    length: int | None,
    ask: Ask,
) -> list[Feed]:
    """Choose a feed for each input: from `given`, by its name, else from weaver or the file.

    `flatten`: each item of jagged columns becomes a row. `length`: see `fitted`. A mask belongs to
    the jagged input before it, or after it if there is none before. Raises InitError.
    """
    ports = model.ports or tuple(Port(name) for name in given)
    names = [port.name for port in ports]
    if not names or not {*given} <= {*names}:
        takes = f"forward takes {', '.join(names)}" if names else "forward names no inputs"
        raise InitError(f"{takes}: give --input NAME=COLUMN,COLUMN for each, in its order")
    trained = dict(zip(names, weaver, strict=False)) if len(weaver) == len(names) else {}
    trained |= {n: w for n in names for w in weaver if w.endswith(f"_{n}") or given.get(n) == [w]}
    used = [p for p in ports if p.needed or p.name in given or p.name in trained] or [ports[0]]
    used = list(ports[: ports.index(used[-1]) + 1])  # arguments are positional: no gaps
    said = {name: weaver[own] for name, own in trained.items()}
    words = _words(used, data, given, said, ask)
    missing = "trees" in model.said  # for boosted trees, NaN is a valid value
    feeds = []
    for port in used:
        feed = _read(port, words[port.name], data, said.get(port.name), missing, model.dtype)
        if feed.trained and feed.trained.mask and (feed if length else feed.vectors()).jagged:
            feed = Feed(port, (), mask=True)
        feeds.append(feed)
    feeds = _with_masks(feeds)
    every = [column for feed in feeds for column in feed.columns]
    cuts = {(c.rows, c.cut if flatten else None): f"{c.name} has {c.rows} rows" for c in every}
    if len(cuts) > 1:
        same = "items in each" if flatten else "rows"
        raise InitError(f"{', '.join(cuts.values())}: name columns that have the same {same}")
    return [feed.flat() for feed in feeds] if flatten else feeds


def _words(
    ports: Sequence[Port],
    data: Source | None,
    given: Mapping[str, Sequence[str]],
    trained: Mapping[str, WeaverInput],
    ask: Ask,
) -> dict[str, Sequence[str]]:
    """The names, ranges and patterns of the columns of each input. Raises InitError."""
    have = [*data.columns] if data else []

    def known(port: Port) -> Sequence[str]:
        if port.name in trained:
            return trained[port.name].columns
        if port.name in given:
            return given[port.name]
        if port.columns and (not data or {*port.columns} <= {*have}):
            return port.columns
        if port.name in have:
            return [port.name]
        return ["mask"] if "mask" in port.name else []

    words = {port.name: known(port) for port in ports}
    taken = [n for name in words for n in expanded(f"--input {name}", words[name], have)]
    unsaid = [port for port in ports if not words[port.name]]
    for port in unsaid:
        likely = [n for n in have if n not in taken] if len(unsaid) == 1 else []
        if not data:
            likely = [f"{port.name}{i}" for i in range(port.width)]
        question = f"the columns of {port.name!r}, out of {', '.join(have[:9]) or 'your data'}, …"
        default = ",".join(likely) if 0 < len(likely) <= 64 or not data else None
        answer = ask(f"--input {port.name}=COLUMN,…", question, default or None)
        words[port.name] = answer.split(",")
    return words


def _read(
    port: Port,
    words: Sequence[str],
    data: Source | None,
    trained: WeaverInput | None,
    missing: bool,
    dtype: str,
) -> Feed:
    """Read an input's columns; without a file they have no rows. Raises InitError, DataError."""
    names = expanded(f"--input {port.name}", words, data.columns if data else [])
    if names == ["mask"] and not (data and "mask" in data.columns):
        return Feed(port, (), trained, mask=True)
    if data is None:
        empty = np.zeros(0, port.dtype or dtype)
        return Feed(port, tuple(FileColumn(name, empty) for name in names), trained)
    columns = tuple(_column(data, name, missing) for name in names)
    for column in columns if not missing else ():
        if bad := int(np.sum(~np.isfinite(column.values))):
            raise InitError(
                f"{column.name} is NaN or infinite {bad} times in the rows that were read: "
                "clean the file, or leave the column out"
            )
    return Feed(port, columns, trained)


def _with_masks(feeds: Sequence[Feed]) -> list[Feed]:
    """The feeds, in which each mask has the columns of its jagged input. Raises InitError."""
    found = []
    for i, feed in enumerate(feeds):
        others = [f for f in [*feeds[:i][::-1], *feeds[i:]] if f.jagged]
        if feed.mask and not others:
            raise InitError(f"{feed.port.name!r} is a mask, and no input is jagged: name columns")
        found.append(replace(feed, columns=others[0].columns) if feed.mask else feed)
    return found


def _column(data: Source, name: str, missing: bool) -> FileColumn:
    """The first rows of a column. Raises DataError."""
    data.require([name])
    try:
        found = column_of(name, data.head([name], _MOST_ROWS)[name], missing)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"{data.path}: {name} {first_line(error)}") from error
    if found.rows == 0:
        raise DataError(f"{data.path} has no rows: give a file that has some, or none at all")
    return found


def _check_cuts(feed: Feed) -> None:
    """Raise InitError if the columns of an input differ in their numbers of items per row."""
    cuts = {c.cut: c.name for c in feed.columns}
    if len(cuts) > 1:
        first, *others = cuts.values()
        advice = f"--input {feed.port.name}=COLUMN,COLUMN names columns of one kind"
        if feed.trained:
            advice = "give the file one of them for each item (ak.broadcast_arrays), or a column "
            advice += "of the formula's own name"
        raise InitError(
            f"{feed.port.name!r} would get {first} and {', '.join(others)}, which differ in their "
            f"items per row: {advice}"
        )


def expanded(flag: str, words: Iterable[str], have: Sequence[str]) -> list[str]:
    """The column names that the words of an option mean. Raises InitError."""
    try:
        return [each for word in words for each in names_in(word.strip(), have or None)]
    except ValueError as error:
        raise InitError(f"{flag}: {error}") from None


def fitted(
    model: Model, feeds: Sequence[Feed], length: int | None, named: bool, ask: Ask
) -> tuple[list[Feed], int]:
    """The feeds with a combination of options that forward accepts, and the number of items of a
    jagged row: `length`, else weaver's, else the user's answer. `named`: whether the user named the
    columns. Raises InitError.

    Lists of equal length become vectors. They become jagged rows if there is a `length` or a mask,
    or if forward accepts them only as jagged rows.
    """
    forms = [feeds]
    if not length and not any(feed.mask for feed in feeds):
        vectors = [feed.vectors() for feed in feeds]
        changed = any(v is not f for v, f in zip(vectors, feeds, strict=True))
        forms = [vectors, feeds] if changed else [vectors]
    for feed in forms[0]:
        _check_cuts(feed)
    tried = []
    for form in forms:
        if any(len({c.cut for c in feed.columns}) > 1 for feed in form):
            continue  # vectors and jagged columns in one input do not fit together
        size = _length(model, form, length, ask)
        # size + 1 first: if there are `size` columns too, only this shows which axis is which.
        for probe in (size + 1, size):
            place = fitting(model.module, _options(model, form, probe))
            if place is None:
                continue
            options = _at(model, form, size, place)
            if not why_not(model.module, options):
                triples = zip(form, options, place, strict=True)
                return [f.fitted(o, i, probe) for f, o, i in triples], size
        asked = _at(model, form, size, [0] * len(form))
        said = f"{_shown(form, asked)} ({why_not(model.module, asked)})"
        if said not in tried:
            tried.append(said)
    advice = "" if named else "; name the columns of each: --input NAME=COLUMN,COLUMN"
    raise InitError(f"forward does not run on {', nor on '.join(tried)}{advice}")


def _length(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> int:
    """How many items of a jagged row the model gets; 0 if no input is jagged. Raises InitError."""
    offsets = [c.offsets for feed in feeds for c in feed.columns if c.offsets is not None]
    size = length or max((f.trained.length for f in feeds if f.trained), default=0)
    if not offsets or size:
        return size
    flat = [feed.flat() for feed in feeds]
    if place := fitting(model.module, _options(model, flat, 1)):
        raise InitError(
            f"forward takes {_shown(flat, _at(model, flat, 1, place))}, and the columns are "
            "jagged: --flatten makes a row of each item; or --length N, if the model takes whole "
            "rows"
        )
    largest = max(int(np.diff(each).max(initial=1)) for each in offsets)
    said = ask("--length", "how many items of a row the model sees at most", str(largest))
    if not said.isdecimal() or not int(said):
        raise InitError(f"--length: found {said!r}; expected a whole number")
    return int(said)


def _options(model: Model, feeds: Sequence[Feed], size: int) -> list[list[Option]]:
    return [feed.options(model.dtype, size) for feed in feeds]


def _at(model: Model, feeds: Sequence[Feed], size: int, place: Sequence[int]) -> list[Option]:
    return [each[i] for each, i in zip(_options(model, feeds, size), place, strict=True)]


def _shown(feeds: Sequence[Feed], options: Sequence[Option]) -> str:
    def one(feed: Feed, shape: tuple[int, ...]) -> str:
        names = [column.name for column in feed.columns]
        more = ", …" if len(names) > 4 else ""
        taken = "" if feed.mask else f" of {', '.join(names[:4])}{more}"
        return f"{feed.port.name} ({', '.join(['n', *map(str, shape)])}){taken}"

    return "; ".join(one(f, shape) for f, (shape, _) in zip(feeds, options, strict=True))
