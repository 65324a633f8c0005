"""The JSON schema of configs: the structure of the models, and descriptions kept in the file.

    python -m tests.pipeline.config.schema_file      # after a change of the models

writes the file anew. A new key gets an empty description there: write one.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.config.schema import SCHEMA_FILE, Config


def structure() -> dict[str, Any]:
    """pydantic's schema, without titles and docstrings."""
    found = bare(Config.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def bare(node: Any) -> Any:
    if isinstance(node, list):
        return [bare(each) for each in node]
    if not isinstance(node, dict):
        return node
    texts = {key for key in ("title", "description") if isinstance(node.get(key), str)}
    return {key: bare(value) for key, value in node.items() if key not in texts}


def described(node: Any, said: Any) -> Any:
    """The structure with the descriptions of the existing file."""
    if isinstance(node, list):
        before = said if isinstance(said, list) else []
        return [described(each, dict(enumerate(before)).get(i)) for i, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    old = said if isinstance(said, dict) else {}
    found = {key: described(value, old.get(key)) for key, value in node.items()}
    for name, part in found.get("properties", {}).items():
        text = old.get("properties", {}).get(name, {}).get("description", "")
        found["properties"][name] = {"description": text, **part}
    return found


def stored() -> dict[str, Any]:
    text = SCHEMA_FILE.read_text(encoding="utf-8") if SCHEMA_FILE.exists() else "{}"
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    text = json.dumps(described(structure(), stored()), indent=1, ensure_ascii=False)
    SCHEMA_FILE.write_text(text + "\n", encoding="utf-8")
