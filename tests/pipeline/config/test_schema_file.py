"""The published JSON schema accepts what load_config accepts, and refuses common mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.yaml_lines import CoreLoader
from tests.pipeline.config.schema_file import bare, stored, structure

jsonschema = pytest.importorskip("jsonschema", reason="the extra `test` has it")
ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
CONFIGS = [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted(HERE.glob("*.yaml"))]
FULL = (HERE / "full.yaml").read_text()


def mistakes(text: str) -> list[str]:
    """Where the schema refuses a config with this text, as JSON paths."""
    errors = jsonschema.Draft202012Validator(stored()).iter_errors(yaml.load(text, CoreLoader))
    return [error.json_path for error in errors]


def test_the_file_has_the_structure_of_the_models() -> None:
    """To write the file again: python -m tests.pipeline.config.schema_file."""
    assert bare(stored()) == structure()


def test_each_key_has_a_description() -> None:
    def keys(node: Any) -> Iterator[tuple[str, Any]]:
        """Each key of a config, at any depth of the schema, with its own schema."""
        if isinstance(node, dict):
            yield from node.get("properties", {}).items()
            for inner in node.values():
                yield from keys(inner)

    assert [name for name, key in keys(stored()) if not key["description"]] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_accepts_our_configs(path: Path) -> None:
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("description:", "descriptoin:", "$"),
        ("max: 4096", "max: many", "$.rows.n.max"),
        ("  factory: model.py:build", "  factory: model.py:build\n  program: model.pt2", "$.model"),
        ("dtype: float16", "dtype: flot16", "$.inputs[0].dtype"),
        ("alignment: 64", "alignement: 64", "$.collections.jets"),
        ("storage: columns", "storage: column", "$.collections.jets.storage"),
        ("name: jet-tagger\n", "", "$"),
        ("columns: [run]", "columns: []", "$.inputs[2].columns"),
        ("[exported, aoti]", "[exported, aot]", "$.engines[1]"),
    ],
)
def test_the_schema_refuses_a_typical_mistake_at_its_place(old: str, new: str, start: str) -> None:
    assert FULL.count(old) == 1
    assert mistakes(FULL) == []
    assert any(place.startswith(start) for place in mistakes(FULL.replace(old, new)))
