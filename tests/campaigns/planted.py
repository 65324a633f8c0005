"""Puts faults into the program on purpose: for each one, a test or a campaign must fail.

    python -m tests.campaigns.planted --jobs 2
    python -m tests.campaigns.planted --only "file lock" --only lease

The tree is copied to a scratch folder. There, one fault of `faults.py` at a time is put in, the
checks that must see it run, and the fault is taken out again. Without a fault these checks must
pass.

The models and registries that tests share are made once, without a fault; for a fault in C++ code,
programs in C++ are made again. If the checks do not see a fault, they run again with everything
made again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pipeline.building.provenance import code_digest
from tests.campaigns.faults import FAULTS, Fault
from tests.models import environment

ROOT = Path(__file__).parents[2]
PRODUCT = ("soa", "engines", "registry", "runtime", "stages", "serving", "pipeline")
_SOURCES = (".py", ".cpp", ".h", ".hpp")
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "dist", "*.egg-info"
)
_LIMIT_S = 600.0
_LONG_AGO = 1_000_000_000
_NATIVE = ("cplusplus-*", "downstream*")  # shared by tests, and made from C++


@functools.cache
def sources() -> dict[Path, str]:
    """The product's files, relative to the root."""
    found = (path for top in PRODUCT for path in (ROOT / top).rglob("*"))
    return {p.relative_to(ROOT): p.read_text() for p in found if p.suffix in _SOURCES}


def place(fault: Fault) -> Path:
    """The file that contains the text of a fault. SystemExit unless it occurs exactly once."""
    found = {path: n for path, text in sources().items() if (n := text.count(fault.old))}
    if sum(found.values()) != 1:
        where = ", ".join(f"{path} ({n})" for path, n in found.items()) or "nowhere"
        raise SystemExit(f"{fault.name}: its text must stand in one place, it stands in: {where}")
    return next(iter(found))


def with_fault(fault: Fault) -> str:
    """The file's text with the fault. SystemExit if it is not Python, or the same as before."""
    path = place(fault)
    text = sources()[path].replace(fault.old, fault.new)
    if fault.old == fault.new:
        raise SystemExit(f"{fault.name}: it changes nothing")
    if path.suffix == ".py":
        try:
            compile(text, str(path), "exec")
        except SyntaxError as error:
            raise SystemExit(
                f"{fault.name}: not Python, so any test would see it: {error}"
            ) from error
    return text


@functools.cache
def tests_by_name() -> dict[str, str]:
    """pytest's name of each test, by `function` and by `file.function`, where that is unique."""
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


def command_of(check: str) -> list[str]:
    """The module and arguments of a campaign; empty for a test."""
    if check in tests_by_name():
        return []
    name, *arguments = shlex.split(check)
    campaigns = [*ROOT.glob(f"tests/**/campaigns/{name}.py")]
    if len(campaigns) != 1:
        raise SystemExit(f"{name}: neither the name of one test nor a campaign")
    return [".".join(campaigns[0].relative_to(ROOT).with_suffix("").parts), *arguments]


@dataclass(frozen=True)
class Seen:
    fault: Fault
    red: tuple[str, ...]
    anew: bool = False
    """Whether a check saw it only after everything was made again."""

    @property
    def missed(self) -> list[str]:
        return [check for check in self.fault.seen_by if check not in self.red]

    def __str__(self) -> str:
        by = ", ".join(f"`{check}`" for check in self.red) or "**nothing**"
        return f"| {self.fault.name} | {by} |"


class Copy:
    """A copy of the tree, for one fault at a time."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.root = Path(shutil.copytree(ROOT, folder / "tree", ignore=_NOT_COPIED, symlinks=True))
        self._folder, self._made = folder, made
        # Python compares a .pyc with its source by size and second: each edit gets a second of its
        # own.
        self._seconds = count(_LONG_AGO)
        self._env = os.environ | {"PYTHONPATH": str(self.root), "MLFLOW_DISABLE_TELEMETRY": "true"}

    def red(self, checks: Sequence[str], made: Path | None) -> list[str]:
        """The tests and campaigns that fail.

        `made` is the folder with what the tests share; with None they make it again.
        """
        return [check for check in checks if not self._passes(check, made)]

    def put_in(self, fault: Fault) -> Seen:
        path = self.root / place(fault)
        good, bad, built = path.read_text(), with_fault(fault), self._libraries()
        if path.suffix != ".py" and not self._compiles(path, bad) and self._compiles(path, good):
            raise SystemExit(f"{fault.name}: it does not compile, so any test would see it")
        try:
            self._write(path, bad)
            if path.name in _extension():
                self._build()
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                red = self.red(fault.seen_by, self._made_with(path, Path(scratch)))
            missed = [check for check in fault.seen_by if check not in red]
            late = self.red(missed, None)
        finally:
            self._write(path, good)
            for library, content in built.items():
                library.write_bytes(content)
        seen_by = tuple(check for check in fault.seen_by if check in {*red, *late})
        return Seen(fault, seen_by, bool(late))

    def passes_all(self, checks: Sequence[str], made: Path) -> bool:
        """Whether all of these pass; tests in one process, so they share the fixtures of a file."""
        tests = [tests_by_name()[check] for check in checks if not command_of(check)]
        campaigns = [check for check in checks if command_of(check)]
        return self._pytest(tests, made) and not self.red(campaigns, made)

    def _passes(self, check: str, made: Path | None) -> bool:
        command = command_of(check)
        if not command:
            return self._pytest([tests_by_name()[check]], made)
        code, said = self._run([sys.executable, "-m", *command])
        if code > 1:  # 1: the campaign failed; below 0: it crashed or hung
            raise SystemExit(f"{check}: {code}, which says nothing:\n{said[-3000:]}")
        return code == 0

    def _pytest(self, tests: Sequence[str], made: Path | None) -> bool:
        """Whether tests pass. SystemExit if pytest gives no result, or all are skipped."""
        environment = {} if made is None else {"TESTS_MADE": str(made), "DIGEST": code_digest()}
        with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
            options = ["-q", "-p", "no:cacheprovider", "-m", "", "--tb", "short"]
            options += ["-p", "tests.campaigns.kept_digest", f"--basetemp={temporary}/pytest"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            code, said = self._run(command, environment)
        if code > 1:
            raise SystemExit(f"{tests}: pytest ended with {code}:\n{said[-3000:]}")
        if code == 0 and " passed" not in said.splitlines()[-1]:
            raise SystemExit(f"{tests}: says nothing, it is skipped")
        return code == 0

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, given: str = ""
    ) -> tuple[int, str]:
        """The exit code, negative for a crash or a hang, and what the process printed."""
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(
                command, cwd=self.root, env={**self._env, **(environment or {})}, text=True,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            ) as process,
        ):  # fmt: skip
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(given, timeout=_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what it has started
            code = process.wait()
            log.seek(0)
            return code, log.read()

    def _made_with(self, path: Path, scratch: Path) -> Path:
        """The folder of what tests share, for a fault in this file."""
        if path.suffix == ".py":
            return self._made
        (scratch / "shared").mkdir()
        for each in (self._made / "shared").glob("*"):
            if not any(each.match(pattern) for pattern in _NATIVE):
                (scratch / "shared" / each.name).symlink_to(each)
        return scratch

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            os.utime(path, (second := next(self._seconds), second))

    def _compiles(self, path: Path, text: str) -> bool:
        """Whether this C++ compiles by itself; headers of `lanes` never do."""
        native = Path("engines", "native")
        folders = (path.parent, native, native / "include", sysconfig.get_path("include"))
        command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-mavx2", "-mfma"]
        command += [*(f"-I{folder}" for folder in folders), "-x", "c++", "-"]
        return self._run(command, given=text)[0] == 0

    def _libraries(self) -> dict[Path, bytes]:
        """The libraries that are built in the tree."""
        folder = self.root / "engines" / "native"
        return {path: path.read_bytes() for path in folder.glob("*.so")}

    def _build(self) -> None:
        """Builds the extension; the compiler cache skips files that are unchanged."""
        compiler = f"{os.environ.get('CMAKE_CXX_COMPILER_LAUNCHER', '')} g++".strip()
        build = [sys.executable, "setup.py", "build_ext", "--inplace", "--force", "-q"]
        code, said = self._run(build, {"CC": compiler, "CXX": compiler})
        if code:
            raise SystemExit(f"the native code does not build with its fault:\n{said}")


@functools.cache
def _extension() -> frozenset[str]:
    """Names of the files from which Python's extension and the shim are built, not the library."""
    native = ROOT / "engines" / "native"
    made = {p.name for p in native.rglob("*") if p.suffix in (".cpp", ".h", ".inc")}
    return frozenset(made - {path.name for path in (native / "library").iterdir()})


def run(folder: Path, faults: Sequence[Fault], jobs: int) -> list[Seen]:
    """Put in each fault. SystemExit if a check fails without a fault."""
    for fault in faults:
        place(fault)
    made = folder / "made"
    all_copies = [Copy(folder / str(number), made) for number in range(jobs)]
    copies: queue.Queue[Copy] = queue.Queue()
    for copy in all_copies:
        copies.put(copy)

    def seen(fault: Fault) -> Seen:
        copy, begun = copies.get(), time.monotonic()
        try:
            found = copy.put_in(fault)
        finally:
            copies.put(copy)
        took, late = time.monotonic() - begun, ", anew" if found.anew else ""
        print(f"{found} {took:.0f} s{late}", file=sys.stderr)
        return found

    checks = list(dict.fromkeys(check for fault in faults for check in fault.seen_by))
    parts = parted(checks, jobs)
    with ThreadPoolExecutor(jobs) as pool:
        passed = pool.map(lambda copy, part: copy.passes_all(part, made), all_copies, parts)
        doubtful = [c for part, green in zip(parts, passed, strict=True) if not green for c in part]
        if red := all_copies[0].red(doubtful, made):  # one by one, with no other copy at work
            raise SystemExit(f"without any fault these are red: {', '.join(red)}")
        print(f"{len(checks)} checks are green without a fault", file=sys.stderr)
        return list(pool.map(seen, faults))


def parted(checks: Sequence[str], parts: int) -> list[list[str]]:
    """The checks in parts of about equal length.

    Checks of one file share its fixtures, so they stay together.
    """
    files: dict[str, list[str]] = {}
    for check in checks:
        files.setdefault(tests_by_name().get(check, check).partition("::")[0], []).append(check)
    found: list[list[str]] = [[] for _ in range(parts)]
    for file in sorted(files.values(), key=len, reverse=True):
        min(found, key=len).extend(file)
    return found


def _table(found: Sequence[Seen]) -> list[str]:
    return ["| fault | seen by |", "| --- | --- |", *map(str, found)]


def chosen(texts: Iterable[str]) -> list[Fault]:
    found = [fault for fault in FAULTS if any(text in fault.name for text in texts)]
    if not found:
        raise SystemExit(f"no fault has such a name; there are: {[f.name for f in FAULTS]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="TEXT", help="Faults named like this.")
    parser.add_argument("--jobs", type=int, default=1, help="Faults at a time.")
    parser.add_argument("--table", action="store_true", help="Print what sees which, run nothing.")
    asked = parser.parse_args()
    faults = chosen(asked.only or [""])
    if asked.table:
        print(*_table([Seen(fault, fault.seen_by) for fault in faults]), sep="\n")
        return
    environment.settle(ROOT)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soa-planted-") as folder:
        found = run(Path(folder), faults, asked.jobs)
    print(*_table(found), sep="\n")
    unseen = [seen.fault.name for seen in found if not seen.red]
    took = time.monotonic() - begun
    print(f"{len(found) - len(unseen)} of {len(found)} faults were seen, {took:.0f} s")
    blind = [f"{check} ({seen.fault.name})" for seen in found for check in seen.missed]
    if blind:
        print(f"these should have seen it and did not: {'; '.join(blind)}")
    if unseen:
        raise SystemExit(f"not seen: {'; '.join(unseen)}")
    if blind:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
