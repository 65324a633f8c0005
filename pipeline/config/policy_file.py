"""Reads a promotion policy from a YAML file; lists mistakes with their lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from engines.errors import TargetError
from engines.target import Target
from pipeline.config.mistakes import validate
from pipeline.config.yaml_lines import Problem, read_yaml
from registry.errors import TrustError
from registry.promotion import Policy, ReferenceFile, SourcedPolicy
from registry.trust import read_trusted
from soa.files import digest_of


def load_policy(source: Path) -> SourcedPolicy:
    """Read a policy file. If it has mistakes, raises a ConfigError that lists all of them, a line
    for each: `file:line: key: found; allowed`.

    `reference` and the files under `signed_by` are relative to the policy's folder. In the result,
    `signed_by` holds the keys themselves instead of the names of their files.
    """
    document = read_yaml(source)
    policy = validate(document, Policy, "policy")
    problems = list(_check_targets(policy.targets or ()))
    keys: list[str] = []
    for i, name in enumerate(policy.signed_by or ()):
        try:
            keys.append(read_trusted(source.parent / name).pem)
        except TrustError as error:
            problems.append((("signed_by", i), str(error)))
    if policy.reference is not None and not (source.parent / policy.reference).is_file():
        problems.append((("reference",), f"{policy.reference} does not exist, or is no file"))
    document.refuse(problems, "policy")
    reference = None
    if policy.reference is not None:
        path = (source.parent / policy.reference).resolve()
        reference = ReferenceFile(path, digest_of(path))
    policy = policy.model_copy(update={"signed_by": tuple(keys) or None})
    return SourcedPolicy(policy, f"{source.name} ({digest_of(source)[:12]})", reference)


def _check_targets(targets: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem for each name that is no target, or is not written in full."""
    for i, name in enumerate(targets):
        try:
            full_name = str(Target.parse(name))
        except TargetError as error:
            yield ("targets", i), str(error)
            continue
        if full_name != name:  # `cpu` can mean another target on another host
            yield ("targets", i), f"found {name!r}; write it in full, as {full_name!r}"
