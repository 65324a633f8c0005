"""The records of a bundle as JSON schemas, for the library that reads them in C++.

    python -m tests.registry.bundle.schemas_file      # after a change of the records

writes engines/native/library/schemas.h anew.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from registry.bundle import Manifest, PulledNote
from registry.bundle.annex import AnnexRecord

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


def text() -> str:
    _, found = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter(kind)) for kind in KINDS]
    )
    said = json.dumps(bare(found), separators=(", ", ":"))
    lines = textwrap.fill(said, 118, break_long_words=False, break_on_hyphens=False)
    return _TEXT.format(schemas=lines)


def bare(node: Any, names: bool = False) -> Any:
    """Without what is for people, and without defaults; `names`: its keys are names of fields."""
    if isinstance(node, list):
        return [bare(each) for each in node]
    if not isinstance(node, dict):
        return node
    left = {k: v for k, v in node.items() if names or k not in ("title", "description", "default")}
    return {key: bare(value, not names and key in _NAMED) for key, value in left.items()}


_NAMED = ("$defs", "properties", "patternProperties")


if __name__ == "__main__":
    FILE.write_text(text())
