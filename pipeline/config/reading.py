"""Reads configs, from YAML or a version's manifest, and policies; errors name file and line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from engines.base import DEFAULT_ENGINES
from engines.errors import TargetError
from engines.target import Target
from pipeline.config.checks import check_config, find_files
from pipeline.config.gates import GatesConfig
from pipeline.config.mistakes import validated
from pipeline.config.ranges import written_out
from pipeline.config.schema import ApplyConfig, CompileConfig, Config, ReferenceConfig
from pipeline.config.yaml_lines import Problem, read_yaml
from registry.bundle import Manifest
from registry.errors import BundleError, TrustError
from registry.promotion import Asked, Policy, ReferenceFile
from registry.trust import read_trusted
from soa.files import digest_of

T = TypeVar("T")


def load_config(path: str | Path) -> Config:
    """Read a config; ConfigError lists every mistake as `file:line: key: found; allowed`."""
    source = Path(path)
    document = written_out(read_yaml(source))
    config = validated(document, Config, "config")
    files, problems = find_files(config, source.resolve().parent)
    document.refuse(check_config(config) + problems, "config")
    config._files = files
    return config


@dataclass(frozen=True)
class BuiltFrom:
    """The config that a version was built from, as stored in its manifest.

    Each part is read when it is used. BundleError if this program cannot read the part.
    """

    manifest: Manifest

    @property
    def gates(self) -> GatesConfig:
        return self._part("gates", GatesConfig, {})

    @property
    def reference(self) -> ReferenceConfig:
        return self._part("reference", ReferenceConfig, {})

    @property
    def compile(self) -> CompileConfig:
        return self._part("compile", CompileConfig, {})

    @property
    def apply(self) -> ApplyConfig:
        return self._part("apply", ApplyConfig, {})

    @property
    def missing(self) -> bool:
        """True if NaN and null mean a missing value, as for boosted trees."""
        return self._part("model", dict[str, Any], {}).get("trees") is not None

    @property
    def engines(self) -> tuple[str, ...]:
        return self._part("engines", tuple[str, ...], DEFAULT_ENGINES)

    def _part(self, key: str, kind: type[T], default: object) -> T:
        found = self.manifest.provenance.config.get(key) or default
        try:
            part: T = _adapter(kind).validate_python(found)  # type: ignore[arg-type]  # it has a hash
            return part
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (key, *first["loc"])))
            name = self.manifest.name
            raise BundleError(
                f"{name}: the config in its manifest: {where}: {first['msg']}"
            ) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def load_policy(source: Path) -> Asked:
    """Read a policy; ConfigError lists every mistake as `file:line: key: found; allowed`.

    `reference` and the files under `signed_by` are relative to the policy's folder. In the result,
    `signed_by` holds the keys, not the names of their files.
    """
    document = read_yaml(source)
    policy = validated(document, Policy, "policy")
    problems: list[Problem] = []
    for i, name in enumerate(policy.targets or ()):
        try:
            full = str(Target.parse(name))
        except TargetError as error:
            problems.append((("targets", i), str(error)))
            continue
        if full != name:  # `cpu` can mean another target on another host
            problems.append((("targets", i), f"found {name!r}; write it in full, as {full!r}"))
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
    return Asked(policy, f"{source.name} ({digest_of(source)[:12]})", reference)
