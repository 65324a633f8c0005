"""Faults put in on purpose: none has lost its place, and the campaign sees what is red."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.campaigns import planted
from tests.campaigns.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_checks(fault: Fault) -> None:
    planted.place(fault)
    for check in fault.seen_by:
        planted.command_of(check)
    row = str(planted.Seen(fault, fault.seen_by, 0.0))
    assert row in (planted.ROOT / "docs" / "testing.md").read_text().splitlines()


def test_a_fault_without_a_place() -> None:
    with pytest.raises(SystemExit, match="nowhere"):
        planted.place(Fault("gone", "text that" + " nobody wrote", "", ()))


@pytest.mark.long
def test_two_faults_are_seen() -> None:
    chosen = ("--only", "one column is left out", "--only", "NaN agrees")
    command = [sys.executable, "-m", "tests.campaigns.planted", *chosen]
    done = subprocess.run(command, cwd=planted.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 faults were seen" in done.stdout
