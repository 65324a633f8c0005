"""Targets: `<kind>/<architecture>` says where an artifact runs. Each kind is a file in `kinds/`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from engines.errors import TargetError
from soa.declared import find_declared

# The highest level that plain `cpu` stands for, because not every host of a site has AVX-512.
_HIGHEST_BY_DEFAULT = "x86-64-v3"


class Kind(ABC):
    """A kind of target, such as `cpu`.

    A subclass declares itself by literal keywords. `kind` is its name, and `order` its position
    among the kinds. `arch` is a regular expression that matches the names of its architectures,
    which are also folders of a bundle. `said` is how error messages describe its targets.
    """

    name: ClassVar[str]
    torch_device: ClassVar[str]
    """torch's name of the device; for ROCm it is `cuda`, too."""
    engines: ClassVar[tuple[str, ...]] = ()
    """The names of the only engines that build for this kind. If empty, any engine may."""
    for_sessions: ClassVar[bool] = True
    """True if a session takes artifacts of this kind when no target is named."""

    def __init_subclass__(cls, kind: str, order: int, arch: str, said: str) -> None:
        cls.name = kind

    @abstractmethod
    def here(self, index: int = 0) -> tuple[str, ...]:
        """The architectures of this kind that device `index` of this host runs, best first.

        There may be none. Raises TargetError if there is no such device.
        """

    def torch_runs(self) -> bool:
        """True if torch works on this host's devices of this kind, as building and measuring
        need."""
        return True

    @abstractmethod
    def why_not(self, arch: str) -> str:
        """Say why this host cannot run `arch`, which must not be in `here()`."""


def _load_kind(name: str) -> Kind:
    """Import the kind with this name, and return an instance. Raises KeyError if none is
    declared."""
    kind: Kind = find_declared("engines", "kind")[name].load()()
    return kind


@dataclass(frozen=True)
class Target:
    """Where an artifact runs. `device` is the name of a kind, and `arch` a CPU level or a GPU
    architecture, such as `x86-64-v3` or `sm_90`."""

    device: str
    arch: str

    def __str__(self) -> str:
        return f"{self.device}/{self.arch}"

    @property
    def torch_device(self) -> str:
        """torch's name of the device: `cpu` or `cuda`."""
        return _load_kind(self.device).torch_device

    @property
    def has_tf32(self) -> bool:
        """True for a CUDA GPU from sm_80 on. These have the TF32 format."""
        digits = re.match("sm_([0-9]+)", self.arch)
        return digits is not None and int(digits[1]) >= 80

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read the name of a target, such as `cpu/x86-64-v3`. Plain `cpu` is the best level of this
        host up to x86-64-v3. Raises TargetError if there is no such target."""
        device, _, arch = text.partition("/")
        if text == "cpu":
            levels = _load_kind("cpu").here()
            if not levels:
                raise TargetError(
                    "this host is below x86-64-v2 (or its CPU flags cannot be read): "
                    "name a target explicitly"
                )
            return cls("cpu", _HIGHEST_BY_DEFAULT if _HIGHEST_BY_DEFAULT in levels else levels[0])
        declaration = find_declared("engines", "kind").get(device)
        # The whole name must match, because a target is also a folder of the bundle.
        if declaration is None or not re.fullmatch(declaration.settings["arch"], arch):
            kinds = find_declared("engines", "kind").values()
            known = [str(kind.settings["said"]) for kind in kinds]
            raise TargetError(f"unknown target {text!r}: use {', '.join(known)}")
        return cls(device, arch)


def only_engines(target: Target) -> tuple[str, ...]:
    """The names of the only engines that build for a target. If empty, any engine may."""
    return _load_kind(target.device).engines


def for_sessions(target: Target) -> bool:
    """True if a session takes artifacts for this target when no target is named."""
    return _load_kind(target.device).for_sessions


def parse_targets(text: str) -> list[Target]:
    """Read the name of a target in a config, as `Target.parse` does. Plain `cpu` gives two targets
    if this host's best level is higher than x86-64-v3: the second one is that level."""
    targets = [Target.parse(text)]
    if text == "cpu":
        targets.append(host_targets("cpu")[0])
    return list(dict.fromkeys(targets))


def host_runs(target: Target) -> bool:
    """True if this host can run artifacts for `target`."""
    try:
        return target.arch in _load_kind(target.device).here()
    except TargetError:  # there is no such device
        return False


def check_host_runs(target: Target) -> None:
    """Raise TargetError if this host cannot run `target`. The message says what is missing."""
    if not host_runs(target):
        lacking = _load_kind(target.device).why_not(target.arch)
        raise TargetError(f"this host cannot run {target}: {lacking}")


def check_torch_runs(target: Target) -> None:
    """Raise TargetError unless this host runs `target` and torch works on its device."""
    check_host_runs(target)
    if not _load_kind(target.device).torch_runs():
        raise TargetError(
            f"this host has a GPU for {target}, but its torch is not built for GPUs: install one "
            "that is, to build and measure"
        )


def torch_runs(target: Target) -> bool:
    """True if this host runs `target` and torch works on its device."""
    return _load_kind(target.device).torch_runs() and host_runs(target)


def host_targets(device: str) -> list[Target]:
    """The targets that this host runs on a device, best first. `device` is `cpu`, or as in torch
    `cuda` or `cuda:<index>`. Raises TargetError if there is no such device."""
    name, _, index = device.partition(":")
    kinds = [
        kind
        for kind in map(_load_kind, find_declared("engines", "kind"))
        if kind.torch_device == name and kind.for_sessions
    ]
    if not kinds or not (index or "0").isdecimal():
        raise TargetError(f"unknown device {device!r}: use cpu, cuda or cuda:<index>")
    device_index = int(index or 0)
    return [Target(kind.name, arch) for kind in kinds for arch in kind.here(device_index)]


def gpu_target(index: int) -> Target:
    """The best target that GPU number `index` of this host runs. Raises TargetError if there is no
    such GPU."""
    return host_targets(f"cuda:{index}")[0]


def best_target(available: Collection[str], device: str) -> str | None:
    """The best of the `available` targets that this host runs on `device` (see `host_targets`).
    None if it runs none of them."""
    names = map(str, host_targets(device))
    return next((name for name in names if name in available), None)


def choose_target(available: Collection[str], device: str) -> str:
    """As `best_target`, but raises TargetError if this host runs none of the `available` targets on
    `device`. The message says what it lacks."""
    if best := best_target(available, device):
        return best
    holds = f"this version holds: {', '.join(available) or 'none'}"
    if device.partition(":")[0] != "cpu":
        wanted = " or ".join(map(str, host_targets(device)))
        raise TargetError(f"no artifact for {wanted}; {holds}")
    cpu_targets = [target for target in available if target.startswith("cpu/")]
    if not cpu_targets:
        raise TargetError(f"no artifact for the CPU; {holds}")
    lacking = [
        f"{target}: {_load_kind('cpu').why_not(target.partition('/')[2])}" for target in cpu_targets
    ]
    raise TargetError(f"no artifact that this CPU can run: {'; '.join(lacking)}")
