"""The records of a bundle as JSON schemas, for the C++ library that reads them.

    python -m tests.registry.bundle.schemas_file      # after a change of the records

writes engines/native/library/schemas.h anew.
"""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from registry.bundle import Manifest, PulledNote, safe_relative
from registry.bundle.annex import AnnexRecord
from soa.records import Before, Matching, Within

FILE = Path(__file__).resolve().parents[3] / "engines" / "native" / "library" / "schemas.h"
KINDS = (Manifest, AnnexRecord, PulledNote)
_TEXT = """\
// The records of a bundle as a JSON schema. It follows from Python's classes (registry/bundle);
// do not edit: python -m tests.registry.bundle.schemas_file
#ifndef SOA_SCHEMAS_H
#define SOA_SCHEMAS_H

namespace soa_library {{

inline constexpr char kSchemas[] = R"json(
{schemas}
)json";

}}  // namespace soa_library

#endif
"""
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def text() -> str:
    found: dict[str, Any] = {}
    for kind in KINDS:
        schema(kind, found)
    said = json.dumps({"$defs": dict(sorted(found.items()))}, separators=(", ", ":"))
    lines = textwrap.fill(said, 118, break_long_words=False, break_on_hyphens=False)
    return _TEXT.format(schemas=lines)


def schema(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of an annotation; those of its dataclasses are added to `defs`."""
    if kind is Any:
        return {}
    if kind in _NAMES:
        return {"type": _NAMES[kind]}
    if is_dataclass(kind):
        return _of_record(kind, defs)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _of_annotated(inner[0], inner[1:], defs)
    if origin is Literal:
        choice = {"enum": list(inner)} if len(inner) > 1 else {"const": inner[0]}
        return {**choice, "type": "string"}
    if origin in (Union, types.UnionType):
        return {"anyOf": list(_one_of(inner, defs))}
    if origin is list:
        return {"items": schema(inner[0], defs), "type": "array"}
    if origin in (dict, Mapping):
        return _of_mapping(inner[0], inner[1], defs)
    raise TypeError(f"no schema for {kind}")


def _of_record(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in defs:
        assert kind.__closed__
        hints = get_type_hints(kind, include_extras=True)
        needed = [each.name for each in fields(kind)
                  if each.default is MISSING and each.default_factory is MISSING]  # fmt: skip
        defs[kind.__name__] = {
            "additionalProperties": False,
            "properties": {each.name: schema(hints[each.name], defs) for each in fields(kind)},
            **({"required": needed} if needed else {}),
            "type": "object",
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _of_annotated(kind: Any, said: tuple[Any, ...], defs: dict[str, Any]) -> dict[str, Any]:
    found, also = schema(kind, defs), []
    for each in said:
        if isinstance(each, Before):
            also.append(schema(each.also, defs))
        elif isinstance(each, Matching):
            found = {"pattern": f"^{each.pattern}$", **found}
        elif isinstance(each, Within):
            limits = {"maximum": each.most, "minimum": each.least}
            found = {**{key: limit for key, limit in limits.items() if limit is not None}, **found}
        else:
            assert each is safe_relative
            found = {"format": "path-inside", **found}
    return {"anyOf": [found, *also]} if also else found


def _one_of(kinds: tuple[Any, ...], defs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        found = schema(kind, defs)
        yield from found.get("anyOf", [found])


def _of_mapping(keys: Any, values: Any, defs: dict[str, Any]) -> dict[str, Any]:
    pattern = schema(keys, defs).get("pattern")
    inner = schema(values, defs)
    if pattern is not None:
        return {"patternProperties": {pattern: inner}, "type": "object"}
    return {"additionalProperties": inner or True, "type": "object"}


if __name__ == "__main__":
    FILE.write_text(text())
