"""Targets: their names, the levels of a CPU from its flags, and the choice among several."""

from __future__ import annotations

import pytest
import torch

from engines.errors import TargetError
from engines.target import (
    Target,
    check_host_runs,
    choose_target,
    cpu_flags,
    host_cpu_levels,
    missing_flags,
)

# What /proc/cpuinfo shows, beyond what every 64-bit processor has.
V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
V3 = V2 | frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
ALL = ["cpu/x86-64-v2", "cpu/x86-64-v4", "cpu/x86-64-v3", "cuda/sm_90"]


@pytest.mark.parametrize(
    ("text", "device", "arch"),
    [
        ("cpu/x86-64-v2", "cpu", "x86-64-v2"),
        ("cpu/x86-64-v4", "cpu", "x86-64-v4"),
        ("cpu/aarch64", "cpu", "aarch64"),
        ("cuda/sm_90", "cuda", "sm_90"),
        ("cuda/sm_90a", "cuda", "sm_90a"),
        ("rocm/gfx90a", "rocm", "gfx90a"),
    ],
)
def test_parse(text: str, device: str, arch: str) -> None:
    target = Target.parse(text)
    assert (target.device, target.arch) == (device, arch)
    assert str(target) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu",
        "cpu/",
        "cpu/x86-64",
        "cpu/x86-64-v1",
        "cpu/x86-64-v30",
        "cpu/x86-64-v3/extra",
        "cpu/native",
        "cuda",
        "cuda/",
        "cuda/sm_",
        "cuda/sm_\u0669\u0660",
        "cuda/90",
        "cuda/sm_../../elsewhere",
        "rocm/gfx",
        "rocm/gfxZZ",
        "CPU/x86-64-v3",
        "cpu/x86-64-v3\n",
    ],
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(TargetError, match=r"unknown target .*: use cpu, cpu/x86-64-v2"):
        Target.parse(text)


def test_plain_cpu_is_the_hosts_best_level_up_to_v3() -> None:
    levels = host_cpu_levels()
    assert Target.parse("cpu").arch == ("x86-64-v3" if "x86-64-v3" in levels else levels[0])
    check_host_runs(Target.parse("cpu"))


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (frozenset[str](), ()),
        (V2 - {"ssse3"}, ()),
        (V2, ("x86-64-v2",)),
        (V3 - {"movbe"}, ("x86-64-v2",)),
        (V3, ("x86-64-v3", "x86-64-v2")),
        (V4, ("x86-64-v4", "x86-64-v3", "x86-64-v2")),
        # Some virtual machines show AVX-512 without a flag below it: the levels stop there.
        (V4 - {"fma"}, ("x86-64-v2",)),
    ],
)
def test_levels_from_flags(flags: frozenset[str], levels: tuple[str, ...]) -> None:
    assert host_cpu_levels(flags) == levels


def test_missing_flags_include_those_of_lower_levels() -> None:
    assert missing_flags("x86-64-v3", V3) == ()
    assert missing_flags("x86-64-v3", V3 - {"popcnt", "fma"}) == ("fma", "popcnt")
    assert missing_flags("x86-64-v2", frozenset()) == tuple(sorted(V2))
    assert missing_flags("aarch64", V2) == ()


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [(V2, "cpu/x86-64-v2"), (V3, "cpu/x86-64-v3"), (V4, "cpu/x86-64-v4")],
)
def test_the_best_level_that_the_host_runs_is_chosen(flags: frozenset[str], chosen: str) -> None:
    assert choose_target(ALL, "cpu", flags) == chosen


def test_a_lower_level_serves_where_the_own_one_is_not_built() -> None:
    assert choose_target(["cpu/x86-64-v2"], "cpu", V4) == "cpu/x86-64-v2"


def test_the_refusal_says_what_the_host_lacks() -> None:
    with pytest.raises(TargetError) as caught:
        choose_target(["cpu/x86-64-v3", "cpu/x86-64-v4"], "cpu", V3 - {"fma"})
    assert str(caught.value) == (
        "no artifact that this CPU can run: cpu/x86-64-v3 needs fma; cpu/x86-64-v4 needs "
        "avx512bw, avx512cd, avx512dq, avx512f, avx512vl, fma"
    )
    with pytest.raises(TargetError, match="cpu/aarch64 needs another processor family"):
        choose_target(["cpu/aarch64"], "cpu", V3)


def test_no_artifact_for_the_cpu_at_all() -> None:
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_9"):
        choose_target(["cuda/sm_90"], "cpu", V3)
    with pytest.raises(TargetError, match="this version holds: none"):
        choose_target([], "cpu", V3)


@pytest.mark.parametrize("device", ["meta", "cuda:x", "cuda:-1", "xpu:0", ""])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(TargetError, match="unknown device"):
        choose_target(ALL, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_without_a_gpu_that_is_what_the_error_says() -> None:
    with pytest.raises(TargetError, match="there is no GPU 0 here: torch sees 0"):
        choose_target(ALL, "cuda")
    with pytest.raises(TargetError, match="cannot run cuda/sm_90: torch sees no GPU"):
        check_host_runs(Target.parse("cuda/sm_90"))


def test_a_host_does_not_run_another_processor_family() -> None:
    other = "aarch64" if cpu_flags() else "x86-64-v2"
    with pytest.raises(TargetError, match=f"cannot run cpu/{other}: it lacks"):
        check_host_runs(Target("cpu", other))
