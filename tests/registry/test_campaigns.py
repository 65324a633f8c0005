"""Short runs of the campaigns, each in a process of its own that forks its workers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.project import Built
from tests.registry.campaigns import each_write, postgres

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def campaign(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.registry.campaigns.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_in_the_middle() -> None:
    said = campaign("kill", "--every", "64", "--seed", "7", "--kills", "4")
    found = re.search(r"^(\d+) operations: killed at (\d+) writes, paused at (\d+)", said, re.M)
    assert found is not None, said
    operations, kills, pauses = map(int, found.groups())
    assert operations == len(each_write.OPERATIONS)
    assert min(kills, pauses) >= operations  # at least at the first write of each
    (first,) = re.findall(r"^seed 7: \d+ kills, (\d+) inside an operation, 1 checks", said, re.M)
    assert int(first) > 0


def test_twenty_promoters_at_once() -> None:
    assert campaign("promoters", "--promoters", "20").startswith("20 promoters, one order, ")


def test_damage_to_a_bundle(jets: Built) -> None:
    size = ("--flips", "600", "--beside", "20")
    said = campaign("bitflips", "--seed", "7", *size, "--bundle", str(jets.bundle.path))
    assert said.startswith("seed 7: 600 of 600 changes of a byte refused")
    assert "undamaged: loads with 3 engines" in said


@pytest.mark.skipif(
    postgres.binaries() is None or None in map(importlib.util.find_spec, ("flask", "psycopg2")),
    reason="takes Debian's postgresql, psycopg2-binary and the mlflow extra",
)
def test_postgresql_and_its_server_killed_under_load() -> None:
    size = ("--kills", "1", "--writers", "2", "--lease", "12")
    said = campaign("postgres", "--seed", "7", *size)
    first = "seed 7: 2 writers, server killed 1 times, PostgreSQL once, "
    assert said.startswith(first)
    counts = {what: int(number) for number, what in re.findall(r"^ +(\d+) (.+)$", said, re.M)}
    assert counts["operations that returned"] >= 6
    assert counts["events, in one order"] > 0
