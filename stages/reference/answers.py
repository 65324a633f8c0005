"""The reference: inputs, and the eager model's answers to them on ordinary row-major tensors.

It shares only the numbers with the path through SoA memory. Inputs are one pool of arrays per
collection; a case takes its first n rows. The reference is stored as safetensors (no pickle).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from engines.errors import first_line
from engines.processes import report_step
from runtime.session import Session
from soa.dtypes import is_float, itemsize, torch_dtype
from soa.layout import DEFAULT_ALIGNMENT, Column, Layout
from soa.memory import Collection, Device, read_block
from soa.records import as_record, parse_json
from soa.signature import BoundBlock, Signature, offsets_of
from stages.errors import CaptureError, ReferenceDataError
from stages.model import outputs_in_order, where_raised
from stages.reference.nonfinite import Case, label
from stages.reference.offsets import draw_offsets, inputs_at, pad_row_by_row, with_edge_lengths

Arrays = dict[str, dict[str, torch.Tensor]]
Index = slice | torch.Tensor

EdgeKind = Literal["stress", "integers", "special", "extreme"]
"""How the answers to such rows are judged. `stress`: as those to the reference's own rows.
`integers`: as these, in any size. `special` (NaN, infinities, -0.0): a decision must be the
model's. `extreme` (huge and denormal numbers): a difference is only reported."""

_SPECIAL = ("NaN", "infinity", "-infinity", "-0.0")


@dataclass(frozen=True)
class Edge:
    """Further rows of one kind, with the eager model's outputs: rows with unusual values, or many
    rows like those of the reference. `what` names the kind in reports."""

    what: str
    kind: EdgeKind
    inputs: Arrays
    case: Case
    outputs: dict[str, torch.Tensor]

    @property
    def exact(self) -> bool:
        """Whether an artifact is refused for any other answer. Older releases read this in place of
        the kind."""
        return self.kind in ("stress", "integers")

    @classmethod
    def stored(cls, what: str, exact: bool, case: Case, kind: str | None) -> Edge:
        """An edge as a file describes it, without its tensors, which `put` adds. Older references
        have no `kind`: it is inferred. Raises ValueError for a kind that is not known."""
        if not kind:
            inexact = "special" if what in _SPECIAL else "extreme"
            kind = "integers" if exact else inexact
        if kind not in get_args(EdgeKind):
            raise ValueError(f"found a kind of edge {kind!r}")
        return cls(what, cast("EdgeKind", kind), {}, case, {})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the edge, by the names under which they are stored."""
        tensors = _name_inputs(self.inputs)
        tensors |= {f"output/{name}": value for name, value in self.outputs.items()}
        return {name: value.clone() for name, value in tensors.items()}

    def put(self, name: str, value: torch.Tensor) -> None:
        """Add a tensor by the name under which it was stored: `input/<collection>/<column>` or
        `output/<block>`. Raises ValueError for a name without a slash."""
        kind, collection_or_block, *column = name.split("/")
        if kind == "input":
            self.inputs.setdefault(collection_or_block, {})["/".join(column)] = value
        else:
            self.outputs[collection_or_block] = value


@dataclass(frozen=True)
class MoreRows:
    """Rows beside those of a reference, with the eager model's answers; and notes for the user on
    what was not tried, because the model fails on it."""

    edges: tuple[Edge, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """Inputs, and the eager model's outputs to them for each case.

    `inputs[collection][column]` has as many rows as validation runs: `(n,)`, Eigen `(n, r)` or `(n,
    r, c)`, scalars `()`. `outputs[i]` has the outputs of case i by block, in the model's shapes.
    `notes` say what the reference does not show. `edges` are further rows; older references have
    none.
    """

    inputs: Arrays
    cases: tuple[Case, ...]
    outputs: tuple[dict[str, torch.Tensor], ...]
    notes: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()

    def save(self, path: Path) -> None:
        """Write the reference as a safetensors file. Equal references give equal bytes."""
        tensors = _name_inputs(self.inputs)
        for i, outputs in enumerate(self.outputs):
            tensors |= {f"output/{i}/{name}": value for name, value in outputs.items()}
        for i, edge in enumerate(self.edges):
            tensors |= {f"edge/{i}/{name}": value for name, value in edge.tensors().items()}
        metadata = {
            "cases": json.dumps(list(self.cases)),
            "notes": json.dumps(self.notes),
            "edges": json.dumps([[edge.what, edge.exact, edge.case] for edge in self.edges]),
            "edge_kinds": json.dumps([edge.kind for edge in self.edges]),
        }
        # save_file is not used: its error on a full disk is no OSError.
        content = save({name: value.contiguous() for name, value in tensors.items()}, metadata)
        # safetensors writes the metadata in another order each time: the same rows, the same file.
        # A file is the size of its head in 8 bytes, the head (JSON, padded to 8), and the values.
        size = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + size])  # trusted
        head["__metadata__"] = metadata
        encoded = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.write(memoryview(content)[8 + size :])

    @classmethod
    def load(cls, path: Path, signature: Signature | None = None) -> Reference:
        """Read a file that `save` wrote. Raises ReferenceDataError for any other file, or if a
        `signature` is given and the reference does not fit it."""
        metadata, tensors = read_tensors(path, "a stored reference")
        inputs: Arrays = {}
        try:
            cases = as_record(list[Case], parse_json(metadata["cases"]))
            # Older references have no notes.
            notes = as_record(tuple[str, ...], parse_json(metadata.get("notes", "[]")))
            outputs: dict[str, dict[str, torch.Tensor]] = {str(i): {} for i in range(len(cases))}
            edges = _parse_edges(metadata)
            for (kind, where, name), value in tensors.items():
                if kind == "input":
                    inputs.setdefault(where, {})[name] = value
                elif kind == "edge":
                    edges[where].put(name, value)
                else:
                    outputs[where][name] = value
        except (KeyError, ValueError) as error:
            raise ReferenceDataError(f"{path} is not a stored reference: {error}") from error
        reference = cls(inputs, tuple(cases), tuple(outputs.values()), notes, tuple(edges.values()))
        return reference if signature is None else reference._check_fits(signature, path)

    def _check_fits(self, signature: Signature, path: Path) -> Reference:
        """Check that the reference has all inputs and answers that the signature needs. Returns it,
        with its inputs in new memory. Raises ReferenceDataError, which names the file `path`."""
        of_edges = [(edge.case, edge.outputs) for edge in self.edges]
        for case, outputs in (*zip(self.cases, self.outputs, strict=True), *of_edges):
            if not _answers_fit(signature, case, outputs):
                raise ReferenceDataError(f"{path}: its case {label(case)} is of another signature")
        edges = tuple(
            replace(edge, inputs=check_inputs(signature, edge.inputs, edge.case))
            for edge in self.edges
        )
        return replace(self, inputs=check_inputs(signature, self.inputs), edges=edges)


def _answers_fit(signature: Signature, case: Case, outputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether a case lies within the signature's ranges, and `outputs` has an answer of the right
    shape for each output block."""
    if case.keys() != set(signature.dims):
        return False
    if not all(0 <= n <= signature.ranges[dim].proven for dim, n in case.items()):
        return False
    return all(
        bound.name in outputs and tuple(outputs[bound.name].shape) == bound.shape(case[bound.rows])
        for bound in signature.outputs
    )


def _name_inputs(inputs: Arrays) -> dict[str, torch.Tensor]:
    """The input tensors by the names under which they are stored, `input/<collection>/<column>`."""
    return {
        f"input/{collection}/{column}": values
        for collection, columns in inputs.items()
        for column, values in columns.items()
    }


def _parse_edges(metadata: Mapping[str, str]) -> dict[str, Edge]:
    """Read the edges of a stored reference from its metadata, without their tensors. The keys are
    their indices as text: "0", "1" … Raises ValueError if the metadata does not fit."""
    stored = as_record(list[tuple[str, bool, Case]], parse_json(metadata.get("edges", "[]")))
    kinds = as_record(list[str], parse_json(metadata.get("edge_kinds", "[]")))  # not in older ones
    if kinds and len(kinds) != len(stored):
        raise ValueError(f"{len(stored)} edges, {len(kinds)} kinds of edges")
    return {
        str(i): Edge.stored(what, exact, case, kinds[i] if kinds else None)
        for i, (what, exact, case) in enumerate(stored)
    }


def read_tensors(
    path: Path, what: str, prefix: str = ""
) -> tuple[dict[str, str], dict[tuple[str, str, str], torch.Tensor]]:
    """Read the metadata and the tensors of a safetensors file.

    The keys are the three parts of the tensors' names, which slashes separate: `input/jets/pt` is
    `("input", "jets", "pt")`. Only tensors whose names begin with `prefix` are read. Raises
    ReferenceDataError, which says that the file is not `what`.
    """
    tensors: dict[tuple[str, str, str], torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as stored:
            for key in list(stored.keys()):
                if key.startswith(prefix):
                    kind, _, rest = key.partition("/")
                    where, _, name = rest.partition("/")
                    tensors[kind, where, name] = stored.get_tensor(key)
            return stored.metadata() or {}, tensors
    except (OSError, SafetensorError, ValueError) as error:
        raise ReferenceDataError(f"{path} is not {what}: {error}") from error


TILES = (64, 256, 1024, 4096, 16384)
"""Numbers of rows that an artifact may run at a time. Each is a multiple of the one before."""


def make_cases(signature: Signature) -> tuple[Case, ...]:
    """The cases at which artifacts are validated.

    The sizes of a row dimension are 0, 1, 2, the typical ones, the least and the largest, those
    around each alignment, and one row more than a whole number of tiles, all within its range. With
    several dimensions, case i has the i-th size of each; a shorter list starts again. Further cases
    have all dimensions at their largest, and one at its least and the others at their largest.
    """
    per_dim: dict[str, list[int]] = {}
    for dim in signature.dims:
        rows = signature.ranges[dim]
        sizes = {0, 1, 2, 37, *rows.typical, rows.min, rows.max, rows.proven}
        for name, layout in signature.layouts.items():
            if signature.rows_of[name] == dim:
                for column in layout.numbers:
                    aligned = layout.alignment if layout.alignment > 1 else DEFAULT_ALIGNMENT
                    line = aligned // itemsize(column.dtype)  # rows between aligned addresses
                    sizes |= {line - 1, line, line + 1}
        if signature.tile_kinds is not None:
            sizes.add(max((2 * tile + 1 for tile in TILES if 2 * tile < rows.max), default=1))
        per_dim[dim] = sorted(n for n in sizes if rows.min <= n <= rows.proven)
    longest = max(len(sizes) for sizes in per_dim.values())
    cases = [{dim: sizes[i % len(sizes)] for dim, sizes in per_dim.items()} for i in range(longest)]
    for least in (None, *per_dim):
        corner = {dim: sizes[0 if dim == least else -1] for dim, sizes in per_dim.items()}
        if corner not in cases:
            cases.append(corner)
    return tuple(cases)


def random_inputs(
    signature: Signature, seed: int, ranges: Mapping[str, tuple[float, float]]
) -> Arrays:
    """Draw reference inputs at random, as many rows as validation runs.

    A column named in `ranges` is uniform between its two numbers. Other floats are normal, other
    integers from 0 to 99, bools false or true. The same `seed` gives the same inputs.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(column: Column, n: int) -> torch.Tensor:
        """The values of a column with n rows."""
        shape = _column_shape(column, n)
        dtype = torch_dtype(column.dtype)
        if column.name in ranges:
            low, high = ranges[column.name]
            values = torch.rand(shape, generator=generator, dtype=torch.float64)
            return (low + (high - low) * values).to(dtype)
        if is_float(column.dtype):
            return torch.randn(shape, generator=generator).to(dtype)
        high_int = 2 if column.dtype == "bool" else 100
        return torch.randint(0, high_int, shape, generator=generator).to(dtype)

    rows = {name: signature.ranges[dim].proven for name, dim in signature.rows_of.items()}
    inputs: Arrays = {
        name: {column.name: draw(column, rows[name]) for column in signature.layouts[name].numbers}
        for name in signature.input_collections
    }
    for name in signature.jagged:
        offsets = offsets_of(name)
        inputs[offsets] = draw_offsets(inputs[offsets], rows[name], generator)
    return with_edge_lengths(signature, inputs)


def check_inputs(
    signature: Signature, arrays: Mapping[str, Mapping[str, Any]], rows: Case | None = None
) -> Arrays:
    """Check inputs from the user against the layouts, and copy their first `rows` rows.

    `rows` is by dimension. If it is None, these are as many rows as validation runs; then the first
    three jagged rows are also made overlong, empty and full. Raises ReferenceDataError if a column
    is missing, has too few rows, or another shape or dtype.
    """
    checked: Arrays = {}
    for name in signature.input_collections:
        layout = signature.layouts[name]
        dim = signature.rows_of[name]
        n = signature.ranges[dim].proven if rows is None else rows[dim]
        if not isinstance(arrays, Mapping) or not isinstance(arrays.get(name), Mapping):
            raise ReferenceDataError(
                f"the reference has no collection {name!r}: give {{collection: {{column: array}}}}"
            )
        columns = {**_zeros_for_written_columns(signature, name, n), **arrays[name]}
        checked[name] = {
            column.name: _check_column(name, column, columns, n) for column in layout.numbers
        }
    return with_edge_lengths(signature, checked) if rows is None else checked


def _zeros_for_written_columns(signature: Signature, name: str, n: int) -> dict[str, torch.Tensor]:
    """Zeros for those columns of the input collection `name` that the model itself writes: the user
    need not give them. `n` is the number of rows."""
    layout = signature.layouts[name]
    blocks = [bound.block for bound in signature.outputs if bound.block.collection == name]
    written = [layout[column] for block in blocks for column in block.columns]
    return {
        column.name: torch.zeros(_column_shape(column, n), dtype=torch_dtype(column.dtype))
        for column in written
    }


def _column_shape(column: Column, n: int) -> tuple[int, ...]:
    """The shape of a column of n rows."""
    return () if column.kind == "scalar" else (n, *column.shape)


def _check_column(
    collection: str, column: Column, columns: Mapping[str, Any], n: int
) -> torch.Tensor:
    """Copy the first n rows of a column of the user's into a new tensor. Raises ReferenceDataError
    if it is missing, or its shape or dtype does not fit the layout."""
    where = f"reference column {collection}.{column.name}"
    if column.name not in columns:
        raise ReferenceDataError(f"{where} is missing")
    value = columns[column.name]
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise ReferenceDataError(f"{where}: {error}") from None
    shape = _column_shape(column, n)
    if column.kind != "scalar" and tensor.ndim and tensor.shape[0] > n:
        tensor = tensor[:n]
    if tuple(tensor.shape) != shape:
        raise ReferenceDataError(f"{where} has shape {tuple(tensor.shape)}, needed {shape}")
    if tensor.dtype != torch_dtype(column.dtype):
        raise ReferenceDataError(
            f"{where} is {tensor.dtype}, the layout says {column.dtype}: convert it first"
        )
    return tensor.clone()


def filled_collections(
    signature: Signature, inputs: Arrays, case: Case, device: Device | torch.device
) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """Make the collections of a case on a device: the input collections with the first rows of
    `inputs`, and the output collections with zeros, both by name.

    A collection that is input and output is the same object in both.
    """
    inputs = inputs_at(signature, inputs, case)
    sources: dict[str, Collection] = {}
    for name in signature.input_collections:
        collection = Collection(signature.layouts[name], case[signature.rows_of[name]])
        for column in collection.layout.numbers:
            collection.fill(column.name, inputs[name][column.name])
        sources[name] = collection if device.type == "cpu" else collection.to(device)
    written = {
        name: sources.get(name)
        or Collection(signature.layouts[name], case[signature.rows_of[name]], device)
        for name in signature.output_collections
    }
    return sources, written


def run_session(session: Session, inputs: Arrays, case: Case) -> dict[str, torch.Tensor]:
    """Run a session on the first rows of `inputs`, as many as `case` says. Returns its answers on
    the CPU, by block."""
    sources, written = filled_collections(session.signature, inputs, case, session.device)
    session.run(sources, written)
    return {
        bound.name: read_block(bound, written[bound.block.collection]).cpu()
        for bound in session.signature.outputs
    }


def take_rows(signature: Signature, inputs: Arrays, rows: Mapping[str, Index]) -> Arrays:
    """Take some rows of all columns. `rows` has the indices, or a slice, for each dimension; a
    slice gives views. Scalars, which have no rows, are taken as they are."""

    def rows_of(name: str, column: Column) -> torch.Tensor:
        values = inputs[name][column.name]
        return values if column.kind == "scalar" else values[rows[signature.rows_of[name]]]

    return {
        name: {column.name: rows_of(name, column) for column in signature.layouts[name].numbers}
        for name in signature.input_collections
    }


def row_major_inputs(signature: Signature, arrays: Arrays, case: Case) -> list[torch.Tensor]:
    """The input blocks of a case as ordinary contiguous tensors, as the eager model takes them."""
    arrays = inputs_at(signature, arrays, case)
    return [
        _row_major_block(bound, signature.layouts[bound.block.collection], arrays, case)
        for bound in signature.inputs
    ]


def _row_major_block(bound: BoundBlock, layout: Layout, arrays: Arrays, case: Case) -> torch.Tensor:
    """An input block as the eager model takes it: a contiguous tensor with the first n rows of its
    columns side by side. Scalars are joined, and repeated for each row unless it is rowless."""
    columns = arrays[bound.block.collection]
    dtype = torch_dtype(bound.plan.dtype)
    n = case[bound.rows]
    if bound.plan.kind == "scalars":
        flat = torch.stack([columns[name].to(dtype) for name in bound.block.columns])
        return flat.reshape(bound.plan.feature_shape).expand(bound.shape(n)).contiguous()
    matrices = [
        columns[name][:n].to(dtype).reshape(n, layout[name].components)
        for name in bound.block.columns
    ]
    return torch.cat(matrices, dim=1).reshape(n, *bound.plan.feature_shape).contiguous()


def eager_outputs(
    model: torch.nn.Module, signature: Signature, inputs: list[torch.Tensor], case: Case
) -> dict[str, torch.Tensor]:
    """Run the eager model. Returns its outputs by block name, in new memory and in the shapes of
    the output blocks. Raises CaptureError if its shapes or dtypes do not fit the blocks, or
    whatever the model raises."""
    report_step(f"with the first rows, {label(case)}")
    with torch.no_grad():
        values = outputs_in_order(pad_row_by_row(model)(*inputs), signature)
    outputs: dict[str, torch.Tensor] = {}
    for bound, value in zip(signature.outputs, values, strict=True):
        shape = bound.shape(case[bound.rows])
        allowed = [shape]
        if shape[-1:] == (1,):
            allowed.append(shape[:-1])  # (n,) for (n, 1), () for (1,)
        if tuple(value.shape) not in allowed:
            raise CaptureError(
                f"output {bound.name!r}: the model returns shape {tuple(value.shape)} at "
                f"{label(case)}, its columns {', '.join(bound.block.columns)} hold {shape}"
            )
        if value.is_floating_point() != is_float(bound.plan.dtypes[0]):
            raise CaptureError(
                f"output {bound.name!r}: the model returns {value.dtype}, "
                f"its columns are {bound.plan.dtypes[0]}: convert it in the model"
            )
        outputs[bound.name] = value.detach().reshape(shape).clone()
    return outputs


def compute_reference(
    model: torch.nn.Module,
    signature: Signature,
    inputs: Arrays,
    cases: tuple[Case, ...],
    known: tuple[Case, dict[str, torch.Tensor]] | None = None,
) -> Reference:
    """Run the eager model at each case, and return its answers with the inputs, as a reference.

    `known` is a case with its answers, if they are already computed. Raises CaptureError if the
    model fails.
    """
    known_case, known_answers = known if known is not None else ({}, {})  # no case is empty
    outputs = tuple(
        known_answers if case == known_case else run_eager(model, signature, inputs, case)
        for case in cases
    )
    return Reference(inputs, cases, outputs)


def run_eager(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, case: Case
) -> dict[str, torch.Tensor]:
    """Run the eager model on the first rows of `inputs`, as many as `case` says. Returns its
    answers by block. Raises CaptureError if it fails."""
    try:
        arguments = row_major_inputs(signature, inputs, case)
        return eager_outputs(model, signature, arguments, case)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the eager model itself fails at {label(case)} ({where_raised(error)}): "
            f"{first_line(error)}; if it cannot take that many rows, say so in rows: (min, max)"
        ) from error
