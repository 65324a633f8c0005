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
from pipeline.config.mistakes import validate
from pipeline.config.name_ranges import expand_columns
from pipeline.config.schema import ApplyConfig, CompileConfig, Config, ReferenceConfig
from pipeline.config.yaml_lines import read_yaml
from registry.bundle import Manifest
from registry.errors import BundleError

T = TypeVar("T")


def load_config(path: str | Path) -> Config:
    """Read a config file and check it. If it has mistakes, raises a ConfigError that lists all of
    them, a line for each: `file:line: key: found; allowed`."""
    source = Path(path)
    document = expand_columns(read_yaml(source))
    config = validate(document, Config, "config")
    config._folder = source.resolve().parent
    document.refuse(check_config(config), "config")
    return config


@dataclass(frozen=True)
class BuiltFrom:
    """The config that a version was built from, as stored in its manifest.

    A part of the config is checked only when it is used: the rest may have been written by another
    release. Raises BundleError if this program cannot read the part.
    """

    manifest: Manifest

    @property
    def gates(self) -> GatesConfig:
        return self._read_part("gates", GatesConfig, {})

    @property
    def reference(self) -> ReferenceConfig:
        return self._read_part("reference", ReferenceConfig, {})

    @property
    def compile(self) -> CompileConfig:
        return self._read_part("compile", CompileConfig, {})

    @property
    def apply(self) -> ApplyConfig:
        return self._read_part("apply", ApplyConfig, {})

    @property
    def missing(self) -> bool:
        """True if the model takes NaN and null for a missing value, as boosted trees do."""
        return self._read_part("model", dict[str, Any], {}).get("trees") is not None

    @property
    def engines(self) -> tuple[str, ...]:
        return self._read_part("engines", tuple[str, ...], DEFAULT_ENGINES)

    def _read_part(self, key: str, kind: type[T], default: object) -> T:
        """Convert the value of a top-level key of the stored config to the type `kind`. `default`
        stands for a missing or empty value. Raises BundleError if the value does not fit."""
        stored = self.manifest.provenance.config.get(key) or default
        try:
            part: T = _adapter(kind).validate_python(stored)  # type: ignore[arg-type]  # it has a hash
            return part
        except ValidationError as error:
            first_error = error.errors(include_url=False)[0]
            key_path = ".".join(map(str, (key, *first_error["loc"])))
            name, text = self.manifest.name, first_error["msg"]
            raise BundleError(f"{name}: the config in its manifest: {key_path}: {text}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
