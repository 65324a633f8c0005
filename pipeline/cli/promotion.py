"""The commands that move aliases, and those that say why they may and what was moved."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from pipeline.cli.options import (
    Number,
    json_option,
    registry_at,
    registry_option,
    say,
    tell,
    tell_json,
)


@click.command()
@click.argument("ref")
@click.option("--to", "alias", required=True, help="staging, production, or an alias of your own.")
@click.option(
    "--policy", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Ask for what this policy asks too, on top of the config's gates and the registry's.",
)  # fmt: skip
@click.option(
    "--allow-unverified", multiple=True, metavar="TARGET",
    help="Let this target pass although no device of its kind has run it; not one that a policy "
    "names.",
)  # fmt: skip
@click.option(
    "--max-slowdown", type=Number(0, min_open=True),
    help="Allow this ratio of times, new over old, instead of the config's.",
)  # fmt: skip
@click.option(
    "--override", multiple=True, metavar="GATE",
    help="Promote although this gate refuses; takes --reason. Not for digests and signature.",
)  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
@click.option("--dry-run", is_flag=True, help="Ask every gate, show the answers, change nothing.")
@registry_option
@json_option
def promote(
    ref: str,
    alias: str,
    policy: Path | None,
    allow_unverified: tuple[str, ...],
    max_slowdown: float | None,
    override: tuple[str, ...],
    reason: str,
    dry_run: bool,
    registry_uri: str | None,
    as_json: bool,
) -> None:
    """Move an alias to REF if every gate lets it pass.

    Gates: digests good; every required target verified; within tolerance when validated again here;
    not slower than the version it replaces, measured side by side; and what policies ask for. A
    refusal exits with 1, names the gate and the number, and moves nothing.
    """
    from pipeline.promotion import promote as ask_gates
    from pipeline.report import console, print_decisions
    from registry.errors import PromotionRefused

    asked: dict[str, Any] = {
        "allow_unverified": frozenset(allow_unverified),
        "max_slowdown": max_slowdown,
        "policy": policy,
        "override": frozenset(override),
        "reason": reason,
        "say": say,
    }
    registry, title = registry_at(registry_uri), f"{ref} to @{alias}"
    if dry_run:
        found = ask_gates(registry, ref, alias, dry_run=True, **asked)
        if as_json:
            answer = {"would_promote": found.passed, "decisions": _decisions(found.decisions)}
            tell_json(answer)
        else:
            print_decisions(console(), f"{title}, dry run", found.decisions)
            tell(f"it would {'pass' if found.passed else 'be refused'}; nothing was changed")
        if not found.passed:
            sys.exit(1)
        return
    try:
        done = ask_gates(registry, ref, alias, **asked)
    except PromotionRefused as refused:
        if as_json:
            tell_json({"promoted": None, "decisions": _decisions(refused.decisions)})
        else:
            print_decisions(console(), title, refused.decisions)
        raise
    if as_json:
        answer = {
            "promoted": done.version.ref,
            "alias": alias,
            "replaced": done.replaced.ref if done.replaced else None,
            "decisions": _decisions(done.decisions),
        }
        tell_json(answer)
        return
    print_decisions(console(), title, done.decisions)
    tell(f"{done.version.ref} is now {done.version.name}@{alias}")


def _decisions(decisions: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(decision) for decision in decisions]


@click.command()
@click.argument("ref")
@click.option(
    "--as", "name", metavar="NAME",
    help="The name that a policy asks for. Default: the user who runs this.",
)  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="What it rests on.")
@registry_option
@json_option
def approve(
    ref: str, name: str | None, reason: str, registry_uri: str | None, as_json: bool
) -> None:
    """Record that NAME wants REF in production, for policies that ask for approvals.

    It counts for this version and its digest. The name is not proven: the record also has the user
    and the host.
    """
    from registry.stamp import user

    registry = registry_at(registry_uri)
    version = registry.find(ref)
    event = registry.approve(version, user() if name is None else name, reason)
    if as_json:
        tell_json(event.to_json())
        return
    tell(f"{version.ref} is approved by {event.approver} (recorded by {event.by})")


@click.command()
@click.argument("name")
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
@registry_option
@json_option
def rollback(name: str, reason: str, registry_uri: str | None, as_json: bool) -> None:
    """Put the version before back into production."""
    version = registry_at(registry_uri).rollback(name, reason)
    if as_json:
        tell_json({"production": version.ref})
        return
    tell(f"{version.ref} is {name}@production again")


@click.command()
@click.argument("name")
@click.option(
    "--at", "moment", metavar="TIME",
    help="What each alias was then, as 2026-11-01T12:00: in UTC, unless it ends in an offset such "
    "as +01:00.",
)  # fmt: skip
@registry_option
@json_option
def history(name: str, moment: str | None, registry_uri: str | None, as_json: bool) -> None:
    """List what happened to NAME: promotions, rollbacks, refusals, approvals, builds, removals."""
    from pipeline.report import console, print_history
    from registry.history import aliases_at, gaps

    when = None if moment is None else _moment(moment)
    events = registry_at(registry_uri).history(name)
    if missing := gaps(events):
        say(f"{name}: events {', '.join(map(str, missing))} were removed from the registry")
    if when is not None:
        found = aliases_at(events, when)
        shown = {a: f"{name}/{n}" for a, n in sorted((found or {}).items())}
        if as_json:
            known = found is not None
            tell_json({"at": when.isoformat(), "known": known, "aliases": shown})
            return
        if found is None:
            tell(f"the history of {name} does not go back to {when.isoformat()}")
        elif not shown:
            tell(f"no alias of {name} at {when.isoformat()}")
        for alias, ref in shown.items():
            tell(f"{name}@{alias} was {ref} at {when.isoformat()}")
        return
    if as_json:
        tell_json([event.to_json() for event in events])
        return
    if not events:
        tell(f"nothing has happened to {name} since it was registered")
        return
    print_history(console(), name, events)


def _moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time; write 2026-11-01T12:00 (UTC) or 2026-11-01T12:00+01:00",
            param_hint="--at",
        ) from None


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="NAME", help="For this model only. Default: for every model.")
@registry_option
@json_option
def policy(file: Path | None, model: str | None, registry_uri: str | None, as_json: bool) -> None:
    """Show the registry's policies, or make FILE the registry's policy.

    Every promotion asks for what they ask, whatever the config or an option says. An empty mapping,
    {}, in FILE asks for nothing more.
    """
    registry = registry_at(registry_uri)
    if file is not None:
        from pipeline.config import load_policy

        asked = load_policy(file)
        registry.set_policy(asked.policy, model, asked.reference.path if asked.reference else None)
    models = [each.name for each in registry.list()] if model is None else [model]
    if model is not None:
        registry.versions(model)  # there has to be such a model
    kept = [each for scope in (None, *models) for each in registry.policies(scope)]
    found = list({each.origin: each for each in kept}.values())
    if as_json:
        shown = [
            {"origin": each.origin, **each.policy.model_dump(exclude_defaults=True)}
            for each in found
        ]
        tell_json(shown)
        return
    if not found:
        tell("no policy: a promotion asks for what the version's config says")
    for each in found:
        tell(each.origin)
        for key, value in each.policy.model_dump(exclude_defaults=True).items():
            tell(f"  {key}: {json.dumps(value)}")


@click.command()
@click.argument("ref")
@click.argument("folder", type=click.Path(path_type=Path))
@registry_option
@json_option
def pull(ref: str, folder: Path, registry_uri: str | None, as_json: bool) -> None:
    """Copy the bundle of REF into the new FOLDER, digests checked.

    The copy of a version that was promoted to production loads in production mode without a
    registry.
    """
    from pipeline.promotion import pull as pull_bundle

    version, bundle = pull_bundle(registry_at(registry_uri), ref, folder)
    if as_json:
        found = {"version": version.ref, "digest": bundle.digest, "folder": str(bundle.path)}
        tell_json(found)
        return
    tell(f"{version.ref} is in {folder}")
