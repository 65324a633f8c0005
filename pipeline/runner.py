"""The runner: chains the stages from a config to a registered version, and skips what is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.engine import Executable, engine
from engines.target import Target, host_runs
from pipeline.assemble import (
    classifiers_of,
    reference_fingerprint,
    reference_inputs,
    signature_of,
    source_of,
    targets_of,
    tolerances_of,
)
from pipeline.cache import StageCache, content_key, unchanged, write_whole
from pipeline.config import Config, load_config
from pipeline.provenance import code_digest, host, provenance, tools
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError
from registry.manifest import SessionSettings
from registry.store import Registry
from registry.version import Version
from runtime.session import Session
from stages.benchmark import BenchmarkReport, benchmark
from stages.capture import Capture, capture
from stages.compile import Compiled, artifact_file, compile_candidate
from stages.package import TargetResult, package
from stages.reference import Reference
from stages.source import build_model, loaded_sources
from stages.validate import ValidationReport, validate_candidate

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. `worked` names the stages that did any work; empty if none did."""

    version: Version
    bundle: Bundle
    worked: tuple[str, ...]
    seconds: float


@dataclass
class _Run:
    """One run in progress: what every step needs."""

    config: Config
    path: Path
    cache: StageCache
    say: Say
    worked: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """The user's own code behind the capture, with digests."""
    passing: bool = False
    """Whether a candidate failed for want of time or memory: a re-run tries again."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step when it begins; note it as work, with its time, when it ends."""
        self.say(f"{name} …")
        begun = time.monotonic()
        yield
        self.worked.append(name)
        self.say(f"{name}: {time.monotonic() - begun:.1f} s")


def run(
    config_path: str | Path,
    registry: Registry | None = None,
    work: Path | None = None,
    say: Say = lambda text: None,
) -> RunResult:
    """Build, validate, package and register what a config describes.

    `work` holds the stages' results (by default `pipeline-work` in the working folder). Stages are
    keyed by content, so an unchanged run does nothing, and one that was interrupted goes on where
    it stopped. Raises the typed error of the stage that refused.
    """
    begun = time.monotonic()
    path = Path(config_path)
    config = load_config(path)
    store = registry or Registry()
    state = _Run(config, path, StageCache(work or Path("pipeline-work")), say)
    key = _keys(config)
    known = _finished(state, store, key["run"])
    if known is not None:
        bundle, version = known
        return RunResult(version, bundle, (), time.monotonic() - begun)
    with suppress(NotFoundError):
        store.versions(config.name)  # an unreachable registry is said before the work, not after
    bundle = _build(state, key)
    with state.step("register"):
        version = store.register(bundle)
    if state.passing:
        return RunResult(version, bundle, tuple(state.worked), time.monotonic() - begun)
    record = state.cache.root / "runs" / f"{key['run']}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    done = {"bundle": str(bundle.path), "digest": bundle.digest, "files": state.files}
    write_whole(record, json.dumps(done))
    return RunResult(version, bundle, tuple(state.worked), time.monotonic() - begun)


def _keys(config: Config) -> dict[str, str]:
    """Content keys: of the capture, and of the whole run."""
    made_of = {
        "model": source_of(config).fingerprint(),
        "route": config.model.torchscript_route,
        "precision": config.precision,
        "signature": signature_of(config).to_dict(),
        "reference": reference_fingerprint(config),
        "code": code_digest(),
        "tools": tools(),
    }
    whole = {
        **made_of,
        "config": config.digest(),
        "targets": [str(t) for t in targets_of(config)],
        "host": host(),
    }
    return {"capture": content_key(made_of), "run": content_key(whole)}


def _finished(state: _Run, store: Registry, key: str) -> tuple[Bundle, Version] | None:
    """The bundle and version of this very run, if it ended before and both are still there."""
    record = state.cache.root / "runs" / f"{key}.json"
    if not record.is_file():
        return None
    data = json.loads(record.read_text())
    if not unchanged(data["files"]):
        return None
    try:
        bundle = Bundle.open(data["bundle"], verify=False)
        for version in store.versions(bundle.manifest.name):
            if version.digest == bundle.digest == data["digest"]:
                return bundle, version
    except (BundleError, NotFoundError):
        pass
    return None


def _build(state: _Run, key: dict[str, str]) -> Bundle:
    config = state.config
    captured = _capture(state, key["capture"])
    # What follows depends on what was captured, not on how: a new capture is a new key.
    captured_key = content_key({"capture": captured.digest()})
    results = {
        str(target): _target(state, captured, target, captured_key) for target in targets_of(config)
    }
    place: list[Bundle] = []

    def build(folder: Path) -> None:
        with state.step("package"):
            place.append(
                package(
                    folder / "bundle",
                    config.name,
                    config.description,
                    captured,
                    results,
                    tolerances_of(config, captured.signature),
                    classifiers_of(config),
                    SessionSettings(**config.session.model_dump()),
                    provenance(config, state.path),
                )
            )

    # A candidate that failed is tried again in the next run, and may be valid then.
    verdicts = {t: {e: r.valid for e, r in done.reports.items()} for t, done in results.items()}
    packaged = content_key({**key, "captured": captured_key, "verdicts": verdicts})
    folder, _ = state.cache.folder("package", packaged, build)
    return place[0] if place else Bundle.open(folder / "bundle")


def _capture(state: _Run, key: str) -> Capture:
    config = state.config

    def build(folder: Path) -> None:
        with state.step("capture"):
            signature = signature_of(config)
            capture(
                build_model(source_of(config)),
                signature,
                reference_inputs(config, signature),
                folder,
                config.model.torchscript_route,
                say=lambda text: state.say(f"  {text}"),
                precision=config.precision,
            )

    folder, _ = state.cache.folder("capture", key, build, loaded_sources)
    state.files = state.cache.files(folder)
    return Capture.load(folder)


def _target(state: _Run, captured: Capture, target: Target, capture_key: str) -> TargetResult:
    config = state.config
    options = {str(name): each for name, each in config.compile.options.items()}
    compiled: dict[str, Compiled] = {}
    reports: dict[str, ValidationReport] = {}
    for name in config.engines:
        parts = {
            "capture": capture_key,
            "engine": name,
            "target": str(target),
            "options": options.get(name, {}),
        }
        compiled[name] = _compile(state, captured, target, name, content_key(parts))
        if compiled[name].error:
            reports[name] = ValidationReport.failed(
                name, f"{compiled[name].error} (repeat with: {compiled[name].script})"
            )
            continue
        if not host_runs(target):
            reports[name] = ValidationReport.not_run(name, str(target))
            continue
        tolerances = tolerances_of(config, captured.signature)
        judged_by = {
            **parts,
            "tolerances": {key: asdict(t) for key, t in tolerances.items()},
            "classifiers": sorted(classifiers_of(config)),
        }
        reports[name] = _validate(state, captured, target, compiled[name], content_key(judged_by))
    valid = [name for name, report in reports.items() if report.valid]
    timed = _benchmark(state, captured, target, compiled, valid, capture_key) if valid else None
    return TargetResult(str(target), options, compiled, reports, timed)


def _compile(state: _Run, captured: Capture, target: Target, name: str, key: str) -> Compiled:
    made: list[Compiled] = []

    def build(folder: Path) -> bool:
        with state.step(f"compile {name} for {target}"):
            found = compile_candidate(
                name,
                captured,
                target,
                dict(state.config.compile.options.get(name, {})),  # type: ignore[call-overload]
                folder,
                state.config.compile.timeout_s,
            )
        made.append(found)
        record = {**asdict(found), "folder": str(found.folder)}
        (folder / "compiled.json").write_text(json.dumps(record))
        state.passing = state.passing or found.passing
        if found.error:
            state.say(f"  {name} for {target} failed: {found.error}; log: {found.log}")
        return found.error is None

    folder, _ = state.cache.folder("compile", key, build)
    if made:
        return made[0]
    data: dict[str, Any] = json.loads((folder / "compiled.json").read_text())
    artifact = folder / Path(data["folder"]).name  # here, also where the work folder has moved
    return Compiled(**{**data, "folder": artifact, "files": tuple(data["files"])})


def _validate(
    state: _Run, captured: Capture, target: Target, compiled: Compiled, key: str
) -> ValidationReport:
    made: list[ValidationReport] = []

    def build(folder: Path) -> bool:
        with state.step(f"validate {compiled.engine} on {target}"):
            report = validate_candidate(
                compiled.engine,
                artifact_file(compiled.engine, compiled.files, compiled.folder, captured),
                captured.signature,
                captured.reference,
                tolerances_of(state.config, captured.signature),
                classifiers_of(state.config),
                folder / "child",
                state.config.compile.timeout_s,
                target.torch_device,
            )
        made.append(report)
        (folder / "report.json").write_text(json.dumps(report.to_dict()))
        if not report.valid:
            state.say(f"  {compiled.engine} on {target} is refused: {report.reason}")
        return report.valid

    folder, _ = state.cache.folder("validate", key, build)
    if made:
        return made[0]
    return ValidationReport.from_dict(json.loads((folder / "report.json").read_text()))


def _benchmark(
    state: _Run,
    captured: Capture,
    target: Target,
    compiled: dict[str, Compiled],
    valid: list[str],
    capture_key: str,
) -> BenchmarkReport:
    key = content_key(
        {
            "capture": capture_key,
            "target": str(target),
            "engines": valid,
            "options": state.config.compile.options,
            "host": host(),
        }
    )

    def build(folder: Path) -> None:
        with state.step(f"benchmark on {target}"):
            device = torch.device(target.torch_device)
            sessions = {
                name: Session(
                    captured.signature, open_candidate(compiled[name], captured, device), device
                )
                for name in valid
            }
            report = benchmark(
                captured.signature,
                sessions,
                Reference.load(captured.reference).inputs,
                build_model(source_of(state.config)),
            )
        (folder / "report.json").write_text(json.dumps(report.to_dict()))

    folder, _ = state.cache.folder("benchmark", key, build)
    return BenchmarkReport.from_dict(json.loads((folder / "report.json").read_text()))


def open_candidate(compiled: Compiled, captured: Capture, device: torch.device) -> Executable:
    """Open a candidate that was validated, in this process."""
    file = artifact_file(compiled.engine, compiled.files, compiled.folder, captured)
    return engine(compiled.engine).open(file, device)
