"""A promotion policy: the requirements of the gates as data, and the sum of several policies.

If there are several policies, the strictest limit counts, and targets, approvals and reference sets
are joined. So a file or an option on the command line cannot weaken a policy in the registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def parse_duration(text: str) -> timedelta:
    """Read a time such as `90s`, `30min`, `24h` or `7d`. Raises ValueError for any other text."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(s|min|h|d)", text)
    if match is None:
        raise ValueError(f"found {text!r}; write a number and s, min, h or d, as 24h")
    return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])


def _checked_duration(text: str) -> str:
    """Return the text if `parse_duration` can read it; else raise ValueError."""
    parse_duration(text)
    return text


Fraction = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Policy(BaseModel):
    """The requirements for a promotion. A field that is left out requires nothing.

    `min_time_in_staging`, `approvals` and `signed_by` apply only to `production`, the others to
    every alias.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    targets: Names | None = None
    """These targets must be verified, even with --allow-unverified."""
    max_outside: Fraction | None = None
    max_outside_by_output: dict[str, Fraction] = {}
    max_slowdown: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    reproducible: bool = False
    """If True, outputs must have the same bits on every processor: see docs/howto/same_bits.md."""
    independence: Literal["shown"] | None = None
    """If `shown`, the program's graph must show that rows are independent: no trial is enough."""
    reference: str | None = None
    """The path of a safetensors file, see `stages.reference.read_set`."""
    min_time_in_staging: Annotated[str, AfterValidator(_checked_duration)] | None = None
    approvals: Names | None = None
    signed_by: Names | None = None
    """Public keys in PEM format, one of which must have signed. A policy file has paths instead."""


@dataclass(frozen=True)
class ReferenceFile:
    """A larger reference set: its path on this host, and its sha256 when the policy was read."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class SourcedPolicy:
    """A policy, the text that names its origin, and the reference file that the policy names."""

    policy: Policy
    origin: str
    reference: ReferenceFile | None = None


@dataclass(frozen=True)
class Requirements:
    """The requirements of the config and of all policies together."""

    targets: tuple[str, ...]
    named_targets: frozenset[str]
    """The targets that a policy names."""
    max_outside: float
    max_outside_by_output: Mapping[str, float]
    max_slowdown: float
    reproducible: bool
    shown: bool
    """True if the program's graph must show that rows are independent."""
    references: tuple[ReferenceFile, ...]
    min_time_in_staging: timedelta
    approvals: tuple[str, ...]
    signed_by: tuple[tuple[str, ...], ...]
    """The keys of each policy that requires a signature; one key of each must have signed."""
    origins: tuple[str, ...]
    production: bool = True
    """True if the alias is `production`, for which a test on an emulator is not enough."""


def strictest(
    own_targets: Sequence[str],
    own_max_outside: float,
    own_max_slowdown: float,
    policies: Sequence[SourcedPolicy],
    *,
    production: bool = True,
    own_reproducible: bool = False,
    own_shown: bool = False,
) -> Requirements:
    """Join the requirements of the config (the `own_...` arguments) and of all policies.

    For each number the strictest limit is taken, and lists are joined.

    `production`: True if the alias is `production`. For other aliases `min_time_in_staging`,
    `approvals` and `signed_by` are ignored.
    """
    every = [sourced.policy for sourced in policies]
    for_production = every if production else []  # those whose production requirements count
    named = [target for policy in every for target in policy.targets or ()]
    by_output: dict[str, float] = {}
    for policy in every:
        for output, limit in policy.max_outside_by_output.items():
            by_output[output] = min(limit, by_output.get(output, limit))
    outside = [policy.max_outside for policy in every if policy.max_outside is not None]
    slowdown = [policy.max_slowdown for policy in every if policy.max_slowdown is not None]
    references = {
        sourced.reference.sha256: sourced.reference for sourced in policies if sourced.reference
    }
    waits = [policy.min_time_in_staging for policy in for_production if policy.min_time_in_staging]
    approvals = [name for policy in for_production for name in policy.approvals or ()]
    return Requirements(
        targets=tuple(dict.fromkeys((*own_targets, *named))),
        named_targets=frozenset(named),
        max_outside=min((own_max_outside, *outside)),
        max_outside_by_output=by_output,
        max_slowdown=min((own_max_slowdown, *slowdown)),
        reproducible=own_reproducible or any(policy.reproducible for policy in every),
        shown=own_shown or any(policy.independence == "shown" for policy in every),
        references=tuple(references.values()),
        min_time_in_staging=max(map(parse_duration, waits), default=timedelta(0)),
        approvals=tuple(dict.fromkeys(approvals)),
        signed_by=tuple(policy.signed_by for policy in for_production if policy.signed_by),
        origins=tuple(sourced.origin for sourced in policies),
        production=production,
    )
