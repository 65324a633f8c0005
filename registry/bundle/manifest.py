"""`manifest.json`: the content of a bundle, how it was made, and the measurements on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from sys import float_info
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from registry.errors import BundleError
from registry.ref import NAME_PATTERN, TARGET_PATTERN
from soa.records import (
    Before,
    Matching,
    Record,
    Within,
    as_data,
    check_fields,
    parse_json,
    read_record,
)
from soa.text import number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


SCHEMA_VERSION = 1
"""The newest manifest that this code writes and reads."""


def safe_relative(text: str) -> str:
    """Return the text if it is a plain path inside a folder, with `/`; else raise ValueError."""
    if not text or text.startswith("/") or "\\" in text or not text.isprintable():
        raise ValueError(f"{text!r} is not a relative path with plain characters")
    names = text.split("/")
    if any(name in ("", ".", "..") for name in names) or str(PurePosixPath(text)) != text:
        raise ValueError(f"{text!r} leaves its folder or is not in normal form")
    return text


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as record_to_json writes them


def _as_number(value: object) -> object:
    """Convert a value of `_NOT_FINITE` to a number; return any other value unchanged."""
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


Measured = Annotated[float, Before(_as_number, also=Literal["NaN", "Infinity", "-Infinity"])]
BundlePath = Annotated[str, safe_relative]
ModelName = Annotated[
    str,
    Matching(NAME_PATTERN, "a model name: up to 200 of A-Z a-z 0-9 . _ - and no . or - in front"),
]
TargetName = Annotated[str, Matching(TARGET_PATTERN, "a target, as cpu/x86-64-v3")]
EngineName = Annotated[str, Matching(r"[A-Za-z0-9_.-]{1,100}", "the name of an engine")]
CaseName = Annotated[
    str, Matching(r"([^=,]+=)?[0-9]{1,12}(,[^=,]+=[0-9]{1,12})*", "row counts, as 1000 or nodes=5")
]
"""Row counts: `1000`, or `nodes=5,edges=20`."""
Sha256 = Annotated[str, Matching(r"[0-9a-f]{64}", "a sha256")]
MOST_THREADS = 4096
"""The limit on threads, and also on instances."""
Count = Annotated[int, Within(1, MOST_THREADS)]
Time = Annotated[float, Within(0, float_info.max)]

# The C++ library reads these records too. It takes their fields as they are.


@dataclass(frozen=True, kw_only=True)
class Capture(Record):
    """How the portable programs were captured from the model."""

    program: Literal["torch.export"] = "torch.export"
    torchscript: Literal["scripted", "traced"] | None = None
    torchscript_note: str | None = None
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    dependence: str | None = None
    """Why rows may depend on each other, as the program's graph shows; an empty text: they do not.
    None: the graph was not analysed, in bundles of older releases."""
    tried: str = ""
    """If only a trial found that rows are independent: the reason why no graph shows it."""

    @property
    def shown(self) -> bool:
        """True if the program's graph shows that rows are independent."""
        return self.dependence == "" and not self.tried


@dataclass(frozen=True, kw_only=True)
class Worst(Record):
    """The largest deviations of one output from the reference, over all validated row counts."""

    max_abs: Measured
    max_rel: Measured
    outside: Measured
    """The fraction of the elements that deviate by more than `atol + rtol * |reference|`."""


@dataclass(frozen=True, kw_only=True)
class ManyRows(Record):
    """How often an artifact deviated from the eager model on many rows like the reference's."""

    rows: Annotated[int, Within(1)]
    outside: Annotated[int, Within(0)]
    """The number of rows with an output outside its tolerance."""
    below: Measured
    """The share of such rows is below this number, with a confidence of 95 %."""
    artifact: Annotated[int, Within(0)] = 0
    """In how many rows the artifact is nearer to the model in float64 than the eager model is.
    Only rows outside are looked at, and not all of them. `eager` counts the opposite."""
    eager: Annotated[int, Within(0)] = 0
    neither: Annotated[int, Within(0)] = 0

    @property
    def text(self) -> str:
        """The numbers in words."""
        share = (
            f"{self.outside:,} of {self.rows:,} rows outside the tolerance: a share below "
            f"{number(self.below, digits=2)} with 95 %"
        )
        if not self.outside:
            return share
        nearer = f"the artifact in {self.artifact:,}, eager in {self.eager:,}"
        return f"{share}; nearer to float64: {nearer}, neither in {self.neither:,}"


@dataclass(frozen=True)
class Tolerance:
    """An element agrees if |found - reference| <= atol + rtol * |reference|.

    `max_outside` is the largest fraction of elements that may disagree. NaN agrees only with NaN,
    and an infinity only with the same infinity.
    """

    atol: Annotated[float, Within(0)]
    rtol: Annotated[float, Within(0)]
    max_outside: Annotated[float, Within(0, 1)] = 0.0
    __closed__ = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class BenchmarkStats(Record):
    """The time of one call at one row count, in microseconds."""

    median_us: Time
    p05_us: Time
    p95_us: Time


@dataclass(frozen=True, kw_only=True)
class SessionSettings(Record):
    """The default settings of a session, which its user can override."""

    threads: Count = 1
    instances: Count | None = None
    """How many runs a session has at the same time; None: one for each core."""


Evidence = Literal["unverified", "compiles", "emulated"]
"""The evidence for an artifact that has not run on a device of its target: `unverified`: none;
`compiles`: its compiler accepted it; `emulated`: it gave the reference's values on an emulator. See
docs/howto/targets.md."""

Verdict = Literal["valid", "refused", "failed", "not applicable", "unverified", "compiles",
                  "emulated"]  # fmt: skip
"""The status of one candidate. `refused`: its outputs deviate, or it does something that artifacts
must not do; `failed`: its compiler failed or the artifact crashed; `not applicable`: the engine
does not support this model or target."""


def _current_word(status: object) -> object:
    """Translate a candidate's status into the words of this release: "invalid" is "refused" now."""
    return "refused" if status == "invalid" else status


@dataclass(frozen=True, kw_only=True)
class Candidate(Record):
    """The artifact of one engine for one target, with its measurements."""

    status: Annotated[Verdict, Before(_current_word, also=Literal["invalid"])]
    reason: str | None = None
    files: list[BundlePath] = field(default_factory=list)
    """Paths relative to the bundle; the engine opens the first."""
    tile: Annotated[int, Within(1)] | None = None
    """The number of rows in one call of the engine; None: each call has all rows."""
    windows: bool = False
    """True if it was validated on windows of larger collections that begin at odd rows."""
    bits: Sha256 | None = None
    """The sha256 of its answers to some rows of the reference: see runtime/opening/same_bits.py."""
    options: dict[str, Any] = field(default_factory=dict)
    compile_seconds: Measured | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the engine records about its artifact, such as an opset or the bytes a call copies."""
    worst: dict[str, Worst] = field(default_factory=dict)
    many_rows: ManyRows | None = None
    """None: this was not tried, as in bundles of older releases."""
    benchmark: dict[CaseName, BenchmarkStats] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Below(Record):
    """The engine that runs fewer than `rows` rows."""

    rows: Annotated[int, Within(1)]
    engine: EngineName


@dataclass(frozen=True, kw_only=True)
class TargetRecord(Record):
    """One target: its candidates, and which of them serve it.

    With the status `unverified`, `compiles` or `emulated` it was built, but has not run on a device
    of its kind: see `Evidence`.
    """

    status: Literal["verified", "unverified", "compiles", "emulated", "failed"]
    chosen: str | None = None
    below: list[Below] = field(default_factory=list)
    """Engines other than `chosen` that are faster for small row counts, with `rows` ascending."""
    raced_with: list[str] = field(default_factory=list)
    """Targets whose times may be compared with these, because they were measured together."""
    metrics: dict[str, Measured] = field(default_factory=dict)
    """The metrics of the chosen artifact's outputs on the labelled rows, by name."""
    candidates: dict[EngineName, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen is None and self.status == "verified":
            raise ValueError("a verified target names the chosen engine")
        for engine in self.engines():
            self._require_chosen(engine)
        limits = [below.rows for below in self.below]
        if self.chosen is not None and limits != sorted(set(limits)):
            raise ValueError(f"the row counts under 'below' do not ascend: {limits}")

    def _require_chosen(self, engine: str) -> None:
        """Raise ValueError if a session of this target could not run `engine`."""
        if engine not in self.candidates:
            raise ValueError(f"chosen engine {engine!r} is not among {sorted(self.candidates)}")
        candidate = self.candidates[engine]
        if not candidate.files:
            raise ValueError(f"chosen engine {engine!r} has no files")
        if self.status == "verified" and candidate.status != "valid":
            raise ValueError(f"chosen engine {engine!r} is {candidate.status}, not valid")

    def engines(self) -> list[str]:
        """Return every engine that a session of this target runs; none if none was chosen."""
        if self.chosen is None:
            return []
        return list(dict.fromkeys([self.chosen, *(below.engine for below in self.below)]))

    def engine_at(self, case: str) -> str:
        """Return the engine for a case of the benchmark, such as `32` or `nodes=5,edges=20`."""
        if case.isdecimal():  # with several row dimensions, `chosen` runs every case
            for below in self.below:
                if int(case) < below.rows:
                    return below.engine
        return str(self.chosen)

    def choice(self) -> str:
        """Write the chosen engines, as `aoti` or `aoti (onnxruntime below 100 rows)`."""
        others = [f"{name} {rows}" for name, rows in self.spans().items() if name != self.chosen]
        return f"{self.chosen} ({', '.join(others)})" if others else f"{self.chosen}"

    def spans(self) -> dict[str, str]:
        """Return the row counts at which each engine runs as text, see `spans_of`."""
        return spans_of([(below.rows, below.engine) for below in self.below], self.chosen)


def spans_of(below: Sequence[tuple[int, str]], chosen: str | None) -> dict[str, str]:
    """Return the row counts at which each engine runs, as text: an empty one means all of them.

    `below`: pairs (rows, engine), ascending: the engine runs fewer than `rows` rows. `chosen` runs
    from the last of these row counts on. `[(100, "onnxruntime")], "aoti"` gives
    `{"onnxruntime": "below 100 rows", "aoti": "from 100 rows on"}`.
    """
    spans: dict[str, list[str]] = {}
    start = 0
    for rows, engine in below:
        text = f"from {start} to {rows - 1} rows" if start else f"below {rows} rows"
        spans.setdefault(engine, []).append(text)
        start = rows
    if chosen is not None:
        last_span = [f"from {start} rows on"] if start else []  # none: it runs for all row counts
        spans.setdefault(chosen, []).extend(last_span)
    return {engine: " and ".join(texts) for engine, texts in spans.items()}


@dataclass(frozen=True, kw_only=True)
class Provenance(Record):
    """How a bundle was made: from which config and commit, with which tools, on which host."""

    created: str
    """UTC, ISO 8601."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    config_sha256: str
    config: dict[str, Any]
    tools: dict[str, str] = field(default_factory=dict)
    host: dict[str, str] = field(default_factory=dict)
    python: str
    seconds: dict[str, Measured] = field(default_factory=dict)
    """The time of each stage's steps, added up even if they ran at the same time. Steps whose
    result was kept from an earlier run are left out."""


@dataclass(frozen=True, kw_only=True)
class LabelledData(Record):
    """Labelled rows for computing metrics, and the user's own metric functions."""

    file: BundlePath
    source: str
    """The name of the file from which the rows were taken; `sha256` is its digest."""
    sha256: str
    rows: int
    code: dict[str, BundlePath] = field(default_factory=dict)
    """The file with the function of each metric, by its name."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """The content of `manifest.json`: a bundle's files, how it was made, and its measurements."""

    schema_version: Annotated[int, Within(1)] = SCHEMA_VERSION
    name: ModelName
    description: str = ""
    signature: dict[str, Any]
    """`soa.Signature.to_dict()`"""
    capture: Capture
    program: BundlePath = "program.pt2"
    torchscript: BundlePath | None = None
    reference: BundlePath = "reference.safetensors"
    targets: dict[TargetName, TargetRecord] = field(default_factory=dict)
    tolerances: dict[str, Tolerance] = field(default_factory=dict)
    """The tolerance of each output, by its name."""
    classifiers: list[str] = field(default_factory=list)
    """The outputs that are scores of classes: the agreement of their arg-max is reported."""
    labelled: LabelledData | None = None
    session: SessionSettings = SessionSettings()
    provenance: Provenance

    def files(self) -> dict[str, str]:
        """Return every file that the manifest names, with the place in the manifest."""
        places = {self.program: "program", self.reference: "reference"}
        if self.torchscript is not None:
            places[self.torchscript] = "torchscript"
        if self.labelled is not None:
            places[self.labelled.file] = "labelled"
            places |= dict.fromkeys(self.labelled.code.values(), "labelled.code")
        for target, record in self.targets.items():
            for engine, candidate in record.candidates.items():
                places |= dict.fromkeys(candidate.files, f"targets[{target}].candidates[{engine}]")
        return places

    def to_json(self) -> str:
        """Return the text of `manifest.json`; equal manifests give equal bytes."""
        return record_to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "manifest.json") -> Manifest:
        """Read a manifest from JSON.

        Raises BundleError with a message of one line, in which `where` names the file.
        """
        return record_from_json(cls, text, where, SCHEMA_VERSION)


R = TypeVar("R", bound=Record)


def record_to_json(record: DataclassInstance) -> str:
    """Write a record as JSON text: equal records give equal bytes, since the keys are sorted."""
    # JSON has no NaN and no Infinity, but a worst relative deviation can be either: these values
    # are written as strings, and read back as numbers.
    data = json.loads(  # trusted
        json.dumps(as_data(record)), parse_constant=lambda constant: constant
    )  # every key is a string now
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def record_from_json(kind: type[R], text: str | bytes, where: str, newest: int) -> R:
    """Read a record that has a `schema_version` from JSON.

    `newest`: the newest version that can be read. Raises BundleError, in which `where` names the
    file, for a newer one and for anything that is no such record.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise BundleError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"{where}: a JSON object is needed, found {type(data).__name__}")
    schema_version = data.get("schema_version")
    if isinstance(schema_version, int) and schema_version > newest:
        raise BundleError(
            f"{where}: schema version {schema_version} is newer than {newest}, the newest that "
            "this installation reads: update soa-pipeline",
            code="bundle-newer",
        )
    try:
        return read_record(kind, text)
    except ValueError as error:
        raise BundleError(f"{where}: {error}") from error
