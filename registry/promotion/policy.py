"""A promotion policy: what gates ask for, as data; and what several policies ask for together.

Policies add up: the strictest limit counts, targets, approvals and reference sets are joined. So a
policy kept in the registry cannot be loosened by a file or an option of who promotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def duration(text: str) -> timedelta:
    """`90s`, `30min`, `24h`, `7d`; ValueError says so."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(s|min|h|d)", text)
    if match is None:
        raise ValueError(f"found {text!r}; write a number and s, min, h or d, as 24h")
    return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])


def _a_duration(text: str) -> str:
    duration(text)
    return text


Fraction = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Policy(BaseModel):
    """What a version needs to be promoted. Whatever is left out asks for nothing.

    `min_time_in_staging`, `approvals` and `signed_by` count for `production` only, the rest for
    every alias.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    targets: Names | None = None
    """Must be verified, and cannot be excused by --allow-unverified."""
    max_outside: Fraction | None = None
    max_outside_by_output: dict[str, Fraction] = {}
    max_slowdown: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reproducible: bool = False
    """Whether the same bits are needed on every processor: see docs/howto/same_bits.md."""
    reference: str | None = None
    """A safetensors file, see `stages.reference.read_set`."""
    min_time_in_staging: Annotated[str, AfterValidator(_a_duration)] | None = None
    approvals: Names | None = None
    signed_by: Names | None = None
    """Public keys in PEM format (in a policy's file: theirs), one of which must have signed."""


@dataclass(frozen=True)
class ReferenceFile:
    """A larger reference set: where it is on this host, and what it was when it was named."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class Asked:
    """A policy and whose it is; `reference` is the file that it names."""

    policy: Policy
    origin: str
    reference: ReferenceFile | None = None


@dataclass(frozen=True)
class Requirements:
    """What all policies together ask for."""

    targets: tuple[str, ...]
    named_targets: frozenset[str]
    """Those that a policy names."""
    max_outside: float
    max_outside_by_output: Mapping[str, float]
    max_slowdown: float
    reproducible: bool
    references: tuple[ReferenceFile, ...]
    min_time_in_staging: timedelta
    approvals: tuple[str, ...]
    signed_by: tuple[tuple[str, ...], ...]
    """Of each policy that asks: one of these keys."""
    origins: tuple[str, ...]
    production: bool = True
    """Whether the alias is: there an emulator proves nothing."""


def strictest(
    own_targets: Sequence[str],
    own_max_outside: float,
    own_max_slowdown: float,
    policies: Sequence[Asked],
    *,
    production: bool = True,
    own_reproducible: bool = False,
) -> Requirements:
    """The config's gates, which every version has, and on top of them each policy.

    `production`: whether the alias is `production`. For other aliases `min_time_in_staging`,
    `approvals` and `signed_by` are not asked for.
    """
    every = [asked.policy for asked in policies]
    for_production = every if production else []
    named = [target for policy in every for target in policy.targets or ()]
    by_output: dict[str, float] = {}
    for policy in every:
        for output, limit in policy.max_outside_by_output.items():
            by_output[output] = min(limit, by_output.get(output, limit))
    outside = [p.max_outside for p in every if p.max_outside is not None]
    slowdown = [p.max_slowdown for p in every if p.max_slowdown is not None]
    references = {asked.reference.sha256: asked.reference for asked in policies if asked.reference}
    waits = [duration(p.min_time_in_staging) for p in for_production if p.min_time_in_staging]
    return Requirements(
        targets=tuple(dict.fromkeys((*own_targets, *named))),
        named_targets=frozenset(named),
        max_outside=min((own_max_outside, *outside)),
        max_outside_by_output=by_output,
        max_slowdown=min((own_max_slowdown, *slowdown)),
        reproducible=own_reproducible or any(policy.reproducible for policy in every),
        references=tuple(references.values()),
        min_time_in_staging=max(waits, default=timedelta(0)),
        approvals=tuple(dict.fromkeys(name for p in for_production for name in p.approvals or ())),
        signed_by=tuple(p.signed_by for p in for_production if p.signed_by),
        origins=tuple(asked.origin for asked in policies),
        production=production,
    )
