"""Runs a config: all stages until a version is registered. Stages already done are skipped."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType

from engines.base import engine
from engines.errors import MORE_MEMORY, is_out_of_memory
from engines.lanes import compiler_identity
from engines.processes import expect_jobs, run_in_fork
from engines.target import Target, host_targets, parse_targets
from pipeline.applying import Labelled
from pipeline.building.candidates import build_targets, first_engines
from pipeline.building.provenance import code_digest, host, make_provenance, tools
from pipeline.building.steps import Recipe, open_session_in_tiles
from pipeline.building.work import Say, Show, Work, depends_on, show_nothing, silent
from pipeline.config import (
    Config,
    further_inputs,
    load_config,
    metric_code,
    metrics_fingerprint,
    reference_fingerprint,
    reference_inputs,
    source_of,
    stated_columns,
    tolerances_of,
)
from pipeline.errors import ConfigError, ReportError
from pipeline.report import page_file, publish, require_libraries
from registry.bundle import SUMS, Bundle, SessionSettings
from registry.errors import BundleError, NotFoundError
from registry.store import Registry
from registry.version import Version
from soa.options import FUNCTION, PATH, of_type, takes
from soa.signature import Signature
from stages.capture import Capture, capture
from stages.compile import TO_READ_PROGRAMS
from stages.errors import CaptureError, MetricError
from stages.judging import how_cpu_target_runs
from stages.model import build_model, loaded_sources
from stages.package import TargetResult, package


@dataclass(frozen=True)
class RunResult:
    """The result of `run`: the version, its bundle and the wall time in seconds. `worked` names the
    steps that ran; the results of the others were kept from an earlier run."""

    version: Version
    bundle: Bundle
    worked: tuple[str, ...]
    seconds: float
    report: Path | None = None
    """A page about the version, in the work folder; None if no page was made."""


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
    say: Say = silent,
    quick: bool = False,
    show: Show = show_nothing,
) -> RunResult:
    """Build, validate, package and register what a config describes.

    `quick`, for work in progress, builds one engine only and times it briefly. It is the first of
    `QUICK_ENGINES` that is applicable, whatever engines the config names. `work` is the folder for
    the results of the stages (by default `pipeline-work` in the working folder). A result is used
    again as long as nothing that it depends on changes. So an unchanged run does nothing, and an
    interrupted run continues. `say` gets lines about the progress; `show` makes a context that is
    open while a step runs. Raises the error of the stage that failed.

    Examples
    --------
    >>> pipeline.run("configs/demo.yaml", quick=True).version.ref  # doctest: +SKIP
    'jet-tagger/1'
    """
    begun = time.monotonic()
    config = load_config(config_path)
    if quick:
        config = config.quick()
    store = registry or Registry()
    folder = Path(work or "pipeline-work")
    progress = Work(folder, say, show, config.name, meanwhile=lambda: _import_early(store))
    earlier: list[Version] = []
    with suppress(NotFoundError):  # an unreachable registry ends the run here, before any work
        earlier = list(store.versions(config.name))
    bundle = _build_bundle(config, Path(config_path), progress)
    version = next((known for known in earlier if known.digest == bundle.digest), None)
    if version is not None:
        page = page_file(progress.root / "reports", version)
        report = page if page.is_file() else None
    else:
        with progress.step("register"):
            version = store.register(bundle)
            with suppress(BundleError):  # the previous version is damaged
                if difference := _describe_difference(store, earlier, bundle):
                    say(difference)
            report = write_page(store, version, bundle, progress.root / "reports", say)
    progress.keep_seconds()
    seconds = time.monotonic() - begun
    return RunResult(version, bundle, tuple(progress.worked), seconds, report)


def build_unregistered(config_path: Path, work: Path, say: Say = silent) -> Bundle:
    """Build the bundle that `run` with `quick` would make, but only for this host's CPU. Nothing is
    registered."""
    only_here = {"targets": (str(host_targets("cpu")[0]),)}
    config = load_config(config_path).model_copy(update=only_here).quick()
    return _build_bundle(config, config_path, Work(work, say))


def write_page(
    store: Registry, version: Version, bundle: Bundle, folder: Path, say: Say
) -> Path | None:
    """Write the page about a version into a folder, and return its path. If that is impossible, for
    example because a library is missing, pass the reason to `say`, and return None."""
    try:
        return publish(store, version, bundle, folder)
    except ReportError as error:
        say(f"  no report: {error}")
        return None


def _import_early(store: Registry) -> None:
    """Import the libraries that registering and the page need. Runs while compilers run in other
    processes. A missing library is no error here: `write_page` reports it at the end."""
    store.get_ready()
    with suppress(ReportError):
        require_libraries()


_SHOWN = 8  # the largest number of differences that a line lists
_MEASURED = ("manifest.json", "MLmodel", "reports/")
"""The files of a bundle that hold times, and so differ from run to run."""


def _describe_difference(store: Registry, earlier: list[Version], bundle: Bundle) -> str:
    """Return a line that lists in which fields of its origin, and in which files, a bundle differs
    from the last of the earlier versions. Returns "" if that one is not on this host."""
    folder = store.local_path(earlier[-1]) if earlier else None
    if folder is None:
        return ""
    last = Bundle.open(folder, verify=False)
    names = sorted({*last.files, *bundle.files})
    files = [
        "/".join(name.split("/")[:4])  # an artifact's folder, as targets/cpu/x86-64-v3/aoti
        for name in names
        if last.files.get(name) != bundle.files.get(name) and not name.startswith(_MEASURED)
    ]
    new, old = asdict(bundle.manifest.provenance), asdict(last.manifest.provenance)
    keys = new.keys() - {"created", "seconds", "config"}  # config_sha256 stands for the config
    different = list(dict.fromkeys([*sorted(k for k in keys if new[k] != old[k]), *files]))
    shown = [*different[:_SHOWN], "…"] if len(different) > _SHOWN else different
    listed = ", ".join(shown) or "nothing"
    return f"  differs from {earlier[-1].ref} in {listed}, apart from measured times"


def _build_bundle(config: Config, path: Path, work: Work) -> Bundle:
    """Build the bundle of a config in the work folder. If an earlier run with the same inputs has
    made it already, nothing is built, and that bundle is returned."""
    labelled = _load_labelled(config)
    targets = _list_targets(config)
    captured = _capture_model(config, targets, work)
    dependencies = {
        "capture": [captured.folder.name, captured.digest()],
        "config": config.digest(),
        "every engine": config.names_engines,
        "metrics": metrics_fingerprint(config),
        "targets": {str(target): compiler_identity(target) for target in targets},
        # What runs a target here: the processor, or an emulator, which may be installed later.
        "processors": {str(target): how_cpu_target_runs(target) for target in targets},
        "host": host(),
    }

    def build(folder: Path) -> str:
        recipe = _make_recipe(config, captured)
        results = build_targets(work, captured, targets, recipe)
        # The verdicts belong to the key: a candidate that failed for lack of time is tried again by
        # the next run, and may then be valid.
        verdicts = {
            target: {name: candidate.report.valid for name, candidate in result.candidates.items()}
            for target, result in results.items()
        }
        with_verdicts = {**dependencies, "verdicts": verdicts}
        make = partial(_write_bundle, config, path, work, captured, recipe, results, labelled)
        digest = work.read_or_make("package", with_verdicts, str, make)
        bundle = work.folder("package", with_verdicts) / "bundle"
        depends_on(folder, {str(bundle / SUMS): digest})
        return os.path.relpath(bundle, work.root)  # the work folder may be moved

    folder = work.read_or_make("runs", dependencies, str, build, keep=lambda _: not work.try_again)
    return Bundle.open(work.root / folder, verify=False)


def _load_labelled(config: Config) -> Labelled | None:
    """Find and check the labelled rows for the config's metrics. Returns None if the config has no
    metrics. Raises MetricError or DataError if the rows do not fit."""
    metrics = config.gates.metrics
    if metrics is None:
        return None
    labelled = Labelled(config.file(metrics.data), metrics, metric_code(config))
    labelled.check(config.signature(), config.apply.columns)
    return labelled


def _list_targets(config: Config) -> list[Target]:
    """Return the targets that the config names, each once.

    The name `cpu` stands for x86-64-v3, and also for this host's level if that is higher. It stands
    for one target only if the artifacts of all engines run on any CPU.
    """
    if all(engine(name).anywhere for name in config.engines):
        return list(dict.fromkeys(map(Target.parse, config.targets)))
    targets = [target for name in config.targets for target in parse_targets(name)]
    return list(dict.fromkeys(targets))


def _capture_model(config: Config, targets: Sequence[Target], work: Work) -> Capture:
    """Build and run the user's model in a child process, and capture it, unless the capture is in
    the work folder already. Returns the capture.

    Meanwhile, processes that will compile the first candidates start and import torch. There are at
    most two of them, because each needs the memory that torch takes.
    """
    signature = config.signature()
    dependencies = {  # modules that the user's code imports are noted after it ran, in the child
        "model": source_of(config).fingerprint(),
        "route": config.model.torchscript_route,
        "precision": config.precision,
        "independence": config.gates.independence,
        "signature": signature.to_dict(),
        "reference": reference_fingerprint(config),
        "code": code_digest(),
        "tools": tools(),
    }

    def make(folder: Path) -> None:
        first = first_engines(config.engines, not config.names_engines)
        jobs = min(len(first) * len(targets), len(os.sched_getaffinity(0)), 2)
        with work.step("capture"):
            expect_jobs(jobs, TO_READ_PROGRAMS)
            run_in_fork(
                "the model",
                lambda say: _capture_in_child(config, signature, folder, say),
                lambda text: work.say(f"  {text}"),
            )

    work.read_or_make("capture", dependencies, NoneType, make)
    return Capture.load(work.folder("capture", dependencies))


def _capture_in_child(config: Config, signature: Signature, folder: Path, say: Say) -> None:
    """Build and capture the user's model, in the child process that calls this. `folder` gets the
    capture. CaptureError if memory runs out."""
    try:
        capture(
            build_model(source_of(config), lambda note: say(f"note: {note}")),
            signature,
            inputs=reference_inputs(config, signature),
            folder=folder,
            route=config.model.torchscript_route,
            say=say,
            precision=config.precision,
            nonfinite=config.reference.nonfinite,
            more=further_inputs(config, signature),
            stated=stated_columns(config, signature),
            tried_is_enough=config.gates.independence == "tried",
            many=config.reference.many_rows,
        )
        depends_on(folder, loaded_sources())
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises the latter
        if not is_out_of_memory(error):
            raise
        largest = ", ".join(f"{dim} = {rows.max:,}" for dim, rows in signature.ranges.items())
        raise CaptureError(
            f"out of memory while the model is captured with {largest}: {MORE_MEMORY}"
        ) from error


def _make_recipe(config: Config, captured: Capture) -> Recipe:
    """Make the recipe that says how the candidates of a config are made and judged."""
    return Recipe(
        config.engines,
        {str(name): options for name, options in config.compile.options.items()},
        timeout_s=config.compile.timeout_s,
        tolerances=tolerances_of(config, captured.signature),
        classifiers=frozenset(output.name for output in config.outputs if output.classifier),
        baseline=lambda: build_model(source_of(config)),
        benchmark_s=config.compile.benchmark_s,
        special_values=config.gates.special_values,
        by_default=not config.names_engines,
    )


def _write_bundle(
    config: Config,
    path: Path,
    work: Work,
    captured: Capture,
    recipe: Recipe,
    results: Mapping[str, TargetResult],
    labelled: Labelled | None,
    folder: Path,
) -> str:
    """Measure the metrics, and write the bundle of `results` into `folder / "bundle"`. Returns the
    bundle's digest. `labelled`: None if the config has no metrics."""
    labelled_files = None
    if labelled is not None:
        results = {
            target: _add_metrics(config, work, captured, result, labelled)
            for target, result in results.items()
        }
        labelled_files = labelled.copy_files(folder / "metrics"), folder / "metrics"
    with work.step("package"):
        bundle = package(
            folder / "bundle",
            name=config.name,
            description=config.description,
            capture=captured,
            results=results,
            tolerances=recipe.tolerances,
            classifiers=recipe.classifiers,
            session=SessionSettings(**config.session.model_dump()),
            provenance=make_provenance(config, path, work.worked),
            labelled=labelled_files,
            own_rows=bool(config.reference.file or config.reference.factory),
        )
    depends_on(folder, {str(bundle.path / SUMS): bundle.digest})  # the user may delete the bundle
    return bundle.digest


def _add_metrics(
    config: Config, work: Work, captured: Capture, result: TargetResult, labelled: Labelled
) -> TargetResult:
    """Measure the metrics of a target's chosen candidate on the labelled rows. Returns the result
    with these metrics, or unchanged if the target has no chosen candidate. MetricError if a metric
    cannot be computed."""
    if result.status != "verified":
        return result
    with work.step(f"metrics on {result.target}"):
        chosen = result.candidates[str(result.chosen)]
        session = open_session_in_tiles(captured, Target.parse(result.target), chosen)
        trees = config.model.trees is not None
        measured = labelled.measure(session, config.apply.columns, trees)
    if reasons := [metric.why for metric in measured.values() if metric.why]:
        raise MetricError(reasons[0])
    metrics = {name: metric.value for name, metric in measured.items()}
    curves = {name: metric.curve for name, metric in measured.items() if metric.curve}
    return replace(result, metrics=metrics, curves=curves)
