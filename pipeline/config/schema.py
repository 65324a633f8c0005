"""The config: one YAML file that says what a model is, what it reads and writes, where it runs.

The models hold what the file says; `Config.files` holds the paths it names, resolved on this host.
Nothing here needs torch: what only the stages can know they check again.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from engines.base import DEFAULT_ENGINES, ENGINES, WITH_OPTIONS
from engines.errors import TargetError
from engines.target import Target
from pipeline.config.checks import Files, check_config, find_files
from pipeline.config.wording import shown, validated
from pipeline.config.yaml_lines import read_yaml
from registry.bundle import Count, Manifest
from registry.errors import BundleError
from registry.ref import NAME_PATTERN
from soa.block import Block
from soa.files import as_record
from soa.layout import IDENTIFIER, Column, Layout
from soa.options import known_options
from soa.signature import RowRange, Signature

T = TypeVar("T")


def _name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"found {shown(name)}; allowed: letters, digits, '_', '.' and '-', the last two not in "
            "front; at most 200"
        )
    return name


def _identifier(name: str) -> str:
    if not IDENTIFIER.fullmatch(name):
        raise ValueError(
            f"found {shown(name)}; allowed: letters, digits and '_', not a digit first"
        )
    return name


def _target(name: str) -> str:
    try:
        Target.parse(name)
    except TargetError as error:
        raise ValueError(str(error)) from None
    return name


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"found {twice[0]!r} a second time; each name once")
    return names


def _in_order(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError(f"found {list(pair)}; expected [low, high]")
    return pair


Dtype = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[str, AfterValidator(_identifier)]
TargetName = Annotated[str, AfterValidator(_target)]
# `strict` below would refuse a YAML list for a tuple; what is in it stays strict.
Listed = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]
Shape = Listed[PositiveInt]
Pair = Annotated[tuple[Number, Number], Field(strict=False), AfterValidator(_in_order)]
if TYPE_CHECKING:
    _Engine = str
    _EngineWithOptions = str
else:
    _Engine, _EngineWithOptions = Literal[ENGINES], Literal[WITH_OPTIONS]


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
    """A plain column; with `eigen` a vector [r] or matrix [r, c] per row; or a `scalar`.

    `opaque`: bytes of an element that no model gets, instead of a dtype.
    """

    name: Identifier
    dtype: Literal[Dtype, "uint64"] | None = None
    opaque: PositiveInt | None = None
    eigen: Annotated[Shape, Field(max_length=2)] | None = None
    scalar: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> ColumnConfig:
        if self.dtype is None and self.opaque is None:
            raise ValueError("the key 'dtype' is missing")
        if self.dtype is not None and self.opaque is not None:
            raise ValueError("found both dtype and opaque; bytes that no model gets have no dtype")
        if self.scalar and self.eigen is not None:
            raise ValueError("found both eigen and scalar; a scalar is one plain value")
        return self


class CollectionConfig(_Part):
    columns: Listed[ColumnConfig]
    alignment: PositiveInt | None = None
    storage: Literal["buffer", "columns"] = "buffer"
    rows: str = "n"

    def layout(self) -> Layout:
        """Raises LayoutError."""
        columns = [
            Column(
                c.name,
                c.dtype or f"opaque{c.opaque}",
                "scalar" if c.scalar else "eigen" if c.eigen else "column",
                tuple(c.eigen or ()),
            )
            for c in self.columns
        ]
        return Layout(columns, self.alignment, self.storage)


class BlockConfig(_Part):
    """Columns that the model gets as one tensor; `dtype` casts, `shape` reshapes each row."""

    name: Identifier
    collection: str
    columns: Listed[str]
    dtype: Dtype | None = None
    shape: Shape | None = None

    def block(self) -> Block:
        return Block(self.name, self.collection, self.columns, self.dtype, self.shape)


class PreprocessConfig(_Part):
    """Expressions of a block's columns, one for each feature that the model gets.

    Where the column `exists` is not above zero, every feature is `pad`.
    """

    features: Listed[Any]
    exists: str | None = None
    pad: Number = 0.0


class InputConfig(BlockConfig):
    preprocess: PreprocessConfig | None = None


class ToleranceConfig(_Part):
    """|found - expected| <= atol + rtol * |expected|."""

    atol: NonNegative
    rtol: NonNegative


class OutputConfig(BlockConfig):
    tolerance: ToleranceConfig | None = None
    classifier: bool = False


class RowsConfig(_Part):
    """The range a row dimension is compiled for, and the sizes to benchmark.

    `unbounded`: n may be larger than `max`; such a run goes over at most `max` rows at a time.
    """

    min: NonNegativeInt = 0
    max: Annotated[int, Field(ge=2)]  # torch.export takes a dimension of at most 1 for a constant
    typical: Listed[NonNegativeInt]
    unbounded: bool = False

    def range(self) -> RowRange:
        """Raises SignatureError."""
        return RowRange(self.min, self.max, self.typical, self.unbounded)


class ReferenceConfig(_Part):
    """How reference inputs are made: by a callable, else at random within `ranges`.

    `nonfinite`: the fraction of an output's values there that may be NaN or infinite.
    """

    seed: NonNegativeInt = 1
    factory: str | None = None
    ranges: dict[str, Pair] = {}
    nonfinite: Annotated[float, Field(ge=0, lt=1)] = 0.01

    @model_validator(mode="after")
    def _one_source(self) -> ReferenceConfig:
        if self.factory is not None and self.ranges:
            raise ValueError("found ranges and a factory; a factory needs no ranges")
        return self


class CompileConfig(_Part):
    """`options.aoti`, `.aoti-autotune` and `.aoti-folded`: any setting of Inductor.

    `options.onnxruntime`: `opset`. `options.tensorrt`: any of `torch_tensorrt.dynamo.compile`.
    """

    timeout_s: Positive = 600.0
    benchmark_s: Positive = 10.0
    options: dict[_EngineWithOptions, dict[str, Any]] = {}


class SessionConfig(_Part):
    """How sessions run it: threads inside one run, and runs at one moment (None: one a core)."""

    threads: Count = 1
    instances: Count | None = None


class GatesConfig(_Part):
    """What a promotion asks for. `required_targets`: None for every target of this config."""

    max_slowdown: Positive = 1.1
    max_outside: Annotated[float, Field(ge=0, le=1)] = 0.0
    required_targets: (
        Annotated[tuple[TargetName, ...], Field(strict=False), AfterValidator(_once)] | None
    ) = None


class Config(_Part):
    """What a config file says, every key with its default; docs/config.md explains them."""

    name: Annotated[str, AfterValidator(_name)]
    description: str = ""
    model: ModelConfig
    collections: Annotated[dict[Identifier, CollectionConfig], Field(min_length=1)]
    inputs: Listed[InputConfig]
    outputs: Listed[OutputConfig]
    rows: Annotated[dict[Identifier, RowsConfig], Field(min_length=1)]
    reference: ReferenceConfig = ReferenceConfig()
    targets: Annotated[Listed[TargetName], AfterValidator(_once)] = ("cpu",)
    engines: Annotated[Listed[_Engine], AfterValidator(_once)] = DEFAULT_ENGINES
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    compile: CompileConfig = CompileConfig()
    gates: GatesConfig = GatesConfig()
    session: SessionConfig = SessionConfig()

    _files: Files = PrivateAttr(default_factory=Files)

    @property
    def files(self) -> Files:
        """The files that the config names, as absolute paths; empty unless it was loaded."""
        return self._files

    def signature(self) -> Signature:
        """The signature that the config describes, with a plan for every block."""
        return Signature.build(
            {name: c.layout() for name, c in self.collections.items()},
            [b.block() for b in self.inputs],
            [b.block() for b in self.outputs],
            {dim: r.range() for dim, r in self.rows.items()},
            {name: c.rows for name, c in self.collections.items()},
        )

    def members(self, block: BlockConfig) -> list[ColumnConfig]:
        """The columns of a block that was checked, in its order."""
        columns = {c.name: c for c in self.collections[block.collection].columns}
        return [columns[name] for name in block.columns]

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
