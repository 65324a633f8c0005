"""A config as YAML with a comment on each line: what the JSON schema says of its key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from pipeline.config import SCHEMA_FILE, CoreLoader

_Key = tuple[str | int, ...]
_ON_ONE_LINE = ("jagged", "kwargs")
_COMMENTS_AT = 46


def text_of(config: Mapping[str, Any], notes: Mapping[_Key, str]) -> str:
    """`notes`, by the path of a key, stand for the schema's own descriptions."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))

    def plain(node: Any) -> Any:
        """Without references and alternatives: the mapping or list that it may be."""
        while "$ref" in node or "anyOf" in node:
            node = node["anyOf"][0] if "anyOf" in node else schema["$defs"][node["$ref"][8:]]
        return node

    def lines(value: Mapping[str, Any], node: Any, at: _Key) -> Iterator[tuple[str, str]]:
        for key, inner in value.items():
            here = (*at, key)
            below = node.get("properties", {}).get(key) or node["additionalProperties"]
            said, below = notes.get(here, below.get("description", "")), plain(below)
            if isinstance(inner, dict) and not (key in _ON_ONE_LINE or at == ("rows",)):
                yield f"{key}:", said
                yield from ((f"  {text}", more) for text, more in lines(inner, below, here))
            elif isinstance(inner, list) and isinstance(inner[0], dict | list):
                yield f"{key}:", said
                for i, each in enumerate(inner):
                    inside = iter([(_yaml(each), notes.get((*here, i), ""))])
                    if key not in ("columns", "features"):
                        inside = lines(each, plain(below["items"]), (*here, i))
                    for k, (text, more) in enumerate(inside):
                        yield f"  {' ' if k else '-'} {text}", more
            else:
                yield f"{key}: {_yaml(inner)}", said

    found = lines(config, schema, ())
    return "".join(f"{t:<{_COMMENTS_AT}} # {said}\n" if said else f"{t}\n" for t, said in found)


def _yaml(value: Any) -> str:
    """On one line; text in quotes where a reader would take it for something else."""
    match value:
        case str():
            with suppress(yaml.YAMLError):
                if yaml.load(f"[{value}]", CoreLoader) == [value]:
                    return value
        case list() | tuple():
            return f"[{', '.join(map(_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{_yaml(key)}: {_yaml(each)}' for key, each in value.items())}}}"
    return json.dumps(value)
