"""Short forms for many names: `part0 .. part15` is sixteen columns, `part*` all that match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from pipeline.config.mistakes import not_among, shown
from pipeline.config.yaml_lines import Document, Key, Problem

_MOST = 1 << 16
_DOTS = re.compile(r"\s*(?:…|\.{2,3})\s*")
_NUMBER = re.compile(r"([0-9]+)")


def names_in(written: str, have: Sequence[str] | None = None) -> list[str]:
    """The names of a range, the names in `have` that match a pattern with `*` or `?`, or the name.

    Raises ValueError for an invalid range, and for a pattern that matches nothing.
    """
    if _DOTS.search(written):
        return _range(written)
    if have is None or not {"*", "?"} & set(written):
        return [written]
    matching = [name for name in have if fnmatchcase(name, written)]
    if not matching:
        raise ValueError(f"no column fits it: {not_among(written, have)}")
    return matching


def _range(written: str) -> list[str]:
    """The names from `part0` to `part15` of `part0 .. part15`. Raises ValueError.

    Numbers keep the leading zeros of the first name: `a08 .. a10` is a08, a09, a10.
    """
    ends = _DOTS.split(written)
    place = _growing(*ends) if len(ends) == 2 else None
    if place is not None:
        first, last = map(_NUMBER.split, ends)
        numbers = range(int(first[place]), int(last[place]) + 1)
        if len(numbers) > _MOST:
            raise ValueError(f"found {shown(written)}; at most {_MOST} names in a range")
        before, after = "".join(first[:place]), "".join(first[place + 1 :])
        width = len(first[place])
        names = [f"{before}{n:0{width}}{after}" for n in numbers]
        if names[-1:] == [ends[1]]:  # else the number falls, or has other zeros in front
            return names
    raise ValueError(
        f"found {shown(written)}; a range is its first and its last name, which differ in one "
        "number that grows: part0 .. part15"
    )


def _growing(first: str, last: str) -> int | None:
    """The place of the only number in which two names differ, among the pieces that `_NUMBER` cuts
    a name into; None if they differ in more, or in a number of ten or more digits."""
    pieces, others = _NUMBER.split(first), _NUMBER.split(last)
    if len(pieces) != len(others):
        return None
    differing = [i for i, piece in enumerate(pieces) if piece != others[i]]
    # `split` puts the numbers, which its pattern captures, at the odd places.
    if len(differing) != 1 or differing[0] % 2 == 0 or len(others[differing[0]]) >= 10:
        return None
    return differing[0]


def in_short(names: Sequence[str]) -> list[str]:
    """The same names for `names_in`: three or more that follow one another become a range."""
    runs: list[list[str]] = []
    for name in names:
        place = _next_in_range(runs[-1][-1], name) if runs else None
        if place is not None and (len(runs[-1]) < 2 or place == _growing(*runs[-1][:2])):
            runs[-1].append(name)
        else:
            runs.append([name])
    short = ([f"{run[0]} .. {run[-1]}"] if len(run) > 2 else run for run in runs)
    return [*chain.from_iterable(short)]


def _next_in_range(name: str, following: str) -> int | None:
    """The place of the number that is one larger in the name that follows, as of `_growing`; None
    if the two names are no range."""
    try:
        names = _range(f"{name} .. {following}")
    except ValueError:
        return None
    return _growing(name, following) if names == [name, following] else None


def written_out(document: Document) -> Document:
    """The document of a config, with ranges and patterns replaced by the names of their columns.

    Each name has the line of its range or pattern. ConfigError if a range or pattern is wrong.
    """
    lines, problems = dict(document.lines), list[Problem]()
    have: dict[str, list[str]] = {}
    for name, collection in _mappings(document.data.get("collections")):
        problems += _expand(lines, ("collections", name), collection, None)
        have[name] = [str(each.get("name")) for _, each in _mappings(collection.get("columns"))]
    for kind in ("inputs", "outputs"):
        for i, block in _mappings(document.data.get(kind)):
            known = have.get(str(block.get("collection")), [])
            problems += _expand(lines, (kind, i), block, known)
    document.refuse(problems, "config")
    return replace(document, lines=lines)


def _expand(
    lines: dict[Key, int], at: Key, part: dict[str, Any], have: Sequence[str] | None
) -> list[Problem]:
    """Replace the ranges and patterns in the `columns` of one collection or block, `part`, and
    update `lines`. `have`: the names for patterns; None in a collection, which has no patterns.
    Returns the mistakes."""
    written, at = part.get("columns"), (*at, "columns")
    if not isinstance(written, list):
        return []
    problems: list[Problem] = []
    entries: list[Any] = []
    origins: list[int] = []  # of each entry, the index in `written`
    for i, entry in enumerate(written):
        try:
            meant = _entries(entry, have)
        except ValueError as error:
            problems.append(((*at, i), str(error)))
        else:
            entries += meant
            origins += [i] * len(meant)
    part["columns"] = entries
    if len(entries) != len(written):
        _move_lines(lines, at, origins)
    return problems


def _move_lines(lines: dict[Key, int], at: Key, origins: Sequence[int]) -> None:
    """Give the entries of the list at `at` the lines of the entries that they come from."""
    lines_of: dict[Any, dict[Key, int]] = {}  # by old index: the line of each key inside
    for key in [key for key in lines if key[: len(at)] == at and key != at]:
        lines_of.setdefault(key[len(at)], {})[key[len(at) + 1 :]] = lines.pop(key)
    for place, origin in enumerate(origins):
        lines.update({(*at, place, *rest): line for rest, line in lines_of[origin].items()})


def _entries(entry: Any, have: Sequence[str] | None) -> list[Any]:
    """The entries that one entry stands for: declarations of columns, or names in a block."""
    if isinstance(entry, str) and have is not None:
        return [*names_in(entry, have)]
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        return [entry]
    return [entry | {"name": each} for each in names_in(name)]


def _mappings(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The mappings in a mapping or a list, each with its key or index. Nothing else is checked yet:
    `part` may be anything that YAML can hold."""
    entries = part if isinstance(part, list) else []
    pairs = part.items() if isinstance(part, dict) else enumerate(entries)
    return ((key, value) for key, value in pairs if isinstance(value, dict))
