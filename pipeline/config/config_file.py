"""Reads a config: a YAML file, or the copy in a manifest. Lists mistakes with their lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from engines.base import DEFAULT_ENGINES
from pipeline.config.checks import check_config
from pipeline.config.gates import GatesConfig
from pipeline.config.mistakes import validated
from pipeline.config.name_ranges import written_out
from pipeline.config.schema import ApplyConfig, CompileConfig, Config, ReferenceConfig
from pipeline.config.yaml_lines import read_yaml
from registry.bundle import Manifest
from registry.errors import BundleError

T = TypeVar("T")


def load_config(path: str | Path) -> Config:
    """Read a config; ConfigError lists every mistake as `file:line: key: found; allowed`."""
    source = Path(path)
    document = written_out(read_yaml(source))
    config = validated(document, Config, "config")
    config._folder = source.resolve().parent
    document.refuse(check_config(config), "config")
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
        """A part of the stored config. Raises BundleError if it does not fit `kind`."""
        stored = self.manifest.provenance.config.get(key) or default
        try:
            part: T = _adapter(kind).validate_python(stored)  # type: ignore[arg-type]  # it has a hash
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
