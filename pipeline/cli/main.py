"""The `pipeline` command."""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

import click

from pipeline.cli.build import build
from pipeline.cli.cache import cache
from pipeline.cli.housekeeping import diff, export_command, gc, import_command, push, rm
from pipeline.cli.options import (
    Number,
    json_option,
    opened_at,
    registry_at,
    registry_option,
    say,
    tell,
    tell_json,
)
from pipeline.cli.promotion import approve, history, policy, promote, pull, rollback
from pipeline.cli.serving import deploy, serve
from pipeline.cli.signing import sign, verify
from soa.errors import SoaPipelineError

_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Group(click.Group):
    """Turns a user's mistake into one line on stderr, and exit status 1, or 2 for the usage."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            _refuse(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            _refuse(error.ctx or ctx, error)
        except SoaPipelineError as error:
            for line in f"pipeline: {error}".split("\n"):  # a config's mistakes, each on a line
                say(line)
            ctx.exit(1)
        except OSError as error:
            say(f"pipeline: {_of_the_disk(error)}")
            ctx.exit(1)


def _refuse(ctx: click.Context, error: click.UsageError) -> NoReturn:
    said, command = error.format_message().rstrip("."), ctx.command_path
    say(f"{command}: {said}; see {command} --help")
    ctx.exit(error.exit_code)


def _of_the_disk(error: OSError) -> str:
    """What is wrong with the user's disk or a path; raises an error that is ours."""
    if error.errno in _FULL_DISK:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: free some space and run again"
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    raise error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="soa-pipeline", prog_name="pipeline")
def main() -> None:
    """Compile trained torch models so that they run right, without a copy, on SoA memory.

    \b
    The usual way:
      pipeline run configs/demo.yaml            build, validate, register a version
      pipeline promote NAME/1 --to production   let it through the gates
      python: pipeline.load("NAME@production")  run it on your own columns

    A REF is NAME (its latest version), NAME/3, NAME@production, or the path of a bundle's folder
    with a slash in it, as ./FOLDER.
    """
    # Behind a server MLflow prints a link whenever a run ends; standard output is for answers.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


@main.command()
@click.argument("config", type=click.Path(dir_okay=False))
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("pipeline-work"),
    show_default=True, help="Folder for the results of the stages; keep it, and re-runs are quick.",
)  # fmt: skip
@registry_option
@json_option
def run(config: str, work: Path, registry_uri: str | None, as_json: bool) -> None:
    """Build, validate, package and register the model that CONFIG describes.

    An unchanged re-run does no work. One interrupted by Ctrl-C goes on where it stopped.
    """
    from pipeline.building import run as run_pipeline

    with redirect_stdout(sys.stderr):  # the user's own factories may print
        result = run_pipeline(config, registry_at(registry_uri), work, say)
    if as_json:
        tell_json(
            {
                "version": result.version.ref,
                "digest": result.bundle.digest,
                "bundle": str(result.bundle.path),
                "worked": list(result.worked),
                "targets": {
                    t: {"status": r.status, "chosen": r.chosen}
                    for t, r in result.bundle.manifest.targets.items()
                },
            }
        )
        return
    from pipeline.report import print_reports

    if not result.worked:
        tell(f"{result.version.ref} is up to date: nothing to do ({result.seconds:.1f} s)")
        return
    print_reports(result.bundle)
    tell(f"registered {result.version.ref} in {result.seconds:.1f} s")
    tell(f"next: pipeline promote {result.version.ref} --to production")


@main.command("ls")
@click.argument("name", required=False)
@registry_option
@json_option
def ls(name: str | None, registry_uri: str | None, as_json: bool) -> None:
    """List all models with their versions, or the versions of NAME."""
    registry = registry_at(registry_uri)
    names = [name] if name else [model.name for model in registry.list()]
    models = {each: registry.versions(each) for each in names}
    if as_json:
        tell_json({k: [_version(v) for v in vs] for k, vs in models.items()})
        return
    if not any(models.values()):
        empty = "the registry is empty: fill it with `pipeline run CONFIG`"
        tell(f"{name} has no version" if name else empty)
        return
    from pipeline.report import console, print_versions

    print_versions(console(), models)


_COMMANDS = (
    build, promote, approve, rollback, history, policy, pull, push, cache, rm, gc, diff,
    export_command, import_command, sign, verify, deploy, serve,
)  # fmt: skip
for _command in _COMMANDS:
    main.add_command(_command)


def _version(version: Any) -> dict[str, Any]:
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


@main.command()
@click.argument("ref")
@registry_option
@json_option
def show(ref: str, registry_uri: str | None, as_json: bool) -> None:
    """Show one version: blocks, targets, candidates, deviations, times, provenance."""
    from dataclasses import asdict

    from stages.reference import proof_of

    opened = opened_at(ref, registry_uri)
    bundle, version = opened.bundle, opened.version
    if as_json:
        data = json.loads(bundle.manifest.to_json())
        described = _version(version) if version else None
        annexes = {
            target: {"digest": annex.digest, **json.loads(annex.record.to_json())}
            for target, annex in bundle.annexes.items()
        }
        counts, notes = proof_of(bundle)
        proof = {"outputs": [asdict(one) for one in counts], "notes": notes}
        shown = {"version": described, "manifest": data, "annexes": annexes, "reference": proof}
        tell_json(shown)
        return
    from pipeline.report import console, print_bundle

    print_bundle(console(), bundle, version)


@main.command()
@click.argument("ref")
@click.option("--target", help="Only this target. Default: all that this host runs.")
@registry_option
@json_option
def validate(ref: str, target: str | None, registry_uri: str | None, as_json: bool) -> None:
    """Run every artifact of REF against its reference again, here.

    Exits with 1 if an artifact chosen for a target is no longer valid.
    """
    from pipeline.promotion import revalidate
    from pipeline.report import console, print_reference, print_validation

    opened = opened_at(ref, registry_uri)
    bundle = opened.bundle
    reports: dict[str, list[Any]] = {}
    for name in _targets_here(bundle, target):
        record = bundle.manifest.targets[name]
        reports[name] = [revalidate(opened, name, engine, say) for engine in record.candidates]
    if as_json:
        found = {name: [r.to_dict() for r in each] for name, each in reports.items()}
        tell_json(found)
    else:
        print_reference(console(), bundle)
        for name, each in reports.items():
            print_validation(console(), f"validation on {name}", each)
    chosen = {name: bundle.manifest.targets[name].engines() for name in reports}
    if any(
        r.engine in chosen[name] and not r.valid for name, each in reports.items() for r in each
    ):
        sys.exit(1)


def _targets_here(bundle: Any, wanted: str | None) -> list[str]:
    from engines.errors import TargetError
    from engines.target import Target, check_host_runs
    from pipeline.promotion import runnable

    have = list(bundle.manifest.targets)
    if wanted is None:
        found = runnable(have)
        if not found:
            raise TargetError(f"this host runs none of the version's targets: {', '.join(have)}")
        return found
    target = str(Target.parse(wanted))
    if target not in have:
        raise TargetError(f"the version has no target {target}; it has: {', '.join(have)}")
    check_host_runs(Target.parse(target))
    return [target]


@main.command()
@click.argument("ref")
@click.option("--target", help="Only this target. Default: all that this host runs.")
@click.option(
    "--seconds", type=Number(0, min_open=True), default=1.0, show_default=True,
    help="Time to spend on each size.",
)  # fmt: skip
@registry_option
@json_option
def bench(
    ref: str, target: str | None, seconds: float, registry_uri: str | None, as_json: bool
) -> None:
    """Time the valid artifacts of REF side by side, here, at its typical sizes."""
    from pipeline.report import console, print_benchmark
    from runtime.loader import measured_session
    from stages.benchmark import benchmark
    from stages.reference import Reference

    opened = opened_at(ref, registry_uri)
    bundle = opened.bundle
    inputs = Reference.load(bundle.file(bundle.manifest.reference), opened.signature).inputs
    found: dict[str, Any] = {}
    for name in _targets_here(bundle, target):
        valid = [
            e for e, c in bundle.manifest.targets[name].candidates.items() if c.status == "valid"
        ]
        say(f"timing {', '.join(valid)} on {name}")
        sessions = {e: measured_session(opened, name, e) for e in valid}
        found[name] = benchmark(opened.signature, sessions, inputs, seconds=seconds)
    if as_json:
        tell_json({name: r.to_dict() for name, r in found.items()})
        return
    for name, report in found.items():
        print_benchmark(console(), f"one call on {name}: median [p05 … p95], one thread", report)


@main.command()
@registry_option
@json_option
def doctor(registry_uri: str | None, as_json: bool) -> None:
    """Say what this host can build and run, and what to do about the rest.

    Exits with 1 if something needed is missing.
    """
    from dataclasses import asdict

    from pipeline.doctor import examine

    findings = examine(registry_at(registry_uri))
    if as_json:
        tell_json([asdict(f) for f in findings])
    else:
        for f in findings:
            tell(f"{f.status:8} {f.what:14} {f.found}" + (f" — {f.cure}" if f.cure else ""))
    if any(f.status == "missing" for f in findings):
        sys.exit(1)
