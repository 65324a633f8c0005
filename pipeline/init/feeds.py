"""Which columns each input of a model gets, and in which shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.config import names_in
from pipeline.errors import InitError
from pipeline.init.data import DataFile, FileColumn
from pipeline.init.model import Model, Option, Port, fitting, why_not
from pipeline.init.weaver import WeaverInput

Ask = Callable[[str, str, str | None], str]
"""`ask(flag, question, default)`: what the user says; InitError where nobody answers."""
MOST = 4096  # rows that are read
_LENGTHS = (32, 128)


@dataclass(frozen=True)
class Feed:
    """What an input gets: columns, weaver's expressions of them, or the mask of jagged ones.

    `option` is how forward took it; `items_first`: jagged rows as (n, items, columns). With neither
    columns nor a mask, what it may take is unknown.
    """

    port: Port
    columns: tuple[FileColumn, ...] = ()
    trained: WeaverInput | None = None
    mask: bool = False
    option: Option = ((), "")
    items_first: bool = False

    @property
    def jagged(self) -> bool:
        return self.mask or any(column.offsets is not None for column in self.columns)

    @property
    def count(self) -> int:
        return len(self.trained.features if self.trained else self.columns) or 1

    @property
    def length(self) -> int:
        """Of jagged rows: how many items the model sees."""
        return self.option[0][0 if self.items_first else 1]

    @property
    def usual(self) -> tuple[int, ...]:
        """The shape that a block has if none is said."""
        inner = [column.values.shape[1:] for column in self.columns]
        if self.jagged and not self.mask:
            return () if self.items_first else (self.count, self.length)
        if self.trained or self.mask:
            return self.option[0]
        if len(inner) == 1 and len(inner[0]) == 2:
            return inner[0]
        return (sum(map(math.prod, inner)),)

    @property
    def seen(self) -> bool:
        """Whether it has columns with rows in them, and so a known kind."""
        return any(column.rows for column in self.columns)

    def options(self, dtype: str, widths: Sequence[int], length: int) -> list[Option]:
        """The forms in which forward may want it, the likely ones first."""
        known, count = self.port.shape, self.count
        extents = max((c.values.shape[1:] for c in self.columns), key=len, default=())
        if self.mask:
            shapes: list[tuple[int, ...]] = [(1, length)]
        elif not self.seen and known is not None:
            shapes = [tuple(length if extent is None else extent for extent in known)]
        elif not self.seen:
            widths = [count] if self.columns else widths
            shapes = [s for w in widths for s in ((w,), (w, length), (length, w))]
        elif self.jagged:
            shapes = [(count, length), (length, count)]
        elif self.trained or not extents:
            shapes = [(count, *extents)]
        else:
            flat = (sum(math.prod(c.values.shape[1:]) for c in self.columns),)
            shapes = [(count, *extents), flat] if count > 1 else [extents, (1, *extents), flat]
        if known is not None:
            shapes = [s for s in shapes if len(s) == len(known)
                      and all(b in (None, a) for a, b in zip(s, known, strict=True))]  # fmt: skip
        dtypes = [self.port.dtype] if self.port.dtype else [dtype, "bool" if self.mask else "int64"]
        return [(shape, each) for each in dtypes for shape in shapes]

    def flat(self) -> Feed:
        """With a row for each item."""
        return replace(self, columns=tuple(FileColumn(c.name, c.values) for c in self.columns))

    def with_option(self, option: Option, longer: tuple[int, ...]) -> Feed:
        """With columns of the kind that forward takes, where they were not seen in a file: named
        `features0`, `features1`, … where they have no name.

        `longer`: the shape where rows have one item more.
        """
        shape, dtype = option
        turned = len(shape) == 2 and shape[0] != longer[0]
        if self.seen or self.mask:
            return replace(self, option=option, items_first=turned)
        count, *inner = shape[::-1] if turned else shape
        names = [c.name for c in self.columns] or list(self.port.columns)
        names = names or [f"{self.port.name}{i}" for i in range(count)]
        values = np.zeros((0, *[math.prod(inner)] * (len(inner) > 1)), dtype)
        offsets = np.zeros(1, int) if len(inner) == 1 else None
        columns = tuple(FileColumn(name, values, offsets) for name in names)
        return replace(self, columns=columns, option=option, items_first=turned)


def choose(
    model: Model,
    data: DataFile | None,
    given: Mapping[str, Sequence[str]],
    weaver: Mapping[str, WeaverInput],
    flatten: bool,
    ask: Ask,
) -> list[Feed]:
    """A feed for each input: as `given` by its name, else what weaver or the file has for it.

    `flatten`: each item of jagged columns is a row.

    Raises InitError.
    """
    ports = model.ports or tuple(Port(name) for name in given)
    names = [port.name for port in ports]
    if not names or not {*given} <= {*names}:
        takes = f"forward takes {', '.join(names)}" if names else "forward names no inputs"
        raise InitError(f"{takes}: give --input NAME=COLUMN,COLUMN for each, in its order")
    trained = dict(zip(names, weaver, strict=False)) if len(weaver) == len(names) else {}
    trained |= {n: w for n in names for w in weaver if w.endswith(f"_{n}") or given.get(n) == [w]}
    used = [p for p in ports if p.needed or p.name in given or p.name in trained] or [ports[0]]
    used = list(ports[: ports.index(used[-1]) + 1])  # an optional one takes those before it along
    have = [*data.readers] if data else []
    words: dict[str, Sequence[str]] = {}
    for port in used:
        source, own = trained.get(port.name), {*port.columns} <= {*have} or not data
        found = weaver[source].columns if source else given.get(port.name) or port.columns * own
        found = found or [port.name] * (port.name in have)
        words[port.name] = found or ["mask"] * ("mask" in port.name)
    taken = [n for p in words for n in expanded(f"--input {p}", words[p], have)]
    left = [n for n in have if n not in taken]
    for port in used if data else ():
        if not words[port.name]:
            only = len(left) <= 64 and [p for p in words if not words[p]] == [port.name]
            question = f"the columns of {port.name!r}, out of {', '.join(have[:9])}, …"
            default = ",".join(left) if only else None
            words[port.name] = ask(f"--input {port.name}=COLUMN,…", question, default).split(",")
    feeds = []
    for port in used:
        each = expanded(f"--input {port.name}", words[port.name], have)
        mask = each == ["mask"] and "mask" not in have
        columns = tuple(
            data.column(n) if data else FileColumn(n, np.zeros(0, model.dtype))
            for n in each
            if not mask
        )
        said = weaver.get(trained.get(port.name, ""))
        if said and said.mask and columns[0].offsets is not None:
            mask, columns, said = True, (), None
        for column in columns if "trees" not in model.said else ():
            if bad := int(np.sum(~np.isfinite(column.values))):
                raise InitError(
                    f"{column.name} is NaN or infinite {bad} times in the rows that were read: "
                    "clean the file, or leave the column out"
                )
        alike = {c.offsets is None: c.name for c in columns}
        if len(alike) > 1:
            raise InitError(
                f"{port.name!r} would get {alike[False]}, which is jagged, beside {alike[True]}: "
                f"name columns of one kind by --input {port.name}=COLUMN,COLUMN"
            )
        feeds.append(Feed(port, columns, said, mask))
    every = [column for feed in feeds for column in feed.columns]
    kinds = {c.offsets is None or c.offsets.tobytes(): c.name for c in every}
    if flatten and len(kinds) > 1:
        raise InitError(
            f"--flatten: {' and '.join(kinds.values())} have not the same items in a row"
        )
    rows = {column.rows: column.name for column in every}
    if len(rows) > 1:
        counts = ", ".join(f"{name} has {n} rows" for n, name in rows.items())
        raise InitError(f"{counts}: name columns that have the same")
    return [feed.flat() for feed in feeds] if flatten else feeds


def expanded(flag: str, words: Iterable[str], have: Sequence[str]) -> list[str]:
    """The names that words of an option stand for. Raises InitError."""
    try:
        return [each for word in words for each in names_in(word.strip(), have or None)]
    except ValueError as error:
        raise InitError(f"{flag}: {error}") from None


def fitted(model: Model, feeds: Sequence[Feed], length: int | None, ask: Ask) -> list[Feed]:
    """The feeds with the options that forward takes together, and columns for those without.

    `length`: items of a jagged row. Raises InitError, which says what forward takes instead.
    """
    until = time.monotonic() + 30
    offsets = [c.offsets for feed in feeds for c in feed.columns if c.offsets is not None]
    largest = max((int(np.diff(each).max(initial=1)) for each in offsets), default=None)
    wide = model.widths
    inner = [a // b for a in wide for b in wide if a > b and a % b == 0]
    lengths = [length] if length else [*dict.fromkeys([largest or 32, *_LENGTHS, *wide, *inner])]

    def options(feeds: Sequence[Feed], size: int) -> list[list[Option]]:
        return [feed.options(model.dtype, wide, size) for feed in feeds]

    def tried(feeds: Sequence[Feed]) -> tuple[tuple[int, ...], int]:
        """Which options forward takes together, and with how many items of a row; () if none."""
        for size in lengths:
            for probe in (size + 1, size):  # where a row is as long as it is wide, the order shows
                place = fitting(model.module, options(feeds, probe), until)
                if place and not why_not(model.module, at(place, size, feeds)):
                    return place, size
            if options(feeds, size) == options(feeds, size + 1):
                break  # no length matters
        return (), lengths[0]

    def at(place: Sequence[int], size: int, feeds: Sequence[Feed] = feeds) -> list[Option]:
        return [each[i] for each, i in zip(options(feeds, size), place, strict=True)]

    flat = [feed.flat() for feed in feeds]
    if offsets and length is None and (alone := tried(flat))[0]:
        raise InitError(
            f"forward takes {_shown(flat, at(*alone, flat))}, and the columns are jagged: "
            "--flatten makes a row of each item; or --length N, where it is to see whole rows"
        )
    place, size = tried(feeds)
    if not place:
        asked = [each[0] if each else ((), "") for each in options(feeds, size)]
        advice = "name the columns of each: --input NAME=COLUMN,COLUMN"
        bare = [Feed(feed.port) for feed in feeds]
        takes = tried(bare)
        if takes[0]:
            advice = f"it takes {_shown(bare, at(*takes, bare))}: {advice}"
        said = why_not(model.module, asked)
        raise InitError(f"forward does not run on {_shown(feeds, asked)} ({said}); {advice}")
    matters = length is None and at(place, size + 1) != at(place, size)
    if matters and not why_not(model.module, at(place, size + 1)):  # any length will do
        question = "how many items of a row the model sees at most"
        said = ask("--length", question, str(largest) if largest else None)
        if not said.isdecimal() or not int(said):
            raise InitError(f"--length: found {said!r}; expected a whole number")
        size = int(said)
    pairs = zip(feeds, at(place, size), at(place, size + 1), strict=True)
    return [feed.with_option(option, longer[0]) for feed, option, longer in pairs]


def _shown(feeds: Sequence[Feed], options: Sequence[Option]) -> str:
    pairs = zip(feeds, options, strict=True)
    return ", ".join(f"{f.port.name} ({', '.join(['n', *map(str, s)])})" for f, (s, _) in pairs)
