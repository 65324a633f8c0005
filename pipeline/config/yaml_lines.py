"""Reads YAML into plain data, and keeps the line of every key, so that errors can name the line.

Scalars follow the core schema of YAML 1.2, not PyYAML's 1.1: `1e-5` is a number, `on` and `no` are
text (they may be names of columns), `010` is ten, and a date is text. A key must be text; the same
key twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from soa.files import read_plain

Key = tuple[str | int, ...]
Problem = tuple[Key, str]  # the key, and what is wrong there

_CORE = "tag:yaml.org,2002:"
_PLAIN = (_CORE + "map", _CORE + "seq")
# With anchors, a small file can expand to a huge document.
_MOST_NODES = 100_000
_LARGEST = 4 << 20  # bytes; PyYAML takes 2 s for each million


class CoreLoader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema,
    https://yaml.org/spec/1.2.2/#103-core-schema."""


CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _initials in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]:
    CoreLoader.add_implicit_resolver(_CORE + _tag, re.compile(f"^(?:{_pattern})$"), _initials)


@dataclass(frozen=True)
class Document:
    """A YAML mapping: `data`, and in `lines` the line (from 1) of each key path.

    `("inputs", 0, "dtype")` has the line of this key, `("inputs", 0)` the first line of the item,
    and `()` the first line of the mapping.
    """

    source: Path
    data: dict[str, Any]
    lines: Mapping[Key, int]

    def line(self, key: Key) -> int:
        """Returns the line of a key; if the key is missing, that of the part that should hold
        it."""
        while key not in self.lines:
            key = key[:-1]
        return self.lines[key]

    def refuse(self, problems: Iterable[Problem], whole: str) -> None:
        """Raises a ConfigError if there are problems, with a line `file:line: key: text` for each.
        `whole`: what to write for the empty key, which is that of the document as a whole.
        """
        mistakes = [(self.line(key), dotted(key), text) for key, text in problems]
        if mistakes:
            raise ConfigError(
                *(f"{self.source}:{n}: {key or whole}: {text}" for n, key, text in sorted(mistakes))
            )


def read_yaml(source: Path) -> Document:
    """Read a file that holds one YAML mapping. Raises a ConfigError, with the line, for any other
    content."""
    root = _compose(source)
    if not isinstance(root, yaml.MappingNode):
        kind = "nothing" if root is None else _KIND[type(root)]
        line = f":{root.start_mark.line + 1}" if root is not None else ""
        raise ConfigError(f"{source}{line}: found {kind}; a config is a mapping of keys to values")
    reader = _Reader(source)
    data = reader.read(root, (), root.start_mark.line + 1)
    if reader.problems:
        raise ConfigError(*reader.problems)
    return Document(source, data, reader.lines)


def _compose(source: Path) -> yaml.Node | None:
    """Parse a file, and return the root node of its YAML; None if the file has no value. Raises
    ConfigError if it cannot be read, is not UTF-8, or is not YAML."""
    try:
        text = read_plain(source, links=True, largest=_LARGEST).decode()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: is not UTF-8 text: byte {error.start} {error.reason}"
        ) from None
    try:
        root: yaml.Node | None = yaml.compose(text, CoreLoader)
        return root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        cause = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else "too deep"
        raise ConfigError(f"{source}: not YAML: {cause}") from None


_KIND: dict[type[yaml.Node], str] = {
    yaml.ScalarNode: "a single value",
    yaml.SequenceNode: "a list",
    yaml.MappingNode: "a mapping",
}


class _Reader:
    """Reads the nodes of a document into plain data. It keeps the line of each key path in `lines`.
    Reading goes on after a mistake, which is added to `problems`."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.lines: dict[Key, int] = {}
        self.problems: list[str] = []
        self._open: set[int] = set()
        """The identities of the nodes that are being read. An alias to one of them would be a value
        that contains itself."""

    def read(self, node: yaml.Node, key: Key, line: int) -> Any:
        """Returns the value of a node, which is at `key` and begins in `line`. Raises ConfigError
        if the document is too large or contains itself."""
        if len(self.lines) >= _MOST_NODES:
            raise ConfigError(f"{self.source}:{line}: more than {_MOST_NODES} entries")
        if id(node) in self._open:
            raise ConfigError(f"{self.source}:{line}: an anchor that contains itself")
        self.lines[key] = line
        self._open.add(id(node))
        try:
            if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
                self._report(line, f"the tag {node.tag} is not allowed; write plain YAML")
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, key)
            if isinstance(node, yaml.SequenceNode):
                return [
                    self.read(item, (*key, i), item.start_mark.line + 1)
                    for i, item in enumerate(node.value)
                ]
            return self._read_scalar(node, line)
        finally:
            self._open.remove(id(node))

    def _read_mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        """Returns the values of a mapping by their keys. A key that is no text, or that is given a
        second time, is a problem and is left out."""
        mapping: dict[str, Any] = {}
        for key_node, value in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag != _CORE + "str":
                self._report(line, f"a key must be text, found {_describe(key_node)}; quote it")
                continue
            name = key_node.value
            path = (*key, name)
            if name in mapping:
                self._report(
                    line, f"{dotted(path)}: given twice, first on line {self.lines[path]}; keep one"
                )
                continue
            mapping[name] = self.read(value, path, line)
        return mapping

    def _read_scalar(self, node: yaml.Node, line: int) -> Any:
        """Returns the value of a scalar, converted to the type of its tag. If it does not fit the
        tag, adds a problem and returns None."""
        tag, text = node.tag.removeprefix(_CORE), node.value
        try:
            match tag:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
                case "float":
                    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self._report(line, f"{text!r} is not of the type {node.tag} that it is given")
            return None
        self._report(line, f"the tag {node.tag} is not allowed; write plain YAML")
        return None

    def _report(self, line: int, text: str) -> None:
        self.problems.append(f"{self.source}:{line}: {text}")


def _describe(node: yaml.Node) -> str:
    """Returns the text of a scalar, and for another node its kind, such as `a list`."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else _KIND[type(node)]


def dotted(key: Key) -> str:
    """Returns a key path as text: ("inputs", 0, "columns", 1) -> `inputs[0].columns[1]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")
