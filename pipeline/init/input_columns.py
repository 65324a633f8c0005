"""Finds out which columns each input of a model gets, and in which shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.errors import first_line
from pipeline.applying import FileColumn, Source, column_of
from pipeline.config import in_short, names_in
from pipeline.errors import DataError, InitError
from pipeline.init.model import Model, Port
from pipeline.init.trial import Option
from pipeline.init.weaver import WeaverInput
from soa.dtypes import DTYPES
from stages.model import Order

Ask = Callable[[str, str, str | None], str]
"""`ask(flag, question, default)`: the user's answer, or the default. InitError without either."""
_MOST_ROWS = 4096  # read from a file
_MOST_NAMES = 64  # names and ranges of names that are offered as all columns of a file


@dataclass(frozen=True)
class Asked:
    """What `--input` says about an input: its columns, and in parentheses before them its axes,
    `n`, `items` and `features` or numbers, and a dtype."""

    words: tuple[str, ...]
    axes: tuple[str, ...] = ()
    dtype: str | None = None


def asked(flag: str, text: str) -> Asked:
    """Read `a,b,c` or `(n, items, features) bool: a,b,c`. Raises InitError."""
    parts = re.fullmatch(r"\s*\(([^)]*)\)\s*(\w+)?\s*:\s*(.*)", text)
    if parts is None:
        if text.lstrip().startswith("("):
            raise InitError(f"{flag}: found {text!r}; expected '(n, items, features): a,b,c'")
        return Asked(tuple(text.split(",")))
    axes = tuple(re.sub(r"\s", "", axis) for axis in parts[1].split(",") if axis.strip())
    axes = tuple("n" if axis in _ROWS else axis for axis in axes)
    form = re.compile(r"n|\d+|(items|features)(\*(items|features))?")
    if axes.count("n") != 1 or not all(map(form.fullmatch, axes)):
        raise InitError(
            f"{flag}: found ({', '.join(axes)}); its axes are n once, and items, features, "
            "items*features or numbers"
        )
    if parts[2] and parts[2] not in DTYPES:
        raise InitError(f"{flag}: {parts[2]} is no dtype: use one of {', '.join(DTYPES)}")
    return Asked(tuple(parts[3].split(",")), axes, parts[2])


_ROWS = ("rows", "batch", "events", "b", "N", "B")


_NOTHING, _NO_OPTION = Asked(()), Option((), ("n",))


@dataclass(frozen=True)
class Feed:
    """The data of one input: columns, weaver's expressions in them, or the mask of jagged columns.

    `asked`: what the user says about its axes. `option`: the order and dtype that forward accepted.
    """

    port: Port
    columns: tuple[FileColumn, ...]
    trained: WeaverInput | None = None
    mask: bool = False
    asked: Asked = _NOTHING
    option: Option = _NO_OPTION

    @property
    def jagged(self) -> bool:
        return any(column.offsets is not None for column in self.columns)

    @property
    def whole(self) -> bool:
        """Whether the columns have whole numbers only; NaN and infinities do not count."""
        return all(map(_whole, self.columns))

    @property
    def shaped(self) -> bool:
        """Whether the config must name the shape of a row."""
        if self.mask:
            return True
        if self.jagged:  # (features, items) is the default
            return self.option.axes[-1] != "items" or len(self.option.axes) != 3
        return len(self.option.shape) != 1 and self.trained is None

    def options(self, dtype: str, length: int) -> list[Option]:
        """The ways to give this input, the likely ones first; only those that the user allows.

        Integers are a way only for columns of whole numbers: else they would lose digits.
        """
        likely = [dtype]
        if self.mask or "mask" in self.port.name:
            likely = [dtype, "bool"]
        bools = {column.values.dtype.name for column in self.columns} == {"bool"}
        if bools and not self.mask and not self.trained:
            likely = ["bool", dtype]
        if self.mask or self.trained or self.whole:
            likely.append("int64")
        only = self.asked.dtype or self.port.dtype
        forms = self.forms(length)
        if self.asked.axes:
            forms = [form for form in forms if _allowed(self.asked.axes, form)]
            forms = forms or self._numbered()
        return [replace(f, dtype=each) for each in ([only] if only else likely) for f in forms]

    def _numbered(self) -> list[Option]:
        """The components in their order, in the axes that the user gives as numbers."""
        axes = self.asked.axes
        sizes = tuple(int(axis) for axis in axes if axis.isdecimal())
        count = sum(math.prod(column.extents) for column in self.columns)
        if self.jagged or self.mask or len(sizes) + 1 != len(axes) or math.prod(sizes) != count:
            return []
        at = axes.index("n")
        order = Order((*range(1, at + 1), 0, *range(at + 1, len(axes))) if at else ())
        return [Option(sizes, ("n", *map(str, sizes)), order)]

    def forms(self, length: int) -> list[Option]:
        """The possible orders of this input, the likely ones first."""
        if self.mask:
            return _vector(length, 1)
        count = len(self.trained.features if self.trained else self.columns)
        if self.jagged:
            plain = _vector(length, 0)[:1] if count == 1 else []
            return [*plain, *_items(count, length)]
        extents = max((c.extents for c in self.columns), key=len, default=())
        if not extents:
            return self._of_numbers(count)
        if self.trained:
            names = ("n", "features", "items", "")[: 2 + len(extents)]
            return [Option((count, *extents), names)]
        return _stored(extents) if count == 1 else self._of_vectors(extents)

    def _of_numbers(self, count: int) -> list[Option]:
        """Columns with one number a row."""
        wide = Option((count,), ("n", "features"))
        turned = replace(wide, order=Order((1, 0)))
        if count == 1 and not self.trained:
            return [wide, Option((), ("n",)), turned]
        return [wide, turned]

    def _of_vectors(self, extents: tuple[int, ...]) -> list[Option]:
        """Several columns, of vectors or matrices; `extents`: those of the one with most axes."""
        flat = Option((sum(math.prod(c.extents) for c in self.columns),), ("n", "features*items"))
        if len({c.extents for c in self.columns}) > 1:
            return [replace(flat, axes=("n", "features"))]
        count = len(self.columns)
        if len(extents) > 1:
            return [Option((count, *extents), ("n", "features", *map(str, extents))), flat]
        return _columns(count, extents[0], flat)

    def flat(self) -> Feed:
        """The feed with one row for each item."""
        return replace(self, columns=tuple(replace(c, offsets=None) for c in self.columns))

    def vectors(self) -> Feed:
        """The feed with lists of equal length as vectors. It stays as it is if weaver padded these
        lists to another length."""
        lists = [c for c in self.columns if c.vectors is not c]
        widths = {c.vectors.values.shape[1] for c in lists}
        padded = self.trained is not None and not widths <= {self.trained.length or max(widths)}
        if not lists or padded:
            return self
        return replace(self, columns=tuple(column.vectors for column in self.columns))


def _whole(column: FileColumn) -> bool:
    values = column.values
    if values.dtype.kind != "f":
        return True
    finite = values[np.isfinite(values)]
    return bool((finite == np.trunc(finite)).all())


def _allowed(axes: Sequence[str], form: Option) -> bool:
    """Whether a form has these axes, each given by its name or its size."""
    pairs = [*zip(axes, form.named, form.sizes, strict=False)]
    return len(axes) == len(form.named) and all(axis in (name, size) for axis, name, size in pairs)


def _columns(count: int, length: int, flat: Option) -> list[Option]:
    """Columns of vectors, (n, features, items) in memory, in every order."""
    axes, shape = ("n", "features", "items"), (count, length)
    turned = [(), (0, 2, 1)]
    second = [(2, 0, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)]
    return [
        *(Option(shape, axes, Order(permute)) for permute in turned),
        flat,
        Option(shape, axes, Order((0, 2, 1), True)),
        *(Option(shape, axes, Order(permute)) for permute in second),
    ]


def _items(count: int, length: int) -> list[Option]:
    """Jagged columns, padded to `length` items, in every order."""
    features = "features" if count > 1 else "1"
    options = [
        Option((count, length), ("n", features, "items")),
        Option((length, count), ("n", "items", features)),
    ]
    return [
        *options,
        *(replace(each, order=Order((), True)) for each in options),
        *(replace(each, order=Order((1, 0, 2))) for each in options[::-1]),
    ]


def _vector(length: int, first: int) -> list[Option]:
    """One value an item; `first`: the form that is tried first."""
    plain = Option((length,), ("n", "items"))
    inner = Option((1, length), ("n", "1", "items"))
    last = Option((length, 1), ("n", "items", "1"))
    forms = [inner, plain, last] if first else [plain, inner, last]
    return [*forms, replace(plain, order=Order((1, 0))), replace(last, order=Order((1, 0, 2)))]


def _stored(extents: tuple[int, ...]) -> list[Option]:
    """One column of vectors or matrices: as it is stored, then in other orders."""
    if len(extents) == 1:
        return _vector(extents[0], 0)
    axes = ("n", *map(str, extents))
    plain = Option(extents, axes)
    last = len(extents)
    to_front, to_back = (0, last, *range(1, last)), (0, *range(2, last + 1), 1)  # channels
    orders = [to_front, to_back] if last > 2 else [(0, 2, 1), (1, 0, 2), (2, 0, 1)]
    return [
        plain,
        Option((1, *extents), ("n", "1", *axes[1:])),
        Option((math.prod(extents),), ("n", "*".join(axes[1:]))),
        *(replace(plain, order=Order(permute)) for permute in orders),
    ]


def choose(
    model: Model,
    data: Source | None,
    asked_of: Mapping[str, Asked],
    weaver: Mapping[str, WeaverInput],
    flatten: bool,
    length: int | None,
    ask: Ask,
) -> list[Feed]:
    """Choose a feed for each input: from `asked_of`, by its name, else from weaver or the file.

    `flatten`: each item of jagged columns becomes a row. `length`: see `fitted`. A mask belongs to
    the jagged input before it, or after it if there is none before. Raises InitError.
    """
    ports = model.ports or tuple(Port(name) for name in asked_of)
    names = [port.name for port in ports]
    if not names or not {*asked_of} <= {*names}:
        takes = f"forward takes {', '.join(names)}" if names else "forward names no inputs"
        raise InitError(f"{takes}: give --input NAME=COLUMN,COLUMN for each, in its order")
    by_port = _by_port(names, weaver, asked_of)
    used = [p for p in ports if p.needed or p.name in asked_of or p.name in by_port] or [ports[0]]
    used = list(ports[: ports.index(used[-1]) + 1])  # arguments are positional: no gaps
    words = _words(used, data, {name: each.words for name, each in asked_of.items()}, by_port, ask)
    missing = getattr(model.module, "missing", False)  # NaN is a valid value
    feeds = []
    for port in used:
        feed = _read(port, words[port.name], data, by_port.get(port.name), missing, model.dtype)
        if feed.trained and feed.trained.mask and (feed if length else feed.vectors()).jagged:
            feed = Feed(port, (), mask=True)
        feeds.append(replace(feed, asked=asked_of.get(port.name, _NOTHING)))
    feeds = _with_masks(feeds)
    every = [column for feed in feeds for column in feed.columns]
    cuts = {(c.rows, c.cut if flatten else None): f"{c.name} has {c.rows} rows" for c in every}
    if len(cuts) > 1:
        same = "items in each" if flatten else "rows"
        raise InitError(f"{', '.join(cuts.values())}: name columns that have the same {same}")
    return [feed.flat() for feed in feeds] if flatten else feeds


def _by_port(
    names: Sequence[str], weaver: Mapping[str, WeaverInput], asked_of: Mapping[str, Asked]
) -> dict[str, WeaverInput]:
    """Weaver's input of each port: by the end of its name or by the user's word, else by its
    place."""
    by_port = dict(zip(names, weaver.values(), strict=True)) if len(weaver) == len(names) else {}
    for name in names:
        words = asked_of[name].words if name in asked_of else ()
        for own, trained in weaver.items():
            if own.endswith(f"_{name}") or words == (own,):
                by_port[name] = trained
    return by_port


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
        masks = [name for name in have if "mask" in name]
        return (masks if len(masks) == 1 else ["mask"]) if "mask" in port.name else []

    words = {port.name: known(port) for port in ports}
    taken = [n for name in words for n in expanded(f"--input {name}", words[name], have)]
    unsaid = [port for port in ports if not words[port.name]]
    for port in unsaid:
        likely = [n for n in have if n not in taken] if len(unsaid) == 1 else []
        if not data:
            likely = [f"{port.name}{i}" for i in range(port.width)]
        question = f"the columns of {port.name!r}, out of {', '.join(have[:9]) or 'your data'}, …"
        short = in_short(likely)
        default = ",".join(short) if 0 < len(short) <= _MOST_NAMES or not data else None
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
    for column in columns:
        bad = int(np.sum(~np.isfinite(column.values)))
        if bad and not missing:
            raise InitError(
                f"{column.name} is NaN or infinite {bad} times in the rows that were read: "
                "clean the file, or leave the column out"
            )
    return Feed(port, columns, trained)


def _with_masks(feeds: Sequence[Feed]) -> list[Feed]:
    """The feeds, in which each mask has the columns of its jagged input. Raises InitError."""
    completed = []
    for i, feed in enumerate(feeds):
        others = [f for f in [*feeds[:i][::-1], *feeds[i:]] if f.jagged]
        if feed.mask and not others:
            raise InitError(f"{feed.port.name!r} is a mask, and no input is jagged: name columns")
        if feed.mask and "pad" in feed.port.name:
            raise InitError(
                f"{feed.port.name!r} sounds like a padding mask, true where there is no item; the "
                "mask of jagged columns is 1 where there is one: call forward's argument `mask`, "
                "and invert it there"
            )
        completed.append(replace(feed, columns=others[0].columns) if feed.mask else feed)
    return completed


def _column(data: Source, name: str, missing: bool) -> FileColumn:
    """The first rows of a column. Raises DataError."""
    data.require([name])
    try:
        column = column_of(name, data.head([name], _MOST_ROWS)[name], missing)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"{data.path}: {name} {first_line(error)}") from error
    if column.rows == 0:
        raise DataError(f"{data.path} has no rows: give a file that has some, or none at all")
    return column


def check_cuts(feed: Feed) -> None:
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
