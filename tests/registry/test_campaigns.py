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
    """What a campaign prints; it must end without an error."""
    process = subprocess.run(
        [sys.executable, "-m", f"tests.registry.campaigns.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_writers_that_are_killed_or_paused_leave_a_registry_in_order() -> None:
    output = campaign("kill", "--every", "64", "--seed", "7", "--kills", "4")
    line = re.search(r"^(\d+) operations: killed at (\d+) writes, paused at (\d+)", output, re.M)
    assert line is not None, output
    operations, kills, pauses = map(int, line.groups())
    assert operations == len(each_write.OPERATIONS)
    assert min(kills, pauses) >= operations  # at least at the first write of each
    (inside,) = re.findall(r"^seed 7: \d+ kills, (\d+) inside an operation, 1 checks", output, re.M)
    assert int(inside) > 0


def test_twenty_promoters_at_once_leave_one_order() -> None:
    assert campaign("promoters", "--promoters", "20").startswith("20 promoters, one order, ")


def test_every_damage_to_a_bundle_is_refused(jets: Built) -> None:
    size = ("--flips", "600", "--beside", "20")
    output = campaign("bitflips", "--seed", "7", *size, "--bundle", str(jets.bundle.path))
    assert output.startswith("seed 7: 600 of 600 changes of a byte refused")
    assert "undamaged: loads with 3 engines" in output


@pytest.mark.skipif(
    postgres.binaries() is None or None in map(importlib.util.find_spec, ("flask", "psycopg2")),
    reason="takes Debian's postgresql, psycopg2-binary and the mlflow extra",
)
def test_a_server_and_postgresql_killed_under_load_leave_a_registry_in_order() -> None:
    size = ("--kills", "1", "--writers", "2", "--lease", "12")
    output = campaign("postgres", "--seed", "7", *size)
    assert output.startswith("seed 7: 2 writers, server killed 1 times, PostgreSQL once, ")
    counted = re.findall(r"^ +(\d+) (.+)$", output, re.M)
    counts = {name: int(number) for number, name in counted}
    assert counts["operations that returned"] >= 6
    assert counts["events, in one order"] > 0
