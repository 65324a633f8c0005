"""Faults that are put in on purpose: the tests, or a campaign, must turn red for every one.

    python -m tests.campaigns.planted --jobs 2
    python -m tests.campaigns.planted --only "file lock" --only lease

The tree is copied to a scratch folder. There, one fault of `faults.py` at a time is put in, what
must see it runs, and the fault is taken out again. What runs has to be green without any fault.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PRODUCT = ("soa", "engines", "registry", "runtime", "stages", "serving", "pipeline")
_SOURCES = (".py", ".cpp", ".h", ".hpp")
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info"
)


@functools.cache
def sources() -> dict[Path, str]:
    """The product's files, relative to the root."""
    found = (path for top in PRODUCT for path in (ROOT / top).rglob("*"))
    return {p.relative_to(ROOT): p.read_text() for p in found if p.suffix in _SOURCES}


def place(fault: Fault) -> Path:
    """The file in which the text of a fault stands; SystemExit unless it stands once in all."""
    found = {path: n for path, text in sources().items() if (n := text.count(fault.old))}
    if sum(found.values()) != 1:
        where = ", ".join(f"{path} ({n})" for path, n in found.items()) or "nowhere"
        raise SystemExit(f"{fault.name}: its text must stand in one place, it stands in: {where}")
    return next(iter(found))


@functools.cache
def tests_by_name() -> dict[str, str]:
    """What pytest calls a test, by `function` and `file.function`, as far as that names one."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        inner = [(f"{c.name}::", c.body) for c in body if isinstance(c, ast.ClassDef)]
        for prefix, statements in (("", body), *inner):
            for each in statements:
                if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                    node = f"{path.relative_to(ROOT)}::{prefix}{each.name}"
                    found.setdefault(each.name, []).append(node)
                    found[f"{path.stem}.{each.name}"] = [node]
    return {name: nodes[0] for name, nodes in found.items() if len(nodes) == 1}


def command_of(checks: Sequence[str]) -> list[str]:
    """How tests are run, or one campaign with its arguments."""
    tests = tests_by_name()
    if all(check in tests for check in checks):
        return [
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            "--hypothesis-profile",
            "thorough",
            *(tests[each] for each in checks),
        ]
    ((name, *arguments),) = map(shlex.split, checks)
    campaigns = [*ROOT.glob(f"tests/**/campaigns/{name}.py")]
    if len(campaigns) != 1:
        raise SystemExit(f"{name}: neither the name of one test nor a campaign")
    return [".".join(campaigns[0].relative_to(ROOT).with_suffix("").parts), *arguments]


@dataclass(frozen=True)
class Seen:
    fault: Fault
    red: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        by = ", ".join(f"`{check}`" for check in self.red) or "**nothing**"
        return f"| {self.fault.name} | {by} |"


class Copy:
    """The tree in a scratch folder, for one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = Path(shutil.copytree(ROOT, folder, ignore=_NOT_COPIED, symlinks=True))
        # No .pyc: an edit may keep a file's size and come within its second.
        self._env = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}

    def red(self, *checks: str) -> bool:
        """Whether one of these tests fails, or a campaign. SystemExit where that stays open."""
        command = [sys.executable, "-m", *command_of(checks)]
        done = subprocess.run(
            command, cwd=self.root, env=self._env, capture_output=True, text=True, check=False
        )
        # 1: it failed. Below 0: it crashed. All else is a mistake of this campaign.
        if done.returncode > 1 or re.search(r"^\d+ (skipped|deselected)", done.stdout, re.M):
            said = (done.stdout + done.stderr)[-3000:]
            raise SystemExit(f"{checks}: {done.returncode}, which says nothing:\n{said}")
        return done.returncode != 0

    def put_in(self, fault: Fault) -> Seen:
        path, begun = self.root / place(fault), time.monotonic()
        good = path.read_text()
        path.write_text(good.replace(fault.old, fault.new))
        try:
            red = tuple(check for check in fault.seen_by if self.red(check))
        finally:
            path.write_text(good)
        return Seen(fault, red, time.monotonic() - begun)


def run(folder: Path, faults: Sequence[Fault], jobs: int) -> list[Seen]:
    """Put in each fault. SystemExit where a check is red without any."""
    for fault in faults:
        place(fault)
    copies: queue.Queue[Copy] = queue.Queue()
    for number in range(jobs):
        copies.put(Copy(folder / str(number)))

    def seen(fault: Fault) -> Seen:
        copy = copies.get()
        try:
            found = copy.put_in(fault)
        finally:
            copies.put(copy)
        print(f"{found} {found.seconds:.0f} s", file=sys.stderr)
        return found

    _require_green(copies.queue[0], list(dict.fromkeys(c for f in faults for c in f.seen_by)))
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(seen, faults))


def _require_green(copy: Copy, checks: Sequence[str]) -> None:
    tests = tests_by_name()
    campaigns = [check for check in checks if check not in tests]
    for together in (
        [check for check in checks if check in tests],
        *([each] for each in campaigns),
    ):
        if together and copy.red(*together):
            raise SystemExit(f"without any fault, one of these is red: {', '.join(together)}")
    print(f"{len(checks)} checks are green without a fault", file=sys.stderr)


def chosen(texts: Iterable[str]) -> list[Fault]:
    found = [fault for fault in FAULTS if any(text in fault.name for text in texts)]
    if not found:
        raise SystemExit(f"no fault has such a name; there are: {[f.name for f in FAULTS]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="TEXT", help="Faults named like this.")
    parser.add_argument("--jobs", type=int, default=1, help="Faults at a time.")
    asked = parser.parse_args()
    faults = chosen(asked.only or [""])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soa-planted-") as folder:
        found = run(Path(folder), faults, asked.jobs)
    print("| fault | seen by |\n| --- | --- |")
    print(*found, sep="\n")
    unseen = [seen.fault.name for seen in found if not seen.red]
    print(f"{len(found) - len(unseen)} of {len(found)} faults were seen, "
          f"{time.monotonic() - begun:.0f} s")  # fmt: skip
    if unseen:
        raise SystemExit(f"not seen: {'; '.join(unseen)}")


if __name__ == "__main__":
    main()
