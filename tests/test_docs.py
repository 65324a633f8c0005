"""What the documentation shows works: its configs load, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.assemble import signature_of
from pipeline.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_config_page_loads_and_names_every_key(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "config.md", "yaml")
    for name in ("model.py", "weights.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml")
    assert [b.plan.kind for b in signature_of(config).inputs] == [
        "matrix",
        "matrix",
        "matrix",
        "scalars",
    ]
    for key in Config.model_fields:
        assert re.search(rf"^{key}:", text, re.MULTILINE), key


def test_the_python_of_the_layout_page_runs() -> None:
    found = blocks(ROOT / "docs" / "layout.md", "python")
    assert len(found) == 2
    for text in found:
        exec(compile(text, "docs/layout.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_names_real_commands() -> None:
    from pipeline.cli import main

    named = set(re.findall(r"^pipeline (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named <= set(main.commands)
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(f"\n{name}:" in (ROOT / "Makefile").read_text() for name in targets)
