"""Short forms for many names: `part0 .. part15` is sixteen columns, `part*` all that match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
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
    """The names from `part0` to `part15` of `part0 .. part15`. Raises ValueError."""
    ends = [_NUMBER.split(end) for end in _DOTS.split(written)]
    if len(ends) == 2 and len(ends[0]) == len(ends[1]):
        first, last = ends
        differ = [i for i, part in enumerate(first) if part != last[i]]
        # Numbers have odd indices.
        if len(differ) == 1 and differ[0] % 2 and len(last[differ[0]]) < 10:
            i = differ[0]
            numbers = range(int(first[i]), int(last[i]) + 1)
            if len(numbers) > _MOST:
                raise ValueError(f"found {shown(written)}; at most {_MOST} names in a range")
            width = len(first[i])
            names = ["".join([*first[:i], f"{k:0{width}}", *first[i + 1 :]]) for k in numbers]
            if names[-1:] == ["".join(last)]:
                return names
    raise ValueError(
        f"found {shown(written)}; a range is its first and its last name, which differ in one "
        "number that grows: part0 .. part15"
    )


def in_short(names: Sequence[str]) -> list[str]:
    """The same names for `names_in`: three or more that follow one another become a range."""
    runs: list[list[str]] = []
    for name in names:
        grows = _grows(runs[-1][-1], name) if runs else None
        if grows is not None and (len(runs[-1]) < 2 or grows == _grows(*runs[-1][:2])):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [n for run in runs for n in ([f"{run[0]} .. {run[-1]}"] if len(run) > 2 else run)]


def _grows(name: str, following: str) -> int | None:
    """Which number of a name is one larger in the name that follows, if they are two of a range."""
    try:
        if _range(f"{name} .. {following}") != [name, following]:
            return None
    except ValueError:
        return None
    pairs = zip(_NUMBER.split(name), _NUMBER.split(following), strict=True)
    return next(i for i, (one, other) in enumerate(pairs) if one != other)


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
    """Replace the ranges and patterns in one collection or block, and update `lines`."""
    written, at = part.get("columns"), (*at, "columns")
    if not isinstance(written, list):
        return []
    problems: list[Problem] = []
    entries: list[tuple[int, Any]] = []
    for i, entry in enumerate(written):
        try:
            entries += [(i, each) for each in _entries(entry, have)]
        except ValueError as error:
            problems.append(((*at, i), str(error)))
    part["columns"] = [each for _, each in entries]
    if len(entries) == len(written):
        return problems
    under: dict[Any, dict[Key, int]] = {}
    for key in [key for key in lines if key[: len(at)] == at and key != at]:
        under.setdefault(key[len(at)], {})[key[len(at) + 1 :]] = lines.pop(key)
    for place, (i, _) in enumerate(entries):
        lines.update({(*at, place, *rest): line for rest, line in under[i].items()})
    return problems


def _entries(entry: Any, have: Sequence[str] | None) -> list[Any]:
    """The entries that one entry stands for: declarations of columns, or names in a block."""
    if isinstance(entry, str) and have is not None:
        return [*names_in(entry, have)]
    name = entry.get("name") if isinstance(entry, dict) else None
    return [entry | {"name": each} for each in names_in(name)] if isinstance(name, str) else [entry]


def _mappings(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    entries = part if isinstance(part, list) else []
    pairs = part.items() if isinstance(part, dict) else enumerate(entries)
    return ((key, value) for key, value in pairs if isinstance(value, dict))
