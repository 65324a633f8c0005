"""CPUs: the micro-architecture levels of the x86-64 psABI, and versions of the ARM architecture.

Code built with `-march=native` ends with SIGILL on an older node. So each artifact is built for a
named level.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from engines.target import Kind, Target

# By processor family: the flags in /proc/cpuinfo that each level needs besides those of the levels
# before it.
_X86: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
_ARM: dict[str, frozenset[str]] = {
    "aarch64": frozenset({"fp", "asimd"}),
    "armv8.2-a": frozenset({"asimdrdm", "atomics", "crc32"}),
}
_FAMILIES = {"x86_64": _X86, "aarch64": _ARM}

# Bits of a vector that Inductor may use. 1 turns its vectorisation off, which needs at least AVX2.
_SIMD_BITS = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}


class Cpu(
    Kind,
    kind="cpu",
    order=0,
    arch=r"x86-64-v[234]|aarch64|armv8\.2-a",
    said="cpu, cpu/x86-64-v2, cpu/x86-64-v3, cpu/x86-64-v4, cpu/aarch64, cpu/armv8.2-a",
):
    torch_device = "cpu"

    def here(self, index: int = 0) -> tuple[str, ...]:
        return host_cpu_levels()

    def why_not(self, arch: str) -> str:
        other = arch not in _FAMILIES.get(platform.machine(), ())
        lacking = "another processor family" if other else ", ".join(missing_flags(arch))
        return f"it lacks {lacking}"


@cache
def cpu_flags() -> frozenset[str]:
    """CPU feature flags of this host, by Linux's names; empty if they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()  # ours
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())


def host_cpu_levels() -> tuple[str, ...]:
    """The CPU architectures that this host runs, best first."""
    own = _FAMILIES.get(platform.machine(), {})
    return tuple(reversed([level for level in own if not missing_flags(level)]))


def missing_flags(arch: str, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """CPU flags that `arch` needs and this host (or `flags`) lacks. Flags of different processor
    families have different names."""
    flags = cpu_flags() if flags is None else flags
    for family in _FAMILIES.values():
        needed: set[str] = set()
        for level, own in family.items():
            needed |= own
            if level == arch:
                return tuple(sorted(needed - flags))
    return ()


def cpu_code(target: Target) -> dict[str, Any]:
    """Inductor's settings for the code that runs on a CPU; its default is code for this host.

    An artifact for a GPU has such code, too: it launches the kernels. It is built for the lowest
    level, so that any host with such a GPU runs it.
    """
    arch = target.arch
    if target.device != "cpu":
        arch = "aarch64" if platform.machine() == "aarch64" else "x86-64-v2"
    settings: dict[str, Any] = {"cpp.march": "armv8-a" if arch == "aarch64" else arch}
    if arch in _SIMD_BITS:
        settings["cpp.simdlen"] = _SIMD_BITS[arch]
    return settings


@contextmanager
def inductor_settings(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings that this torch knows. Before torch 2.13 there is no `cpp.march`, and Inductor
    compiles for this host: inside the block it compiles for that architecture."""
    from torch._inductor import config, cpp_builder

    march = settings.get("cpp.march")
    if march is None or hasattr(config.cpp, "march"):
        yield dict(settings)
        return
    flags_of = cpp_builder._get_optimization_cflags

    def flags(*arguments: Any, **named: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags_of(*arguments, **named)
        return [f"march={march}" if f == "march=native" else f for f in compiling], linking

    cpp_builder._get_optimization_cflags = flags
    try:
        yield {key: value for key, value in settings.items() if key != "cpp.march"}
    finally:
        cpp_builder._get_optimization_cflags = flags_of
