"""A full disk: a real, small tmpfs in its own mount namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from registry.store.registry import Registry
from tests.models.project import PASSED, Built, write_project
from tests.models.scored import columns, write_rows

ROOT = Path(__file__).parents[3]

DRIVER = """
import json, os, subprocess, sys, tempfile
from pathlib import Path
from click.testing import CliRunner
import torch._inductor, torch.export._trace  # here once, instead of in each child that captures
from pipeline.cli.main import main
from pipeline.promotion import measuring

measuring._SECONDS_A_SIZE = 0.2
disk, cases = sys.argv[1], json.loads(sys.argv[2])
for size, commands in cases:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    for command in commands:
        if command == ["free some space"]:
            subprocess.run(["mount", "-o", "remount,size=100M", disk], check=True)
            continue
        if "--to" in command:  # a promotion writes temporary files alone
            os.environ["TMPDIR"] = tempfile.tempdir = disk
        result = CliRunner().invoke(main, command)
        unexpected = not isinstance(result.exception, (SystemExit, type(None)))
        files = sorted(str(p.relative_to(disk)) for p in Path(disk).rglob("*") if p.is_file())
        said = repr(result.exception) if unexpected else result.stderr
        print(json.dumps([result.exit_code, result.stdout, said, files]), flush=True)
    subprocess.run(["umount", "--lazy", disk], check=True)
"""
# Its mounts end with the process; without root, it is in a user namespace.
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-r", "--mount"]


@pytest.fixture(scope="module")
def small_disks() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1)")
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


_PAGE = os.sysconf("SC_PAGE_SIZE")
_MORE = ["free some space"]
_ROWS = 50_000
Case = tuple[int, list[list[str]]]
Found = tuple[int, str, str, list[str]]
"""Exit code, stdout, stderr, remaining files."""


def on_small_disks(disk: Path, cases: dict[str, list[Case]]) -> dict[str, list[Found]]:
    """Runs each case on a new disk of the given size in bytes.

    One process runs all commands, as it takes seconds to start.
    """
    disk.mkdir()
    flat = [case for each in cases.values() for case in each]
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", DRIVER, str(disk), json.dumps(flat)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (found, done.stderr[-2000:])
    lines = iter(found)
    return {
        name: [next(lines) for _, commands in each for command in commands if command != _MORE]
        for name, each in cases.items()
    }


@pytest.fixture(scope="module")
def found(
    small_disks: None, jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Found]]:
    """The results of the commands on full disks."""
    folder = tmp_path_factory.mktemp("full")
    disk = folder / "disk"
    shutil.copy(empty_database, folder / "registry.db")
    registry = Registry(f"sqlite:///{folder}/registry.db")
    registry.promote(registry.register(jets.bundle), "production", PASSED)
    cases = {
        "run": a_run(jets, disk, folder),
        "pull and register": a_pull_and_a_registration(jets, disk, registry, empty_database),
        "apply": an_apply(disk, registry, folder),
        "promote": a_promotion(disk, registry),
    }
    return on_small_disks(disk, cases)


def a_run(jets: Built, disk: Path, folder: Path) -> list[Case]:
    """The disk is full in a file of capture, and in the first stage after it.

    tests/campaigns/faults.py lets each write fail.
    """
    project = write_project(folder / "project")
    project.variant("config.yaml", ("[aoti, torchscript, exported]", "[exported]"))
    names = ("model.ts", "program.pt2", "reference.safetensors")
    sizes = [jets.bundle.file(name).stat().st_size for name in names]
    run = ["run", str(project.config), "--work", str(disk / "work")]
    run += ["--registry", f"sqlite:///{folder}/none.db"]
    return [(size, [run]) for size in (sizes[0] + sizes[1] // 2, sum(sizes) + 12_000)] + [
        (100_000_000, [["ls", "--json", *run[-2:]]])
    ]


def test_during_run(found: dict[str, list[Found]]) -> None:
    *runs, listed = found["run"]
    assert len(runs) == 2
    for code, output, said, files in runs:
        assert (code, output) == (1, ""), said
        line = said.splitlines()[-1]
        assert line.startswith("pipeline: the disk is full"), said
        assert line.endswith(": free some space and run again [disk]")
        assert not any("bundle" in file for file in files)
    for _, _, _, files in runs[:-1]:
        assert not any(file.endswith("done.json") for file in files)
    assert json.loads(listed[1])["error"]["code"] == "no-registry"


def a_pull_and_a_registration(
    jets: Built, disk: Path, registry: Registry, empty_database: Path
) -> list[Case]:
    files = [path.stat().st_size for path in jets.bundle.path.rglob("*") if path.is_file()]
    size, pages = sum(files), sum(-(-size // _PAGE) * _PAGE for size in files)
    pull = ["pull", "jets", str(disk / "copy"), "--registry", registry.uri]
    # Two databases, as a process refuses one that was replaced since it opened it.
    one, two = (["--registry", f"sqlite:///{disk}/{name}.db"] for name in ("one", "two"))
    run = ["run", str(jets.project.config), "--work", str(jets.project.work)]
    database = empty_database.stat().st_size
    return [
        (size // 2, [pull]),
        (pages, [pull]),  # the bundle fits, but not the note of its promotion
        (database // 2, [[*run, *one], _MORE, [*run, *one]]),
        (database + size // 2, [[*run, *two], ["ls", "--json", *two], _MORE, [*run, *two]]),
    ]


def test_during_pull_and_register(found: dict[str, list[Found]]) -> None:
    half, no_note, no_tables, later, no_bundle, listed, at_last = found["pull and register"]
    for code, output, said, left in (half, no_note):
        assert (code, output, left) == (1, "", [])
        assert said.count("\n") == 1
        assert "No space left on device" in said or "the disk is full" in said
    for code, output, said, left in (no_tables, no_bundle):
        assert (code, output) == (1, "")
        assert said.splitlines()[-1].startswith("pipeline: "), said
        assert "full" in said or "No space left" in said
        assert not any("manifest.json" in file for file in left)
    assert json.loads(listed[1]) == {}
    for code, output, _, _ in (later, at_last):
        assert code == 0
        assert "registered jets/1" in output


def an_apply(disk: Path, registry: Registry, folder: Path) -> list[Case]:
    """The disk is full in a part, in the output, and when the ROOT file begins."""
    source = write_rows(folder / "rows.parquet", columns(_ROWS))
    apply = ["apply", "jets@production", str(source), "--out", f"{disk}/out.root"]
    apply += ["--keep", "event", "--json", "--registry", registry.uri]
    part = _ROWS * (8 + 3 * 4)
    sizes = (part // 2, part + 2 * _PAGE, part + part // 2)
    return [(size, [apply, _MORE, apply]) for size in sizes]


def test_during_apply(found: dict[str, list[Found]]) -> None:
    """The repeated job continues with the parts that are complete."""
    tries = found["apply"]
    for full, again in zip(tries[::2], tries[1::2], strict=True):
        code, output, said, files = full
        assert (code, said.count("\n")) == (1, 1), said
        assert json.loads(output)["error"]["message"] in said
        assert "No space left on device" in said or "the disk is full" in said
        assert "out.root" not in files and not any(".partial" in file for file in files)
        code, output, said, files = again
        assert (code, files) == (0, ["out.root"]), said
        assert json.loads(output)["rows"] == _ROWS
    assert [json.loads(output)["found"] for _, output, _, _ in tries[1::2]] == [0, _ROWS, _ROWS]


def a_promotion(disk: Path, registry: Registry) -> list[Case]:
    """The disk for temporary files is full in the files of the job, or in its answer."""
    promote = ["promote", "jets/1", "--to", "staging", "--registry", registry.uri]
    history = ["history", "jets", "--json", "--registry", registry.uri]
    return [(pages * _PAGE, [promote, history]) for pages in (2, 3, 4)] + [
        (100_000_000, [promote, history])
    ]


def test_during_a_promotion(found: dict[str, list[Found]]) -> None:
    """A full disk is no verdict on the version: nothing is in the history."""
    *full, enough, at_last = found["promote"]
    for code, output, said, _ in full[::2]:
        assert (code, output) == (1, ""), said
        assert "the disk is full" in said.splitlines()[-1], said
        assert said.endswith(": free some space and run again [disk]\n")
    events = [json.loads(output) for _, output, _, _ in (*full[1::2], at_last)]
    assert all(each == events[0] for each in events[:-1])
    assert enough[0] == 0, enough[2]
    assert len(events[-1]) == len(events[0]) + 1
