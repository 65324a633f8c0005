"""Small slices of the campaigns, each in a process of its own that forks its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.models.project import Built

ROOT = Path(__file__).parents[2]


def campaign(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.registry.campaigns.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_in_the_middle() -> None:
    said = campaign("kill", "--seed", "7", "--kills", "10")
    first = said.splitlines()[0]
    assert first.startswith("seed 7: 11 kills, ")  # the tenth check ends the second writer too
    assert "1 checks" in first
    assert int(first.split(", ")[1].split()[0]) > 0  # inside an operation


def test_twenty_promoters_at_once() -> None:
    assert campaign("promoters", "--promoters", "20").startswith("20 promoters, one order, ")


def test_builders_killed_and_at_once() -> None:
    killed, at_once = campaign("builds", "--builders", "2").splitlines()
    # five files; then the event, the tag that counts, two that show it, and the event closed; a
    # page for people
    assert killed == "killed at 11 points: the version had its target at 4 of them, whole"
    assert at_once == "2 builders of each target at once, told so: [1, 1, 1]"


def test_damage_to_a_bundle(jets: Built) -> None:
    size = ("--flips", "600", "--beside", "20")
    said = campaign("bitflips", "--seed", "7", *size, "--bundle", str(jets.bundle.path))
    assert said.startswith("seed 7: 600 of 600 changes of a byte refused")
    assert "undamaged: loads with 3 engines" in said
