"""The config: one YAML file that says what a model is, what it reads and writes, where it runs.

These pydantic models hold the values of the file. Nothing here needs torch: the stages make the
checks that need the model itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    model_validator,
)

from engines.base import DEFAULT_ENGINES, ENGINES, QUICK_ENGINES, WITH_OPTIONS, known_engines
from pipeline.config.gates import GatesConfig
from pipeline.config.mistakes import (
    Identifier,
    Listed,
    NonNegative,
    Number,
    Pair,
    Part,
    Positive,
    RowShape,
    Shape,
    TargetName,
    check_unique,
    quote,
)
from registry.bundle import MOST_THREADS
from registry.ref import NAME_PATTERN
from soa.block import Block
from soa.layout import IDENTIFIER, Column, Layout
from soa.signature import RowRange, Signature, offsets_layout, offsets_of

SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
"""The JSON schema of configs, with a description of each key: for editors, and for people."""


def _check_name(name: str) -> str:
    """Returns the name if a model may have it. Raises ValueError if not."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"found {quote(name)}; allowed: letters, digits, '_', '.' and '-', the last two not in "
            "front; at most 200"
        )
    return name


Dtype = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
if TYPE_CHECKING:
    _Engine = str
    _EngineWithOptions = str
else:
    _Engine = Literal[known_engines()]
    _EngineWithOptions = Literal[(*WITH_OPTIONS, *known_engines()[len(ENGINES) :])]


SOURCES = ("factory", "program", "torchscript", "onnx", "trees")

_Count = Annotated[int, Field(ge=1, le=MOST_THREADS)]


class ModelConfig(Part):
    """The source of the model: exactly one of `SOURCES`.

    Paths may hold `${NAME}` or `${NAME:-default}` and are relative to the config's folder.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [key]} for key in SOURCES]})

    factory: str | None = None
    program: str | None = None
    torchscript: str | None = None
    onnx: str | None = None
    trees: str | None = None
    kwargs: dict[str, Any] = {}
    weights: str | None = None
    weights_prefix: str = ""
    takes: Literal["tensors", "dict", "list"] = "tensors"
    torchscript_route: Literal["auto", "script", "trace", "none"] = "auto"

    @model_validator(mode="after")
    def _check_source(self) -> ModelConfig:
        """Refuse none or several sources, and keys that belong to another source."""
        named = [key for key in SOURCES if getattr(self, key) is not None]
        if len(named) != 1:
            listed = " and ".join(named) or "none of them"
            raise ValueError(f"found {listed}; give exactly one of {', '.join(SOURCES)}")
        if self.factory is None:
            extra = [key for key in ("kwargs", "weights", "weights_prefix") if getattr(self, key)]
            if extra:
                raise ValueError(f"found {', '.join(extra)} with {named[0]}; only a factory has it")
        if self.weights_prefix and self.weights is None:
            raise ValueError("found weights_prefix without weights; give weights, or remove it")
        return self


class ColumnConfig(Part):
    """A plain column; with `eigen` a vector [r] or matrix [r, c] per row; or a `scalar`.

    `opaque`, in place of a dtype: the size in bytes of elements that no model reads.
    """

    name: Identifier
    dtype: Literal[Dtype, "uint64"] | None = None
    opaque: PositiveInt | None = None
    eigen: Annotated[Shape, Field(max_length=2)] | None = None
    scalar: bool = False

    @model_validator(mode="after")
    def _check_type(self) -> ColumnConfig:
        """Refuse a column without a type, with two, or with two shapes."""
        if self.dtype is None and self.opaque is None:
            raise ValueError("the key 'dtype' is missing")
        if self.dtype is not None and self.opaque is not None:
            raise ValueError("found both dtype and opaque; bytes that no model gets have no dtype")
        if self.scalar and self.eigen is not None:
            raise ValueError("found both eigen and scalar; a scalar is one plain value")
        return self


class JaggedConfig(Part):
    """Each row of the row dimension `rows` has a list of items of this collection; the model gets
    the first `length` items."""

    rows: str
    length: PositiveInt
    offsets: Literal["int32", "int64"] = "int64"


class CollectionConfig(Part):
    """A structure of arrays: its columns, how they lie in memory, and what counts its rows."""

    columns: Listed[ColumnConfig]
    alignment: PositiveInt | None = None
    storage: Literal["buffer", "columns"] = "buffer"
    rows: str = "n"
    jagged: JaggedConfig | None = None

    def layout(self) -> Layout:
        """Returns the layout of the collection. Raises LayoutError."""
        columns = [
            Column(
                column.name,
                column.dtype or f"opaque{column.opaque}",
                "scalar" if column.scalar else "eigen" if column.eigen else "column",
                tuple(column.eigen or ()),
            )
            for column in self.columns
        ]
        return Layout(columns, self.alignment, self.storage)


class BlockConfig(Part):
    """Columns that the model gets, or returns, as one tensor.

    `dtype`: the tensor's, if it differs from the columns'. `shape`: the shape of a row.
    `broadcast`: the columns are scalars, and the model gets their values in every row. `permute`:
    the order of the axes in the model's tensor; axis 0 has the rows, so `(0, 2, 1)` swaps the other
    two.
    """

    name: Identifier
    collection: str
    columns: Listed[str]
    dtype: Dtype | None = None
    shape: RowShape | None = None
    permute: Listed[NonNegativeInt] = ()
    broadcast: bool = False

    @model_validator(mode="after")
    def _check_axes(self) -> BlockConfig:
        """Refuse a `permute` that lacks an axis or names one twice."""
        if sorted(self.permute) != [*range(len(self.permute))]:
            raise ValueError(
                f"permute: found {[*self.permute]}; it names each axis once, as [0, 2, 1]"
            )
        return self

    def block(self) -> Block:
        """Returns the block for `soa`, with the shape that the model gets."""
        return Block(
            self.name, self.collection, self.columns, self.dtype, self.shape, self.broadcast
        )


class PreprocessConfig(Part):
    """Expressions in the columns of a block, one for each feature that the model gets.

    `exists`: a column that is above zero where there is an item; elsewhere every feature is `pad`.
    """

    features: Listed[Any]
    exists: str | None = None
    pad: Number = 0.0


class InputConfig(BlockConfig):
    """An input block. `pad` is the value in places of jagged rows that have no item. A `mask` has
    no columns: it is 1 in places with an item, and 0 in the others. `flatten`: after `permute`, all
    axes but the rows become one."""

    columns: Listed[str] = ()
    flatten: bool = False
    preprocess: PreprocessConfig | None = None
    pad: Number | None = None
    mask: bool = False

    @model_validator(mode="after")
    def _check_content(self) -> InputConfig:
        """Refuse an input with neither columns nor a mask, or with both."""
        if not self.columns and not self.mask:
            raise ValueError("the key 'columns' is missing")
        if self.mask and (self.columns or self.preprocess or self.pad is not None):
            raise ValueError("found a mask with columns, preprocess or pad; it has none of them")
        return self


class ToleranceConfig(Part):
    """A value agrees if |found - expected| <= atol + rtol * |expected|."""

    atol: NonNegative
    rtol: NonNegative


class OutputConfig(BlockConfig):
    """An output block. `tolerance`: None means the default for its dtype and the precision.
    `classifier`: the columns are scores of classes, and a row's answer is the class with the
    highest score."""

    tolerance: ToleranceConfig | None = None
    classifier: bool = False


class RowsConfig(Part):
    """The numbers of rows that a dimension is compiled for, and the sizes to benchmark.

    `unbounded`: a call may have more than `max` rows, which are then run in parts of at most `max`.
    """

    min: NonNegativeInt = 0
    max: Annotated[int, Field(ge=2)]  # torch.export makes a dimension of at most 1 a constant
    typical: Listed[NonNegativeInt]
    unbounded: bool = False

    def range(self) -> RowRange:
        """Returns the range for `soa`. Raises SignatureError."""
        return RowRange(self.min, self.max, self.typical, self.unbounded)


class ReferenceConfig(Part):
    """How reference inputs are made: from the rows of an .npz file with arrays `collection/column`,
    by a callable, else at random within `ranges`.

    `nonfinite`: the fraction of an output's reference values that may be NaN or infinite.
    `many_rows`: how many more rows, which are like those of the reference, are tried. None means
    200,000, or fewer if the model needs much work for a row.
    """

    seed: NonNegativeInt = 1
    file: str | None = None
    factory: str | None = None
    ranges: dict[str, Pair] = {}
    nonfinite: Annotated[float, Field(ge=0, lt=1)] = 0.01
    many_rows: Annotated[int, Field(ge=0, le=10_000_000)] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> ReferenceConfig:
        """Refuse several sources of the inputs."""
        keys = [key for key in ("ranges", "factory", "file") if getattr(self, key)]
        if len(keys) > 1:
            raise ValueError(f"found {keys[0]} and a {keys[1]}; a {keys[1]} needs no {keys[0]}")
        return self


class CompileConfig(Part):
    """Limits and options of the compilers.

    `options` has a mapping for each engine. `aoti` and `aoti-standalone` take any setting of
    Inductor, `onnxruntime` takes `opset`, and `tensorrt` any argument of
    `torch_tensorrt.dynamo.compile`.
    """

    timeout_s: Positive = 600.0
    benchmark_s: Positive = 10.0
    options: dict[_EngineWithOptions, dict[str, Any]] = {}


class SessionConfig(Part):
    """How sessions run the model. `threads`: the threads of one run. `instances`: the most runs at
    the same time (None: one per core)."""

    threads: _Count = 1
    instances: _Count | None = None


class ApplyConfig(Part):
    """The names of the model's columns in the files that `pipeline apply` scores. A key of
    `columns` is `collection/column` or `collection/*`; its value is the name in the files, `Jet_*`
    for all.
    """

    columns: dict[str, str] = {}


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_QUICK_BENCHMARK_S = 0.5


class Config(Part):
    """A config file, with the default of every key; docs/reference/config.md explains the keys."""

    name: Annotated[str, AfterValidator(_check_name)]
    description: str = ""
    model: ModelConfig
    collections: Annotated[dict[Identifier, CollectionConfig], Field(min_length=1)]
    inputs: Listed[InputConfig]
    outputs: Listed[OutputConfig]
    rows: Annotated[dict[Identifier, RowsConfig], Field(min_length=1)]
    reference: ReferenceConfig = ReferenceConfig()
    targets: Annotated[Listed[TargetName], AfterValidator(check_unique)] = ("cpu",)
    engines: Annotated[Listed[_Engine], AfterValidator(check_unique)] = DEFAULT_ENGINES
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    compile: CompileConfig = CompileConfig()
    gates: GatesConfig = GatesConfig()
    session: SessionConfig = SessionConfig()
    apply: ApplyConfig = ApplyConfig()

    _folder: Path = PrivateAttr(default=Path())
    _quick: bool = PrivateAttr(default=False)

    @property
    def names_engines(self) -> bool:
        """True if the config chooses its engines. Otherwise the default ones apply, of which some
        are built only if another one fails or may be slower."""
        return not self._quick and self.engines != DEFAULT_ENGINES

    def file(self, written: str) -> Path:
        """Returns the path on this host of a file that the config names. Variables are expanded; a
        relative path starts in the config's folder. Raises ValueError if there is no such file."""
        path = Path(os.path.normpath(self._folder / _expand_variables(written)))
        if not path.is_file():
            state = "is a folder" if path.is_dir() else "does not exist"
            raise ValueError(f"the file {path} {state}; paths start from the config's folder")
        return path

    def factory(self, written: str) -> str:
        """Returns a callable that the config names, as `module:name` or `/path/file.py:name`.
        Raises ValueError if it has another form or if there is no such file."""
        text = _expand_variables(written)
        file_or_module, _, name = text.rpartition(":")
        is_file = file_or_module.endswith(".py")
        is_module = all(IDENTIFIER.fullmatch(part) for part in file_or_module.split("."))
        if not IDENTIFIER.fullmatch(name) or not (is_file or is_module):
            raise ValueError(f"found {quote(text)}; write file.py:callable or module:callable")
        return f"{self.file(file_or_module)}:{name}" if is_file else text

    def quick(self) -> Config:
        """Returns a copy for work in progress, with another digest: it is built for one engine,
        which needs no TorchScript, with a short race of the candidates, and `many_rows` are not
        tried.
        """
        compiled = self.compile.model_copy(update={"benchmark_s": _QUICK_BENCHMARK_S})
        reference = self.reference.model_copy(update={"many_rows": 0})
        model = self.model.model_copy(update={"torchscript_route": "none"})
        parts = {"compile": compiled, "reference": reference, "model": model}
        copy = self.model_copy(update={"engines": QUICK_ENGINES, **parts})
        copy._quick = True
        return copy

    def signature(self) -> Signature:
        """Returns the signature that the config describes, with a plan for every block."""
        parts = self.collections.items()
        jagged = {name: part.jagged for name, part in parts if part.jagged}
        layouts = {name: part.layout() for name, part in parts}
        inputs = [self.block(block) for block in self.inputs if not block.mask]
        rows_of = {name: part.rows for name, part in parts}
        for name, padded in jagged.items():
            # The offsets of the items of each row are a collection of their own, with one block.
            offsets = offsets_of(name)
            layouts[offsets] = offsets_layout(padded.offsets)
            inputs.append(Block(offsets, offsets, ("begin", "end")))
            rows_of[offsets] = padded.rows
        return Signature.build(
            layouts,
            inputs,
            [block.block() for block in self.outputs],
            {dim: rows.range() for dim, rows in self.rows.items()},
            rows_of,
            jagged={name: padded.length for name, padded in jagged.items()},
        )

    def jagged(self, block: BlockConfig) -> JaggedConfig | None:
        """Returns how the rows of a block are padded; None if it has scalars or is not jagged."""
        if any(member.scalar for member in self.members(block)):
            return None
        return self.collections[block.collection].jagged

    def block(self, block: BlockConfig) -> Block:
        """Returns a block as callers bind it: a jagged one holds its items without padding, and
        without the shape that the model gets."""
        plain = block.block()
        return replace(plain, shape=None) if self.jagged(block) else plain

    def members(self, block: BlockConfig) -> list[ColumnConfig]:
        """Returns the columns of a block, in its order. Their names must have been checked
        before."""
        columns = {column.name: column for column in self.collections[block.collection].columns}
        return [columns[name] for name in block.columns]

    def digest(self) -> str:
        """Returns the SHA-256 of the config's values, defaults included. Comments and formatting do
        not count, but the order of `collections` does.

        It is the same on every host, since paths are used as they are written.
        """
        data = self.model_dump(mode="json")
        data["collections"] = list(data["collections"].items())
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _expand_variables(written: str) -> str:
    """Returns a text with `${NAME}` and `${NAME:-default}` replaced by the value of the environment
    variable. Raises ValueError if it is not set and there is no default."""

    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        if default is None and name not in os.environ:
            raise ValueError(
                f"the environment variable {name} is not set; set it or write ${{{name}:-...}}"
            )
        return os.environ.get(name) or default or ""

    text = _VARIABLE.sub(value_of, written)
    if "${" in text:
        raise ValueError(f"found {quote(written)}; write ${{NAME}} or ${{NAME:-default}}")
    return text
