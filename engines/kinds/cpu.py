"""CPUs, by the micro-architecture levels of the x86-64 psABI.

Native code built with `-march=native` dies of SIGILL on an older node, so each artifact is built
for a level by name.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

from engines.target import Kind, Target
from soa.options import known_options

# The flags /proc/cpuinfo shows for each level of the x86-64 psABI (each includes the one before).
_LEVEL_FLAGS: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}

# Bits per vector that Inductor may use; 1 turns its own vectorisation off, since it knows none
# below AVX2.
_SIMD_BITS = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}


class Cpu(
    Kind,
    kind="cpu",
    order=0,
    arch="x86-64-v[234]|aarch64",
    said="cpu, cpu/x86-64-v2, cpu/x86-64-v3, cpu/x86-64-v4, cpu/aarch64",
):
    torch_device = "cpu"

    def here(self, index: int = 0) -> tuple[str, ...]:
        return host_cpu_levels()

    def why_not(self, arch: str) -> str:
        return f"it lacks {', '.join(missing_flags(arch)) or 'another processor family'}"


@cache
def cpu_flags() -> frozenset[str]:
    """CPU feature flags of this host as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())


@known_options()
def host_cpu_levels() -> tuple[str, ...]:
    """The CPU architectures this host runs, best first."""
    if platform.machine() == "aarch64":
        return ("aarch64",)
    levels = [level for level in _LEVEL_FLAGS if not missing_flags(level)]
    return tuple(reversed(levels))


def missing_flags(arch: str, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """CPU flags that `arch` needs and this host lacks; none for another processor family."""
    flags = cpu_flags() if flags is None else flags
    needed: set[str] = set()
    for level, own in _LEVEL_FLAGS.items():
        needed |= own
        if level == arch:
            return tuple(sorted(needed - flags))
    return ()


def cpu_code(target: Target) -> dict[str, Any]:
    """Inductor's settings for what runs on a CPU. By itself it builds that for this very host.

    Of a GPU's artifact that is the code that launches kernels: built for the lowest level, so that
    any host with such a GPU runs it.
    """
    arch = target.arch
    if target.device != "cpu":
        arch = "aarch64" if platform.machine() == "aarch64" else "x86-64-v2"
    settings: dict[str, Any] = {"cpp.march": "armv8-a" if arch == "aarch64" else arch}
    if arch in _SIMD_BITS:
        settings["cpp.simdlen"] = _SIMD_BITS[arch]
    return settings
