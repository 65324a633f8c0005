"""Exports and compiles functions of rows with `lanes`, to compare with eager torch."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from engines import Portable, Target, engine
from engines.exported import quiet_torch
from engines.lanes.compiling.devices import build_row_kernel
from engines.lanes.compiling.library import build_row
from engines.lanes.planning.program import Given, OneRow, lower_row, trace_operators
from engines.lanes.tensors import Program
from engines.target import gpu_target
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.dtypes import dtype_name
from soa.signature import BoundBlock
from tests.models import building

MOST = 64
_SCRATCH = Path(tempfile.mkdtemp(prefix="lanes-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


class Function(nn.Module):
    """A model with an output for each entry of `outputs`, a function of all inputs."""

    def __init__(self, outputs: Mapping[str, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output(*inputs) for output in self.outputs.values())


@dataclass(frozen=True)
class Compiled:
    """A model, and a session of its artifact. `same_bits`: a row has the same bits in each call."""

    model: nn.Module
    signature: Signature
    session: Session
    same_bits: bool = False

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The artifact's answers as tensors of rows; it runs on columns. With `same_bits`, each row
        runs alone, too."""
        answers = self.together(*inputs)
        if self.same_bits and len(inputs[0]):
            self._require_same_alone(inputs, answers)
        return answers

    def together(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The answers of one call with all rows."""
        n = len(inputs[0])
        rows, written = self._collections(n)
        for bound, values in zip(self.signature.inputs, inputs, strict=True):
            by_row(bound, rows).copy_(flat(values))
        device = self.session.device
        on_device = {name: collection.to(device) for name, collection in written.items()}
        self.session.run({name: given.to(device) for name, given in rows.items()}, on_device)
        back = {name: collection.to("cpu") for name, collection in on_device.items()}
        return {b.name: by_row(b, back).reshape(b.shape(n)) for b in self.signature.outputs}

    def _require_same_alone(self, inputs: Sequence[Tensor], together: Mapping[str, Tensor]) -> None:
        """Runs each row in a call of its own, in the same memory, and compares the bits."""
        rows, written = self._collections(1)
        binding = self.session.bind(rows, written)
        row_inputs = [by_row(bound, rows) for bound in self.signature.inputs]
        answers = {bound.name: by_row(bound, written) for bound in self.signature.outputs}
        wanted = {name: flat(values) for name, values in together.items()}
        for row in range(len(inputs[0])):
            for row_input, values in zip(row_inputs, inputs, strict=True):
                row_input.copy_(flat(values[row : row + 1]))
            for collection in written.values():
                assert collection.buffer is not None
                collection.buffer.fill_(0x55)  # so that an answer that is not written shows
            binding()
            for name, answer in answers.items():
                assert bits(answer) == bits(wanted[name][row : row + 1]), (name, row)

    def _collections(self, n: int) -> tuple[dict[str, Collection], dict[str, Collection]]:
        """The inputs and the outputs, without values."""
        rows, written = (
            {name: Collection(self.signature.layouts[name], n) for name in names}
            for names in (self.signature.input_collections, self.signature.output_collections)
        )
        return rows, written

    def eager(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The answers of the model in eager torch."""
        with torch.no_grad():
            answers = self.model(*inputs)
        return dict(zip((b.name for b in self.signature.outputs), answers, strict=True))


def by_row(bound: BoundBlock, collections: Mapping[str, Collection]) -> Tensor:
    """The collection of a block of `signature_of` as one tensor (rows, columns) over its memory."""
    collection, columns = collections[bound.block.collection], bound.block.columns
    whole = collection.run(columns[0], 0, len(columns)).tensor()
    return whole[:, : collection.n].t()


def flat(values: Tensor) -> Tensor:
    """(rows, elements of a row)"""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def bits(values: Tensor) -> bytes:
    """The bits of numbers; all NaN have the same ones."""
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), math.nan)
    contiguous = values.clone(memory_format=torch.contiguous_format)
    return contiguous.view(torch.uint8).numpy().tobytes()


def signature_of(inputs: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Signature:
    """A collection for each tensor of rows, with a column for each element of a row."""
    layouts: dict[str, Layout] = {}

    def block(name: str, values: Tensor) -> Block:
        shape = tuple(values.shape[1:])
        names = tuple(f"{name}_{k}" for k in range(math.prod(shape)))
        dtype = dtype_name(values.dtype)
        layouts[name] = Layout([column(column_name, dtype) for column_name in names])
        return Block(name, name, names, shape=shape if len(shape) > 1 else None)

    input_blocks = [block(f"x{k}", values) for k, values in enumerate(inputs)]
    output_blocks = [block(name, values) for name, values in outputs.items()]
    return Signature.build(layouts, input_blocks, output_blocks, {"n": RowRange(0, MOST)})


def target_on(device: str) -> Target:
    """The target of this host's processor ("cpu") or GPU ("cuda:0")."""
    place = torch.device(device)
    return Target.parse("cpu") if place.type == "cpu" else gpu_target(place.index or 0)


@dataclass(frozen=True)
class Prepared:
    """A model, and its exported program."""

    model: nn.Module
    signature: Signature
    program: Path

    def compiled(self, name: str = "lanes", device: str = "cpu") -> Compiled:
        """The artifact of the engine with this name, one that compiles exported programs, for this
        host's processor or GPU."""
        folder, place = Path(tempfile.mkdtemp(dir=_SCRATCH)), torch.device(device)
        source = Portable(self.program, None)
        files = engine(name).compile(source, target_on(device), {}, folder)
        opened = engine(name).open(folder / files[0], place)
        session = Session(self.signature, opened, place)
        same_bits = name == "lanes" and place.type == "cpu"
        return Compiled(self.model, self.signature, session, same_bits)


def prepared(
    model: nn.Module, inputs: Sequence[Tensor], names: Sequence[str], row_wise: bool = False
) -> Prepared:
    """Exports the model with these rows as its example. `row_wise`: captures it at one row."""
    outputs = dict(zip(names, first_rows(model, inputs), strict=True))
    signature = signature_of(inputs, outputs)
    arrays: dict[str, dict[str, Any]] = {}
    for bound, values in zip(signature.inputs, inputs, strict=True):
        elements = flat(values)
        arrays[bound.name] = {c: elements[:, k].clone() for k, c in enumerate(bound.block.columns)}
    file = Path(tempfile.mkdtemp(dir=_SCRATCH)) / "program.pt2"
    return Prepared(model, signature, building.exported(model, signature, arrays, file, row_wise))


def compiled(
    model: nn.Module, inputs: Sequence[Tensor], names: Sequence[str], device: str = "cpu"
) -> Compiled:
    """For a GPU the model is captured at one row: torch 2.11 there exports fewer programs."""
    return prepared(model, inputs, names, row_wise=device != "cpu").compiled(device=device)


def arguments(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Given]:
    """The arguments of a program for one row: the number of rows, and a matrix (columns, 1) for
    each input and output."""
    sizes = [(flat(values).shape[1], values.dtype) for values in (*inputs, *outputs)]
    matrices = [Given(torch.empty(size, 1, dtype=dtype), "m") for size, dtype in sizes]
    return [Given(torch.empty(1, 0), "n"), *matrices]


def one_row(
    model: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor], vmapped: bool = False
) -> OneRow:
    """The model's operators at one row, on `arguments`. `vmapped`: it calls torch.vmap."""

    def run(_count: Tensor, *matrices: Tensor) -> list[Tensor]:
        pairs = zip(matrices[: len(inputs)], inputs, strict=True)
        rows = [matrix.T.reshape(1, *values.shape[1:]) for matrix, values in pairs]
        return [flat(answer).T for answer in model(*rows)]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    row_arguments = arguments(inputs, outputs)
    examples = [mode.from_tensor(argument.value) for argument in row_arguments]
    with quiet_torch(), torch.no_grad(), mode:
        # `trace_operators` cannot see through torch.vmap.
        graph = trace_operators(make_fx(run)(*examples) if vmapped else run, examples, mode)
    return OneRow(graph, list(range(1 + len(inputs), len(row_arguments))))


def first_rows(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The model's answers to the first two rows. It makes the model one for inference."""
    model.eval().requires_grad_(False)
    with torch.no_grad():
        answers: tuple[Tensor, ...] = model(*[x[:2] for x in inputs])
    return answers


def program_of(model: nn.Module, inputs: Sequence[Tensor]) -> Program:
    """The program of `lanes` for one row of a model."""
    outputs = first_rows(model, inputs)
    return lower_row(one_row(model, inputs, outputs), arguments(inputs, outputs))


def compiled_row(
    model: nn.Module,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    device: str = "cpu",
    vmapped: bool = False,
    target: Target | None = None,
) -> Compiled:
    """The artifact of `lanes` from the model's operators at one row: `compiled` needs some times as
    long, as it exports the model. For tests of what operators do, also for another target that this
    host runs."""
    outputs = first_rows(model, inputs)
    signature = signature_of(inputs, dict(zip(names, outputs, strict=True)))
    program = lower_row(one_row(model, inputs, outputs, vmapped), arguments(inputs, outputs))
    folder, place = Path(tempfile.mkdtemp(dir=_SCRATCH)), torch.device(device)
    build = build_row if place.type == "cpu" else build_row_kernel
    files = build(program, target or target_on(device), folder)
    opened = engine("lanes").open(folder / files[0], place)
    return Compiled(model, signature, Session(signature, opened, place), place.type == "cpu")
