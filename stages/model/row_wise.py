"""A model captured at exactly one row, and run for each row.

torch.export needs a graph that is right for every number of rows. It refuses a model in which
Python takes this number as a plain number, as `len(x)` does. At one row all sizes are numbers, and
the model exports. `RowWise` runs the exported program for each row, so no row can see another one.
Whether the rows of the model itself are independent is another question:
stages/capture/independence.py tries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import Distribution
from torch.fx import Interpreter, traceback

from soa.signature import Signature
from stages.errors import CaptureError
from stages.model.blame import find_written_state
from stages.model.soa_program import outputs_in_order


class RowWise(torch.nn.Module):
    """A model that was exported at one row, and is run for each row of the inputs.

    It takes the model's inputs, and returns its outputs in the order of the output blocks. All
    outputs have rows.
    """

    def __init__(
        self, model: torch.nn.Module, signature: Signature, arguments: Sequence[torch.Tensor]
    ) -> None:
        """`arguments`: row-major inputs with any number of rows. Raises CaptureError, or an error
        of torch.export, if the model does not export at one row."""
        super().__init__()
        self.training = False
        self.shared = [bound.rowless for bound in signature.inputs]
        one_row = tuple(
            argument if shared else argument[:1].clone()
            for argument, shared in zip(arguments, self.shared, strict=True)
        )
        program = _export_at_one_row(_InOrder(model, signature), one_row)
        tensors = {**program.state_dict, **program.constants}
        all_specs = program.graph_signature.input_specs
        specs = [spec for spec in all_specs if spec.kind.name != "USER_INPUT"]
        self.weights = [f"weight_{i}" for i in range(len(specs))]
        for name, spec in zip(self.weights, specs, strict=True):
            self.register_buffer(name, tensors[str(spec.target)].detach())
        self._one_row = (program.graph_module,)  # in a tuple: not a part of this module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program for each row, by torch's map operator.

        The operator calls `one_row` with a row of each input that has rows, followed by all other
        tensors as they are. The weights are passed too, since the function may use no tensors from
        outside.
        """
        weights = [self.get_buffer(name) for name in self.weights]
        with_sharing = list(zip(inputs, self.shared, strict=True))
        whole = [tensor for tensor, shared in with_sharing if shared]
        with_rows = [tensor for tensor, shared in with_sharing if not shared]
        first_weight = len(inputs)

        def one_row(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """The answers to one row. `tensors` are its values, then the inputs that all rows
            share, then the weights."""
            row_values = iter(tensors[: len(with_rows)])
            whole_values = iter(tensors[len(with_rows) : first_weight])
            arguments = [
                next(whole_values) if shared else next(row_values).unsqueeze(0)
                for shared in self.shared
            ]
            with traceback.preserve_node_meta():  # keeps the lines of the model
                answers = Interpreter(self._one_row[0]).run(*tensors[first_weight:], *arguments)
            return tuple(answer.squeeze(0).clone() for answer in answers)

        answers_of_rows: tuple[torch.Tensor, ...] = torch.ops.higher_order.map_impl(
            one_row, with_rows, [*whole, *weights]
        )
        return answers_of_rows


def _export_at_one_row(
    model: torch.nn.Module, one_row: tuple[torch.Tensor, ...]
) -> torch.export.ExportedProgram:
    """Export a model for inputs of one row, as a functional program. Raises CaptureError if the
    model writes into its own state, or what torch.export raises."""
    exported = torch.export.export(model, one_row, strict=False)
    program: torch.export.ExportedProgram = exported.run_decompositions({})
    if find_written_state(program):
        raise CaptureError("the model writes into its own state: an artifact keeps none")
    return program


class _InOrder(torch.nn.Module):
    """The model, called with one row. It returns its outputs as a tuple in the order of the blocks,
    and raises CaptureError if one does not have exactly one row."""

    def __init__(self, model: torch.nn.Module, signature: Signature) -> None:
        super().__init__()
        self.training = False
        self.model, self.signature = model, signature

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = outputs_in_order(self.model(*inputs), self.signature)
        if any(output.dim() == 0 or output.shape[0] != 1 for output in outputs):
            raise CaptureError("an output does not have one answer for each row")
        return tuple(outputs)


class _ChecksOff:
    """Replaces the attribute `Distribution._validate_args`: it is always false, and `read` becomes
    true when torch reads it."""

    read = False

    def __get__(self, instance: Any, owner: Any) -> bool:
        self.read = True
        return False


@contextmanager
def checks_off() -> Iterator[_ChecksOff]:
    """Keep torch.distributions from checking its arguments until the block ends. The attribute
    `read` of the value that is yielded tells afterwards whether it would have checked any.

    The checks branch on values ("is the variance positive?"), so that a model which uses them has
    no graph. They are no part of an answer. Not thread-safe.
    """
    before, off = Distribution._validate_args, _ChecksOff()
    Distribution._validate_args = off  # type: ignore[assignment]
    try:
        yield off
    finally:
        Distribution._validate_args = before
