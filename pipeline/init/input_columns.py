"""Finds out which columns each input of a model gets, and in which shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.errors import first_line
from pipeline.applying import FileColumn, Source, column_of
from pipeline.config import expand_names, shorten_names
from pipeline.errors import DataError, InitError
from pipeline.init.model import Model, Port
from pipeline.init.trial import Option
from pipeline.init.weaver import WeaverInput
from soa.dtypes import DTYPES
from stages.model import Order

Ask = Callable[[str, str, str | None], str]
"""`ask(flag, question, default)` returns the user's answer, or the default if the user cannot be
asked. Raises an InitError, which names the option `flag`, if there is no default either."""
_MOST_ROWS = 4096  # read from a file
_MOST_NAMES, _SHOWN = 64, 9  # names that are offered as a default, and shown in a question
_ROWS = ("rows", "batch", "events", "b", "N", "B")
"""Words that users may write for the axis `n`, the rows."""


@dataclass(frozen=True)
class Asked:
    """What `--input` says about an input. `words`: its columns, as names, ranges or patterns.
    `axes`: those of the model's tensor, each `n`, `items`, `features` or a number; () if they are
    not given."""

    words: tuple[str, ...]
    axes: tuple[str, ...] = ()
    dtype: str | None = None


def parse_input_option(flag: str, text: str) -> Asked:
    """Parse what follows `NAME=` in `--input`: `a,b,c` or `(n, items, features) bool: a,b,c`.
    `flag`: the option's name in errors. Raises InitError."""
    match = re.fullmatch(r"\s*\(([^)]*)\)\s*(\w+)?\s*:\s*(.*)", text)
    if match is None:
        if text.lstrip().startswith("("):
            raise InitError(f"{flag}: found {text!r}; expected '(n, items, features): a,b,c'")
        return Asked(tuple(text.split(",")))
    listed, dtype, columns = match.groups()
    axes = tuple(re.sub(r"\s", "", axis) for axis in listed.split(",") if axis.strip())
    axes = tuple("n" if axis in _ROWS else axis for axis in axes)
    axis_form = re.compile(r"n|\d+|(items|features)(\*(items|features))?")
    if axes.count("n") != 1 or not all(map(axis_form.fullmatch, axes)):
        raise InitError(
            f"{flag}: found ({', '.join(axes)}); its axes are n once, and items, features, "
            "items*features or numbers"
        )
    if dtype and dtype not in DTYPES:
        raise InitError(f"{flag}: {dtype} is no dtype: use one of {', '.join(DTYPES)}")
    return Asked(tuple(columns.split(",")), axes, dtype)


_NOTHING, _NO_OPTION = Asked(()), Option((), ("n",))


@dataclass(frozen=True)
class Feed:
    """What one input of the model gets: columns, or expressions in them, or the mask of columns.

    `trained`: the input of a network trained with weaver, with its expressions. `mask`: the input
    is the mask of the jagged `columns`. `asked`: what the user says about it. `option`: the order
    of axes and the dtype that forward accepted; it is filled in last.
    """

    port: Port
    columns: tuple[FileColumn, ...]
    trained: WeaverInput | None = None
    mask: bool = False
    asked: Asked = _NOTHING
    option: Option = _NO_OPTION

    @property
    def jagged(self) -> bool:
        """Whether a column has a list of items in each row, instead of a number or a vector."""
        return any(column.offsets is not None for column in self.columns)

    @property
    def whole(self) -> bool:
        """Whether all finite values of the columns are whole numbers."""
        return all(map(_has_whole_values, self.columns))

    @property
    def shaped(self) -> bool:
        """Whether the config must name the shape of a row, since the default is another one."""
        if self.mask:
            return True
        if self.jagged:  # (features, items) is the default
            return self.option.axes[-1] != "items" or len(self.option.axes) != 3
        # A vector is the default of plain columns; expressions make (features, *vector).
        return len(self.option.shape) != 1 and self.trained is None

    def options(self, dtype: str, length: int) -> list[Option]:
        """Returns the ways to give this input that agree with what the user says, the likely ones
        first. `dtype`: that in which the model computes. `length`: see `forms`.

        Integers are a way only for columns of whole numbers: others would lose their fractions.
        """
        forms = self.forms(length)
        if self.asked.axes:
            forms = [form for form in forms if _has_axes(self.asked.axes, form)]
            forms = forms or self._form_from_numbers()
        dtypes = self._likely_dtypes(dtype)
        if known := self.asked.dtype or self.port.dtype:
            dtypes = [known]
        return [replace(form, dtype=likely) for likely in dtypes for form in forms]

    def _likely_dtypes(self, dtype: str) -> list[str]:
        """Returns the dtypes to try if none is known, the likely ones first. `dtype`: that in which
        the model computes."""
        likely = [dtype]
        if self.mask or "mask" in self.port.name:
            likely = [dtype, "bool"]
        only_bools = {column.values.dtype.name for column in self.columns} == {"bool"}
        if only_bools and not self.mask and not self.trained:
            likely = ["bool", dtype]
        if self.mask or self.trained or self.whole:
            likely.append("int64")
        return likely

    def other_dtypes(self, chosen: str) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yields the dtypes other than `chosen` that may be meant, each with limits between which
        to try them: the columns' own one, and bool for whole numbers 0 and 1.

        Columns of integers are also tried with numbers as large as their dtype holds, since later
        rows may have them. Yields nothing if something else decides about the dtype.
        """
        names = {column.values.dtype.name for column in self.columns}
        known = self.mask or self.trained or self.asked.dtype or self.port.dtype
        if known or len(names) != 1 or not names <= {*DTYPES}:
            return
        own, limits = names.pop(), self._limits
        if own != chosen:
            yield own, limits
        if np.issubdtype(own, np.integer):
            if own != chosen:
                yield own, (float(np.iinfo(own).min), float(np.iinfo(own).max))
            if chosen != "bool" and 0 <= limits[0] <= limits[1] <= 1:
                yield "bool", limits

    @property
    def _limits(self) -> tuple[float, float]:
        """The least and the largest finite value of the columns; (0, 1) if there is none."""
        values = np.concatenate([column.values.ravel() for column in self.columns])
        finite = values[np.isfinite(values)]
        return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)

    @property
    def asked_length(self) -> int:
        """The number of items of a jagged row, if the user's axes tell it; else 0.

        They tell it if one of their numbers is that of the features and one other is left. If both
        are equal, nothing says which axis is which.
        """
        axes = self.asked.axes
        sizes = [int(axis) for axis in axes if axis.isdecimal()]
        features = 1 if self.mask or "features" in axes else self._feature_count
        if not self.jagged or any("items" in axis for axis in axes):
            return 0
        if features in sizes:
            sizes.remove(features)
        elif features > 1:
            return 0
        return sizes[0] if len(sizes) == 1 and sizes[0] != features else 0

    @property
    def _feature_count(self) -> int:
        """How many features the model gets of each row or item."""
        return len(self.trained.features if self.trained else self.columns)

    def _form_from_numbers(self) -> list[Option]:
        """Returns the form in which the user's axes are `n` and numbers, such as (n, 3, 4), and the
        values of a row fill them in the order of the columns. Returns [] if an axis has a name, if
        the sizes do not hold just these values, or if the rows are jagged."""
        axes = self.asked.axes
        sizes = tuple(int(axis) for axis in axes if axis.isdecimal())
        count = sum(math.prod(column.extents) for column in self.columns)
        if self.jagged or self.mask or len(sizes) + 1 != len(axes) or math.prod(sizes) != count:
            return []
        at_n = axes.index("n")
        # The block has the rows first: its axis 0 goes to `at_n`, and the others keep their order.
        permute = (*range(1, at_n + 1), 0, *range(at_n + 1, len(axes))) if at_n else ()
        return [Option(sizes, ("n", *map(str, sizes)), Order(permute))]

    def forms(self, length: int) -> list[Option]:
        """Returns the possible orders of the axes of this input, the likely ones first. `length`:
        how many items of a jagged row the model gets."""
        if self.mask:
            return _forms_of_one_value(length, inner_first=True)
        count = self._feature_count
        if self.jagged:
            plain = _forms_of_one_value(length)[:1] if count == 1 else []
            return [*plain, *_forms_of_items(count, length)]
        extents = max((column.extents for column in self.columns), key=len, default=())
        if not extents:
            return self._forms_of_numbers(count)
        if self.trained:
            # A second axis of an image has no name.
            names = ("n", "features", "items", "")[: 2 + len(extents)]
            return [Option((count, *extents), names)]
        return _forms_as_stored(extents) if count == 1 else self._forms_of_columns(extents)

    def _forms_of_numbers(self, count: int) -> list[Option]:
        """Returns the forms of `count` features that are one number a row."""
        rows_first = Option((count,), ("n", "features"))
        rows_last = replace(rows_first, order=Order((1, 0)))
        if count == 1 and not self.trained:
            return [rows_first, Option((), ("n",)), rows_last]
        return [rows_first, rows_last]

    def _forms_of_columns(self, extents: tuple[int, ...]) -> list[Option]:
        """Returns the forms of several columns of vectors or matrices. `extents`: the shape of a
        row of the column with most axes."""
        flat = Option((sum(math.prod(c.extents) for c in self.columns),), ("n", "features*items"))
        if len({c.extents for c in self.columns}) > 1:
            return [replace(flat, axes=("n", "features"))]
        count = len(self.columns)
        if len(extents) > 1:
            return [Option((count, *extents), ("n", "features", *map(str, extents))), flat]
        return _forms_of_vectors(count, extents[0], flat)

    def flat(self) -> Feed:
        """Returns the feed with one row for each item of its jagged columns."""
        return replace(self, columns=tuple(replace(c, offsets=None) for c in self.columns))

    def vectors(self) -> Feed:
        """Returns the feed with vectors in place of jagged columns whose lists all have one length.
        Returns the feed itself if it has none, or if weaver padded the lists to another length."""
        lists = [column for column in self.columns if column.vectors is not column]
        if not lists:
            return self
        widths = {column.vectors.values.shape[1] for column in lists}
        if self.trained is not None and widths != {self.trained.length or max(widths)}:
            return self
        return replace(self, columns=tuple(column.vectors for column in self.columns))


def _has_whole_values(column: FileColumn) -> bool:
    """Whether the finite values of a column are whole numbers."""
    values = column.values
    if values.dtype.kind != "f":
        return True
    finite = values[np.isfinite(values)]
    return bool((finite == np.trunc(finite)).all())


def _has_axes(axes: Sequence[str], form: Option) -> bool:
    """Whether a form has these axes of the model's tensor, each given by its name or its size."""
    if len(axes) != len(form.named):
        return False
    triples = zip(axes, form.named, form.sizes, strict=False)  # a weaver image has more sizes
    return all(axis in (name, size) for axis, name, size in triples)


def _forms_of_vectors(count: int, length: int, flat: Option) -> list[Option]:
    """Returns `count` columns of vectors in every order of their axes, which are (n, features,
    items) in memory. `flat`: the form in which items and features are one axis."""
    axes, shape = ("n", "features", "items"), (count, length)
    rows_first = [(), (0, 2, 1)]
    rows_later = [(2, 0, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)]
    return [
        *(Option(shape, axes, Order(permute)) for permute in rows_first),
        flat,
        Option(shape, axes, Order((0, 2, 1), flatten=True)),
        *(Option(shape, axes, Order(permute)) for permute in rows_later),
    ]


def _forms_of_items(count: int, length: int) -> list[Option]:
    """Returns `count` jagged columns, padded to `length` items, in every order of their axes."""
    features = "features" if count > 1 else "1"
    by_feature = Option((count, length), ("n", features, "items"))
    by_item = Option((length, count), ("n", "items", features))
    flat, rows_second = Order(flatten=True), Order((1, 0, 2))
    return [
        by_feature,
        by_item,
        replace(by_feature, order=flat),
        replace(by_item, order=flat),
        replace(by_item, order=rows_second),
        replace(by_feature, order=rows_second),
    ]


def _forms_of_one_value(length: int, inner_first: bool = False) -> list[Option]:
    """Returns the forms of one value for each of `length` items: `(n, items)`, which is tried
    first, and with an axis of size 1. With `inner_first`, `(n, 1, items)` is tried first: so
    networks take masks that they multiply with channels."""
    plain = Option((length,), ("n", "items"))
    one_inside = Option((1, length), ("n", "1", "items"))
    one_last = Option((length, 1), ("n", "items", "1"))
    forms = [one_inside, plain, one_last] if inner_first else [plain, one_inside, one_last]
    return [*forms, replace(plain, order=Order((1, 0))), replace(one_last, order=Order((1, 0, 2)))]


def _forms_as_stored(extents: tuple[int, ...]) -> list[Option]:
    """Returns the forms of one column of vectors or matrices: as it is stored, then in other orders
    of the axes. `extents`: the shape of a row."""
    if len(extents) == 1:
        return _forms_of_one_value(extents[0])
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


def choose_feeds(
    model: Model,
    data: Source | None,
    asked_of: Mapping[str, Asked],
    weaver: Mapping[str, WeaverInput],
    flatten: bool,
    length: int | None,
    ask: Ask,
) -> list[Feed]:
    """Choose a feed for each input of the model, and ask the user about columns that nothing tells.

    `asked_of`: what the user says, and `weaver`: the inputs of weaver's config, both by name.
    `flatten`: each item of jagged columns becomes a row. `length`: the number of items of a jagged
    row that the model gets, if the user gave it. A mask belongs to the nearest jagged input before
    it, or to the first after it if there is none before. Raises InitError.
    """
    ports = model.ports or tuple(Port(name) for name in asked_of)
    names = [port.name for port in ports]
    if not names or not {*asked_of} <= {*names}:
        takes = f"forward takes {', '.join(names)}" if names else "forward names no inputs"
        raise InitError(f"{takes}: give --input NAME=COLUMN,COLUMN for each, in its order")
    by_port = _match_weaver_inputs(names, weaver, asked_of)
    wanted = [p for p in ports if p.needed or p.name in asked_of or p.name in by_port] or [ports[0]]
    used = ports[: ports.index(wanted[-1]) + 1]  # arguments are positional: no gaps
    words = _choose_words(used, data, asked_of, by_port, ask)
    missing = getattr(model.module, "missing", False)  # NaN is a missing value, as in trees
    feeds = []
    for port in used:
        trained = by_port.get(port.name)
        feed = _read_feed(port, words[port.name], data, trained, missing, model.dtype)
        # The config pads jagged rows and makes their mask itself, so weaver's mask is not read.
        if feed.trained and feed.trained.mask and (feed if length else feed.vectors()).jagged:
            feed = Feed(port, (), mask=True)
        feeds.append(replace(feed, asked=asked_of.get(port.name, _NOTHING)))
    feeds = _fill_masks(feeds)
    _check_same_rows(feeds, flatten)
    return [feed.flat() for feed in feeds] if flatten else feeds


def _check_same_rows(feeds: Sequence[Feed], flatten: bool) -> None:
    """Raises InitError if columns differ in their numbers of rows; with `flatten`, also if they
    differ in their items per row."""
    columns = [column for feed in feeds for column in feed.columns]
    cuts = {(c.rows, c.cut if flatten else None): f"{c.name} has {c.rows} rows" for c in columns}
    if len(cuts) > 1:
        same = "items in each" if flatten else "rows"
        raise InitError(f"{', '.join(cuts.values())}: name columns that have the same {same}")


def _match_weaver_inputs(
    names: Sequence[str], weaver: Mapping[str, WeaverInput], asked_of: Mapping[str, Asked]
) -> dict[str, WeaverInput]:
    """Returns weaver's input of each port, by the port's name. An input goes to a port in whose
    name its own ends, as `pf_features` to `features`, or for which the user names it. If there are
    as many inputs as ports, each of the other ports gets the one in its place."""
    by_port = dict(zip(names, weaver.values(), strict=True)) if len(weaver) == len(names) else {}
    for name in names:
        words = asked_of[name].words if name in asked_of else ()
        for own, trained in weaver.items():
            if own.endswith(f"_{name}") or words == (own,):
                by_port[name] = trained
    return by_port


def _choose_words(
    ports: Sequence[Port],
    data: Source | None,
    asked_of: Mapping[str, Asked],
    trained: Mapping[str, WeaverInput],
    ask: Ask,
) -> dict[str, Sequence[str]]:
    """Returns the names, ranges and patterns of the columns of each input. The user is asked about
    the inputs for which nothing tells them; all columns that no other input has are the default if
    there is only one such input. `trained`: weaver's inputs by port. Raises InitError.
    """
    known = [*data.columns] if data else []

    def find_words(port: Port) -> Sequence[str]:
        if port.name in trained:
            return trained[port.name].columns
        if port.name in asked_of:
            return asked_of[port.name].words
        if port.columns and (not data or {*port.columns} <= {*known}):
            return port.columns
        if port.name in known and not _may_be_one_of_several(port, ports, data):
            return [port.name]
        if "mask" not in port.name:
            return []
        masks = [name for name in known if "mask" in name]
        return masks if len(masks) == 1 else ["mask"]

    words = {port.name: find_words(port) for port in ports}
    taken = {c for name in words for c in expand_words(f"--input {name}", words[name], known)}
    unknown = [port for port in ports if not words[port.name]]
    for port in unknown:
        likely = [column for column in known if column not in taken] if len(unknown) == 1 else []
        if not data:
            likely = [f"{port.name}{i}" for i in range(port.width)]
        listed = ", ".join(known[:_SHOWN]) or "your data"
        question = f"the columns of {port.name!r}, out of {listed}, …"
        short = shorten_names(likely)
        default = ",".join(short) if 0 < len(short) <= _MOST_NAMES or not data else None
        if port.name in known:  # that column alone, or all
            default = None
        answer = ask(f"--input {port.name}=COLUMN,…", question, default or None)
        words[port.name] = answer.split(",")
    return words


def _may_be_one_of_several(port: Port, ports: Sequence[Port], data: Source | None) -> bool:
    """Whether the only input has the name of a column of numbers, and there are other columns: the
    input may be that column alone, or all of them."""
    if data is None or len(ports) > 1 or len(data.columns) == 1:
        return False
    column = _read_head(data, port.name, missing=True)
    return column.offsets is None and column.extents == ()


def _read_feed(
    port: Port,
    words: Sequence[str],
    data: Source | None,
    trained: WeaverInput | None,
    missing: bool,
    dtype: str,
) -> Feed:
    """Read the first rows of an input's columns; without a file they have no rows. `missing`: NaN
    is allowed, since it stands for a missing value. `dtype`: that of columns without a file. Raises
    InitError, DataError."""
    names = expand_words(f"--input {port.name}", words, data.columns if data else [])
    if names == ["mask"] and not (data and "mask" in data.columns):
        return Feed(port, (), trained, mask=True)
    if data is None:
        empty = np.zeros(0, port.dtype or dtype)
        return Feed(port, tuple(FileColumn(name, empty) for name in names), trained)
    columns = tuple(_read_head(data, name, missing) for name in names)
    for column in columns:
        nonfinite = int(np.sum(~np.isfinite(column.values)))
        if nonfinite and not missing:
            raise InitError(
                f"{column.name} is NaN or infinite {nonfinite} times in the rows that were read: "
                "clean the file, or leave the column out"
            )
    return Feed(port, columns, trained)


def _fill_masks(feeds: Sequence[Feed]) -> list[Feed]:
    """Returns the feeds, in which each mask has got the columns of its jagged input. Raises
    InitError for a mask if no input is jagged, or if its name says that it is 1 where there is no
    item."""
    completed = []
    for i, feed in enumerate(feeds):
        nearest_first = [*feeds[:i][::-1], *feeds[i:]]
        jagged = [other for other in nearest_first if other.jagged]
        if feed.mask and not jagged:
            raise InitError(f"{feed.port.name!r} is a mask, and no input is jagged: name columns")
        if feed.mask and "pad" in feed.port.name:
            raise InitError(
                f"{feed.port.name!r} sounds like a padding mask, true where there is no item; the "
                "mask of jagged columns is 1 where there is one: call forward's argument `mask`, "
                "and invert it there"
            )
        completed.append(replace(feed, columns=jagged[0].columns) if feed.mask else feed)
    return completed


def _read_head(data: Source, name: str, missing: bool) -> FileColumn:
    """Read the first rows of a column, at most `_MOST_ROWS`. `missing`: see `column_of`. Raises
    DataError."""
    data.require([name])
    try:
        column = column_of(name, data.head([name], _MOST_ROWS)[name], missing)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"{data.path}: {name} {first_line(error)}") from error
    if column.rows == 0:
        raise DataError(f"{data.path} has no rows: give a file that has some, or none at all")
    return column


def check_items_per_row(feed: Feed) -> None:
    """Raises InitError if the columns of an input differ in their numbers of items per row."""
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


def expand_words(flag: str, words: Iterable[str], known: Sequence[str]) -> list[str]:
    """Returns the column names that the words of the option `flag` stand for: names, ranges, and
    patterns of names in `known`. Raises InitError."""
    try:
        return [name for word in words for name in expand_names(word.strip(), known or None)]
    except ValueError as error:
        raise InitError(f"{flag}: {error}") from None
