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
    """The time of one call in microseconds: the median, the 5th and the 95th percentile over
    `rounds` turns, each of which gave one time."""

    median_us: float
    p05_us: float
    p95_us: float
    rounds: int


@dataclass(frozen=True)
class BenchmarkReport:
    """The times of the candidates, and of the eager model, as `timings[case label][contestant]`.

    `fastest` is the candidate that is chosen; None if there are no candidates. `below` has pairs
    `(rows, candidate)` with ascending `rows`: for fewer than `rows` rows this candidate is chosen
    instead.
    """

    timings: dict[str, dict[str, Timing]]
    fastest: str | None
    threads: int = 1
    below: tuple[tuple[int, str], ...] = ()

    def engine_at(self, n: int) -> str | None:
        """The name of the engine that is chosen for n rows; None if there are no candidates."""
        return next((name for rows, name in self.below if n < rows), self.fastest)

    def lines(self) -> list[str]:
        """Sentences about the benchmark, for the user; none if no engine is chosen.

        The first compares the chosen engine's speed with the eager model's, at each size at which
        this was timed. One more follows for each size at which another contestant was faster.
        """
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
    """The distribution of output - label over the labelled rows; if `relative`, of this difference
    divided by the label."""

    found: Histogram
    relative: bool = False


@dataclass(frozen=True)
class NotDrawn:
    """Stands for a curve that is not drawn. `why` is the reason, as the end of a sentence."""

    why: str


Curve = Roc | Residual | NotDrawn
"""The curve that is drawn for a metric, or why none is."""

NOT_TRIED = "not tried"
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:,;'\"()\[\]]+/)+(?=[^\s/])")
"""Matches the folders of an absolute path: all but its last part."""


@dataclass(frozen=True)
class CaseReport:
    """How an artifact ran one case (`rows`, by dimension): the deviation of each output from the
    reference, and other faults as sentences."""

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
        """Make `verdict` and `code` agree with the other fields.

        The verdict is `valid` for a valid artifact, and the evidence for an unverified one. For any
        other, `failed` and `not applicable` are kept, and all else becomes `refused`. An artifact
        that is not valid gets the code of its verdict if it has none.
        """
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
        """Whether the artifact may be bound to windows of collections that begin at any row."""
        return self.valid and not self.window

    @property
    def ended_early(self) -> bool:
        """Whether memory or time ran out, so that the report says nothing about the artifact."""
        return self.code in (NO_MEMORY, "candidate-timeout")

    @property
    def at_edges(self) -> str:
        """The kinds of extreme values for which the answers differ from the eager model's, as a
        phrase; empty if there are none."""
        return f"differs from eager for {', '.join(self.edges)}" if self.edges else ""

    @property
    def why(self) -> str:
        """The reason with its code and, if the report has a trace, where to look on this host."""
        reason = f"{self.reason} [{self.code}]"
        return f"{reason} ({self.trace})" if self.trace else reason

    def for_others(self) -> ValidationReport:
        """A copy of the report without paths of this host, for the bundle. Each absolute path in
        the reason is cut to its last part, and the trace is left out."""
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
        """A report on an artifact that no device here could run; `evidence` says how it was tested
        instead."""
        return cls(
            engine_name, False, reason, worst=dict(worst or {}), seconds=seconds, unverified=True,
            bits=bits, evidence=evidence,
        )  # fmt: skip

    @classmethod
    def failed(
        cls, engine_name: str, reason: str, trace: str | None = None, code: str = ""
    ) -> ValidationReport:
        """A report on a candidate whose compiler or artifact failed."""
        return cls(engine_name, False, reason, verdict="failed", trace=trace, code=code)

    @classmethod
    def refused(cls, engine_name: str, reason: str, code: str = "") -> ValidationReport:
        """A report on an artifact that runs, but whose answers or writes are wrong."""
        return cls(engine_name, False, reason, code=code)

    @classmethod
    def not_applicable(cls, engine_name: str, reason: str) -> ValidationReport:
        """A report on an engine that is not made for this model or target."""
        return cls(engine_name, False, reason, verdict="not applicable")
