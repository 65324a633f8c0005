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
"""The architectures. Within a processor family, each also runs the code of those before it."""

# The vector width in bits that Inductor may use. Its vectorisation needs at least AVX2: 1 turns it
# off.
_SIMD_BITS = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}


class Cpu(
    Kind,
    kind="cpu",
    order=0,
    arch=r"x86-64-v[234]|aarch64|armv8\.2-a",
    said="cpu, cpu/x86-64-v2, cpu/x86-64-v3, cpu/x86-64-v4, cpu/aarch64, cpu/armv8.2-a",
):
    """CPUs, by the levels that this host can run."""

    torch_device = "cpu"

    def here(self, index: int = 0) -> tuple[str, ...]:
        return host_cpu_levels()

    def why_not(self, arch: str) -> str:
        return f"it lacks {missing_features(arch)}"


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU features of this host, by Linux's names for them. Empty if they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()  # trusted
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    flags = next(lines, "").partition(":")[2]
    return frozenset(flags.split())


def host_cpu_levels() -> tuple[str, ...]:
    """The CPU architectures that this host runs, best first."""
    return tuple(arch for arch in reversed(_ARCHITECTURES) if not missing_features(arch))


def missing_features(arch: str) -> str:
    """The CPU features that `arch` needs and this host lacks, such as "avx2, fma". Empty if it
    lacks none."""
    from engines.native import missing_cpu_features

    return missing_cpu_features(arch)


def cpu_code_settings(target: Target) -> dict[str, Any]:
    """The settings by which Inductor builds CPU code for a target instead of for this host.

    An artifact for a GPU has CPU code, too, which launches the kernels. It is built for the lowest
    level, so that any host with such a GPU can run it.
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
    """Make Inductor compile with `settings` inside the block. Gives the block those settings that
    this torch knows, which must be passed to Inductor there.

    Before torch 2.13 there is no setting `cpp.march`, and Inductor compiles for this host. Then its
    function that makes the compiler's flags is replaced inside the block, in all threads.
    """
    from torch._inductor import config, cpp_builder

    march = settings.get("cpp.march")
    if march is None or hasattr(config.cpp, "march"):
        yield dict(settings)
        return
    flags_for_this_host = cpp_builder._get_optimization_cflags

    def flags_for_march(*arguments: Any, **named: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags_for_this_host(*arguments, **named)
        own_march = f"march={march}"
        return [own_march if flag == "march=native" else flag for flag in compiling], linking

    cpp_builder._get_optimization_cflags = flags_for_march
    try:
        yield {key: value for key, value in settings.items() if key != "cpp.march"}
    finally:
        cpp_builder._get_optimization_cflags = flags_for_this_host
