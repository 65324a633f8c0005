"""Targets: where an artifact runs, as `<device>/<architecture>`.

CPU targets are the micro-architecture levels of the x86-64 psABI, because native code built with
`-march=native` dies of SIGILL on an older node.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engines.errors import TargetError
from soa.options import known_options

# The flags /proc/cpuinfo shows for each level of the x86-64 psABI (each includes the one before).
_LEVEL_FLAGS: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
_DEFAULT_CEILING = "x86-64-v3"
# Whole names only: a target is also a folder of the bundle.
_ARCHES = {"cpu": "x86-64-v[234]|aarch64", "cuda": "sm_[0-9]+[a-z]?", "rocm": "gfx[0-9a-f]+"}


@dataclass(frozen=True)
class Target:
    """`device` is cpu, cuda or rocm; `arch` a CPU level or a GPU architecture."""

    device: str
    arch: str

    def __str__(self) -> str:
        return f"{self.device}/{self.arch}"

    @property
    def torch_device(self) -> str:
        """What torch calls the device: ROCm too is `cuda`."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def has_tf32(self) -> bool:
        """CUDA GPUs have it from sm_80 on."""
        digits = re.match("sm_([0-9]+)", self.arch)
        return digits is not None and int(digits[1]) >= 80

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `cpu/x86-64-v3`; plain `cpu` is this host's best level up to x86-64-v3."""
        device, _, arch = text.partition("/")
        if text == "cpu":
            return cls("cpu", _default_cpu_arch())
        if not re.fullmatch(_ARCHES.get(device, "(?!)"), arch):
            raise TargetError(
                f"unknown target {text!r}: use cpu, cpu/x86-64-v2, cpu/x86-64-v3, cpu/x86-64-v4, "
                "cpu/aarch64, cuda/sm_<NN> or rocm/gfx<...>"
            )
        return cls(device, arch)


@cache
def cpu_flags() -> frozenset[str]:
    """CPU feature flags of this host as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@known_options()
def host_cpu_levels(flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """The CPU architectures this host runs, best first."""
    if flags is None:
        if platform.machine() == "aarch64":
            return ("aarch64",)
        flags = cpu_flags()
    levels: list[str] = []
    for level, needed in _LEVEL_FLAGS.items():
        if not needed <= flags:
            break
        levels.insert(0, level)
    return tuple(levels)


def missing_flags(arch: str, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """CPU flags that `arch` needs and this host lacks; none for another processor family."""
    if arch not in _LEVEL_FLAGS:
        return ()
    flags = cpu_flags() if flags is None else flags
    needed: set[str] = set()
    for level, own in _LEVEL_FLAGS.items():
        needed |= own
        if level == arch:
            break
    return tuple(sorted(needed - flags))


def _default_cpu_arch() -> str:
    levels = host_cpu_levels()
    if not levels:
        raise TargetError(
            "this host is below x86-64-v2 (or its CPU flags cannot be read): "
            "name a target explicitly"
        )
    return _DEFAULT_CEILING if _DEFAULT_CEILING in levels else levels[0]


@known_options()
def check_host_runs(target: Target) -> None:
    """Raise TargetError saying what is missing if this host cannot run `target`."""
    if target.device == "cpu":
        if target.arch not in host_cpu_levels():
            lacking = ", ".join(missing_flags(target.arch)) or "another processor family"
            raise TargetError(f"this host cannot run {target}: it lacks {lacking}")
        return
    import torch

    if not torch.cuda.is_available():
        raise TargetError(f"this host cannot run {target}: torch sees no GPU")
    found = gpu_target(0)
    if found != target:
        raise TargetError(f"this host cannot run {target}: its GPU is {found}")


@known_options()
def host_runs(target: Target) -> bool:
    """Whether `check_host_runs` passes."""
    try:
        check_host_runs(target)
    except TargetError:
        return False
    return True


def gpu_target(index: int) -> Target:
    """The target of GPU `index`: torch drives both vendors through `torch.cuda`."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise TargetError(f"there is no GPU {index} here: torch sees {count}")
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target("rocm", properties.gcnArchName.split(":")[0])
    return Target("cuda", f"sm_{properties.major}{properties.minor}")


@known_options()
def choose_target(available: list[str], device: str, flags: frozenset[str] | None = None) -> str:
    """The best of `available` targets that this host runs on `device` (`cpu` or `cuda[:i]`).

    Raises TargetError saying what the host lacks where none fits.
    """
    if device.partition(":")[0] == "cpu":
        levels = host_cpu_levels(flags)
        for level in levels:
            if f"cpu/{level}" in available:
                return f"cpu/{level}"
        cpu = [name for name in available if name.startswith("cpu/")]
        if not cpu:
            raise TargetError(
                f"no artifact for the CPU; this version holds: {', '.join(available) or 'none'}"
            )
        lacking = "; ".join(f"{name} needs {_needs(name, flags)}" for name in cpu)
        raise TargetError(f"no artifact that this CPU can run: {lacking}")
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise TargetError(f"unknown device {device!r}: use cpu, cuda or cuda:<index>")
    found = str(gpu_target(int(index or 0)))
    if found not in available:
        raise TargetError(
            f"no artifact for {found}; this version holds: {', '.join(available) or 'none'}"
        )
    return found


def _needs(target: str, flags: frozenset[str] | None) -> str:
    return ", ".join(missing_flags(target.partition("/")[2], flags)) or "another processor family"
