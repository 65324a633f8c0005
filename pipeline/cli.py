"""The `pipeline` command."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import click

from soa.errors import SoaPipelineError

F = TypeVar("F", bound=Callable[..., Any])
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


class _Group(click.Group):
    """Turns a user's mistake into one line on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SoaPipelineError as error:
            click.echo(f"pipeline: {error}", err=True)
            ctx.exit(1)
        except OSError as error:
            click.echo(f"pipeline: {_of_the_disk(error)}", err=True)
            ctx.exit(1)


def _of_the_disk(error: OSError) -> str:
    """What is wrong with the user's disk or folder; raises an error that is ours."""
    if error.errno in _FULL_DISK:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: free some space and run again"
    if error.errno in _NOT_ALLOWED and error.filename:
        return f"{error.filename}: {error.strerror}"
    raise error


def _registry_option(command: F) -> F:
    return click.option(
        "--registry",
        "registry_uri",
        metavar="URI",
        help="MLflow tracking URI of the registry: sqlite:///FILE, http://HOST:PORT, … "
        "Default: $PIPELINE_REGISTRY, else an SQLite file in ./pipeline-registry.",
    )(command)


def _json_option(command: F) -> F:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print the result as JSON, for machines."
    )(command)


def _registry(uri: str | None) -> Any:
    from registry.store import Registry

    return Registry(uri)


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="soa-pipeline", prog_name="pipeline")
def main() -> None:
    """Compile trained torch models so that they run right, without a copy, on SoA memory.

    \b
    The usual way:
      pipeline run configs/demo.yaml            build, validate, register a version
      pipeline promote NAME/1 --to production   let it through the gates
      python: pipeline.load("NAME@production")  run it on your own columns

    A REF is NAME (its latest version), NAME/3, NAME@production, or the folder of a bundle.
    """


@main.command()
@click.argument("config", type=click.Path(dir_okay=False))
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("pipeline-work"),
    show_default=True, help="Folder for the results of the stages; keep it, and re-runs are quick.",
)  # fmt: skip
@_registry_option
@_json_option
def run(config: str, work: Path, registry_uri: str | None, as_json: bool) -> None:
    """Build, validate, package and register the model that CONFIG describes.

    An unchanged re-run does no work. One interrupted by Ctrl-C goes on where it stopped.
    """
    from pipeline.runner import run as run_pipeline

    with redirect_stdout(sys.stderr):  # the user's own factories may print
        result = run_pipeline(config, _registry(registry_uri), work, _say)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "version": result.version.ref,
                    "digest": result.bundle.digest,
                    "bundle": str(result.bundle.path),
                    "worked": list(result.worked),
                    "targets": {
                        t: {"status": r.status, "chosen": r.chosen}
                        for t, r in result.bundle.manifest.targets.items()
                    },
                },
                indent=1,
            )
        )
        return
    from pipeline.report import print_reports

    if not result.worked:
        click.echo(f"{result.version.ref} is up to date: nothing to do ({result.seconds:.1f} s)")
        return
    print_reports(result.bundle)
    click.echo(f"registered {result.version.ref} in {result.seconds:.1f} s")
    click.echo(f"next: pipeline promote {result.version.ref} --to production")


@main.command("ls")
@click.argument("name", required=False)
@_registry_option
@_json_option
def ls(name: str | None, registry_uri: str | None, as_json: bool) -> None:
    """List all models with their versions, or the versions of NAME."""
    registry = _registry(registry_uri)
    names = [name] if name else [model.name for model in registry.list()]
    models = {each: registry.versions(each) for each in names}
    if as_json:
        click.echo(json.dumps({k: [_version(v) for v in vs] for k, vs in models.items()}, indent=1))
        return
    if not any(models.values()):
        click.echo("the registry is empty: fill it with `pipeline run CONFIG`")
        return
    from pipeline.report import console, print_versions

    print_versions(console(), models)


def _version(version: Any) -> dict[str, Any]:
    return {
        "version": version.ref,
        "digest": version.digest,
        "aliases": list(version.aliases),
        "targets": dict(version.targets),
        "chosen": dict(version.chosen),
        "created": version.created.isoformat(),
        "source": version.source,
    }


@main.command()
@click.argument("ref")
@_registry_option
@_json_option
def show(ref: str, registry_uri: str | None, as_json: bool) -> None:
    """Show one version: blocks, targets, candidates, deviations, times, provenance."""
    from runtime.loader import open_bundle

    bundle, version = open_bundle(ref, _registry(registry_uri))
    if as_json:
        data = json.loads(bundle.manifest.to_json())
        described = _version(version) if version else None
        click.echo(json.dumps({"version": described, "manifest": data}, indent=1))
        return
    from pipeline.report import console, print_bundle

    print_bundle(console(), bundle, version)


@main.command()
@click.argument("ref")
@click.option("--target", help="Only this target. Default: all that this host runs.")
@_registry_option
@_json_option
def validate(ref: str, target: str | None, registry_uri: str | None, as_json: bool) -> None:
    """Run every artifact of REF against its reference again, here.

    Exits with 1 if the artifact chosen for a target is no longer valid.
    """
    from pipeline.promote import revalidate
    from pipeline.report import console, print_validation
    from runtime.loader import open_bundle

    bundle, _ = open_bundle(ref, _registry(registry_uri))
    reports: dict[str, list[Any]] = {}
    for name in _targets_here(bundle, target):
        record = bundle.manifest.targets[name]
        reports[name] = [revalidate(bundle, name, engine, _say) for engine in record.candidates]
    if as_json:
        found = {name: [r.to_dict() for r in each] for name, each in reports.items()}
        click.echo(json.dumps(found, indent=1))
    else:
        for name, each in reports.items():
            print_validation(console(), f"validation on {name}", each)
    chosen = {name: bundle.manifest.targets[name].chosen for name in reports}
    if any(
        r.engine == chosen[name] and not r.valid for name, each in reports.items() for r in each
    ):
        sys.exit(1)


def _targets_here(bundle: Any, wanted: str | None) -> list[str]:
    from engines.errors import TargetError
    from engines.target import Target, check_host_runs
    from pipeline.promote import runnable

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
@click.option("--seconds", default=1.0, show_default=True, help="Time to spend on each size.")
@_registry_option
@_json_option
def bench(
    ref: str, target: str | None, seconds: float, registry_uri: str | None, as_json: bool
) -> None:
    """Time the valid artifacts of REF side by side, here, at its typical sizes."""
    import torch

    from pipeline.report import console, print_benchmark
    from runtime.loader import open_artifact, open_bundle
    from runtime.session import Session
    from soa.signature import Signature
    from stages.benchmark import benchmark
    from stages.reference import Reference

    bundle, _ = open_bundle(ref, _registry(registry_uri))
    signature = Signature.from_dict(bundle.manifest.signature)
    inputs = Reference.load(bundle.file(bundle.manifest.reference)).inputs
    found: dict[str, Any] = {}
    for name in _targets_here(bundle, target):
        valid = [
            e for e, c in bundle.manifest.targets[name].candidates.items() if c.status == "valid"
        ]
        _say(f"timing {', '.join(valid)} on {name}")
        sessions = {
            e: Session(signature, open_artifact(bundle, name, e, torch.device("cpu")))
            for e in valid
        }
        found[name] = benchmark(signature, sessions, inputs, seconds=seconds)
    if as_json:
        click.echo(json.dumps({name: r.to_dict() for name, r in found.items()}, indent=1))
        return
    for name, report in found.items():
        print_benchmark(console(), f"one call on {name}: median [p05 … p95], one thread", report)


@main.command()
@click.argument("ref")
@click.option("--to", "alias", required=True, help="staging, production, or an alias of your own.")
@click.option(
    "--allow-unverified", multiple=True, metavar="TARGET",
    help="Let this target pass although no device of its kind has run it.",
)  # fmt: skip
@click.option(
    "--max-slowdown", type=float,
    help="Allow this ratio of times, new over old, instead of the config's.",
)  # fmt: skip
@_registry_option
@_json_option
def promote(
    ref: str,
    alias: str,
    allow_unverified: tuple[str, ...],
    max_slowdown: float | None,
    registry_uri: str | None,
    as_json: bool,
) -> None:
    """Move an alias to REF if every gate lets it pass.

    Gates: digests good; every required target verified; within tolerance when validated again here;
    not slower than the version it replaces, measured side by side. A refusal exits with 1, names
    the gate and the number, and changes nothing.
    """
    from pipeline.promote import promote as ask_gates
    from pipeline.report import console, print_decisions
    from registry.errors import PromotionRefused

    try:
        done = ask_gates(
            _registry(registry_uri), ref, alias,
            allow_unverified=frozenset(allow_unverified), max_slowdown=max_slowdown, say=_say,
        )  # fmt: skip
    except PromotionRefused as refused:
        if as_json:
            click.echo(json.dumps({"promoted": None, "decisions": _decisions(refused.decisions)}))
        else:
            print_decisions(console(), f"{ref} to @{alias}", refused.decisions)
        raise
    if as_json:
        found = {
            "promoted": done.version.ref,
            "alias": alias,
            "replaced": done.replaced.ref if done.replaced else None,
            "decisions": _decisions(done.decisions),
        }
        click.echo(json.dumps(found, indent=1))
        return
    print_decisions(console(), f"{ref} to @{alias}", done.decisions)
    click.echo(f"{done.version.ref} is now {done.version.name}@{alias}")


def _decisions(decisions: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(decision) for decision in decisions]


@main.command()
@click.argument("name")
@_registry_option
@_json_option
def rollback(name: str, registry_uri: str | None, as_json: bool) -> None:
    """Put the version before back into production."""
    version = _registry(registry_uri).rollback(name)
    if as_json:
        click.echo(json.dumps({"production": version.ref}))
        return
    click.echo(f"{version.ref} is {name}@production again")


@main.command()
@click.argument("ref")
@click.argument("folder", type=click.Path(path_type=Path))
@_registry_option
@_json_option
def pull(ref: str, folder: Path, registry_uri: str | None, as_json: bool) -> None:
    """Copy the bundle of REF into the new FOLDER, digests checked.

    The copy of a version that was promoted to production loads in production mode without a
    registry.
    """
    from pipeline.pull import pull as pull_bundle

    version, bundle = pull_bundle(_registry(registry_uri), ref, folder)
    if as_json:
        click.echo(
            json.dumps(
                {"version": version.ref, "digest": bundle.digest, "folder": str(bundle.path)}
            )
        )
        return
    click.echo(f"{version.ref} is in {folder}")


@main.command()
@_registry_option
@_json_option
def doctor(registry_uri: str | None, as_json: bool) -> None:
    """Say what this host can build and run, and what to do about the rest.

    Exits with 1 if something needed is missing.
    """
    from dataclasses import asdict

    from pipeline.doctor import examine

    findings = examine(_registry(registry_uri))
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        for f in findings:
            click.echo(f"{f.status:8} {f.what:14} {f.found}" + (f" — {f.cure}" if f.cure else ""))
    if any(f.status == "missing" for f in findings):
        sys.exit(1)
