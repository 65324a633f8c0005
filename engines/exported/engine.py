"""The `exported` engine runs the ExportedProgram itself. It is slow, portable and always there."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engines.base import Engine, Executable, Portable
from engines.errors import EngineError
from engines.exported.archive import load_program
from engines.exported.graph import aten, move_to_gpu
from engines.processes import require_openmp
from engines.target import Target


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Ignore warnings and torch's log messages inside the block. Not thread-safe.

    torch warns about its own internals (pytree classes, TorchScript's future, tracing of sizes)
    when it exports, compiles or loads, and logs an error that it also raises. Users of this package
    cannot act on these lines.
    """
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Program(Executable):
    """A loaded program. A call uses torch's number of threads, and writes the outputs in place."""

    def __init__(self, module: torch.nn.Module) -> None:
        # `forward` skips the hook that compares sizes with their range at export. The binding has
        # checked n, and a padded length may be below that range (see stages/capture/exporting.py).
        self._forward = module.forward

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        require_openmp(torch.get_num_threads())
        with torch.no_grad():
            self._forward(*arguments)


class ExportedEngine(Engine, engine="exported", order=60, options=False):
    anywhere = True
    in_place_of = "lanes"

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        return []

    def portable_file(self, source: Portable) -> Path | None:
        return source.program

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        with quiet_torch():
            program = load_program(file)
            try:
                if device.type != "cpu":
                    program = move_to_gpu(program, str(device))
                # No guards: torch adds a guard `S != n`, which its `narrow` does not need. The
                # binding checks n against the compiled range, and validation runs with n == S.
                module = program.module(check_guards=False)
                _store_in_place(module)
                _map_at_once(module)
            except Exception as error:
                raise EngineError(
                    f"{file.name} is not a program torch can load: {error}"
                ) from error
        return _Program(module)


def _store_in_place(module: torch.fx.GraphModule) -> None:
    """Change the program so that it writes only the rows in use of each output.

    In torch's functional form, a store into a part of an output copies the whole output, changes
    the copy and copies it back. That also writes the padding, and changes bytes there that are no
    valid bool.
    """
    for store in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        written, value = store.args[:2]
        if value.target is aten.slice_scatter.default and value.args[0] is written:
            with module.graph.inserting_before(store):
                rows_in_use = (written, *value.args[2:])
                written = module.graph.call_function(aten.slice.Tensor, rows_in_use)
            value = value.args[1]
        if value.target is aten.copy.default:  # the store converts and broadcasts by itself
            value = value.args[1]
        store.args = (written, value)
    module.graph.eliminate_dead_code()
    module.recompile()


def _map_at_once(module: torch.fx.GraphModule) -> None:
    """Change a program that runs a graph for each row so that it runs all rows at once.

    `map_impl` is torch's operator that runs a graph row by row. All rows at once take a third to a
    twentieth of its time. torch cannot do this with every operator: see `_run_each_row`.
    """
    target = torch.ops.higher_order.map_impl
    nodes = module.graph.find_nodes(op="call_function", target=target)
    for node in nodes:
        node.target = _run_each_row
    if nodes:  # an operator without code for many rows is no reason to warn: it runs as before
        functorch: Any = torch._C._functorch
        functorch._set_vmap_fallback_warning_enabled(False)
    module.recompile()


def _run_each_row(
    graph: torch.fx.GraphModule, of_rows: list[torch.Tensor], shared: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run the graph on each row on its own, and return its outputs for all rows.

    Each tensor of `of_rows` has the rows in dimension 0. All rows get the same `shared` tensors.
    """
    if len(of_rows[0]) == 0:  # map_impl needs a row: compute one of zeros, and return none
        one_row = [tensor.new_zeros(1, *tensor.shape[1:]) for tensor in of_rows]
        return tuple(answer[:0] for answer in _run_each_row(graph, one_row, shared))

    def run_graph(*row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(graph(*row, *shared))

    try:
        answers: tuple[torch.Tensor, ...] = torch.vmap(run_graph)(*of_rows)
    except RuntimeError:  # torch cannot do an operator for many rows at once
        answers = torch.ops.higher_order.map_impl(graph, of_rows, shared)
    return answers
