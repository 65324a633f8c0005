"""Signature: which memory a model reads and writes, and how an artifact gets it as arguments.

The signature is stored with a version, and the artifacts of every engine have its arguments, in
order: one zero-size row carrier `(n, 0)` per row dimension, the arguments of each input block, the
arguments of each output block (written in place).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from soa.block import Block, Plan, plan_block
from soa.dtypes import is_float
from soa.errors import BlockError, SignatureError
from soa.layout import IDENTIFIER, Column, Layout, Storage
from soa.options import find_repeated
from soa.records import as_data, as_record
from soa.text import html_table

Role = Literal["carrier", "input", "output"]
_MOST_ROWS = 1 << 40


@dataclass(frozen=True)
class RowRange:
    """The range of n for which a model is compiled, and the values of n that users typically run.

    `unbounded`: n may be larger than `max`; such a run is split into tiles of at most `max` rows.
    """

    min: int
    max: int
    typical: tuple[int, ...] = ()
    unbounded: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise SignatureError(f"rows from {self.min} to {self.max} is not a range")
        if not 2 <= self.max <= _MOST_ROWS:
            raise SignatureError(
                f"rows up to {self.max}: the number must be at least 2 and at most {_MOST_ROWS}"
            )
        outside = [n for n in self.typical if not self.min <= n <= self.max]
        if outside:
            raise SignatureError(f"typical n {outside[0]} lies outside {self.min} … {self.max}")

    @property
    def limit(self) -> int:
        """The largest n that may be bound."""
        return _MOST_ROWS if self.unbounded else self.max

    @property
    def proven(self) -> int:
        """The largest n that validation runs: `max`, or one more (so two tiles) if unbounded."""
        return self.max + 1 if self.unbounded else self.max


@dataclass(frozen=True)
class BoundBlock:
    """A block with its plan, chosen for its collection's layout."""

    block: Block
    plan: Plan
    rows: str

    @property
    def name(self) -> str:
        return self.block.name

    @property
    def rowless(self) -> bool:
        """Whether the model's tensor has no row dimension: it is the same for all rows."""
        return self.plan.kind == "scalars" and not self.block.broadcast

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the tensor that the model sees, or returns, for n rows."""
        per_row = self.plan.feature_shape
        return per_row if self.rowless else (n, *per_row)


@dataclass(frozen=True)
class Argument:
    """One tensor that crosses an artifact's boundary.

    `kind` gives its shape: carrier `(n, 0)`, matrix `(F, S)`, column `(n,)`, scalar `(1,)`.
    `column` and `component` say where its memory starts in `collection`; `count` is F.
    """

    role: Role
    kind: Literal["carrier", "matrix", "column", "scalar"]
    rows: str
    dtype: str
    block: str = ""
    collection: str = ""
    column: str = ""
    component: int = 0
    count: int = 1


def signature_table(title: object, signature: Signature) -> str:
    """Return an HTML table of a signature's collections, for a notebook."""
    inputs, outputs = signature.input_collections, signature.output_collections
    lines = []
    for name, layout in signature.layouts.items():
        dim = signature.rows_of[name]
        least, most = signature.ranges[dim].min, signature.ranges[dim].limit
        role = "written"
        if name in inputs:
            role = "read and written" if name in outputs else "read"
        columns = ", ".join(_name_and_type(column) for column in layout.columns)
        lines.append((name, role, f"{dim}: {least:,} to {most:,}", columns))
    return html_table(title, ("collection", "", "rows", "columns"), lines)


def _name_and_type(column: Column) -> str:
    """Return a column as text: `pt float32`, or `p4 float32[4]` for an Eigen column."""
    shape = list(column.shape) if column.shape else ""
    return f"{column.name} {column.dtype}{shape}"


def offsets_of(collection: str) -> str:
    """Return the name of the collection that holds the offsets of a jagged collection."""
    return f"{collection}_offsets"


def offsets_layout(dtype: str = "int64") -> Layout:
    """Return the layout of offsets: a row has the items from `begin` up to `end` (excluded)."""
    return Layout([Column("begin", dtype), Column("end", dtype)], storage="columns")


@dataclass(frozen=True)
class Signature:
    """Collections with their layouts and row dimensions, and the input and output blocks in order.

    `jagged` maps each collection of items to the number of items per row that the model sees. The
    items belong to rows of another dimension, that of the collection `offsets_of(name)`.
    """

    layouts: Mapping[str, Layout]
    rows_of: Mapping[str, str]
    ranges: Mapping[str, RowRange]
    inputs: tuple[BoundBlock, ...]
    outputs: tuple[BoundBlock, ...]
    jagged: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        layouts: Mapping[str, Layout],
        inputs: tuple[Block, ...] | list[Block],
        outputs: tuple[Block, ...] | list[Block],
        ranges: Mapping[str, RowRange],
        rows_of: Mapping[str, str] | None = None,
        *,
        jagged: Mapping[str, int] | None = None,
        stored: bool = False,
    ) -> Signature:
        """Make a signature: plan every block, and check that all parts fit together.

        `rows_of` maps a collection to its row dimension; for others it is `n`. `stored`: names may
        be any text, because older versions allowed it. Raises SignatureError or BlockError, which
        names the block, column or dimension.
        """
        if not stored:
            _require_identifiers(layouts, [*inputs, *outputs], ranges)
        dims = _row_dimensions(layouts, rows_of or {}, ranges)
        signature = cls(
            dict(layouts),
            dims,
            dict(ranges),
            tuple(_plan_bound(block, layouts, dims) for block in inputs),
            tuple(_plan_bound(block, layouts, dims) for block in outputs),
            dict(jagged or {}),
        )
        signature._check()
        return signature

    def _check(self) -> None:
        """Raise SignatureError or BlockError if blocks, columns and rows do not fit together."""
        if not self.inputs or not self.outputs:
            raise SignatureError("a model needs at least one input and one output block")
        if twice := find_repeated(bound.name for bound in (*self.inputs, *self.outputs)):
            raise SignatureError(f"two blocks are called {twice[0]!r}")
        self._check_rows()
        self._check_outputs()
        used = self.input_collections + self.output_collections
        for collection in self.layouts:
            if collection not in used:
                raise SignatureError(f"collection {collection!r} has no block: remove it")

    def _check_rows(self) -> None:
        """Raise SignatureError if jagged collections or unbounded rows are not possible."""
        for name in self.jagged:
            offsets = offsets_of(name)
            if offsets not in self.layouts or self.rows_of[offsets] == self.rows_of.get(name):
                raise SignatureError(
                    f"jagged collection {name!r} needs {offsets!r}, of another row dimension"
                )
        for dim in self.dims:
            if self.ranges[dim].unbounded and self.tile_kinds is None:
                raise SignatureError(
                    f"rows of {dim!r} are unbounded: that needs one row dimension, a least n of 0 "
                    "or 1, and no output that all rows share"
                )

    def _check_outputs(self) -> None:
        """Raise an error unless each output has columns of its own that fit one dtype.

        SignatureError: a column is also an input, or is written by two outputs. BlockError: the
        columns of an output have different dtypes that are not all floating-point ones.
        """
        read = {(bound.block.collection, c) for bound in self.inputs for c in bound.block.columns}
        written: dict[tuple[str, str], str] = {}  # by collection and column: the output
        for out in self.outputs:
            if out.block.broadcast:
                raise SignatureError(f"output {out.name!r} has broadcast, which is for inputs")
            for name in out.block.columns:
                key = (out.block.collection, name)
                if key in read:
                    raise SignatureError(
                        f"column {name!r} of {out.block.collection!r} is an input and an output: "
                        "a model never writes its inputs"
                    )
                if key in written:
                    raise SignatureError(
                        f"column {name!r} of {out.block.collection!r} is written by "
                        f"{written[key]!r} and {out.name!r}"
                    )
                written[key] = out.name
            if len(set(out.plan.dtypes)) > 1 and not all(map(is_float, out.plan.dtypes)):
                raise BlockError(
                    f"output block {out.name!r} has columns of "
                    f"{', '.join(sorted(set(out.plan.dtypes)))}: one output writes one dtype (or "
                    "floating-point ones); make it several outputs"
                )

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The row dimensions in the order of their carriers."""
        return tuple(dict.fromkeys(bound.rows for bound in (*self.inputs, *self.outputs)))

    @cached_property
    def tile_kinds(self) -> str | None:
        """One letter for each argument, which says how a tile gets its part of the argument.

        The letters are n for a row carrier, c for a column, m for a matrix, and - for an argument
        that all rows share, which each tile gets as it is. None if a run cannot be split into
        tiles: there are several row dimensions, `min` is above 1, or all rows share an output.
        """
        if len(self.dims) > 1 or self.ranges[self.dims[0]].min > 1:
            return None
        if any(bound.plan.kind == "scalars" for bound in self.outputs):
            return None
        letters = {"carrier": "n", "column": "c", "matrix": "m", "scalar": "-"}
        return "".join(letters[argument.kind] for argument in self.arguments)

    @cached_property
    def input_collections(self) -> tuple[str, ...]:
        """The names of the collections that the model reads."""
        return tuple(dict.fromkeys(bound.block.collection for bound in self.inputs))

    @cached_property
    def output_collections(self) -> tuple[str, ...]:
        """The names of the collections that the model writes."""
        return tuple(dict.fromkeys(bound.block.collection for bound in self.outputs))

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """Every argument of an artifact, in order: carriers, inputs, outputs."""
        arguments = [Argument("carrier", "carrier", dim, "float32") for dim in self.dims]
        for bound in self.inputs:
            arguments += _block_arguments(bound, "input")
        for bound in self.outputs:
            arguments += _block_arguments(bound, "output")
        return tuple(arguments)

    def _repr_html_(self) -> str:
        """A table of the collections, for a notebook."""
        return signature_table("Signature", self)

    def to_dict(self) -> dict[str, Any]:
        """Return the signature as data for JSON, as it is stored with a version."""

        def block_data(bound: BoundBlock) -> dict[str, Any]:
            block = as_data(bound.block)
            if not bound.block.broadcast:  # the same text as before `broadcast` existed
                del block["broadcast"]
            return {**block, "plan": as_data(bound.plan)}

        data = {
            "collections": {
                name: {**as_data(layout), "rows": self.rows_of[name]}
                for name, layout in self.layouts.items()
            },
            "rows": {dim: _range_data(rows) for dim, rows in self.ranges.items()},
            "inputs": [block_data(bound) for bound in self.inputs],
            "outputs": [block_data(bound) for bound in self.outputs],
        }
        # Without jagged collections, the text is the same as before `jagged` existed.
        return {**data, "jagged": dict(self.jagged)} if self.jagged else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Signature:
        """Read a signature that `to_dict` made.

        Raises SignatureError for other data, and if its plans do not follow from its layouts.
        """
        try:
            stored = as_record(_StoredSignature, data)
        except ValueError as error:
            raise SignatureError(f"this is not a stored signature: {error}") from None
        signature = cls.build(
            {
                name: Layout(collection.columns, collection.alignment, collection.storage)
                for name, collection in stored.collections.items()
            },
            stored.inputs,
            stored.outputs,
            stored.rows,
            {name: collection.rows for name, collection in stored.collections.items()},
            jagged=stored.jagged,
            stored=True,
        )
        if _canonical_json(signature.to_dict()) != _canonical_json(data):
            raise SignatureError(
                "the stored signature does not follow from its own layouts: it was altered, or "
                "written by another version of this software"
            )
        return signature


def _row_dimensions(
    layouts: Mapping[str, Layout], rows_of: Mapping[str, str], ranges: Mapping[str, RowRange]
) -> dict[str, str]:
    """Return the row dimension of every collection: that in `rows_of`, or else `n`.

    Raises SignatureError if `rows_of` names no collection, or if a dimension has no range.
    """
    unknown = sorted(set(rows_of) - set(layouts))
    if unknown:
        raise SignatureError(f"rows of {unknown[0]!r}, which is no collection")
    dims = {name: rows_of.get(name, "n") for name in layouts}
    for collection, dim in dims.items():
        if dim not in ranges:
            raise SignatureError(f"collection {collection!r}: no range for its rows {dim!r}")
    return dims


def _plan_bound(block: Block, layouts: Mapping[str, Layout], dims: Mapping[str, str]) -> BoundBlock:
    """Return a block with its plan and row dimension (`dims` has that of each collection).

    Raises SignatureError if the collection does not exist, BlockError if its layout cannot provide
    the block.
    """
    if block.collection not in layouts:
        names = ", ".join(layouts)
        raise SignatureError(
            f"block {block.name!r}: no collection {block.collection!r}, there are: {names}"
        )
    plan = plan_block(block, layouts[block.collection])
    return BoundBlock(block, plan, dims[block.collection])


def _require_identifiers(
    layouts: Mapping[str, Layout], blocks: Sequence[Block], dims: Iterable[str]
) -> None:
    """Raise SignatureError for a name that is no identifier in C++."""
    names_of = {
        "collection": layouts,
        "column": [column.name for layout in layouts.values() for column in layout.columns],
        "block": [block.name for block in blocks],
        "row dimension": dims,
    }
    for kind, names in names_of.items():
        for name in names:
            if not IDENTIFIER.fullmatch(name):
                raise SignatureError(f"{kind} {name!r} is not an identifier (A-Z a-z 0-9 _)")


def _canonical_json(data: Mapping[str, Any]) -> str:
    """Return data as JSON text that can be compared: in Python, 1, 1.0 and True are equal."""
    return json.dumps(data, sort_keys=True)


def _range_data(rows: RowRange) -> dict[str, Any]:
    """Return a range as data for JSON, as `Signature.to_dict` stores it."""
    data: dict[str, Any] = as_data(rows)
    if not rows.unbounded:  # the same text as before `unbounded` existed
        del data["unbounded"]
    return data


@dataclass(frozen=True)
class _StoredCollection:
    """A collection as it is stored: the fields of its layout, and its row dimension."""

    columns: tuple[Column, ...]
    alignment: int
    storage: Storage
    rows: str


@dataclass(frozen=True)
class _StoredSignature:
    """The fields of `Signature.to_dict`, except the plans, which are computed from the others."""

    collections: Mapping[str, _StoredCollection]
    rows: Mapping[str, RowRange]
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    jagged: Mapping[str, int] = field(default_factory=dict)


def _block_arguments(bound: BoundBlock, role: Role) -> list[Argument]:
    """Return the arguments of a block in order: one for a matrix, else one for each component."""
    plan, block = bound.plan, bound.block
    kind: Literal["matrix", "column", "scalar"] = "scalar" if plan.kind == "scalars" else "column"
    starts, count = plan.components, 1
    if plan.kind == "matrix":  # its memory starts at its first component
        kind, starts, count = "matrix", starts[:1], len(starts)
    return [
        Argument(role, kind, bound.rows, dtype, block.name, block.collection, name, k, count)
        for (name, k), dtype in zip(starts, plan.dtypes, strict=True)
    ]
