"""A full disk: a real, small tmpfs in its own mount namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
    """Skips where this user may not mount a file system."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1)")
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"this user may not mount: {process.stderr.strip()}")


_PAGE = os.sysconf("SC_PAGE_SIZE")
_MORE = ["free some space"]
_ROWS = 50_000
Case = tuple[int, list[list[str]]]
"""The bytes of a new disk, and the commands that run on it, one after the other."""


class Ended(NamedTuple):
    """How a command ended. `files`: what then lay on the disk."""

    code: int
    stdout: str
    stderr: str
    files: list[str]


def on_small_disks(disk: Path, cases: dict[str, list[Case]]) -> dict[str, list[Ended]]:
    """Runs each case on a new disk of the given size in bytes.

    One process runs all commands, as it takes seconds to start.
    """
    disk.mkdir()
    flat = [case for listed in cases.values() for case in listed]
    process = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", DRIVER, str(disk), json.dumps(flat)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = [Ended(*json.loads(line)) for line in process.stdout.splitlines()]
    assert process.returncode == 0, (results, process.stderr[-2000:])
    following = iter(results)
    return {
        name: [
            next(following) for _, commands in listed for command in commands if command != _MORE
        ]
        for name, listed in cases.items()
    }


@pytest.fixture(scope="module")
def results(
    small_disks: None, jets: Built, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Ended]]:
    """How the commands on full disks ended, by the name of their test."""
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


def test_a_run_on_a_full_disk(results: dict[str, list[Ended]]) -> None:
    *runs, listed = results["run"]
    assert len(runs) == 2
    for run in runs:
        assert (run.code, run.stdout) == (1, ""), run.stderr
        line = run.stderr.splitlines()[-1]
        assert line.startswith("pipeline: the disk is full"), run.stderr
        assert line.endswith(": free some space and run again [disk]")
        assert not any("bundle" in file for file in run.files)
    in_capture = runs[0]
    assert not any(file.endswith("done.json") for file in in_capture.files)
    assert json.loads(listed.stdout)["error"]["code"] == "no-registry"


def a_pull_and_a_registration(
    jets: Built, disk: Path, registry: Registry, empty_database: Path
) -> list[Case]:
    """The disk is full in a pull, and in the database or the bundle of a registration."""
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


def test_a_pull_to_a_full_disk_leaves_nothing(results: dict[str, list[Ended]]) -> None:
    """Also if the bundle fits, but not the note of its promotion."""
    for pull in results["pull and register"][:2]:
        assert (pull.code, pull.stdout, pull.files) == (1, "", [])
        assert pull.stderr.count("\n") == 1
        assert "No space left on device" in pull.stderr or "the disk is full" in pull.stderr


def test_a_registration_on_a_full_disk_succeeds_later(results: dict[str, list[Ended]]) -> None:
    """The disk is full in the tables of the database, and in the bundle."""
    no_tables, later, no_bundle, listed, at_last = results["pull and register"][2:]
    for refused in (no_tables, no_bundle):
        assert (refused.code, refused.stdout) == (1, "")
        assert refused.stderr.splitlines()[-1].startswith("pipeline: "), refused.stderr
        assert "full" in refused.stderr or "No space left" in refused.stderr
        assert not any("manifest.json" in file for file in refused.files)
    assert json.loads(listed.stdout) == {}
    for registered in (later, at_last):
        assert registered.code == 0
        assert "registered jets/1" in registered.stdout


def an_apply(disk: Path, registry: Registry, folder: Path) -> list[Case]:
    """The disk is full in a part, in the output, and when the ROOT file begins."""
    source = write_rows(folder / "rows.parquet", columns(_ROWS))
    apply = ["apply", "jets@production", str(source), "--out", f"{disk}/out.root"]
    apply += ["--keep", "event", "--json", "--registry", registry.uri]
    part = _ROWS * (8 + 3 * 4)
    sizes = (part // 2, part + 2 * _PAGE, part + part // 2)
    return [(size, [apply, _MORE, apply]) for size in sizes]


def test_a_job_on_a_full_disk_goes_on_later(results: dict[str, list[Ended]]) -> None:
    """The repeated job continues with the parts that are complete."""
    jobs = results["apply"]
    stopped, repeated = jobs[::2], jobs[1::2]
    for job in stopped:
        assert (job.code, job.stderr.count("\n")) == (1, 1), job.stderr
        assert json.loads(job.stdout)["error"]["message"] in job.stderr
        assert "No space left on device" in job.stderr or "the disk is full" in job.stderr
        assert "out.root" not in job.files
        assert not any(".partial" in file for file in job.files)
    for job in repeated:
        assert (job.code, job.files) == (0, ["out.root"]), job.stderr
        assert json.loads(job.stdout)["rows"] == _ROWS
    assert [json.loads(job.stdout)["found"] for job in repeated] == [0, _ROWS, _ROWS]


def a_promotion(disk: Path, registry: Registry) -> list[Case]:
    """The disk for temporary files is full in the files of the job, or in its answer."""
    promote = ["promote", "jets/1", "--to", "staging", "--registry", registry.uri]
    history = ["history", "jets", "--json", "--registry", registry.uri]
    return [(pages * _PAGE, [promote, history]) for pages in (2, 3, 4)] + [
        (100_000_000, [promote, history])
    ]


def test_a_promotion_on_a_full_disk_is_no_verdict(results: dict[str, list[Ended]]) -> None:
    """Nothing is in the history until the disk has room."""
    promotions, histories = results["promote"][::2], results["promote"][1::2]
    *refused, promoted = promotions
    for promotion in refused:
        assert (promotion.code, promotion.stdout) == (1, ""), promotion.stderr
        assert "the disk is full" in promotion.stderr.splitlines()[-1], promotion.stderr
        assert promotion.stderr.endswith(": free some space and run again [disk]\n")
    assert promoted.code == 0, promoted.stderr
    *before, after = [json.loads(history.stdout) for history in histories]
    assert all(events == before[0] for events in before)
    assert len(after) == len(before[0]) + 1
