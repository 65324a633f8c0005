"""The command that checks a version on this host, and its parts by their names of before 1.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import (
    Answer,
    Number,
    command,
    html_option,
    open_ref,
    say,
    show_steps,
    write_page,
)
from pipeline.cli.completion import complete_refs

if TYPE_CHECKING:
    from pipeline.report import Part
    from registry.bundle import Bundle
    from registry.store import Registry
    from registry.trust import Trusted
    from runtime.opening import Opened
    from stages.reports import ValidationReport

_Option = Callable[[Any], Any]
_target_option: _Option = click.option(
    "--target", help="Only this target. Default: all targets that this host runs."
)
_seconds_option: _Option = click.option(
    "--seconds", type=Number(0, min_open=True), default=1.0, show_default=True,
    help="Time to spend on each size.",
)  # fmt: skip
_key_option: _Option = click.option(
    "--key", "--root", "keys", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="Public key, or root certificate, in PEM format, or a folder of them; may be repeated. "
    "Default: $PIPELINE_TRUSTED_KEYS.",
)  # fmt: skip


@command()
@click.argument("ref", shell_complete=complete_refs)
@_target_option
@_key_option
@click.option("--times", is_flag=True, help="Also time the valid artifacts side by side.")
@_seconds_option
@click.option(
    "--operators", is_flag=True,
    help="Also show how much of a call of `lanes` each line of the model takes.",
)  # fmt: skip
@html_option
def check(
    ref: str,
    target: str | None,
    keys: tuple[Path, ...],
    times: bool,
    seconds: float,
    operators: bool,
    html: Path | None,
    registry: Registry,
) -> Answer:
    """Check REF here: its digests, its signature, and its artifacts against the reference.

    Every file's digest is computed. If keys are trusted, one of them must have signed REF; all keys
    that a trusted root certificate certifies are trusted too. Then each artifact for this host
    computes the reference again. Exits with 1 if one that was chosen is no longer valid, or if
    there is none for this host.
    """
    if html is not None and times == operators:
        raise click.UsageError("--html goes with --times or with --operators, with one of them")
    trusted = _find_trusted_keys(keys)
    opened = open_ref(ref, registry)
    answers = {"signature": _check_signature(opened, ref, trusted, registry)} if trusted else {}
    if target is None and not _list_runnable(opened.bundle):
        answers["artifacts"] = Answer({}, [_describe_no_target(opened.bundle)], passed=False)
    else:
        answers["artifacts"] = _check_artifacts(opened, target)
        if times:
            answers["times"] = _time_artifacts(opened, ref, target, seconds, html)
    if operators:
        answers["operators"] = _time_operators(opened, ref, html)
    return Answer(
        {"digest": opened.bundle.digest, **{name: part.data for name, part in answers.items()}},
        chain(["every digest is right"], *(part.shown for part in answers.values())),
        passed=all(part.passed for part in answers.values()),
    )


@command()
@click.argument("ref", shell_complete=complete_refs)
@_target_option
def validate(ref: str, target: str | None, registry: Registry) -> Answer:
    """Run every artifact of REF against its reference again, here."""
    return _check_artifacts(open_ref(ref, registry), target)


@command()
@click.argument("ref", shell_complete=complete_refs)
@_target_option
@_seconds_option
@html_option
def bench(
    ref: str, target: str | None, seconds: float, html: Path | None, registry: Registry
) -> Answer:
    """Time the valid artifacts of REF side by side, here, at its typical sizes."""
    return _time_artifacts(open_ref(ref, registry), ref, target, seconds, html)


@command()
@click.argument("ref", shell_complete=complete_refs)
@_key_option
def verify(ref: str, keys: tuple[Path, ...], registry: Registry) -> Answer:
    """Check every digest of REF, and that a trusted key signed it."""
    trusted = _find_trusted_keys(keys)
    if trusted is None:
        raise click.UsageError("whose signature? give --key FILE or set PIPELINE_TRUSTED_KEYS")
    return _check_signature(open_ref(ref, registry), ref, trusted, registry)


def _find_trusted_keys(keys: tuple[Path, ...]) -> tuple[Trusted, ...] | None:
    """Returns the keys in these files and folders. Without files, returns the keys that the host
    trusts, or None if it names none."""
    from registry.trust import host_keys, trusted_keys

    return trusted_keys(keys) if keys else host_keys()


def _check_signature(
    opened: Opened, ref: str, trusted: tuple[Trusted, ...], registry: Registry
) -> Answer:
    """Verify the signature of a version or bundle. Returns an answer that names the key, or the
    root that certified it. Raises TrustError if it was signed by no trusted key."""
    from registry.trust import require_signature

    if opened.version is None:
        signer = require_signature(opened.bundle, trusted)
    else:
        signer = registry.require_signature(opened.version, opened.bundle, trusted)
    name = opened.version.ref if opened.version else ref
    data = {"digest": opened.bundle.digest}
    if signer.is_root:
        data |= {"root": signer.fingerprint, "signer": signer.signer}
        return Answer(data, [f"{name} is signed by {signer.signer}, certified by {signer}"])
    line = f"{name} is signed by {signer.fingerprint} ({signer.origin})"
    return Answer(data | {"key": signer.fingerprint}, [line])


def _check_artifacts(opened: Opened, target: str | None) -> Answer:
    """Run the artifacts for a target, or for all targets that this host runs, and compare their
    answers with the reference. The returned answer does not pass if an artifact that was chosen for
    its target is not valid here. Raises TargetError."""
    from pipeline.promotion import revalidate
    from pipeline.report import describe_reference, describe_validation

    targets = opened.bundle.manifest.targets
    names = _choose_targets(opened.bundle, target)
    work = [(name, engine) for name in names for engine in targets[name].candidates]
    reports: dict[str, list[ValidationReport]] = {name: [] for name in names}
    with show_steps() as show:
        for i, (name, engine) in enumerate(work, start=1):
            with show(f"{i} of {len(work)}: {engine} on {name}", None):
                reports[name].append(revalidate(opened, name, engine, say))

    def describe() -> Iterator[Part]:
        yield from describe_reference(opened.bundle)
        for name, of_target in reports.items():
            yield from describe_validation(f"validation on {name}", of_target)
            for report in of_target:
                recorded_bits = targets[name].candidates[report.engine].bits
                if recorded_bits and report.bits:
                    bits = "the same bits as" if report.bits == recorded_bits else "other bits than"
                    yield f"{report.engine} on {name}: {bits} where it was built"

    valid = all(
        report.valid
        for name, of_target in reports.items()
        for report in of_target
        if report.engine in targets[name].engines()
    )
    data = {name: [report.to_dict() for report in of_target] for name, of_target in reports.items()}
    return Answer(data, describe(), passed=valid)


def _time_operators(opened: Opened, ref: str, html: Path | None) -> Answer:
    """Build the engine `lanes` with a counter for each step, and measure the share of each line of
    the model in the time of a call. Returns the answer with the table; writes the page `html`."""
    from pipeline.report import new_table, operators_page
    from soa.text import number
    from stages.reference import Reference, label
    from stages.timing import benchmark_cases, ladder, time_operators

    bundle, signature = opened.bundle, opened.signature
    inputs = Reference.load(bundle.file(bundle.manifest.reference), signature).inputs
    cases = [ladder(signature)[0], *benchmark_cases(signature)]
    say("building lanes with a counter for each step")
    with show_steps() as show, show("timing operators", None):
        times = time_operators(bundle.file(bundle.manifest.program), signature, inputs, cases)
    table = new_table("shares of a call of lanes", "operator", "line", *map(label, cases))
    for time in times:
        shares = [f"{number(100 * share, 2)} %" for share in time.shares.values()]
        table.add_row(time.operator, time.line, *shares)
    page_lines = write_page(html, lambda: operators_page(ref, table, times))
    return Answer([vars(time) for time in times], [table, *page_lines])


def _time_artifacts(
    opened: Opened, ref: str, target: str | None, seconds: float, html: Path | None
) -> Answer:
    """Time the valid artifacts for a target, or for all that this host runs, side by side,
    `seconds` for each number of rows. Returns the answer with the tables; writes the page
    `html`."""
    from pipeline.report import SPREAD, bench_page, describe_benchmark
    from runtime.loader import open_measured_session
    from stages.reference import Reference
    from stages.reports import BenchmarkReport
    from stages.timing import benchmark, ladder

    bundle = opened.bundle
    inputs = Reference.load(bundle.file(bundle.manifest.reference), opened.signature).inputs
    reports: dict[str, BenchmarkReport] = {}
    for name in _choose_targets(bundle, target):
        candidates = bundle.manifest.targets[name].candidates
        valid = [engine for engine, c in candidates.items() if c.status == "valid"]
        say(f"timing {', '.join(valid)} on {name}")
        sessions = {engine: open_measured_session(opened, name, engine) for engine in valid}
        estimate = seconds * len(ladder(opened.signature))
        with show_steps() as show, show(f"timing {name}", estimate):
            reports[name] = benchmark(opened.signature, sessions, inputs, seconds=seconds)
    page_lines = write_page(html, lambda: bench_page(ref, reports))
    titles = (f"{name}: one call, {SPREAD}" for name in reports)
    tables = map(describe_benchmark, titles, reports.values())
    data = {name: report.to_dict() for name, report in reports.items()}
    return Answer(data, [*tables, *page_lines])


def _choose_targets(bundle: Bundle, wanted: str | None) -> list[str]:
    """Returns the target `wanted`, in full; if it is None, all targets that this host runs. Raises
    TargetError if the bundle has no such target, or if this host runs none."""
    from engines.errors import TargetError
    from engines.target import Target, check_torch_runs

    if wanted is None:
        runnable = _list_runnable(bundle)
        if not runnable:
            raise TargetError(_describe_no_target(bundle))
        return runnable
    built = list(bundle.manifest.targets)
    parsed = Target.parse(wanted)
    target = str(parsed)
    if target not in built:
        raise TargetError(f"the version has no target {target}; it has: {', '.join(built)}")
    check_torch_runs(parsed)
    return [target]


def _list_runnable(bundle: Bundle) -> list[str]:
    """Returns the targets of a version that this host runs."""
    from pipeline.promotion import runnable

    return runnable(list(bundle.manifest.targets))


def _describe_no_target(bundle: Bundle) -> str:
    """Returns the message for a version of which this host runs no target."""
    return f"this host runs none of the version's targets: {', '.join(bundle.manifest.targets)}"
