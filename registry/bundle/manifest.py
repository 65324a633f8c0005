"""`manifest.json`: what a bundle holds, how it was made and what was measured on it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from sys import float_info
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from registry.errors import BundleError
from registry.ref import NAME_PATTERN, TARGET_PATTERN
from soa.files import parse_json, read_record

SCHEMA_VERSION = 1
"""The newest manifest that this code writes and reads."""


def safe_relative(text: str) -> str:
    """`text` itself if it is a plain path inside a folder, with `/`; else ValueError."""
    if not text or text.startswith("/") or "\\" in text or not text.isprintable():
        raise ValueError(f"{text!r} is not a relative path with plain characters")
    parts = text.split("/")
    if any(part in ("", ".", "..") for part in parts) or str(PurePosixPath(text)) != text:
        raise ValueError(f"{text!r} leaves its folder or is not in normal form")
    return text


def _model_name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(
            f"{text!r} is not a model name: up to 200 of A-Z a-z 0-9 . _ - and no . or - in front"
        )
    return text


def _as_number(value: object) -> object:
    return float(value) if value in _NOT_FINITE else value


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as Record writes them
Measured = Annotated[
    float,
    BeforeValidator(
        _as_number, json_schema_input_type=float | Literal["NaN", "Infinity", "-Infinity"]
    ),
]
BundlePath = Annotated[
    str, AfterValidator(safe_relative), Field(json_schema_extra={"format": "path-inside"})
]
ModelName = Annotated[
    str, AfterValidator(_model_name), Field(json_schema_extra={"pattern": f"^{NAME_PATTERN}$"})
]
TargetName = Annotated[str, Field(pattern=f"^{TARGET_PATTERN}$")]
EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
CaseName = Annotated[str, Field(pattern=r"^([^=,]+=)?[0-9]{1,12}(,[^=,]+=[0-9]{1,12})*$")]
"""Row counts: `1000`, or `nodes=5,edges=20`."""
MOST_THREADS = 4096
"""Or instances."""
Count = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Time = Annotated[float, Field(ge=0, le=float_info.max)]


class Record(BaseModel):
    """Base of all records that are written as JSON: frozen; unknown keys are refused.

    Those of a bundle are read by C++ too, by schemas that follow from these classes: after a change
    run `python -m tests.registry.bundle.schemas_file`.
    """

    # JSON has no NaN and no Infinity, and a worst relative deviation can be either: as strings they
    # survive the way out and back, where the default would write null and then fail to read it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", defer_build=True
    )


class Capture(Record):
    """How the portable programs were taken from the model."""

    program: Literal["torch.export"] = "torch.export"
    torchscript: Literal["scripted", "traced"] | None = None
    torchscript_note: str | None = None
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    dependence: str | None = None
    """Why rows may see each other, by the program's graph; empty: they do not. None: not asked, in
    versions made before that was."""


class Worst(Record):
    """The largest deviations of one output from the reference, over all validated row counts."""

    max_abs: Measured
    max_rel: Measured
    outside: Measured
    """Fraction of the elements outside `atol + rtol * |reference|`."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Tolerance:
    """An element agrees if |found - reference| <= atol + rtol * |reference|.

    `max_outside` is the fraction of elements that may disagree. NaN agrees with NaN, an infinity
    with the same infinity; nothing else non-finite agrees.
    """

    atol: float = Field(ge=0)
    rtol: float = Field(ge=0)
    max_outside: float = Field(default=0.0, ge=0, le=1)


class BenchmarkStats(Record):
    """Time of one call at one row count, in microseconds."""

    median_us: Time
    p05_us: Time
    p95_us: Time


class SessionSettings(Record):
    """How a session runs the artifact where its user does not say."""

    threads: Count = 1
    instances: Count | None = None
    """Runs at one moment; None for one a core."""


Evidence = Literal["unverified", "compiles", "emulated"]
"""What speaks for an artifact that no device of its kind has run: nothing; that its compiler took
it; that it gave the reference's answers on an emulator. docs/howto/targets.md says what each
proves."""

Verdict = Literal["valid", "refused", "failed", "not applicable", "unverified", "compiles",
                  "emulated"]  # fmt: skip
"""Of one candidate. `refused`: its answers deviate, or it does what no artifact may; `failed`: its
compiler or the artifact broke; `not applicable`: the engine is not for this model or target."""


def _as_it_is_called(status: object) -> object:
    return "refused" if status == "invalid" else status  # as earlier releases wrote


class Candidate(Record):
    """What one engine made for one target."""

    status: Annotated[
        Verdict,
        BeforeValidator(_as_it_is_called, json_schema_input_type=Verdict | Literal["invalid"]),
    ]
    reason: str | None = None
    files: list[BundlePath] = Field(default_factory=list)
    """Relative to the bundle; the engine opens the first."""
    tile: Annotated[int, Field(ge=1)] | None = None
    """How many rows run at a time; None: all."""
    windows: bool = False
    """Whether it was validated on rows of larger collections, from odd ones on."""
    bits: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The sha256 of its answers to some rows of the reference: see runtime/opening/bits.py."""
    options: dict[str, Any] = Field(default_factory=dict)
    compile_seconds: Measured | None = None
    facts: dict[str, Any] = Field(default_factory=dict)
    """What the engine records of its artifact, as an opset or the bytes a call copies."""
    worst: dict[str, Worst] = Field(default_factory=dict)
    benchmark: dict[CaseName, BenchmarkStats] = Field(default_factory=dict)


class Below(Record):
    """The engine that runs fewer than `rows` rows."""

    rows: int = Field(ge=1)
    engine: EngineName


class TargetRecord(Record):
    """One target. `unverified`, `compiles`, `emulated`: built, but no device of this kind has run
    it."""

    status: Literal["verified", "unverified", "compiles", "emulated", "failed"]
    chosen: str | None = None
    below: list[Below] = Field(default_factory=list)
    """Where another engine than `chosen` is worth it for small n: `rows` ascending."""
    raced_with: list[str] = Field(default_factory=list)
    """Targets whose times may be compared with these: they come from the same race."""
    metrics: dict[str, Measured] = Field(default_factory=dict)
    """What the chosen artifact's outputs on the labelled rows came to, by name."""
    candidates: dict[EngineName, Candidate] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _chosen_exists(self) -> Self:
        if self.chosen is None:
            if self.status == "verified":
                raise ValueError("a verified target names the chosen engine")
            return self
        for engine in self.engines():
            if engine not in self.candidates:
                raise ValueError(f"chosen engine {engine!r} is not among {sorted(self.candidates)}")
            candidate = self.candidates[engine]
            if not candidate.files:
                raise ValueError(f"chosen engine {engine!r} has no files")
            if self.status == "verified" and candidate.status != "valid":
                raise ValueError(f"chosen engine {engine!r} is {candidate.status}, not valid")
        limits = [each.rows for each in self.below]
        if limits != sorted(set(limits)):
            raise ValueError(f"the row counts under 'below' do not ascend: {limits}")
        return self

    def engines(self) -> list[str]:
        """Every engine that a session of this target runs; empty where none was chosen."""
        if self.chosen is None:
            return []
        return list(dict.fromkeys([self.chosen, *(each.engine for each in self.below)]))

    def engine_at(self, case: str) -> str:
        """Who runs a case of the benchmark, as `32` or `nodes=5,edges=20`."""
        n = int(case) if case.isdecimal() else None
        below = (each.engine for each in self.below if n is not None and n < each.rows)
        return next(below, str(self.chosen))

    def choice(self) -> str:
        """The choice for people: `aoti`, or `aoti (onnxruntime below 100 rows)`."""
        others = [f"{name} {rows}" for name, rows in self.spans().items() if name != self.chosen]
        return f"{self.chosen} ({', '.join(others)})" if others else f"{self.chosen}"

    def spans(self) -> dict[str, str]:
        """By engine that runs, for people: at which row counts."""
        return spans_of([(each.rows, each.engine) for each in self.below], self.chosen)


def spans_of(below: Sequence[tuple[int, str]], chosen: str | None) -> dict[str, str]:
    """By engine, the row counts at which it runs, for people; empty where it runs at all of them.

    `below`: the row count up to which each runs, ascending; `chosen` runs from the last one on.
    """
    found: dict[str, list[str]] = {}
    first = 0
    for rows, engine in below:
        said = f"from {first} to {rows - 1} rows" if first else f"below {rows} rows"
        found.setdefault(engine, []).append(said)
        first = rows
    if chosen is not None:
        found.setdefault(chosen, []).extend([f"from {first} rows on"] if first else [])
    return {engine: " and ".join(said) for engine, said in found.items()}


class Provenance(Record):
    created: str
    """UTC, ISO 8601."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    config_sha256: str
    config: dict[str, Any]
    tools: dict[str, str] = Field(default_factory=dict)
    host: dict[str, str] = Field(default_factory=dict)
    python: str
    seconds: dict[str, Measured] = Field(default_factory=dict)
    """What the steps of each stage took, of those whose result was not kept from an earlier run.
    Steps that ran side by side count each."""


class LabelledData(Record):
    """Labelled rows by which metrics are computed, and the user's own functions of them."""

    file: BundlePath
    source: str
    """The name of the file that the rows are from, and its digest."""
    sha256: str
    rows: int
    code: dict[str, BundlePath] = Field(default_factory=dict)
    """By metric."""


class Manifest(Record):
    schema_version: int = Field(default=SCHEMA_VERSION, ge=1)
    name: ModelName
    description: str = ""
    signature: dict[str, Any]
    """`soa.Signature.to_dict()`"""
    capture: Capture
    program: BundlePath = "program.pt2"
    torchscript: BundlePath | None = None
    reference: BundlePath = "reference.safetensors"
    targets: dict[TargetName, TargetRecord] = Field(default_factory=dict)
    tolerances: dict[str, Tolerance] = Field(default_factory=dict)
    """By output."""
    classifiers: list[str] = Field(default_factory=list)
    """Outputs whose arg-max agreement is reported."""
    labelled: LabelledData | None = None
    session: SessionSettings = SessionSettings()
    provenance: Provenance

    def files(self) -> dict[str, str]:
        """Every file that the manifest names, with where it names it."""
        named = {self.program: "program", self.reference: "reference"}
        if self.torchscript is not None:
            named[self.torchscript] = "torchscript"
        if self.labelled is not None:
            named[self.labelled.file] = "labelled"
            named |= dict.fromkeys(self.labelled.code.values(), "labelled.code")
        for target, record in self.targets.items():
            for engine, candidate in record.candidates.items():
                named |= dict.fromkeys(candidate.files, f"targets[{target}].candidates[{engine}]")
        return named

    def to_json(self) -> str:
        """Keys sorted, one final newline: equal manifests give equal bytes."""
        return record_to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "manifest.json") -> Manifest:
        """`where` names the file in the errors, which are BundleErrors of one line."""
        return record_from_json(cls, text, where, SCHEMA_VERSION)


R = TypeVar("R", bound=Record)


def record_to_json(record: Record) -> str:
    data = json.loads(record.model_dump_json())
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def record_from_json(kind: type[R], text: str | bytes, where: str, newest: int) -> R:
    """Read a record with a `schema_version`, of which this code knows those up to `newest`."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise BundleError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"{where}: a JSON object is needed, found {type(data).__name__}")
    found = data.get("schema_version")
    if isinstance(found, int) and found > newest:
        raise BundleError(
            f"{where}: schema version {found} is newer than {newest}, the newest that "
            "this installation reads: update soa-pipeline",
            code="bundle-newer",
        )
    try:
        return read_record(kind, text)
    except ValueError as error:
        raise BundleError(f"{where}: {error}") from error
