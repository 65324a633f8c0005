"""A plan for Triton's TensorRT backend, made of a version's ONNX file with its shell.

No machine has run it: what needs TensorRT or a GPU is written by the documentation of TensorRT 10,
and the rest is tested. A plan is made when it is deployed, since it belongs to one kind of GPU and
one version of TensorRT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.errors import EngineError, RunError, first_line
from engines.target import Target, gpu_target
from serving.errors import ServingError
from serving.native.artifact import FILES, Native
from serving.native.onnx import write_onnx
from serving.wire import Array, Wire
from soa.dtypes import torch_dtype
from soa.signature import RowRange, Signature

# Triton's tensorrt backend has int8 too, and TensorRT uint8: the ONNX parser takes int8 for a
# quantised number, and uint8 for a step that does nothing but convert it. float64 it would cut.
CARRIED = ("bool", "int32", "int64", "float16", "float32")

_POISON = 0xA5  # in the outputs: memory that is used again may hold the right answers

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlanFor:
    """The one kind of GPU and the one TensorRT that run a plan; `gpu` is such a GPU, here."""

    target: Target
    gpu: int
    tensorrt: str

    @property
    def parameters(self) -> dict[str, str]:
        """For config.pbtxt; the compute capability as NVIDIA writes it, 9.0 for sm_90."""
        digits = self.target.arch.removeprefix("sm_")
        return {
            "compute_capability": f"{digits[:-1]}.{digits[-1]}",
            "tensorrt_version": self.tensorrt,
        }


def require_gpus(devices: Sequence[str]) -> None:
    """Raise ServingError for what Triton's tensorrt backend does not run on."""
    if not devices or "cpu" in devices:
        raise ServingError(
            "Triton's tensorrt backend runs on NVIDIA GPUs alone: name them, as --device cuda:0"
        )


def plan_for(devices: Sequence[str], wanted: str | None) -> PlanFor:
    """What a plan built here runs on; ServingError where none can be built for target `wanted`.

    `devices` are the server's. The GPU here is any of the target, or of the one kind there is.
    """
    require_gpus(devices)
    if wanted is not None:
        Target.parse(wanted)
    try:
        library = _library()
    except EngineError as error:
        raise ServingError(str(error)) from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [gpu_target(index) for index in range(count)]
    gpu = choose_gpu(wanted, found)
    return PlanFor(found[gpu], gpu, str(library.__version__))


def choose_gpu(wanted: str | None, found: Sequence[Target]) -> int:
    """The first of the GPUs here that builds a plan for a target; ServingError where none does."""
    kinds = list(dict.fromkeys(str(target) for target in found))
    if wanted is None and len(kinds) > 1:
        raise ServingError(
            f"a TensorRT plan is for one kind of GPU, and here are {', '.join(kinds)}: name one "
            "with --target"
        )
    for index, target in enumerate(found):
        if target.device == "cuda" and wanted in (None, str(target)):
            return index
    raise ServingError(
        f"a TensorRT plan for {wanted or 'an NVIDIA GPU'} is built and tried on such a GPU: torch "
        f"sees {', '.join(kinds) or 'none'} here"
    )


def profile(
    wire: Wire, ranges: Mapping[str, RowRange], preferred: Sequence[int] = ()
) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The one optimization profile: least, typical and largest shape of each input with rows.

    Tuned for the largest preferred size of a single row dimension that is in its range; else for
    the geometric middle of each range.
    """
    typical = {
        dim: max(rows.min, min(rows.max, round(math.sqrt(max(1, rows.min) * rows.max))))
        for dim, rows in ranges.items()
    }
    if len(ranges) == 1:
        ((dim, only),) = ranges.items()
        fitting = [n for n in preferred if max(1, only.min) <= n <= only.max]
        typical[dim] = max(fitting, default=typical[dim])
    return {
        t.name: (t.shape(ranges[t.rows].min), t.shape(typical[t.rows]), t.shape(ranges[t.rows].max))
        for t in wire.inputs
        if not t.scalar
    }


def require_carried(wire: Wire) -> None:
    """Raise EngineError for a dtype that a plan cannot take or give."""
    for t in (*wire.inputs, *wire.outputs):
        if t.column_dtype not in CARRIED:
            raise EngineError(
                f"{t.name} is {t.column_dtype}, which it does not carry: it has "
                f"{', '.join(CARRIED)}"
            )


def check_tensors(wire: Wire, found: Mapping[str, tuple[np.dtype[np.generic], Shape]]) -> None:
    """Raise EngineError unless a plan's tensors are those of the wire; rows are -1 in a shape.

    A plan writes where it is told to: another dtype than the memory's would be wrong answers.
    """
    wanted = {t.name: (t.dtype, t.shape(-1)) for t in (*wire.inputs, *wire.outputs)}
    for name in sorted({*wanted, *found}):
        mine, its = wanted.get(name, ("not there",)), found.get(name, ("not there",))
        if mine != its:
            raise EngineError(
                f"{name} is {' '.join(map(str, its))} in the plan, where the model has "
                f"{' '.join(map(str, mine))}"
            )


def make_plan(
    artifact: Path,
    signature: Signature,
    wire: Wire,
    plan: PlanFor,
    preferred: Sequence[int],
    tf32: bool,
    folder: Path,
) -> Native:
    """Write the plan of an ONNX artifact into `folder`, and open it. Raises ServingError."""
    graph, file = folder / FILES["onnxruntime"], folder / FILES["tensorrt"]
    try:
        require_carried(wire)
        write_onnx(artifact, signature, wire, graph)
        with torch.cuda.device(plan.gpu):
            file.write_bytes(_built(graph, profile(wire, signature.ranges, preferred), tf32))
        return Native(file, OpenPlan(file, wire, plan.gpu))
    except EngineError as error:
        raise ServingError(f"no model for Triton's tensorrt backend: {error}") from None


def _built(graph: Path, shapes: Mapping[str, tuple[Shape, Shape, Shape]], tf32: bool) -> Any:
    """The plan of an ONNX file, for the current GPU."""
    library, log = _library(), _log()
    builder = library.Builder(log)
    # In TensorRT 11 every network is.
    typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = library.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        if not parser.num_errors:
            raise EngineError(f"TensorRT's ONNX parser failed: {log.last()}")
        error = parser.get_error(0)
        why = (error.desc().strip().splitlines() or ["no reason given"])[0]
        raise EngineError(
            f"TensorRT's ONNX parser refuses node {error.node_name()!r} ({error.node_operator()}): "
            f"{why}"
        )
    config = builder.create_builder_config()
    if tf32:
        config.set_flag(library.BuilderFlag.TF32)
    else:  # it would take TF32 by itself
        config.clear_flag(library.BuilderFlag.TF32)
    if shapes:
        chosen = builder.create_optimization_profile()
        for name, each in shapes.items():
            chosen.set_shape(name, *each)
        config.add_optimization_profile(chosen)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise EngineError(f"TensorRT built no plan: {log.last()}")
    return built


class OpenPlan:
    """A plan in the TensorRT of this process, on one GPU: a Program for one thread at a time.

    Raises EngineError where it does not open or has other tensors than the wire, and RunError where
    a run fails.
    """

    def __init__(self, file: Path, wire: Wire, gpu: int) -> None:
        library = _library()
        self._wire, self._device, self._log = wire, torch.device("cuda", gpu), _log()
        with torch.cuda.device(gpu):
            self._runtime = library.Runtime(self._log)  # outlives the engine, as that the context
            self._engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
            if self._engine is None:
                raise EngineError(f"TensorRT does not open the plan: {self._log.last()}")
            check_tensors(wire, _tensors(library, self._engine))
            self._context = self._engine.create_execution_context()
            if self._context is None:
                raise EngineError(f"TensorRT cannot run the plan: {self._log.last()}")
            self._stream = torch.cuda.Stream(self._device)

    def __call__(self, given: Sequence[Array]) -> Sequence[Array]:
        context, stream, wire = self._context, self._stream, self._wire
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            held = []  # until the stream is through
            for t, values in zip(wire.inputs, given, strict=True):
                room = self._room(values.shape, t.column_dtype)
                room[: values.size].copy_(torch.from_numpy(values.reshape(-1)))
                held.append(room)
                if not context.set_input_shape(t.name, values.shape):
                    raise RunError(f"{t.name} of {values.shape} is refused: {self._log.last()}")
                context.set_tensor_address(t.name, room.data_ptr())
            written = []
            for t in wire.outputs:
                shape = tuple(context.get_tensor_shape(t.name))
                if min(shape, default=0) < 0:
                    raise RunError(f"the shape of {t.name} depends on the values of the inputs")
                written.append((self._room(shape, t.column_dtype), shape))
                context.set_tensor_address(t.name, written[-1][0].data_ptr())
            if not context.execute_async_v3(stream.cuda_stream):
                raise RunError(f"TensorRT failed: {self._log.last()}")
            stream.synchronize()
            return [
                room[: math.prod(shape)].cpu().numpy().reshape(shape) for room, shape in written
            ]

    def _room(self, shape: Shape, dtype: str) -> torch.Tensor:
        """Flat, poisoned memory, of one element at least: TensorRT takes no null address."""
        count = max(1, math.prod(shape))
        room = torch.empty(count, dtype=torch_dtype(dtype), device=self._device)
        room.view(torch.uint8).fill_(_POISON)
        return room


def _tensors(library: Any, engine: Any) -> dict[str, tuple[np.dtype[np.generic], Shape]]:
    """Dtype and shape of a plan's tensors, by name. Raises EngineError."""
    found = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.is_shape_inference_io(name):
            raise EngineError(f"{name} decides on shapes, and would have to lie on the host")
        try:
            dtype = np.dtype(library.nptype(engine.get_tensor_dtype(name)))
        except TypeError as error:  # NumPy has no such dtype
            raise EngineError(f"{name} in the plan: {first_line(error)}") from error
        found[name] = (dtype, tuple(engine.get_tensor_shape(name)))
    return found


@cache
def _log() -> Any:
    """TensorRT's logger, quiet, which keeps the last error: its calls return none.

    It takes one logger a process, the first: where something else of this process has set one, the
    errors are there.
    """
    from tensorrt import ILogger

    errors = (ILogger.Severity.ERROR, ILogger.Severity.INTERNAL_ERROR)

    class Log(ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            ILogger.__init__(self)
            self._last = "it gives no reason"

        def log(self, level: Any, message: str) -> None:
            if level in errors:
                self._last = message

        def last(self) -> str:
            return self._last.strip().splitlines()[0]

    return Log()


def _library() -> Any:
    """TensorRT's Python library; EngineError where it, or a library that it loads, is missing."""
    try:
        import tensorrt
    except (ImportError, OSError) as error:  # OSError: libnvinfer is found by the dynamic loader
        raise EngineError(
            f"TensorRT's Python library cannot be imported ({first_line(error)}): "
            "pip install 'soa-pipeline[cuda]'"
        ) from error
    return tensorrt
