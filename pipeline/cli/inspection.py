"""The commands that show versions and measure them again; they change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import (
    Answer,
    Number,
    command,
    give,
    html_option,
    opened_at,
    say,
    steps,
    write_page,
)
from pipeline.cli.completion import names, refs

if TYPE_CHECKING:
    from pipeline.report import Part
    from registry.bundle import Bundle
    from registry.store import Registry
    from registry.version import Version
    from runtime.opening import Opened
    from stages.reports import ValidationReport


@command()
@click.argument("name", required=False, shell_complete=names)
def ls(name: str | None, registry: Registry) -> Answer:
    """List all models with their versions, or the versions of NAME."""
    names = [name] if name else [model.name for model in registry.list()]
    models = {each: registry.versions(each) for each in names}
    versions = [version for each in models.values() for version in each]

    def shown() -> Iterator[Part]:
        from pipeline.report import describe_versions

        if versions:
            yield describe_versions(versions)
        elif name:
            yield f"{name} has no version"
        else:
            yield "the registry is empty: fill it with `pipeline run CONFIG`"

    return Answer({each: [_version(v) for v in found] for each, found in models.items()}, shown())


def _version(version: Version) -> dict[str, Any]:
    return {
        "version": version.ref,
        "digest": version.digest,
        "aliases": list(version.aliases),
        "targets": dict(version.targets),
        "chosen": dict(version.chosen),
        "annexes": dict(version.annexes),
        "created": version.created.isoformat(),
        "source": version.source,
    }


@command()
@click.argument("ref", shell_complete=refs)
@html_option
def show(ref: str, html: Path | None, registry: Registry) -> Answer:
    """Show one version: blocks, targets, candidates, deviations, times, provenance."""
    from pipeline.report import describe_bundle
    from stages.reference import proof_of

    opened = opened_at(ref, registry)
    bundle, version = opened.bundle, opened.version
    said = write_page(html, lambda: _page_of(opened, registry))
    counts, notes = proof_of(bundle)
    data = {
        "version": _version(version) if version else None,
        "manifest": json.loads(bundle.manifest.to_json()),
        "annexes": {
            target: {"digest": annex.digest, **json.loads(annex.record.to_json())}
            for target, annex in bundle.annexes.items()
        },
        "reference": {"outputs": [asdict(one) for one in counts], "notes": notes},
    }
    return Answer(data, said or describe_bundle(bundle, version))


def _page_of(opened: Opened, registry: Registry) -> str:
    from pipeline.report import version_page  # it imports torch, and `show` alone does not

    version = opened.version
    events = registry.history(version.name) if version else []
    return version_page(opened.bundle, version, events)


@command()
@click.argument("a", shell_complete=refs)
@click.argument("b", shell_complete=refs)
@html_option
def diff(a: str, b: str, html: Path | None, registry: Registry) -> Answer:
    """Show what changed from A to B: weights, config, blocks, targets, deviations, times, tools.

    A and B are each a REF: a version, or ./FOLDER of a bundle. Nothing is measured again:
    deviations and times were recorded when each was built.
    """
    from pipeline.report import describe_difference, difference_page
    from pipeline.report import diff as compare

    found = compare(registry, a, b)
    said = write_page(html, lambda: difference_page(found))
    return Answer(found, [*describe_difference(found), *said])


_target_option: Callable[[Any], Any] = click.option(
    "--target", help="Only this target. Default: all targets that this host runs."
)


@command()
@click.argument("ref", shell_complete=refs)
@_target_option
def validate(ref: str, target: str | None, registry: Registry) -> Answer:
    """Run every artifact of REF against its reference again, here.

    Exits with 1 if an artifact chosen for a target is no longer valid.
    """
    opened = opened_at(ref, registry)  # before the imports: a wrong name is said at once
    from pipeline.promotion import revalidate
    from pipeline.report import describe_reference, describe_validation

    targets = opened.bundle.manifest.targets
    here = _targets_here(opened.bundle, target)
    work = [(name, engine) for name in here for engine in targets[name].candidates]
    reports: dict[str, list[ValidationReport]] = {name: [] for name in here}
    with steps() as show:
        for i, (name, engine) in enumerate(work, 1):
            with show(f"{i} of {len(work)}: {engine} on {name}", None):
                reports[name].append(revalidate(opened, name, engine, say))

    def shown() -> Iterator[Part]:
        yield from describe_reference(opened.bundle)
        for name, each in reports.items():
            yield from describe_validation(f"validation on {name}", each)
            for report in each:
                known = targets[name].candidates[report.engine].bits
                if known and report.bits:
                    bits = "the same bits as" if report.bits == known else "other bits than"
                    yield f"{report.engine} on {name}: {bits} where it was built"

    valid = all(
        report.valid
        for name, each in reports.items()
        for report in each
        if report.engine in targets[name].engines()
    )
    data = {name: [report.to_dict() for report in each] for name, each in reports.items()}
    return Answer(data, shown(), passed=valid)


def _targets_here(bundle: Bundle, wanted: str | None) -> list[str]:
    from engines.errors import TargetError
    from engines.target import Target, check_torch_runs
    from pipeline.promotion import runnable

    have = list(bundle.manifest.targets)
    if wanted is None:
        found = runnable(have)
        if not found:
            raise TargetError(f"this host runs none of the version's targets: {', '.join(have)}")
        return found
    parsed = Target.parse(wanted)
    target = str(parsed)
    if target not in have:
        raise TargetError(f"the version has no target {target}; it has: {', '.join(have)}")
    check_torch_runs(parsed)
    return [target]


@command()
@click.argument("ref", shell_complete=refs)
@_target_option
@click.option(
    "--seconds", type=Number(0, min_open=True), default=1.0, show_default=True,
    help="Time to spend on each size.",
)  # fmt: skip
@html_option
def bench(
    ref: str, target: str | None, seconds: float, html: Path | None, registry: Registry
) -> Answer:
    """Time the valid artifacts of REF side by side, here, at its typical sizes."""
    opened = opened_at(ref, registry)  # before the imports: a wrong name is said at once
    from pipeline.report import SPREAD, bench_page, describe_benchmark
    from runtime.loader import measured_session
    from stages.benchmark import benchmark, ladder
    from stages.reference import Reference
    from stages.reports import BenchmarkReport

    bundle = opened.bundle
    inputs = Reference.load(bundle.file(bundle.manifest.reference), opened.signature).inputs
    found: dict[str, BenchmarkReport] = {}
    for name in _targets_here(bundle, target):
        candidates = bundle.manifest.targets[name].candidates
        valid = [engine for engine, c in candidates.items() if c.status == "valid"]
        say(f"timing {', '.join(valid)} on {name}")
        sessions = {engine: measured_session(opened, name, engine) for engine in valid}
        takes = seconds * len(ladder(opened.signature))
        with steps() as show, show(f"timing {name}", takes):
            found[name] = benchmark(opened.signature, sessions, inputs, seconds=seconds)
    said = write_page(html, lambda: bench_page(ref, found))
    return Answer(
        {name: report.to_dict() for name, report in found.items()},
        [
            *(
                describe_benchmark(f"{name}: one call, {SPREAD}", each)
                for name, each in found.items()
            ),
            *said,
        ],
    )


@command()
def doctor(registry: Registry) -> Answer:
    """Say what this host can build and run, and what to do about the rest.

    Exits with 1 if something necessary is missing.
    """
    from pipeline.cli.doctor import examine

    findings = list(examine(registry))
    return Answer(
        [asdict(f) for f in findings],
        (f"{f.status:8} {f.what:14} {f.found}{f' — {f.cure}' if f.cure else ''}" for f in findings),
        passed=all(f.status != "missing" for f in findings),
    )


@command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True,
              help="0: any free port.")  # fmt: skip
def ui(host: str, port: int, registry: Registry) -> None:
    """Show the registry in a browser: models, versions, history, two versions side by side.

    It only reads. It serves until Ctrl-C. There is no password, so only this host can connect,
    unless --host says otherwise.
    """
    from pipeline.report import listening, serve_site

    registry.list()  # raises an error now if the registry cannot be reached
    with listening(host, port) as listener, suppress(KeyboardInterrupt):
        number = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{number}/"
        give(Answer({"url": url}, [f"{registry.shown} is at {url}; Ctrl-C ends it"]))
        serve_site(registry, host, listener)
