"""Runs a config: all stages until a version is registered. Stages already done are skipped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engines.base import engine
from engines.errors import MORE_MEMORY, out_of_memory
from engines.lanes import compiler_identity
from engines.processes import expect_jobs, in_fork
from engines.target import Target, host_targets, targets_called
from pipeline.applying import Labelled
from pipeline.building.candidates import build_targets, chosen_session, first_engines
from pipeline.building.provenance import code_digest, host, provenance, tools
from pipeline.building.run_state import Say, Show, Work, show_nothing
from pipeline.building.stage_cache import StageCache, content_key, unchanged
from pipeline.building.steps import Recipe
from pipeline.config import (
    Config,
    further_inputs,
    load_config,
    metrics_fingerprint,
    reference_fingerprint,
    reference_inputs,
    source_of,
    stated_columns,
    tolerances_of,
)
from pipeline.errors import ConfigError, ReportError
from pipeline.report import page_place, publish, require_libraries
from registry.bundle import Bundle, SessionSettings
from registry.errors import BundleError, NotFoundError
from registry.store import Registry
from registry.version import Version
from soa.files import read_plain, write_whole
from soa.options import FUNCTION, PATH, of_type, takes
from soa.records import as_record, parse_json
from soa.signature import Signature
from stages.capture import Capture, capture
from stages.compile import TO_READ_PROGRAMS
from stages.errors import CaptureError, MetricError
from stages.model import build_model, loaded_sources
from stages.package import package


@dataclass(frozen=True)
class RunResult:
    """The result of a run. `worked` names the steps that were not in the cache."""

    version: Version
    bundle: Bundle
    worked: tuple[str, ...]
    seconds: float
    report: Path | None = None
    """A page about the version, in the work folder; None if no page was made."""


@dataclass(frozen=True)
class _Done:
    """The record of a finished run. `bundle`: path in the work folder; `files`: user code, with
    digests, that the result depends on."""

    bundle: str
    digest: str
    files: dict[str, str]


@takes(
    ConfigError,
    config_path=PATH,
    registry=of_type("a pipeline.Registry", Registry).or_none,
    work=PATH.or_none,
    say=FUNCTION,
    show=FUNCTION,
)
def run(
    config_path: str | Path,
    registry: Registry | None = None,
    work: str | Path | None = None,
    say: Say = lambda text: None,
    quick: bool = False,
    show: Show = show_nothing,
) -> RunResult:
    """Build, validate, package and register what a config describes.

    `quick`, for work in progress: builds only one engine and times it briefly. It is the first of
    `QUICK_ENGINES` that is applicable, whatever engines the config names. `work` is the folder for
    the results of the stages (by default `pipeline-work` in the working folder). Stages are cached
    by content, so an unchanged run does nothing, and an interrupted run continues. `say` gets lines
    about the progress; `show` gives a context that is open while a step runs. Raises the error of
    the stage that failed.

    Examples
    --------
    >>> pipeline.run("configs/demo.yaml", quick=True).version.ref  # doctest: +SKIP
    'jet-tagger/1'
    """
    begun = time.monotonic()
    path = Path(config_path)
    config = load_config(path)
    if quick:
        config = config.quick()
    store = registry or Registry()
    cache = StageCache(Path(work or "pipeline-work"))
    progress = Work(cache, say, show=show, beside=lambda: _get_ready(store), model=config.name)
    root, key = progress.cache.root, _keys(config)
    record = root / "runs" / f"{key['run']}.json"
    known = _finished(record, root, store)
    if known is not None:
        bundle, version = known
        page = page_place(root / "reports", version)
        seconds = time.monotonic() - begun
        return RunResult(version, bundle, (), seconds, page if page.is_file() else None)
    with suppress(NotFoundError):
        store.versions(config.name)  # an unreachable registry ends the run before any work
    bundle, files = _made(config, path, progress, key)
    with progress.step("register"):
        version = store.register(bundle)
        with suppress(BundleError):  # the version before is damaged
            for line in _beside_the_last(store, version, bundle):
                say(line)
        report = page_of(store, version, bundle, root / "reports", say)
    progress.keep_seconds()
    if not progress.try_again:
        record.parent.mkdir(parents=True, exist_ok=True)
        place = os.path.relpath(bundle.path, root)  # relative: the work folder may be moved
        write_whole(record, json.dumps(asdict(_Done(place, bundle.digest, files))))
    return RunResult(version, bundle, tuple(progress.worked), time.monotonic() - begun, report)


_SOURCES = "sources.json"
_MEASURED = ("manifest.json", "MLmodel", "reports/")
"""The files of a bundle that hold times, and so differ from run to run."""


def _beside_the_last(store: Registry, version: Version, bundle: Bundle) -> Iterator[str]:
    """A line on what differs from the version before this one, if that is on this host."""
    numbers = [each for each in store.versions(version.name) if each.number < version.number]
    folder = store.local_path(numbers[-1]) if numbers else None
    if folder is None:
        return
    last = Bundle.open(folder, verify=False)
    names = sorted({*last.files, *bundle.files})
    files = [
        "/".join(name.split("/")[:4])  # of an artifact, its folder: targets/cpu/x86-64-v3/aoti
        for name in names
        if last.files.get(name) != bundle.files.get(name) and not name.startswith(_MEASURED)
    ]
    mine, other = (asdict(each.manifest.provenance) for each in (bundle, last))
    own = mine.keys() - {"created", "seconds", "config"}  # config_sha256 stands for the config
    differ = list(dict.fromkeys([*sorted(k for k in own if mine[k] != other[k]), *files]))
    said = ", ".join(differ[:8]) + (", …" if len(differ) > 8 else "")
    yield f"  differs from {numbers[-1].ref} in {said or 'nothing'}, apart from measured times"


def unregistered(config_path: Path, work: Path, say: Say = lambda text: None) -> Bundle:
    """The bundle of one engine, as of `run` with `quick`, for this host. No registry gets it."""
    here = {"targets": (str(host_targets("cpu")[0]),)}
    config = load_config(config_path).model_copy(update=here).quick()
    return _made(config, config_path, Work(StageCache(work), say), _keys(config))[0]


def _made(
    config: Config, path: Path, work: Work, key: dict[str, str]
) -> tuple[Bundle, dict[str, str]]:
    """The bundle of a config, and the files of the user's code that it depends on."""
    labelled = _labelled(config)
    captured, files = _capture(config, work, key["capture"])
    return _build(config, path, work, captured, labelled, key), files


def _get_ready(store: Registry) -> None:
    """Import what the end of a run needs, while compilers run. Errors come again later."""
    store.get_ready()
    with suppress(ReportError):
        require_libraries()


def page_of(store: Registry, version: Version, bundle: Bundle, at: Path, say: Say) -> Path | None:
    """Write the page about a version. If libraries for pages are missing, say so; return None."""
    try:
        return publish(store, version, bundle, at)
    except ReportError as error:
        say(f"  no report: {error}")
        return None


def _targets(config: Config) -> list[Target]:
    """The targets of the config, each once. `cpu` is x86-64-v3, and also this host's level if that
    is higher; but only one target if the artifacts of all engines run on any CPU."""
    if all(engine(name).anywhere for name in config.engines):
        return list(dict.fromkeys(map(Target.parse, config.targets)))
    return list(dict.fromkeys(t for name in config.targets for t in targets_called(name)))


def _keys(config: Config) -> dict[str, str]:
    """The content keys of the capture and of the whole run."""
    made_of = {
        "model": source_of(config).fingerprint(),
        "route": config.model.torchscript_route,
        "precision": config.precision,
        "independence": config.gates.independence,
        "signature": config.signature().to_dict(),
        "reference": reference_fingerprint(config),
        "code": code_digest(),
        "tools": tools(),
    }
    whole = {
        **made_of,
        "config": config.digest(),
        "every engine": config.names_engines,
        "metrics": metrics_fingerprint(config),
        "targets": {str(t): compiler_identity(t) for t in _targets(config)},
        "host": host(),
    }
    return {"capture": content_key(made_of), "run": content_key(whole)}


def _labelled(config: Config) -> Labelled | None:
    """The labelled rows for the config's metrics, checked; None if the config has no metrics."""
    if config.gates.metrics is None or config.files.metric_data is None:
        return None
    found = Labelled(config.files.metric_data, config.gates.metrics, config.files.metric_code)
    found.check(config.signature(), config.apply.columns)
    return found


def _finished(record: Path, root: Path, store: Registry) -> tuple[Bundle, Version] | None:
    """The bundle and version of an earlier identical run, if both still exist; else None."""
    with suppress(OSError, ValueError, BundleError, NotFoundError):
        done = as_record(_Done, parse_json(read_plain(record)))
        if not unchanged(done.files):
            return None
        bundle = Bundle.open(root / done.bundle, verify=False)
        for version in store.versions(bundle.manifest.name):
            if version.digest == bundle.digest == done.digest:
                return bundle, version
    return None


def _build(
    config: Config,
    path: Path,
    work: Work,
    captured: Capture,
    labelled: Labelled | None,
    key: dict[str, str],
) -> Bundle:
    # The next steps depend on the content of the capture, on our code and on the tools.
    here = {"code": code_digest(), "tools": tools()}
    captured_key = content_key({"capture": captured.digest(), **here})
    tolerances = tolerances_of(config, captured.signature)
    classifiers = frozenset(output.name for output in config.outputs if output.classifier)
    recipe = Recipe(
        config.engines,
        {str(name): each for name, each in config.compile.options.items()},
        config.compile.timeout_s,
        tolerances,
        classifiers,
        lambda: build_model(source_of(config)),
        config.compile.benchmark_s,
        special_values=config.gates.special_values,
        by_default=not config.names_engines,
    )
    results = build_targets(work, captured, _targets(config), recipe, captured_key)

    def build(folder: Path) -> Bundle:
        scored, kept = dict(results), None
        if labelled is not None:
            for target, result in results.items():
                if result.status == "verified":
                    with work.step(f"metrics on {target}"):
                        session = chosen_session(captured, result)
                        trees = config.model.trees is not None
                        values = labelled.values(session, config.apply.columns, trees)
                    if refused := [each.why for each in values.values() if each.why]:
                        raise MetricError(refused[0])
                    found = {name: each.value for name, each in values.items()}
                    curves = {name: each.curve for name, each in values.items() if each.curve}
                    scored[target] = replace(result, metrics=found, curves=curves)
            kept = labelled.keep(folder / "metrics"), folder / "metrics"
        with work.step("package"):
            return package(
                folder / "bundle",
                config.name,
                config.description,
                captured,
                scored,
                tolerances,
                classifiers,
                SessionSettings(**config.session.model_dump()),
                provenance(config, path, work.worked),
                kept,
            )

    # The verdicts are in the key: a candidate that failed is tried again, and may become valid.
    verdicts = {t: {e: r.valid for e, r in done.reports.items()} for t, done in results.items()}
    packaged = content_key({**key, "captured": captured_key, "verdicts": verdicts})
    return work.cache.result("package", packaged, build, lambda at: Bundle.open(at / "bundle"))


def _capture(config: Config, work: Work, key: str) -> tuple[Capture, dict[str, str]]:
    """The capture, and the files of the user's code that it depends on, with digests."""

    def build(folder: Path) -> Capture:
        with work.step("capture"):
            _expect_compilers(config)
            sources = in_fork(
                "the model",
                lambda say: _capture_here(config, config.signature(), folder, say),
                lambda text: work.say(f"  {text}"),
            )
            (folder / _SOURCES).write_text(json.dumps(sources))
        return Capture.load(folder)

    captured = work.cache.result("capture", key, build, Capture.load, depends_on=_sources_in)
    return captured, work.cache.files(captured.folder)


def _expect_compilers(config: Config) -> None:
    """Start the processes that compile the first candidates, so that they import while the model
    is captured. Each holds torch: there are never more than two."""
    first = first_engines(config.engines, not config.names_engines)
    jobs = min(len(first) * len(_targets(config)), len(os.sched_getaffinity(0)), 2)
    expect_jobs(jobs, TO_READ_PROGRAMS)


def _sources_in(folder: Path) -> dict[str, str]:
    return as_record(dict[str, str], parse_json(read_plain(folder / _SOURCES)))


def _capture_here(config: Config, signature: Signature, folder: Path, say: Say) -> dict[str, str]:
    """Build and run the user's model; if it crashes, this process ends. Returns the files of the
    user's code that were read, with their digests."""
    try:
        capture(
            build_model(source_of(config), say),
            signature,
            reference_inputs(config, signature),
            folder,
            config.model.torchscript_route,
            say=say,
            precision=config.precision,
            nonfinite=config.reference.nonfinite,
            more=further_inputs(config, signature),
            stated=stated_columns(config, signature),
            tried_is_enough=config.gates.independence == "tried",
            many=config.reference.many_rows,
        )
        return loaded_sources()
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
        if not out_of_memory(error):
            raise
        largest = ", ".join(f"{dim} = {r.max:,}" for dim, r in signature.ranges.items())
        raise CaptureError(
            f"out of memory while the model is captured with {largest}: {MORE_MEMORY}"
        ) from error
