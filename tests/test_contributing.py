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

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"^## (A new .+)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE))
del EXAMPLES["A new gate"]  # tried in tests/registry/promotion

_GIVEN = """
import json, sys, torch
from pathlib import Path
from engines import Portable
from soa import Signature
root, folder = Path.cwd(), Path("made")
source = Portable(Path(sys.argv[1]), Path(sys.argv[2]))
signature = Signature.from_dict(json.loads(sys.argv[3]))
"""


def parts(text: str, kind: str) -> list[tuple[str, str]]:
    """What follows `<!-- kind: argument -->`, with the argument."""
    return re.findall(rf"^<!-- {kind}(?:: (\S+))? -->\n```\w+\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout to put files into."""
    root = tmp_path_factory.mktemp("checkout")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_one_short_file(title: str, mlp: Built, checkout: Path) -> None:
    ((name, content),) = parts(EXAMPLES[title], "file")
    ((_, check),) = parts(EXAMPLES[title], "check")
    assert len(content.splitlines()) <= 40
    assert not (checkout / name).exists()
    (checkout / name).write_text(content)
    shutil.rmtree(checkout / "made", ignore_errors=True)
    (checkout / "made").mkdir()
    given = [mlp.capture.program, mlp.capture.script, json.dumps(mlp.signature.to_dict())]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _GIVEN + check, *map(str, given)],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    (checkout / name).unlink()
    assert done.returncode == 0, done.stderr


def test_lines_are_counted_by_one_command() -> None:
    (command,) = re.findall(r"^git ls-files .+$", PAGE, re.MULTILINE)
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) > 10_000
