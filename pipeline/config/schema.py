"""The config: one YAML file that says what a model is, what it reads and writes, where it runs.

The models hold what the file says; `Config.files` holds the paths it names, resolved on this host.
Nothing here needs torch: `stages` and `soa` check again what only they can know.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from engines.base import DEFAULT_ENGINES, WITH_OPTIONS
from pipeline.config.checks import Files, check_config, find_files
from pipeline.config.wording import validated
from pipeline.config.yaml_lines import read_yaml
from registry.bundle import Count, Manifest
from registry.errors import BundleError
from soa.files import as_record
from soa.options import known_options

Dtype = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# `strict` below would refuse a YAML list for a tuple; what is in it stays strict.
Shape = Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
if TYPE_CHECKING:
    _EngineWithOptions = str
else:
    _EngineWithOptions = Literal[WITH_OPTIONS]


T = TypeVar("T")


class _Part(BaseModel):
    """Strict: `"64"` and `true` are no numbers, and a key that nobody reads is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(_Part):
    """Where the model comes from: exactly one of `factory`, `program`, `torchscript`.

    Paths may hold `${NAME}` or `${NAME:-default}` and are relative to the config's folder.
    """

    factory: str | None = None
    program: str | None = None
    torchscript: str | None = None
    kwargs: dict[str, Any] = {}
    weights: str | None = None
    weights_prefix: str = ""
    torchscript_route: Literal["auto", "script", "trace", "none"] = "auto"

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        named = [k for k in ("factory", "program", "torchscript") if getattr(self, k) is not None]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            raise ValueError(f"found {found}; give exactly one of factory, program, torchscript")
        if self.factory is None:
            extra = [k for k in ("kwargs", "weights", "weights_prefix") if getattr(self, k)]
            if extra:
                raise ValueError(f"found {', '.join(extra)} with {named[0]}; only a factory has it")
        if self.weights_prefix and self.weights is None:
            raise ValueError("found weights_prefix without weights; give weights, or remove it")
        return self


class ColumnConfig(_Part):
    """A plain column; with `eigen` a vector [r] or matrix [r, c] per row; or a `scalar`."""

    name: str
    dtype: Dtype
    eigen: Annotated[Shape, Field(max_length=2)] | None = None
    scalar: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> ColumnConfig:
        if self.scalar and self.eigen is not None:
            raise ValueError("found both eigen and scalar; a scalar is one plain value")
        return self


class CollectionConfig(_Part):
    columns: Annotated[tuple[ColumnConfig, ...], Field(strict=False, min_length=1)]
    alignment: PositiveInt = 128
    storage: Literal["buffer", "columns"] = "buffer"
    rows: str = "n"


class BlockConfig(_Part):
    """Columns that the model gets as one tensor; `dtype` casts, `shape` reshapes each row."""

    name: str
    collection: str
    columns: Names
    dtype: Dtype | None = None
    shape: Shape | None = None


class PreprocessConfig(_Part):
    """Expressions of a block's columns, one for each feature that the model gets.

    Where the column `exists` is not above zero, every feature is `pad`.
    """

    features: Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]
    exists: str | None = None
    pad: Number = 0.0


class InputConfig(BlockConfig):
    preprocess: PreprocessConfig | None = None


class Tolerance(_Part):
    """|found - expected| <= atol + rtol * |expected|."""

    atol: NonNegative
    rtol: NonNegative


class OutputConfig(BlockConfig):
    tolerance: Tolerance | None = None
    classifier: bool = False


class RowsConfig(_Part):
    """The range a row dimension is compiled for, and the sizes to benchmark."""

    min: NonNegativeInt = 0
    max: Annotated[int, Field(ge=2)]  # torch.export takes a dimension of at most 1 for a constant
    typical: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)]


class ReferenceConfig(_Part):
    """How reference inputs are made: by a callable, else at random within `ranges`.

    `nonfinite`: the fraction of an output's values there that may be NaN or infinite.
    """

    seed: NonNegativeInt = 1
    factory: str | None = None
    ranges: dict[str, Annotated[tuple[Number, Number], Field(strict=False)]] = {}
    nonfinite: Annotated[float, Field(ge=0, lt=1)] = 0.01


class CompileConfig(_Part):
    """`options.aoti`, `.aoti-autotune` and `.aoti-folded`: any setting of Inductor.

    `options.onnxruntime`: `opset`. `options.tensorrt`: any of `torch_tensorrt.dynamo.compile`.
    """

    timeout_s: Positive = 600.0
    options: dict[_EngineWithOptions, dict[str, Any]] = {}


class SessionConfig(_Part):
    """How sessions run it: threads inside one run, and runs at one moment (None: one a core)."""

    threads: Count = 1
    instances: Count | None = None


class GatesConfig(_Part):
    """What a promotion asks for. `required_targets`: None for every target of this config."""

    max_slowdown: Positive = 1.1
    max_outside: Annotated[float, Field(ge=0, le=1)] = 0.0
    required_targets: Texts | None = None


class Config(_Part):
    """What a config file says, every key with its default; docs/config.md explains them."""

    name: str
    description: str = ""
    model: ModelConfig
    collections: Annotated[dict[str, CollectionConfig], Field(min_length=1)]
    inputs: Annotated[tuple[InputConfig, ...], Field(strict=False, min_length=1)]
    outputs: Annotated[tuple[OutputConfig, ...], Field(strict=False, min_length=1)]
    rows: Annotated[dict[str, RowsConfig], Field(min_length=1)]
    reference: ReferenceConfig = ReferenceConfig()
    targets: Names = ("cpu",)
    engines: Names = DEFAULT_ENGINES
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    compile: CompileConfig = CompileConfig()
    gates: GatesConfig = GatesConfig()
    session: SessionConfig = SessionConfig()

    _files: Files = PrivateAttr(default_factory=Files)

    @property
    def files(self) -> Files:
        """The files that the config names, as absolute paths; empty unless it was loaded."""
        return self._files

    def digest(self) -> str:
        """SHA-256 of what the config says, defaults included: not of comments, form or place.

        The same on every host: paths count as written. The order of `collections` counts.
        """
        data = self.model_dump(mode="json")
        data["collections"] = list(data["collections"].items())
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class BuiltFrom:
    """The config that a version was built from, as its manifest keeps it.

    Each part is read when it is asked for; BundleError where it is not what this program knows.
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
    def engines(self) -> tuple[str, ...]:
        return self._part("engines", tuple[str, ...], DEFAULT_ENGINES)

    def _part(self, key: str, kind: type[T], default: object) -> T:
        try:
            return as_record(kind, self.manifest.provenance.config.get(key) or default)
        except ValueError as error:
            name = self.manifest.name
            raise BundleError(f"{name}: the config in its manifest: {key}.{error}") from error


@known_options()
def load_config(path: str | Path) -> Config:
    """Read a config; ConfigError lists every mistake as `file:line: key: found; allowed`."""
    source = Path(path)
    document = read_yaml(source)
    config = validated(document, Config, "config")
    files, problems = find_files(config, source.resolve().parent)
    document.refuse(check_config(config) + problems, "config")
    config._files = files
    return config
