"""Each planted fault still has its place in the source, and the campaign finds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.campaigns import planted
from tests.campaigns.faults import FAULTS, Fault


@pytest.mark.long  # so that a new name of a variable fails no other test
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_checks(fault: Fault) -> None:
    planted.with_fault(fault)  # raises for a fault without a place
    for check in fault.seen_by:
        planted.command_of(check)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("text that" + " nobody wrote", ""),
        (FAULTS[0].old, FAULTS[0].old),
        (FAULTS[0].old, "names = ["),
    ],
    ids=["without a place", "without a change", "no Python"],
)
def test_a_fault_that_would_prove_nothing_is_refused(old: str, new: str) -> None:
    with pytest.raises(SystemExit, match="one of ours"):
        planted.with_fault(Fault("one of ours", old, new, ()))


@pytest.mark.long
def test_the_campaign_sees_the_faults_that_are_chosen() -> None:
    chosen = ("--only", "one column is left out", "--only", "NaN agrees")
    command = [sys.executable, "-m", "tests.campaigns.planted", *chosen]
    process = subprocess.run(command, cwd=planted.ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "2 of 2 faults were seen" in process.stdout
