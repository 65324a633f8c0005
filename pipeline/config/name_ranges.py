"""Short forms for many names: `part0 .. part15` is sixteen columns, `part*` all that match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from pipeline.config.mistakes import not_among, quote
from pipeline.config.yaml_lines import Document, Key, Problem

_MOST, _MOST_DIGITS = 1 << 16, 9  # names in a range, and digits of the number that grows
_DOTS = re.compile(r"\s*(?:…|\.{2,3})\s*")
_NUMBER = re.compile(r"([0-9]+)")


def expand_names(written: str, known: Sequence[str] | None = None) -> list[str]:
    """Returns the names that a range, a pattern or a name stands for.

    `a0 .. a2` -> a0, a1, a2. A pattern with `*` or `?` stands for the names in `known` that match;
    without `known` nothing is a pattern. Any other text is one name. Raises ValueError for an
    invalid range, and for a pattern that matches nothing.
    """
    if _DOTS.search(written):
        return _expand_range(written)
    if known is None or not {"*", "?"} & set(written):
        return [written]
    matching = [name for name in known if fnmatchcase(name, written)]
    if not matching:
        raise ValueError(f"no column fits it: {not_among(written, known)}")
    return matching


def _expand_range(written: str) -> list[str]:
    """Returns the names of a range. Numbers keep the leading zeros of the first name:
    `a08 .. a10` -> a08, a09, a10. Raises ValueError if the text is no range."""
    ends = _DOTS.split(written)
    index = _find_growing_index(*ends) if len(ends) == 2 else None
    if index is not None:
        first, last = map(_NUMBER.split, ends)
        numbers = range(int(first[index]), int(last[index]) + 1)
        if len(numbers) > _MOST:
            raise ValueError(f"found {quote(written)}; at most {_MOST} names in a range")
        before, after = "".join(first[:index]), "".join(first[index + 1 :])
        width = len(first[index])
        names = [f"{before}{n:0{width}}{after}" for n in numbers]
        # They differ if the number falls, or if the last name has other zeros in front.
        if names[-1:] == [ends[1]]:
            return names
    raise ValueError(
        f"found {quote(written)}; a range is its first and its last name, which differ in one "
        "number that grows: part0 .. part15"
    )


def _find_growing_index(first: str, last: str) -> int | None:
    """Returns the index of the number in which two names differ, among the pieces into which
    `_NUMBER` splits a name. `a1_b7` and `a1_b9` begin with the pieces `a`, `1`, `_b`, and differ in
    the next one -> 3. Returns None if they differ in anything else, or if the number is too long.
    """
    pieces, others = _NUMBER.split(first), _NUMBER.split(last)
    if len(pieces) != len(others):
        return None
    differing = [i for i, piece in enumerate(pieces) if piece != others[i]]
    # `split` puts the numbers, which its pattern captures, at the odd indices.
    if len(differing) != 1 or differing[0] % 2 == 0 or len(others[differing[0]]) > _MOST_DIGITS:
        return None
    return differing[0]


def shorten_names(names: Sequence[str]) -> list[str]:
    """Replaces three or more names that follow one another by a range, which `expand_names` expands
    again: a0, a1, a2, b -> `a0 .. a2`, b."""
    runs: list[list[str]] = []
    for name in names:
        index = _find_incremented_index(runs[-1][-1], name) if runs else None
        # In a run of three or more, the same number must grow each time.
        if index is not None and (len(runs[-1]) < 2 or index == _find_growing_index(*runs[-1][:2])):
            runs[-1].append(name)
        else:
            runs.append([name])
    short = ([f"{run[0]} .. {run[-1]}"] if len(run) > 2 else run for run in runs)
    return [*chain.from_iterable(short)]


def _find_incremented_index(name: str, following: str) -> int | None:
    """Returns the index, as `_find_growing_index` does, of the number that is larger by one in the
    following name. Returns None if the two names are not neighbours in a range."""
    try:
        names = _expand_range(f"{name} .. {following}")
    except ValueError:
        return None
    return _find_growing_index(name, following) if names == [name, following] else None


def expand_columns(document: Document) -> Document:
    """Replaces the ranges and patterns in the document of a config by the names that they mean.

    Changes the document's data. In the returned document, each name has the line of its range or
    pattern. Raises ConfigError if a range or pattern is wrong.
    """
    lines, problems = dict(document.lines), list[Problem]()
    columns_of: dict[str, list[str]] = {}
    for name, collection in _iterate_mappings(document.data.get("collections")):
        problems += _expand_part(lines, ("collections", name), collection, None)
        columns = _iterate_mappings(collection.get("columns"))
        columns_of[name] = [str(column.get("name")) for _, column in columns]
    for kind in ("inputs", "outputs"):
        for i, block in _iterate_mappings(document.data.get(kind)):
            known = columns_of.get(str(block.get("collection")), [])
            problems += _expand_part(lines, (kind, i), block, known)
    document.refuse(problems, "config")
    return replace(document, lines=lines)


def _expand_part(
    lines: dict[Key, int], key: Key, part: dict[str, Any], known: Sequence[str] | None
) -> list[Problem]:
    """Replace the ranges and patterns in the `columns` of `part`, the collection or block at `key`,
    and update `lines`. `known`: the names that patterns may match; None in a collection, which
    defines names and has no patterns. Returns the mistakes."""
    written, key = part.get("columns"), (*key, "columns")
    if not isinstance(written, list):
        return []
    problems: list[Problem] = []
    entries: list[Any] = []
    origins: list[int] = []  # for each entry, the index in `written` that it comes from
    for i, entry in enumerate(written):
        try:
            expanded = _expand_entry(entry, known)
        except ValueError as error:
            problems.append(((*key, i), str(error)))
        else:
            entries += expanded
            origins += [i] * len(expanded)
    part["columns"] = entries
    if len(entries) != len(written):
        _move_lines(lines, key, origins)
    return problems


def _move_lines(lines: dict[Key, int], key: Key, origins: Sequence[int]) -> None:
    """Update `lines` after entries of the list at `key` were expanded. `origins`: for each new
    entry, the index of the old one that it comes from and whose lines it gets."""
    depth = len(key)
    lines_of: dict[Any, dict[Key, int]] = {}  # by old index: the line of each key inside
    for inner in [inner for inner in lines if inner[:depth] == key and inner != key]:
        lines_of.setdefault(inner[depth], {})[inner[depth + 1 :]] = lines.pop(inner)
    for index, origin in enumerate(origins):
        lines.update({(*key, index, *rest): line for rest, line in lines_of[origin].items()})


def _expand_entry(entry: Any, known: Sequence[str] | None) -> list[Any]:
    """Returns the entries that one entry of `columns` stands for: names in a block, and mappings
    that declare a column in a collection, where `known` is None. Raises ValueError."""
    if isinstance(entry, str) and known is not None:
        return [*expand_names(entry, known)]
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        return [entry]
    return [entry | {"name": expanded} for expanded in expand_names(name)]


def _iterate_mappings(part: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns the mappings in a mapping or a list, each with its key or index. Other values are
    left out: the document is not checked yet, and `part` may be anything that YAML can hold."""
    entries = part if isinstance(part, list) else []
    pairs = part.items() if isinstance(part, dict) else enumerate(entries)
    return ((key, value) for key, value in pairs if isinstance(value, dict))
