"""The measurement runs on a real Triton, and the CPU times that it reads from /proc are right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.scaling.check import check
from benchmarks.scaling.fit import fit
from benchmarks.scaling.measure import measure
from benchmarks.scaling.processes import children, cpu_s, machine_cpu_s
from benchmarks.scaling.records import Measured
from registry.store.registry import Registry
from serving.errors import ServerError
from serving.local.triton import find_triton
from tests.models.project import PASSED, Built

_SPIN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def test_cpu_time_of_a_process_and_of_the_machine() -> None:
    before = machine_cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", _SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        assert spinning.pid in children(os.getpid())
        found = cpu_s(spinning.pid)
        time.sleep(0.1)
        assert cpu_s(spinning.pid) == pytest.approx(found, abs=0.02)  # a waiting process uses none
        spinning.communicate(b"\n")
    assert 0.2 <= found < 2.0
    assert machine_cpu_s() - before >= 0.15


@pytest.mark.long
def test_one_client_of_a_real_triton(jets: Built, tmp_path: Path) -> None:
    try:
        find_triton()
    except ServerError as error:
        pytest.skip(str(error))
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    version = registry.promote(registry.register(jets.bundle), "production", PASSED)
    probes = ((1, 1), (50, 4))
    measured = measure(
        registry, version.ref, tmp_path / "served",
        seconds=0.2, probes=probes, clients=(2,), rounds=2, say=lambda text: None,
    )  # fmt: skip
    assert [(each.rows, each.burst) for each in measured.probes] == 2 * list(probes)
    assert [each.batching for each in measured.runs] == [True, False, True, False]
    for probe in measured.probes:
        assert 0 < probe.runs <= probe.requests + probe.burst  # Triton counts after it answers
        assert min(probe.client_s, probe.triton_s, probe.stub_s, probe.inside_s) > 0
        assert list(probe.latencies) == sorted(probe.latencies)
    measured.save(tmp_path / "measured.json")
    assert Measured.load(tmp_path / "measured.json") == measured
    assert all(each.predicted.rate > 0 for each in check(measured, fit(measured.probes)))
