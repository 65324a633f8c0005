"""`pipeline.load`: the runtime's, and what to do on a host that no artifact was packaged for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict, Unpack, overload

import torch

from registry.store import Registry
from runtime import loader
from runtime.devices import MultiDeviceSession
from runtime.errors import LoadError
from runtime.loader import Builder, Mode
from runtime.session import Session

Build = Literal["never", "missing"]


class Options(TypedDict, total=False):
    """What `runtime.loader.load` takes and this file only passes on."""

    mode: Mode
    registry: Registry | str | None
    engine_name: str | None
    threads: int | None
    instances: int | None


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path, *, device: Literal["auto"], build: Build = ..., **options: Unpack[Options]
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    target: str | None = ...,
    build: Build = ...,
    **options: Unpack[Options],
) -> Session: ...


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    target: str | None = None,
    build: Build = "never",
    **options: Unpack[Options],
) -> Session | MultiDeviceSession:
    """Open a version for running: `name@alias`, `name/3`, `name`, or the folder of a bundle.

    `build="missing"`: on a host for which the version holds no verified artifact, build one at the
    first use, from the version's program, validated against its reference, into this host's cache
    (PIPELINE_CACHE, else `~/.cache/soa-pipeline`). That takes seconds to minutes, once, and the
    compilers. In production too: the version has to be promoted, what is built has passed no gate
    but the validation.

    Everything else is `runtime.loader.load`'s.
    """
    if build not in ("never", "missing"):
        raise LoadError(f"build {build!r} is neither 'never' nor 'missing'")
    builder: Builder | None = None
    if build == "missing":
        from pipeline.first_use import build_at_first_use  # only here: the stages take a second

        builder = build_at_first_use
    return loader.load(ref, device=device, target=target, builder=builder, **options)
