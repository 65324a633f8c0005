"""A plan for Triton's TensorRT backend, made from a version's ONNX file with its shell.

This was never run. The parts that need TensorRT or a GPU follow the documentation of TensorRT 10;
all other parts are tested. A plan is made at deployment, because it works only on one kind of GPU
and with one version of TensorRT.
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
from serving.native.onnx import write_onnx
from serving.wire import Array, Wire
from soa.dtypes import torch_dtype
from soa.errors import needs_extra
from soa.signature import RowRange, Signature

# Triton's tensorrt backend also has int8, and TensorRT has uint8. But the ONNX parser treats int8
# as a quantised number, and allows uint8 only in conversions. float64 would lose digits.
CARRIED = ("bool", "int32", "int64", "float16", "float32")

_POISON = 0xA5  # fills new memory: reused memory may already contain the right answers

_SAID = "TensorRT has printed why"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlanFor:
    """The kind of GPU and the TensorRT version of a plan; `gpu` is a GPU of this kind on this
    host."""

    target: Target
    gpu: int
    tensorrt: str

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters for config.pbtxt; the compute capability in NVIDIA's form, 9.0 for sm_90."""
        digits = self.target.arch.removeprefix("sm_")
        return {
            "compute_capability": f"{digits[:-1]}.{digits[-1]}",
            "tensorrt_version": self.tensorrt,
        }


@dataclass(frozen=True)
class PlanTuning:
    """Settings for building a plan: the GPU, preferred row counts, and whether TF32 is allowed."""

    plan: PlanFor
    preferred: tuple[int, ...] = ()
    tf32: bool = False


def require_gpus(devices: Sequence[str]) -> None:
    """Raise ServingError for devices on which Triton's tensorrt backend does not run."""
    if not devices or "cpu" in devices:
        raise ServingError(
            "Triton's tensorrt backend runs on NVIDIA GPUs alone: name them, as --device cuda:0"
        )


def plan_for(
    devices: Sequence[str], wanted: str | None, here: Sequence[Target] | None = None
) -> PlanFor:
    """The GPU and TensorRT version of a plan. Raises ServingError if it cannot be built here.

    `devices`: those of the server. `wanted`: the plan's target; if it is None, all GPUs of this
    host must be of one kind. `here`: the targets of this host's GPUs, by default found by torch;
    the plan is built on the first one with the plan's target.
    """
    require_gpus(devices)
    if wanted is not None:
        Target.parse(wanted)
    with needs_extra("cuda", ServingError):
        import tensorrt
    if here is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = [gpu_target(index) for index in range(count)]
    kinds = list(dict.fromkeys(map(str, here)))
    if wanted is None and len(kinds) > 1:
        raise ServingError(
            f"a TensorRT plan is for one kind of GPU, and here are {', '.join(kinds)}: name one "
            "with --target"
        )
    name = wanted or next(iter(kinds), "an NVIDIA GPU")
    if name not in kinds or Target.parse(name).device != "cuda":
        raise ServingError(
            f"a TensorRT plan for {wanted or 'an NVIDIA GPU'} is built and tried on such a GPU: "
            f"torch sees {', '.join(kinds) or 'none'} here"
        )
    gpu = [str(target) for target in here].index(name)
    return PlanFor(here[gpu], gpu, str(tensorrt.__version__))


def profile(
    wire: Wire, ranges: Mapping[str, RowRange], preferred: Sequence[int] = ()
) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The optimization profile: smallest, typical and largest shape of each input with rows.

    If there is one row dimension, the typical row count is the largest of `preferred` that is in
    its range. Otherwise it is the geometric mean of each range.
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
    """Raise EngineError for a dtype that a plan cannot have as input or output."""
    for t in (*wire.inputs, *wire.outputs):
        if t.column_dtype not in CARRIED:
            raise EngineError(
                f"{t.name} is {t.column_dtype}, which it does not support: it has "
                f"{', '.join(CARRIED)}"
            )


def check_tensors(wire: Wire, theirs: Mapping[str, tuple[np.dtype[np.generic], Shape]]) -> None:
    """Raise EngineError if a plan's tensors are not those of the wire. In a shape, rows are -1.

    A plan writes to an address without knowing its dtype: with another dtype, answers are wrong.
    """
    wanted = {t.name: (t.dtype, t.shape(-1)) for t in (*wire.inputs, *wire.outputs)}
    for name in sorted({*wanted, *theirs}):
        mine, its = wanted.get(name, ("not there",)), theirs.get(name, ("not there",))
        if mine != its:
            raise EngineError(
                f"{name} is {' '.join(map(str, its))} in the plan, where the model has "
                f"{' '.join(map(str, mine))}"
            )


def write_plan(
    artifact: Path, signature: Signature, wire: Wire, tuning: PlanTuning, graph: Path, file: Path
) -> None:
    """Write the plan of an ONNX artifact, from the ONNX file `graph`. Raises EngineError."""
    import tensorrt as library

    require_carried(wire)
    write_onnx(artifact, signature, wire, graph)
    with torch.cuda.device(tuning.plan.gpu):
        builder = library.Builder(_log())
        # In TensorRT 11 every network has this property.
        typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(typed)
        parser = library.OnnxParser(network, _log())
        if not parser.parse_from_file(str(graph)):
            why = parser.get_error(0).desc() if parser.num_errors else _SAID
            raise EngineError(f"TensorRT's ONNX parser refuses it: {why.strip().splitlines()[0]}")
        config = builder.create_builder_config()
        if tuning.tf32:
            config.set_flag(library.BuilderFlag.TF32)
        else:  # TensorRT uses TF32 by default
            config.clear_flag(library.BuilderFlag.TF32)
        if shapes := profile(wire, signature.ranges, tuning.preferred):
            chosen = builder.create_optimization_profile()
            for name, each in shapes.items():
                chosen.set_shape(name, *each)
            config.add_optimization_profile(chosen)
        built = builder.build_serialized_network(network, config)
    if built is None:
        raise EngineError(f"TensorRT built no plan: {_SAID}")
    file.write_bytes(built)


class OpenPlan:
    """A plan opened by the TensorRT of this process on one GPU: a Program for one thread at a time.

    Raises EngineError if it does not open or has other tensors than the wire, and RunError if a run
    fails.
    """

    def __init__(self, file: Path, wire: Wire, gpu: int) -> None:
        import tensorrt as library

        self._wire, self._device = wire, torch.device("cuda", gpu)
        with torch.cuda.device(gpu):
            # The runtime must live longer than the engine, and the engine longer than the context.
            self._runtime = library.Runtime(_log())
            self._engine = self._runtime.deserialize_cuda_engine(file.read_bytes())  # ours
            if self._engine is None:
                raise EngineError(f"TensorRT does not open the plan: {_SAID}")
            check_tensors(wire, _tensors(library, self._engine))
            self._context = self._engine.create_execution_context()
            if self._context is None:
                raise EngineError(f"TensorRT cannot run the plan: {_SAID}")
            self._stream = torch.cuda.Stream(self._device)

    def __call__(self, given: Sequence[Array]) -> Sequence[Array]:
        context, stream, wire = self._context, self._stream, self._wire
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            held = []  # kept alive until the stream has finished
            for t, values in zip(wire.inputs, given, strict=True):
                room = self._room(values.shape, t.column_dtype)
                room[: values.size].copy_(torch.from_numpy(values.reshape(-1)))
                held.append(room)
                if not context.set_input_shape(t.name, values.shape):
                    raise RunError(f"{t.name} of {values.shape} is refused: {_SAID}")
                context.set_tensor_address(t.name, room.data_ptr())
            written = []
            for t in wire.outputs:
                shape = tuple(context.get_tensor_shape(t.name))
                if min(shape, default=0) < 0:
                    raise RunError(f"the shape of {t.name} depends on the values of the inputs")
                written.append((self._room(shape, t.column_dtype), shape))
                context.set_tensor_address(t.name, written[-1][0].data_ptr())
            if not context.execute_async_v3(stream.cuda_stream):
                raise RunError(f"TensorRT failed: {_SAID}")
            stream.synchronize()
            return [
                room[: math.prod(shape)].cpu().numpy().reshape(shape) for room, shape in written
            ]

    def _room(self, shape: Shape, dtype: str) -> torch.Tensor:
        """Flat memory filled with `_POISON`. It has at least one element, because TensorRT does not
        accept a null address."""
        count = max(1, math.prod(shape))
        room = torch.empty(count, dtype=torch_dtype(dtype), device=self._device)
        room.view(torch.uint8).fill_(_POISON)
        return room


def _tensors(library: Any, engine: Any) -> dict[str, tuple[np.dtype[np.generic], Shape]]:
    """Dtype and shape of a plan's tensors, by name. Raises EngineError."""
    tensors = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.is_shape_inference_io(name):
            raise EngineError(f"{name} decides on shapes, so it would have to be in host memory")
        try:
            dtype = np.dtype(library.nptype(engine.get_tensor_dtype(name)))
        except TypeError as error:  # NumPy does not have the dtype
            raise EngineError(f"{name} in the plan: {first_line(error)}") from error
        tensors[name] = (dtype, tuple(engine.get_tensor_shape(name)))
    return tensors


@cache
def _log() -> Any:
    """TensorRT's logger, for errors only. TensorRT uses the first logger of a process for all."""
    import tensorrt

    return tensorrt.Logger(tensorrt.Logger.ERROR)
