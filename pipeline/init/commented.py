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
    """Writes YAML for `read_yaml`: only text that YAML 1.2 would take for another type is quoted.
    Lists are indented, and a value that is used twice is written twice."""

    yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def one_line(self, data: OneLine) -> Any:
        """The node of a value that stands on one line."""
        node: Any = self.represent_data(data.value)
        node.flow_style = True
        return node


_Dumper.add_representer(OneLine, _Dumper.one_line)


def write_config(
    path: Path, head: str, config: Mapping[str, Any], notes: Mapping[tuple[str | int, ...], str]
) -> None:
    """Write a config, after the lines of `head`. `notes`, by the path of a key, replace the
    descriptions of the schema. A line with several keys has the comment of the first that has one.
    """
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))  # ours
    text = head + yaml.dump(_in_short(config), Dumper=_Dumper, allow_unicode=True, **_FORM)
    path.write_text(text, encoding="utf-8")
    comments: dict[int, str] = {}
    for key, line in read_yaml(path).lines.items():
        comments[line] = comments.get(line) or notes.get(key, _description(schema, key))
    commented = ""
    for number, line_text in enumerate(text.splitlines(), 1):
        comment = comments.get(number)
        commented += f"{line_text:<46} # {comment}\n" if comment else f"{line_text}\n"
    path.write_text(commented, encoding="utf-8")


def _description(schema: Any, key: tuple[str | int, ...]) -> str:
    """What the schema says about a key; "" about one inside a value that is on one line."""
    if not key or {"columns", "features", "kwargs"} & {*key[:-1]}:
        return ""
    node = schema
    for part in key:
        while "$ref" in node or "anyOf" in node:  # find the definition of the mapping or list
            node = node["anyOf"][0] if "anyOf" in node else schema["$defs"][node["$ref"][8:]]
        inner = node.get("properties", {}).get(part)
        node = inner or node["items" if isinstance(part, int) else "additionalProperties"]
    return str(node.get("description", ""))


def _in_short(config: Any, key: str = "") -> Any:
    """The config with ranges in place of the names in each long list of columns."""
    if isinstance(config, Mapping):
        return {name: _in_short(value, name) for name, value in config.items()}
    if key != "columns" and isinstance(config, list):
        return [_in_short(each) for each in config]
    if key != "columns" or len(config) <= LONG:
        return config
    if isinstance(config[0], str):
        return shorten_names(config)
    # Only columns that differ in nothing but their names can be a range.
    shortened = []
    for rest, alike in groupby((each.value for each in config), lambda v: {**v, "name": ""}):
        names = shorten_names([column["name"] for column in alike])
        shortened += [OneLine({**rest, "name": name}) for name in names]
    return shortened
