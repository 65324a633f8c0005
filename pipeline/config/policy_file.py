"""A policy from its YAML file; a mistake is a line as in a config."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from engines.errors import TargetError
from engines.target import Target
from pipeline.config.wording import Problem, reworded
from pipeline.config.yaml_lines import dotted, read_yaml
from pipeline.errors import ConfigError
from registry.errors import TrustError
from registry.history import digest_of
from registry.promotion import Asked, Policy, ReferenceFile
from registry.trust import read_trusted


def load_policy(source: Path) -> Asked:
    """Read a policy; ConfigError lists every mistake as `file:line: key: found; allowed`.

    `reference` and the files under `signed_by` are relative to the policy's folder. The keys
    themselves come into the policy, in place of their files' names.
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
        keys = _keys(policy, source.parent, problems)
    if problems:
        lines = sorted((document.line(at), dotted(at), text) for at, text in problems)
        raise ConfigError(
            *(f"{source}:{line}: {key or 'policy'}: {text}" for line, key, text in lines)
        )
    policy = policy.model_copy(update={"signed_by": keys or None})
    reference = None
    if policy.reference is not None:
        path = (source.parent / policy.reference).resolve()
        reference = ReferenceFile(path, digest_of(path))
    return Asked(policy, f"{source.name} ({digest_of(source)[:12]})", reference)


def _keys(policy: Policy, folder: Path, problems: list[Problem]) -> tuple[str, ...]:
    keys: list[str] = []
    for i, name in enumerate(policy.signed_by or ()):
        try:
            keys.append(read_trusted(folder / name).pem)
        except TrustError as error:
            problems.append((("signed_by", i), str(error)))
    return tuple(keys)


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
