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

_CHECK = """
import json, shutil, sys, torch, traceback
from pathlib import Path
from engines import Portable
from soa import Signature
names = {"json": json, "torch": torch, "root": Path.cwd(), "folder": Path("made")}
names["source"] = Portable(Path(sys.argv[1]), Path(sys.argv[2]))
names["signature"] = Signature.from_dict(json.loads(sys.argv[3]))
for title, check in json.loads(sys.argv[4]).items():
    shutil.rmtree("made", ignore_errors=True)
    Path("made").mkdir()
    try:
        exec(check, dict(names))
    except Exception:
        print(json.dumps([title, traceback.format_exc()]))
    else:
        print(json.dumps([title, "works"]))
"""


def snippets(text: str, kind: str) -> list[tuple[str, str]]:
    """The snippets that follow `<!-- kind: argument -->`, each with its argument."""
    return re.findall(rf"^<!-- {kind}(?:: (\S+))? -->\n```\w+\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def results(mlp: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The result of each check, all in one process, in a checkout with the new files added."""
    root = tmp_path_factory.mktemp("checkout")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for text in EXAMPLES.values():
        ((name, content),) = snippets(text, "file")
        assert not (root / name).exists()
        (root / name).write_text(content)
    checks = {title: snippets(text, "check")[0][1] for title, text in EXAMPLES.items()}
    signature = json.dumps(mlp.signature.to_dict())
    arguments = [mlp.capture.program, mlp.capture.script, signature, json.dumps(checks)]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHECK, *map(str, arguments)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return dict(json.loads(line) for line in process.stdout.splitlines())


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_one_short_file(title: str) -> None:
    ((_, content),) = snippets(EXAMPLES[title], "file")
    assert len(content.splitlines()) <= 40


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_works(title: str, results: dict[str, str]) -> None:
    assert results[title] == "works"


def test_the_count_of_lines_leaves_out_what_is_no_code(tmp_path: Path) -> None:
    """Blank lines, comments and docstrings, of Python and of C++."""
    (command,) = re.findall(r"^python (\.ci/\S+)$", PAGE, re.MULTILINE)
    (tmp_path / "soa").mkdir()
    (tmp_path / "engines").mkdir()
    python = (
        '"""A\nmodule."""\n\n# why\ndef f(\n    x: int,\n) -> str:\n    """Doc."""\n'
        '    return """a\n\nb"""\n'
    )
    (tmp_path / "soa" / "a.py").write_text(python)
    (tmp_path / "engines" / "a.h").write_text("// why\n/* two\nlines */\nint x;  // here\n\n")
    count = subprocess.run(
        [sys.executable, ROOT / command, tmp_path], capture_output=True, text=True, check=True
    )
    counted = {name: int(lines) for lines, name in map(str.split, count.stdout.splitlines())}
    assert (counted["soa"], counted["engines"], counted["product"]) == (6, 1, 7)
