"""The formats that programs read stay the same: every `--json`, the manifest, a bundle's files.

`goldens.json` holds the form of each: keys, and types of values. After an intended change, `python
-m tests.compatibility.test_goldens` writes it again, and CHANGELOG.md describes the change.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeline
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from tests.models.keys import make_keys
from tests.models.project import TARGET, Built, build, cli, write_project

GOLDENS = Path(__file__).parent / "goldens.json"
# Dictionaries whose keys are data: targets, engines, sizes, tools, aliases of the example.
DATA = {"tools", "host", "config", "worst", "timings", "digests", "before", "after", "tags"}


# Values that depend on the host and the moment.
VARIES = {"below", "tile", "worst_row", "git", "source"}


def form(value: Any, key: str = "") -> Any:
    """The keys, and the types of the values; for lists, and for keys that are data, all types."""
    if key in VARIES:
        return "any"
    if isinstance(value, dict):
        if key in DATA:
            return {"*": kinds(form(member) for member in value.values())}
        return {name: form(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return kinds(form(element, key) for element in value)
    return type(value).__name__


def kinds(forms: Iterator[Any]) -> list[Any]:
    """Each form once, in order."""
    return [
        json.loads(text) for text in sorted({json.dumps(shape, sort_keys=True) for shape in forms})
    ]


def answers(project: Built, scratch: Path) -> dict[str, Any]:
    """The answer of every command; the commands run in the order of a version's life."""
    registry = ("--registry", f"sqlite:///{scratch}/registry.db")
    Registry(registry[1]).register(project.bundle)
    other = ("--registry", f"sqlite:///{scratch}/other.db")
    keys = make_keys(scratch, "release")
    policy = scratch / "policy.yaml"
    policy.write_text("max_outside: 0.5\n")
    pulled, export = scratch / "pulled", scratch / "export.tar"
    commands: dict[str, tuple[object, ...]] = {
        "ls": registry,
        "ls jets": registry,
        "show jets/1": registry,
        "validate jets/1": registry,
        "check jets/1 --times --seconds 0.01": registry,
        "bench jets/1 --seconds 0.01": registry,
        "policy": registry,
        f"policy {policy}": registry,
        "approve jets/1": registry,
        "promote jets/1 --to staging --dry-run": registry,
        "promote jets/1 --to production": registry,
        f"build jets/1 --engine exported --target cpu/x86-64-v2 --work {scratch}/work": registry,
        f"pull jets@production {pulled}": registry,
        f"sign {pulled}/ --key {keys.private}": registry,
        f"verify {pulled}/ --key {keys.public}": registry,
        f"push {pulled}": other,
        f"diff jets/1 {pulled}/": registry,
        f"show jets/1 {pulled}/": registry,
        f"export jets {export}": registry,
        f"import {export} --name again": other,
        "history jets": registry,
        "rm again/1 --yes": other,
        f"deploy jets@production --out {scratch}/models": registry,
        "registry gc --dry-run": registry,
        "cache": (),
        "doctor": registry,
    }
    by_command = {"run": project.answer}
    for words, more in commands.items():
        name = words.replace(f"{scratch}/", "")
        if name == "cache":
            pipeline.load("jets@production", registry=registry[1], lookup="prefer-cache")
        by_command[name] = json.loads(cli(*words.split(), *more, "--json").stdout)
    return by_command


def goldens(project: Built, scratch: Path) -> dict[str, Any]:
    """The content of goldens.json for this version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", str(scratch / "cache"))
        forms = {name: form(answer) for name, answer in answers(project, scratch).items()}
    text = json.dumps(forms).replace(TARGET, "TARGET").replace("cpu/x86-64-v2", "TARGET")
    bundle = Bundle.open(project.bundle.path)
    names = (re.sub(r"\w{30,}", "HASH", name) for name in bundle.files)
    files = sorted({name.replace(TARGET, "TARGET") for name in names})
    return {"names": sorted(dir(pipeline)), "bundle": files, **json.loads(text)}


def test_what_programs_read_is_as_before(jets: Built, tmp_path: Path) -> None:
    before = json.loads(GOLDENS.read_text())
    now = goldens(jets, tmp_path)
    assert now.keys() == before.keys()
    assert {name: shape for name, shape in now.items() if shape != before[name]} == {}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        project = build(write_project(Path(folder) / "own"), page=True)
        new = goldens(project, Path(folder))
    GOLDENS.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    sys.exit()
