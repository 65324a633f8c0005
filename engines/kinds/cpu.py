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

_ARCHITECTURES = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64", "armv8.2-a")
"""A later one of a family runs the code of those before it."""

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
        return f"it lacks {missing_features(arch)}"


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
    return tuple(arch for arch in reversed(_ARCHITECTURES) if not missing_features(arch))


def missing_features(arch: str) -> str:
    """The CPU features that `arch` needs and this host lacks, such as "avx2, fma"; may be empty."""
    from engines.native import missing_cpu_features

    return missing_cpu_features(arch)


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
    """A block that compiles with these settings of Inductor; gives those that this torch knows.

    Before torch 2.13 there is no `cpp.march`, and Inductor compiles for this host. Then the block
    replaces its function for the compiler's flags, in all threads.
    """
    from torch._inductor import config, cpp_builder

    march = settings.get("cpp.march")
    if march is None or hasattr(config.cpp, "march"):
        yield dict(settings)
        return
    flags_for_this_host = cpp_builder._get_optimization_cflags

    def flags_for_march(*arguments: Any, **named: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags_for_this_host(*arguments, **named)
        wanted = f"march={march}"
        return [wanted if flag == "march=native" else flag for flag in compiling], linking

    cpp_builder._get_optimization_cflags = flags_for_march
    try:
        yield {key: value for key, value in settings.items() if key != "cpp.march"}
    finally:
        cpp_builder._get_optimization_cflags = flags_for_this_host
