"""The `tensorrt` engine: torch-tensorrt inside an AOTInductor package. It was never run.

It follows the documentation of torch-tensorrt 2.13. The package returns one tensor for each column
component, and the engine copies them into the columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.base import FACTS, Engine, Executable, Portable
from engines.errors import EngineError, NotApplicableError, first_line
from engines.exported import bounds, load_program, move_to_gpu, quiet_torch
from engines.kinds import cpu_code_settings, inductor_settings
from engines.onnx import OnnxProgram, Output, return_columns
from engines.target import Target
from soa.errors import needs_extra
from soa.files import read_plain
from soa.records import as_record, parse_json

_PACKAGE, _COLUMNS = "tensorrt.pt2", "columns.json"


class TensorRtEngine(Engine, engine="tensorrt", order=70, default=False):
    """Compiles by torch-tensorrt into an AOTInductor package for CUDA GPUs."""

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Compile with any settings of `torch_tensorrt.dynamo.compile` as options."""
        if target.device != "cuda":
            raise NotApplicableError(f"tensorrt builds for CUDA targets; found {target}")
        with needs_extra("cuda", EngineError):
            import torch_tensorrt as library
        with quiet_torch(), torch.no_grad():
            rewritten = return_columns(load_program(source.program))
            ranges = input_ranges(rewritten)
            program = move_to_gpu(rewritten.program, "cuda")
            # The default of torch-tensorrt is to use TF32.
            settings = {"disable_tf32": not torch.backends.cuda.matmul.allow_tf32, **options}
            inputs = [library.Input(**keywords) for keywords in ranges]
            host_code = cpu_code_settings(target)
            try:
                compiled = library.dynamo.compile(program, arg_inputs=inputs, **settings)
                with inductor_settings(host_code) as known, torch._inductor.config.patch(known):
                    library.save(
                        compiled,
                        str(out / _PACKAGE),
                        output_format="aot_inductor",
                        arg_inputs=inputs,
                        retrace=True,
                    )
            except Exception as error:  # torch-tensorrt's errors have no common type
                raise EngineError(f"torch-tensorrt failed: {first_line(error)}") from error
        largest = tuple(keywords["max_shape"] for keywords in ranges)
        columns = _Columns(rewritten.inputs, largest, rewritten.outputs)
        (out / _COLUMNS).write_text(json.dumps(asdict(columns)))
        (out / FACTS).write_text(json.dumps({"host_code": host_code["cpp.march"]}))
        return [_PACKAGE, _COLUMNS, FACTS]

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        """Open a package on a CUDA device, with the description of its columns beside it."""
        if device.type != "cuda":
            raise EngineError(f"{file.name}: tensorrt runs on a CUDA device; found {device}")
        with needs_extra("cuda", EngineError):
            import torch_tensorrt  # noqa: F401 - registers the operation that the package calls
        try:
            content = read_plain(file.parent / _COLUMNS, links=True)
            columns = as_record(_Columns, parse_json(content))
            run = torch._inductor.aoti_load_package(str(file), device_index=device.index or 0)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"{file.name} cannot be opened: {first_line(error)}") from error
        return _TensorRt(run, columns)


@dataclass(frozen=True)
class _Columns:
    """The content of the file `columns.json`: how a package's tensors belong to the arguments."""

    inputs: tuple[int, ...]
    """The indices of the arguments that the package takes, in its order."""
    largest: tuple[tuple[int, ...], ...]
    """The largest shape of each input that the package was built for."""
    outputs: tuple[Output, ...]


class _TensorRt(Executable):
    """A loaded package, which takes the inputs and returns a tensor for each output."""

    def __init__(self, run: Any, columns: _Columns) -> None:
        self._run = run
        self._columns = columns

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run once, and copy the returned tensors into the output columns."""
        inputs = []
        for i, largest in zip(self._columns.inputs, self._columns.largest, strict=True):
            argument = arguments[i]
            if argument.dim() > 1 and argument.shape[1] > largest[1]:
                # The padded length exceeds that of the build. The rows in use come first.
                argument = argument.narrow(1, 0, largest[1]).contiguous()
            inputs.append(argument)
        with torch.no_grad():
            returned = self._run(*inputs)
        for output, tensor in zip(self._columns.outputs, returned, strict=True):
            written = arguments[output.argument]
            column = written if written.dim() == 1 else written[output.component]
            values = tensor.reshape(-1)
            column.narrow(0, 0, values.shape[0]).copy_(values)


def input_ranges(rewritten: OnnxProgram) -> list[dict[str, Any]]:
    """The keyword arguments of `torch_tensorrt.Input` for each input of a program: its dtype, and
    its least, usual and largest shape.

    A padded length without a bound counts as at most the largest row count plus one aligned line.
    """
    graph = rewritten.program.graph
    names = set(rewritten.program.graph_signature.user_inputs)
    placeholders = [node for node in graph.find_nodes(op="placeholder") if node.name in names]
    tensors = [node.meta["val"] for node in placeholders]
    ranges = [[bounds(size) for size in tensor.shape] for tensor in tensors]
    rows = max((high for shape in ranges for _, high in shape if high is not None), default=1)
    inputs: list[dict[str, Any]] = []
    for tensor, shape in zip(tensors, ranges, strict=True):
        # The least padded length is one aligned line. For the program, S and n are different sizes.
        sizes = [(low, rows + low if high is None else high) for low, high in shape]
        inputs.append(
            {
                "min_shape": tuple(low for low, _ in sizes),
                "opt_shape": tuple((low + high) // 2 for low, high in sizes),
                "max_shape": tuple(high for _, high in sizes),
                "dtype": tensor.dtype,
            }
        )
    return inputs
