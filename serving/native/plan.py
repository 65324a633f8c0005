"""What a TensorRT plan is built for. Nothing here needs TensorRT or a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.errors import EngineError
from engines.target import Target
from serving.errors import ServingError
from serving.wire import Wire
from soa.signature import RowRange

# Triton's tensorrt backend has int8 too, and TensorRT uint8: the ONNX parser takes int8 for a
# quantised number, and uint8 for a step that does nothing but convert it. float64 it would cut.
CARRIED = ("bool", "int32", "int64", "float16", "float32")

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


@dataclass(frozen=True)
class Extents:
    """The shapes of an input that a plan takes, and the one that it is tuned for."""

    least: Shape
    typical: Shape
    largest: Shape


def require_gpus(devices: Sequence[str]) -> None:
    """Raise ServingError for what Triton's tensorrt backend does not run on."""
    if not devices or "cpu" in devices:
        raise ServingError(
            "Triton's tensorrt backend runs on NVIDIA GPUs alone: name them, as --device cuda:0"
        )


def choose_gpu(wanted: str | None, found: Sequence[Target]) -> int:
    """The first of the GPUs here that builds a plan for a target; ServingError where none does."""
    there = list(dict.fromkeys(str(target) for target in found))
    if not found:
        raise ServingError(
            "a TensorRT plan is built and tried on a GPU of the kind that serves it: torch sees "
            "none here"
        )
    if wanted is None and len(there) > 1:
        raise ServingError(
            f"a TensorRT plan is for one kind of GPU, and here are {', '.join(there)}: name one "
            "with --target"
        )
    for index, target in enumerate(found):
        if target.device == "cuda" and wanted in (None, str(target)):
            return index
    raise ServingError(
        f"a TensorRT plan for {wanted or 'an NVIDIA GPU'} is built and tried on such a GPU: torch "
        f"sees {', '.join(there)} here"
    )


def require_carried(wire: Wire) -> None:
    """Raise EngineError for a dtype that a plan cannot take or give."""
    for t in (*wire.inputs, *wire.outputs):
        if t.column_dtype not in CARRIED:
            raise EngineError(
                f"{t.name} is {t.column_dtype}, which it does not carry: it has "
                f"{', '.join(CARRIED)}"
            )


def profile(
    wire: Wire, ranges: Mapping[str, RowRange], preferred: Sequence[int] = ()
) -> dict[str, Extents]:
    """The one optimization profile: for each input with rows, by name.

    Tuned for the largest preferred size of a single row dimension that is in its range; else for
    the geometric middle of each range.
    """
    typical = {dim: _middle(each) for dim, each in ranges.items()}
    if len(ranges) == 1:
        ((dim, only),) = ranges.items()
        fitting = [n for n in preferred if max(1, only.min) <= n <= only.max]
        typical[dim] = max(fitting, default=typical[dim])
    return {
        t.name: Extents(
            t.shape(ranges[t.rows].min), t.shape(typical[t.rows]), t.shape(ranges[t.rows].max)
        )
        for t in wire.inputs
        if not t.scalar
    }


def _middle(rows: RowRange) -> int:
    return max(rows.min, min(rows.max, round(math.sqrt(max(1, rows.min) * rows.max))))


def parser_refusal(node: str, operator: str, description: str) -> str:
    """What TensorRT's ONNX parser says of the first node that it does not take, in one line."""
    said = (description.strip().splitlines() or ["no reason given"])[0]
    where = f"node {node or 'without a name'} ({operator})" if operator else "the graph"
    return f"TensorRT's ONNX parser refuses {where}: {said}"


def check_tensors(wire: Wire, found: Mapping[str, tuple[np.dtype[np.generic], Shape]]) -> None:
    """Raise EngineError unless a plan's tensors are those of the wire; rows are -1 in a shape.

    A plan writes where it is told to: another dtype than the memory's would be wrong answers.
    """
    wanted = {t.name: (t.dtype, t.shape(-1)) for t in (*wire.inputs, *wire.outputs)}
    if odd := sorted(set(wanted) ^ set(found)):
        raise EngineError(
            f"the plan has the tensors {', '.join(sorted(found))}: {odd[0]} is in one of plan and "
            "model alone"
        )
    for name, (dtype, shape) in wanted.items():
        if found[name] != (dtype, shape):
            there, extents = found[name]
            raise EngineError(
                f"{name} is {there} {extents} in the plan, where the model has {dtype} {shape}"
            )
