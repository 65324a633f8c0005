"""The worked examples of CONTRIBUTING.md: at most 40 lines, one new file each, and they run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from soa_pipeline import PACKAGES
from tests.models.building import Built

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"^## (A new .+)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
del EXAMPLES["A new gate"]  # tried in tests/registry/promotion

_TRY = """
import json, shutil, sys, torch, traceback
from pathlib import Path
from engines import Portable
from soa import Signature
given = {"json": json, "torch": torch, "root": Path.cwd(), "folder": Path("made")}
given["source"] = Portable(Path(sys.argv[1]), Path(sys.argv[2]))
given["signature"] = Signature.from_dict(json.loads(sys.argv[3]))
for title, check in json.loads(sys.argv[4]).items():
    shutil.rmtree("made", ignore_errors=True)
    Path("made").mkdir()
    try:
        exec(check, dict(given))
    except Exception:
        print(json.dumps([title, traceback.format_exc()]))
    else:
        print(json.dumps([title, "works"]))
"""


def parts(text: str, kind: str) -> list[tuple[str, str]]:
    """The snippets that follow `<!-- kind: argument -->`, each with its argument."""
    return re.findall(rf"^<!-- {kind}(?:: (\S+))? -->\n```\w+\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def tried(mlp: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The result of each check, all in one process, in a checkout with the new files added."""
    root = tmp_path_factory.mktemp("checkout")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for text in EXAMPLES.values():
        ((name, content),) = parts(text, "file")
        assert not (root / name).exists()
        (root / name).write_text(content)
    checks = {title: parts(text, "check")[0][1] for title, text in EXAMPLES.items()}
    signature = json.dumps(mlp.signature.to_dict())
    given = [mlp.capture.program, mlp.capture.script, signature, json.dumps(checks)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRY, *map(str, given)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_one_short_file(title: str, tried: dict[str, str]) -> None:
    ((_, content),) = parts(EXAMPLES[title], "file")
    assert len(content.splitlines()) <= 40
    assert tried[title] == "works"


def test_lines_are_counted_by_one_command() -> None:
    (command,) = re.findall(r"^git ls-files .+$", PAGE, re.MULTILINE)
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) > 10_000
