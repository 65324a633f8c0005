"""Writes a config as YAML; the comment on each line is the JSON schema's description of the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import SCHEMA_FILE, CoreLoader, read_yaml, shorten_names

_FORM: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 1 << 20}
LONG = 64
"""The most columns of a collection of which each has a line of its own."""


@dataclass(frozen=True)
class OneLine:
    """A value that is written on one line, without comments inside."""

    value: Any


class _Dumper(yaml.SafeDumper):
    """Writes YAML for `read_yaml`. Text is quoted only if YAML 1.2 would take it for another type.
    Lists are indented, and a value that occurs twice is written twice, without an alias."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def one_line(self, data: OneLine) -> Any:
        """Returns the YAML node of a value, marked to be written on one line."""
        node: Any = self.represent_data(data.value)
        node.flow_style = True
        return node


_Dumper.add_representer(OneLine, _Dumper.one_line)


def write_config(
    path: Path, head: str, config: Mapping[str, Any], notes: Mapping[tuple[str | int, ...], str]
) -> None:
    """Write the lines of `head` and a config as YAML, with a comment at the end of each line.

    The comment is the schema's description of the key on that line, or the note in `notes`, which
    has key paths as keys. A line with several keys gets the comment of the first that has one.
    """
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))  # trusted
    text = head + yaml.dump(_shorten_columns(config), Dumper=_Dumper, allow_unicode=True, **_FORM)
    path.write_text(text, encoding="utf-8")
    comments: dict[int, str] = {}
    for key, line in read_yaml(path).lines.items():
        comments[line] = comments.get(line) or notes.get(key, _find_description(schema, key))
    commented = ""
    for number, line_text in enumerate(text.splitlines(), 1):
        comment = comments.get(number)
        commented += f"{line_text:<46} # {comment}\n" if comment else f"{line_text}\n"
    path.write_text(commented, encoding="utf-8")


def _find_description(schema: Any, key: tuple[str | int, ...]) -> str:
    """Returns the schema's description of the key at a path; "" if it has none, and for keys inside
    `columns`, `features` and `kwargs`, whose values are written on one line."""
    if not key or {"columns", "features", "kwargs"} & {*key[:-1]}:
        return ""
    node = schema
    for part in key:
        while "$ref" in node or "anyOf" in node:  # find the definition of the mapping or list
            reference = node.get("$ref", "").removeprefix("#/$defs/")
            node = node["anyOf"][0] if "anyOf" in node else schema["$defs"][reference]
        inner = node.get("properties", {}).get(part)
        node = inner or node["items" if isinstance(part, int) else "additionalProperties"]
    return str(node.get("description", ""))


def _shorten_columns(config: Any, key: str = "") -> Any:
    """Returns the config with ranges in place of the names in each list of more than `LONG`
    columns. `config` may be a part of one; `key` is then the key whose value it is."""
    if isinstance(config, Mapping):
        return {name: _shorten_columns(value, name) for name, value in config.items()}
    if key != "columns" and isinstance(config, list):
        return [_shorten_columns(entry) for entry in config]
    if key != "columns" or len(config) <= LONG:
        return config
    if isinstance(config[0], str):
        return shorten_names(config)
    # Only columns that differ in nothing but their names can be a range.
    shortened = []
    columns = (entry.value for entry in config)
    for nameless, alike in groupby(columns, lambda column: {**column, "name": ""}):
        names = shorten_names([column["name"] for column in alike])
        shortened += [OneLine({**nameless, "name": name}) for name in names]
    return shortened
