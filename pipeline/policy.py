"""A policy from its YAML file; a mistake is a line as in a config."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from engines.errors import TargetError
from engines.target import Target
from pipeline.config_wording import Problem, reworded
from pipeline.errors import ConfigError
from pipeline.yaml_lines import dotted, read_yaml
from registry.policy import Asked, Policy, ReferenceFile
from registry.policy_store import digest_of


def load_policy(source: Path) -> Asked:
    """Read a policy; ConfigError lists every mistake as `file:line: key: found; allowed`.

    `reference` is relative to the policy's folder.
    """
    document = read_yaml(source)
    try:
        policy = Policy.model_validate(document.data)
    except ValidationError as error:
        problems = reworded(error, Policy, document.data)
    else:
        problems = _targets(policy)
        if policy.reference is not None and not (source.parent / policy.reference).is_file():
            problems.append((("reference",), f"{policy.reference} does not exist, or is no file"))
    if problems:
        lines = sorted((document.line(at), dotted(at), text) for at, text in problems)
        raise ConfigError(
            *(f"{source}:{line}: {key or 'policy'}: {text}" for line, key, text in lines)
        )
    reference = None
    if policy.reference is not None:
        path = (source.parent / policy.reference).resolve()
        reference = ReferenceFile(path, digest_of(path))
    return Asked(policy, f"{source.name} ({digest_of(source)[:12]})", reference)


def _targets(policy: Policy) -> list[Problem]:
    """`cpu` is another target on another host: a policy says which it means."""
    problems: list[Problem] = []
    for i, name in enumerate(policy.targets or ()):
        try:
            full = str(Target.parse(name))
        except TargetError as error:
            problems.append((("targets", i), str(error)))
            continue
        if full != name:
            problems.append((("targets", i), f"found {name!r}; write it in full, as {full!r}"))
    return problems
