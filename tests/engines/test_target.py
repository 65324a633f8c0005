"""Targets: their names, the levels of a CPU from its flags, and the choice among several."""

from __future__ import annotations

import pytest
import torch

from engines.errors import TargetError
from engines.kinds import cpu, host_cpu_levels
from engines.target import Target, check_host_runs, choose_target

ALL = ["cpu/x86-64-v2", "cpu/x86-64-v4", "cpu/x86-64-v3", "cuda/sm_90"]


GOOD = (
    "cpu/x86-64-v2", "cpu/x86-64-v4", "cpu/aarch64", "cpu/armv8.2-a", "cuda/sm_90", "cuda/sm_90a",
    "rocm/gfx90a",
)  # fmt: skip
BAD = (
    "", "gpu", "cpu/", "cpu/x86-64", "cpu/x86-64-v1", "cpu/x86-64-v30", "cpu/x86-64-v3/extra",
    "cpu/native", "cuda", "cuda/", "cuda/sm_", "cuda/sm_\u0669\u0660", "cuda/90",
    "cuda/sm_../../elsewhere", "rocm/gfx", "rocm/gfxZZ", "CPU/x86-64-v3", "cpu/x86-64-v3\n",
)  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_a_target_is_its_device_and_its_architecture(text: str) -> None:
    target = Target.parse(text)
    assert [target.device, target.arch] == text.split("/")
    assert str(target) == text


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match=r"unknown target .*: use cpu, cpu/x86-64-v2"):
        Target.parse(text)


def test_plain_cpu_is_the_hosts_best_level_up_to_v3() -> None:
    levels = host_cpu_levels()
    assert Target.parse("cpu").arch == ("x86-64-v3" if "x86-64-v3" in levels else levels[0])
    check_host_runs(Target.parse("cpu"))


def host_with_levels(monkeypatch: pytest.MonkeyPatch, *levels: str) -> None:
    """Makes the host appear to run these levels only."""

    def missing(arch: str) -> str:
        return "" if arch in levels else "fma, popcnt"

    monkeypatch.setattr(cpu, "missing_features", missing)


@pytest.mark.parametrize("best", [2, 3, 4])
def test_the_best_level_of_a_host_is_chosen(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [f"x86-64-v{level}" for level in range(best, 1, -1)]
    host_with_levels(monkeypatch, *levels)
    assert host_cpu_levels() == tuple(levels)
    assert choose_target(ALL, "cpu") == f"cpu/{levels[0]}"


@pytest.mark.parametrize("best", [2, 3, 4])
def test_a_lower_level_is_chosen_where_there_is_no_better_artifact(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_with_levels(monkeypatch, *[f"x86-64-v{level}" for level in range(best, 1, -1)])
    assert choose_target(["cpu/x86-64-v2"], "cpu") == "cpu/x86-64-v2"


def test_the_refusal_says_what_the_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    host_with_levels(monkeypatch)
    assert host_cpu_levels() == ()
    says = r"cpu/x86-64-v3: it lacks fma, popcnt; cpu/x86-64-v4: it lacks fma"
    with pytest.raises(TargetError, match=says):
        choose_target(["cpu/x86-64-v3", "cpu/x86-64-v4"], "cpu")


@pytest.mark.parametrize(("targets", "listed"), [(["cuda/sm_90"], "cuda/sm_90"), ([], "none")])
def test_a_version_without_an_artifact_for_the_cpu(targets: list[str], listed: str) -> None:
    with pytest.raises(TargetError, match=f"no artifact for the CPU; this version holds: {listed}"):
        choose_target(targets, "cpu")


@pytest.mark.parametrize("device", ["meta", "cuda:x", "cuda:-1", "xpu:0", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(TargetError, match="unknown device"):
        choose_target(ALL, device)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")


@without_gpu
def test_no_target_is_chosen_for_a_gpu_that_is_not_there() -> None:
    with pytest.raises(TargetError, match="there is no GPU 0 here: torch sees 0"):
        choose_target(ALL, "cuda")


@without_gpu
def test_a_host_without_a_gpu_runs_no_target_of_one() -> None:
    with pytest.raises(TargetError, match="cannot run cuda/sm_90: torch sees no GPU"):
        check_host_runs(Target.parse("cuda/sm_90"))


def test_a_host_does_not_run_another_processor_family() -> None:
    other = "x86-64-v2" if host_cpu_levels()[-1] == "aarch64" else "aarch64"
    with pytest.raises(TargetError, match=f"cannot run cpu/{other}: it lacks another processor"):
        check_host_runs(Target("cpu", other))
