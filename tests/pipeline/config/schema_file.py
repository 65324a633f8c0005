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
    models = bare(Config.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **models}


def bare(node: Any) -> Any:
    """A schema without titles and descriptions, which are text.

    A key of a config may be called `description` too: its value is a schema, and stays.
    """
    if isinstance(node, list):
        return [bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    texts = {key for key in ("title", "description") if isinstance(node.get(key), str)}
    return {key: bare(value) for key, value in node.items() if key not in texts}


def described(node: Any, before: Any) -> Any:
    """The structure with the descriptions of the file as it was before; new keys have none."""
    if isinstance(node, list):
        items = before if isinstance(before, list) else []
        return [
            described(item, items[i] if i < len(items) else None) for i, item in enumerate(node)
        ]
    if not isinstance(node, dict):
        return node
    former = before if isinstance(before, dict) else {}
    schema = {key: described(value, former.get(key)) for key, value in node.items()}
    for name, key_schema in schema.get("properties", {}).items():
        text = former.get("properties", {}).get(name, {}).get("description", "")
        schema["properties"][name] = {"description": text, **key_schema}
    return schema


def stored() -> dict[str, Any]:
    """The schema in the file; empty if there is none yet."""
    text = SCHEMA_FILE.read_text(encoding="utf-8") if SCHEMA_FILE.exists() else "{}"
    schema: dict[str, Any] = json.loads(text)
    return schema


if __name__ == "__main__":
    text = json.dumps(described(structure(), stored()), indent=1, ensure_ascii=False)
    SCHEMA_FILE.write_text(text + "\n", encoding="utf-8")
