"""The `build` command: one more target for a version that is registered."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.options import json_option, registry_at, registry_option, say, tell, tell_json


@click.command()
@click.argument("ref")
@click.option(
    "--target", required=True, metavar="TARGET",
    help="cpu/x86-64-v2, -v3, -v4, cpu/aarch64, cuda/sm_90, rocm/gfx90a …; this host must run it.",
)  # fmt: skip
@click.option(
    "--engine", "engines", multiple=True, metavar="ENGINE",
    help="Only this engine; may be repeated. Default: the engines of the version's config.",
)  # fmt: skip
@click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("pipeline-work"),
    show_default=True, help="Folder for the results of the stages, as for `run`.",
)  # fmt: skip
@registry_option
@json_option
def build(
    ref: str,
    target: str,
    engines: tuple[str, ...],
    work: Path,
    registry_uri: str | None,
    as_json: bool,
) -> None:
    """Build REF for one more TARGET, here, and add it to the version.

    From the portable program of the version, validated against the version's own reference. Its
    bundle and digest stay as they are; what was built lies beside it, with a seal of its own.
    """
    from pipeline.building import build as build_version
    from pipeline.report import print_target

    added = build_version(registry_at(registry_uri), ref, target, engines, work, say)
    record = added.annex.record
    if as_json:
        answer = {
            "version": added.version.ref,
            "digest": added.version.digest,
            "target": added.target,
            "annex": added.annex.digest,
            "status": record.record.status,
            "chosen": record.record.chosen,
            "notes": record.notes,
        }
        tell_json(answer)
        return
    print_target(added.bundle, added.target)
    tell(f"{added.version.ref} has {added.target} now ({record.record.choice()})")
    if added.version.promotion("production") is not None:
        tell(f"next: pipeline promote {added.version.ref} --to production lets it into production")
