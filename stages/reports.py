"""The records of validation and benchmark; reading them needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from engines.errors import NotApplicableError
from registry.bundle import Evidence, ManyRows, Verdict
from runtime.checked import Deviation
from soa.records import as_record
from soa.text import microseconds, number
from stages.histogram import Histogram

EAGER = "eager, row-major"
COPIES = "the copies alone"
_LOST = 1.05  # a chosen engine slower than this times the fastest is reported for that size


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 5th and 95th percentile over `rounds` turns."""

    median_us: float
    p05_us: float
    p95_us: float
    rounds: int


@dataclass(frozen=True)
class BenchmarkReport:
    """`timings[case label][contestant]`; `fastest` is one of the candidates, None if there are
    none.

    `below`: `(rows, candidate)`, ascending: this candidate is chosen for fewer than `rows` rows.
    """

    timings: dict[str, dict[str, Timing]]
    fastest: str | None
    threads: int = 1
    below: tuple[tuple[int, str], ...] = ()

    def engine_at(self, n: int) -> str | None:
        """The engine that runs n rows."""
        return next((name for rows, name in self.below if n < rows), self.fastest)

    def lines(self) -> list[str]:
        """Lines that compare the chosen engine with the eager model, and name each size at which
        another one is faster. There are none if no engine is chosen."""
        ratios: list[str] = []
        lost: list[str] = []
        for case, times in self.timings.items():
            size = case.partition("=")[2]
            name = self.engine_at(int(size)) if size.isdecimal() else self.fastest
            if name is None:
                return []
            chosen_us = times[name].median_us
            medians_us = {rival: timing.median_us for rival, timing in times.items()}
            medians_us.pop(COPIES, None)  # no engine: a part of what the eager model takes
            if EAGER in medians_us:
                ratios.append(f"{number(medians_us[EAGER] / chosen_us, 2)} at {case}")
            best = min(medians_us, key=medians_us.__getitem__)
            if medians_us[best] < chosen_us / _LOST:
                lost.append(
                    f"{best} was faster at {case}: {microseconds(medians_us[best])}, the chosen "
                    f"{name} {microseconds(chosen_us)}"
                )
        if not ratios:
            return lost
        speed = f"{self.fastest} is chosen; its speed relative to the eager model's: "
        return [speed + ", ".join(ratios), *lost]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


NO_MEMORY = "candidate-out-of-memory"
"""The code of a report that ended for want of memory."""


@dataclass(frozen=True)
class Roc:
    """At most 100 points of the ROC curve: the fractions of signal and of background that pass."""

    signal: tuple[float, ...]
    background: tuple[float, ...]


@dataclass(frozen=True)
class Residual:
    """Output - label over the labelled rows; `relative`: divided by the label."""

    found: Histogram
    relative: bool = False


@dataclass(frozen=True)
class NotDrawn:
    """No curve is drawn for the metric; `why` is the end of a sentence that says so."""

    why: str


Curve = Roc | Residual | NotDrawn
"""The curve that is drawn for a metric, or why none is."""

NOT_TRIED = "not tried"
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:,;'\"()\[\]]+/)+(?=[^\s/])")
"""Matches the folders of an absolute path: all but its last part."""


@dataclass(frozen=True)
class CaseReport:
    """One case: the deviation of every output from the reference, and other faults."""

    rows: dict[str, int]
    outputs: dict[str, Deviation]
    faults: tuple[str, ...]
    window: str = NOT_TRIED
    """The fault of a run on a window that begins at an odd row; empty if there is none."""
    code: str = ""
    """The code of the first fault; empty without a fault, and in reports of earlier releases."""


# The codes of artifacts that are not valid, for reports of earlier releases, which have no code.
_CODES = {
    "refused": "candidate-refused",
    "failed": "candidate-failed",
    "not applicable": NotApplicableError.code,
}


@dataclass(frozen=True)
class ValidationReport:
    """The verdict on one artifact. `reason` says why it is not valid.

    `unverified`: the artifact is not refused, but no device here could run it; `evidence` says how
    it was tested instead.
    """

    engine: str
    valid: bool
    reason: str | None
    cases: tuple[CaseReport, ...] = ()
    worst: dict[str, Deviation] = field(default_factory=dict)
    seconds: float = 0.0
    unverified: bool = False
    window: str = NOT_TRIED
    """Why windows that begin at any row are refused; empty if they are allowed."""
    edges: tuple[str, ...] = ()
    """The kinds of extreme values for which the answers differ from the eager model's."""
    bits: str | None = None
    """The digest of the answers to a few rows of the reference; only of valid artifacts for
    CPUs."""
    many_rows: ManyRows | None = None
    """The share of rows outside the tolerance; None: not tried."""
    verdict: Verdict = "refused"
    evidence: Evidence = "unverified"
    trace: str | None = None
    """The log, and a script that repeats the failure, on this host. It is in no bundle."""
    code: str = ""
    """The code of the refusal, see docs/reference/refusals.md. Empty if the artifact is valid."""

    def __post_init__(self) -> None:
        """Set the verdict: `valid` for a valid artifact, `evidence` for an unverified one. For any
        other, `failed` and `not applicable` are kept, and all else becomes `refused`. An artifact
        that is not valid gets a code, if it has none."""
        verdict: Verdict = "refused"
        if self.valid:
            verdict = "valid"
        elif self.unverified:
            verdict = self.evidence
        elif self.verdict in ("failed", "not applicable"):
            verdict = self.verdict
        object.__setattr__(self, "verdict", verdict)  # the class is frozen
        if not self.valid:
            code = self.code or _CODES.get(verdict, "candidate-unverified")
            object.__setattr__(self, "code", code)

    @property
    def windows(self) -> bool:
        """Whether windows that begin at any row may be bound."""
        return self.valid and not self.window

    @property
    def ended_early(self) -> bool:
        """Whether it ended for want of memory or time, which says nothing about the artifact."""
        return self.code in (NO_MEMORY, "candidate-timeout")

    @property
    def at_edges(self) -> str:
        """The kinds of values for which it differs from eager, in words; empty if there are
        none."""
        return f"differs from eager for {', '.join(self.edges)}" if self.edges else ""

    @property
    def why(self) -> str:
        """The reason with its code, and where to look on this host."""
        reason = f"{self.reason} [{self.code}]"
        return f"{reason} ({self.trace})" if self.trace else reason

    def for_others(self) -> ValidationReport:
        """The report without paths of this host: each path in its reason is cut to the last
        part."""
        reason = None if self.reason is None else _FOLDERS.sub("", self.reason)
        return replace(self, reason=reason, trace=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data, which earlier releases read too."""
        data = asdict(self)
        for name in ("trace", "many_rows"):  # earlier releases know no such keys
            if data[name] is None:
                del data[name]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ValidationReport:
        return as_record(cls, data)

    @classmethod
    def without_device(
        cls,
        engine_name: str,
        evidence: Evidence,
        reason: str,
        worst: Mapping[str, Deviation] | None = None,
        seconds: float = 0.0,
        bits: str | None = None,
    ) -> ValidationReport:
        """A report for an artifact that is not refused; `evidence` says what was tried."""
        return cls(
            engine_name, False, reason, worst=dict(worst or {}), seconds=seconds, unverified=True,
            bits=bits, evidence=evidence,
        )  # fmt: skip

    @classmethod
    def failed(
        cls, engine_name: str, reason: str, trace: str | None = None, code: str = ""
    ) -> ValidationReport:
        """A report for a compiler or an artifact that broke."""
        return cls(engine_name, False, reason, verdict="failed", trace=trace, code=code)

    @classmethod
    def refused(cls, engine_name: str, reason: str, code: str = "") -> ValidationReport:
        """A report for an artifact that runs, but must not be used."""
        return cls(engine_name, False, reason, code=code)

    @classmethod
    def not_applicable(cls, engine_name: str, reason: str) -> ValidationReport:
        """A report for an engine that cannot build this model or target."""
        return cls(engine_name, False, reason, verdict="not applicable")
