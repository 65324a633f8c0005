"""Targets: their names, the levels of a CPU from its flags, and the choice among several."""

from __future__ import annotations

import pytest
import torch

from engines.errors import TargetError
from engines.kinds import cpu, host_cpu_levels, missing_flags
from engines.target import Target, check_host_runs, choose_target

# What /proc/cpuinfo shows, beyond what every 64-bit processor has.
V2 = frozenset(["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"])
V3 = V2 | frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
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
def test_parse(text: str) -> None:
    target = Target.parse(text)
    assert [target.device, target.arch] == text.split("/")
    assert str(target) == text


@pytest.mark.parametrize("text", BAD)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(TargetError, match=r"unknown target .*: use cpu, cpu/x86-64-v2"):
        Target.parse(text)


def test_plain_cpu_is_the_hosts_best_level_up_to_v3() -> None:
    levels = host_cpu_levels()
    assert Target.parse("cpu").arch == ("x86-64-v3" if "x86-64-v3" in levels else levels[0])
    check_host_runs(Target.parse("cpu"))


def has(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], machine: str = "x86_64") -> None:
    """Makes the host appear to have such a CPU."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: flags)


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
def test_the_best_level_of_a_host_is_chosen(
    flags: frozenset[str], levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, flags)
    assert host_cpu_levels() == levels
    if levels:
        assert choose_target(ALL, "cpu") == f"cpu/{levels[0]}"
        assert choose_target(["cpu/x86-64-v2"], "cpu") == "cpu/x86-64-v2"


ARM = frozenset({"fp", "asimd", "evtstrm", "aes", "crc32", "atomics", "asimdrdm", "cpuid"})


@pytest.mark.parametrize(
    ("flags", "levels"),
    [(ARM, ("armv8.2-a", "aarch64")), (ARM - {"atomics"}, ("aarch64",)), (V4, ())],
)
def test_levels_of_arm(
    flags: frozenset[str], levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, flags, "aarch64")
    assert host_cpu_levels() == levels
    if levels == ("aarch64",):
        with pytest.raises(TargetError, match=r"cpu/armv8\.2-a: it lacks atomics"):
            choose_target(["cpu/armv8.2-a"], "cpu")


def test_the_refusal_says_what_the_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, V3 - {"popcnt", "fma"})
    assert missing_flags("x86-64-v3") == ("fma", "popcnt")
    with pytest.raises(TargetError, match=r"cpu/x86-64-v3: .*fma, popcnt; cpu/x86-64-v4: .*avx51"):
        choose_target(["cpu/x86-64-v3", "cpu/x86-64-v4"], "cpu")
    with pytest.raises(TargetError, match="cpu/aarch64: it lacks another processor family"):
        choose_target(["cpu/aarch64"], "cpu")


def test_no_artifact_for_the_cpu_at_all() -> None:
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_9"):
        choose_target(["cuda/sm_90"], "cpu")
    with pytest.raises(TargetError, match="this version holds: none"):
        choose_target([], "cpu")


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
    other = "aarch64" if cpu.cpu_flags() else "x86-64-v2"
    with pytest.raises(TargetError, match=f"cannot run cpu/{other}: it lacks"):
        check_host_runs(Target("cpu", other))
