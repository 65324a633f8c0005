"""The commands that move aliases, and those about approvals, policies and the history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.answers import Answer, Number, command, print_answer, say
from pipeline.cli.completion import complete_names, complete_refs

if TYPE_CHECKING:
    from registry.history import Event
    from registry.promotion import Decision
    from registry.store import Registry


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option("--to", "alias", required=True, help="staging, production, or an alias of your own.")
@click.option(
    "--policy", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="A policy that must be met too, besides the config's gates and the registry's policies.",
)  # fmt: skip
@click.option(
    "--allow-unverified", multiple=True, metavar="TARGET",
    help="Accept this target although no device of its kind has run it, unless a policy names it.",
)  # fmt: skip
@click.option(
    "--max-slowdown", type=Number(0, min_open=True),
    help="Allow this ratio of times, new over old, instead of the config's.",
)  # fmt: skip
@click.option(
    "--override", multiple=True, metavar="GATE",
    help="Promote although this gate refuses; needs --reason. Not for digests and signature.",
)  # fmt: skip
@click.option(
    "--shadow", "shadows", multiple=True, type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE", help="Use also this record of a shadow, written by load(shadow_record=...).",
)  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
@click.option("--dry-run", is_flag=True, help="Ask every gate, show the answers, change nothing.")
def promote(
    ref: str,
    alias: str,
    policy: Path | None,
    allow_unverified: tuple[str, ...],
    max_slowdown: float | None,
    override: tuple[str, ...],
    shadows: tuple[Path, ...],
    reason: str,
    dry_run: bool,
    registry: Registry,
) -> Answer:
    """Move an alias to REF if every gate lets it pass.

    Gates: the digests are right; every required target is verified; a new validation here is within
    tolerance; the version is not slower than the one it replaces, timed side by side; and further
    gates of the config (latency, memory, size, metrics, a shadow) and of policies. A refusal names
    the gate and the number, exits with 1, and moves nothing.
    """
    registry.find(ref)  # before the imports, which take seconds: a wrong name is said at once
    from pipeline.promotion import promote as ask_gates
    from registry.promotion import PromotionRefused

    conditions: dict[str, Any] = {
        "allow_unverified": frozenset(allow_unverified),
        "max_slowdown": max_slowdown,
        "policy": policy,
        "override": frozenset(override),
        "shadows": shadows,
        "reason": reason,
        "say": say,
    }
    title = f"{ref} to @{alias}"
    if dry_run:
        assessment = ask_gates(registry, ref, alias, dry_run=True, **conditions)
        verdict = f"it would {'pass' if assessment.passed else 'be refused'}; nothing was changed"
        data = {"would_promote": assessment.passed}
        answer = _make_gates_answer(f"{title}, dry run", data, assessment.decisions, verdict)
        return replace(answer, passed=assessment.passed)
    try:
        promotion = ask_gates(registry, ref, alias, **conditions)
    except PromotionRefused as refused:
        print_answer(_make_gates_answer(title, {"promoted": None}, refused.decisions))
        raise
    version, replaced = promotion.version, promotion.replaced
    moved = {
        "promoted": version.ref,
        "alias": alias,
        "replaced": replaced.ref if replaced else None,
    }
    line = f"{version.ref} is now {version.name}@{alias}"
    return _make_gates_answer(title, moved, promotion.decisions, line)


def _make_gates_answer(
    title: str, data: Mapping[str, object], decisions: Sequence[Decision], *lines: str
) -> Answer:
    """Returns the answer about a promotion: a table of the gates' decisions with this title, and
    below it `lines`. For JSON the decisions are added to `data`."""
    from pipeline.report import describe_decisions

    decided = [{**asdict(decision), "code": decision.code} for decision in decisions]
    return Answer({**data, "decisions": decided}, [*describe_decisions(title, decisions), *lines])


@command()
@click.argument("ref", shell_complete=complete_refs)
@click.option(
    "--as", "name", metavar="NAME",
    help="The name that a policy asks for. Default: the user who runs this.",
)  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
def approve(ref: str, name: str | None, reason: str, registry: Registry) -> Answer:
    """Record that NAME wants REF in production, for policies that ask for approvals.

    The approval is for this version and its digest only. The name is not verified, so the record
    also has the user and the host.
    """
    from registry.stamp import user

    version = registry.find(ref)
    event = registry.approve(version, user() if name is None else name, reason)
    line = f"{version.ref} is approved by {event.approver} (recorded by {event.by})"
    return Answer(event.to_json(), [line])


@command()
@click.argument("name", shell_complete=complete_names)
@click.option("--reason", default="", metavar="TEXT", help="Why; it stays in the history.")
def rollback(name: str, reason: str, registry: Registry) -> Answer:
    """Put the previous version back into production."""
    version = registry.rollback(name, reason)
    return Answer({"production": version.ref}, [f"{version.ref} is {name}@production again"])


@command()
@click.argument("name", shell_complete=complete_names)
@click.option(
    "--at", "moment", metavar="TIME",
    help="Show the aliases at this time, such as 2026-11-01T12:00: in UTC, unless it ends in an "
    "offset such as +01:00.",
)  # fmt: skip
def history(name: str, moment: str | None, registry: Registry) -> Answer:
    """List what happened to NAME: promotions, rollbacks, refusals, approvals, builds, removals."""
    from pipeline.report import describe_history
    from registry.history import missing_numbers

    time = None if moment is None else _parse_moment(moment)
    events = registry.history(name)
    if missing := missing_numbers(events):
        say(f"{name}: events {', '.join(map(str, missing))} were removed from the registry")
    if time is not None:
        return _show_aliases_at(name, events, time)
    nothing = f"nothing has happened to {name} since it was registered"
    shown = [describe_history(name, events) if events else nothing]
    return Answer([event.to_json() for event in events], shown)


def _show_aliases_at(name: str, events: Sequence[Event], time: datetime) -> Answer:
    """Returns the answer that lists the aliases that a model had at a time, by the events of its
    history. "known" is false if the history does not go back so far."""
    from registry.history import aliases_at

    then = time.isoformat()
    numbers = aliases_at(events, time)
    aliases = {alias: f"{name}/{number}" for alias, number in sorted((numbers or {}).items())}
    lines = [f"{name}@{alias} was {ref} at {then}" for alias, ref in aliases.items()]
    if numbers is None:
        lines = [f"the history of {name} does not go back to {then}"]
    elif not aliases:
        lines = [f"no alias of {name} at {then}"]
    return Answer({"at": then, "known": numbers is not None, "aliases": aliases}, lines)


def _parse_moment(text: str) -> datetime:
    """Parse a time in ISO 8601 and convert it to UTC, which is also the zone of a time without an
    offset. Raises BadParameter."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time; write 2026-11-01T12:00 (UTC) or 2026-11-01T12:00+01:00",
            param_hint="--at",
        ) from None


@command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="NAME", help="For this model only. Default: for every model.")
def policy(file: Path | None, model: str | None, registry: Registry) -> Answer:
    """Show the registry's policies, or make FILE the registry's policy.

    Every promotion must meet these policies, whatever the config or an option says. If FILE holds
    an empty mapping, {}, the policy requires nothing.
    """
    if file is not None:
        from pipeline.config import load_policy

        read = load_policy(file)
        registry.set_policy(read.policy, model, read.reference.path if read.reference else None)
    models = [listed.name for listed in registry.list()] if model is None else [model]
    if model is not None:
        registry.versions(model)  # raises an error if there is no such model
    # The scope None has the policies for every model.
    policies = [stored for scope in (None, *models) for stored in registry.policies(scope)]
    rules_of = {p.origin: p.policy.model_dump(exclude_defaults=True) for p in policies}

    def describe() -> Iterator[str]:
        if not rules_of:
            yield "no policy: a promotion asks for what the version's config says"
        for origin, rules in rules_of.items():
            yield origin
            yield from (f"  {key}: {json.dumps(value)}" for key, value in rules.items())

    return Answer([{"origin": origin, **rules} for origin, rules in rules_of.items()], describe())
