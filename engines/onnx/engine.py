"""The `onnxruntime` engine: an ONNX graph that reads and writes the caller's memory.

Inputs are bound by address without a copy: the graph itself narrows the (F, S) matrix. Each output
column is a separate graph output, bound at the column's address. No ONNX operator stores in place.
So if the last node of a column only moves values (a Split, a Cast), the column is a copy of other
memory.
"""

from __future__ import annotations

import ctypes
import json
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.base import FACTS, Engine, Executable, Portable, Prepared
from engines.errors import EngineError, RunError, first_line
from engines.onnx.export import export
from engines.onnx.program import OUTPUTS, Output, input_name, read_outputs
from engines.processes import Lock, tell
from engines.target import Target
from engines.tensors import torch_stream
from soa.dtypes import itemsize
from soa.errors import needs_extra
from soa.memory import Span, span_of

_MODEL, _WEIGHTS = "model.onnx", "model.onnx.data"

# TensorProto.DataType of onnx.proto, because a worker need not have the onnx package.
_ELEMENT_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7,
    "bool": 9, "float16": 10, "float64": 11, "uint32": 12, "bfloat16": 16,
}  # fmt: skip
# The memory at which outputs with 0 rows are bound.
_NOWHERE = torch.zeros(16)


class OnnxRuntimeEngine(Engine, engine="onnxruntime", order=50):
    anywhere = True
    imports = ("torch.onnx", "onnxscript")
    in_place_of = "lanes"

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Options: `opset`; the default is torch's choice."""
        unknown = sorted(set(options) - {"opset"})
        if unknown:
            raise EngineError(f"onnxruntime has no option {unknown[0]!r}: it has opset")
        opset = options.get("opset")
        if opset is not None and type(opset) is not int:
            raise EngineError(f"opset is a whole number; found {opset!r}")
        facts = export(source.program, opset, out / _MODEL)
        (out / FACTS).write_text(json.dumps(facts))
        return [name for name in (_MODEL, _WEIGHTS, FACTS) if (out / name).is_file()]

    def open(
        self, file: Path, device: torch.device, threads: int = 1, instances: int | None = None
    ) -> Executable:
        session = open_session(file, device, threads)
        if OUTPUTS not in session.get_modelmeta().custom_metadata_map:
            raise EngineError(
                f"{file.name} does not say which columns it writes: another tool made it"
            )
        return OnnxExecutable(session, device, threads)


class OnnxExecutable(Executable):
    """An opened session. Any number of threads may run its prepared calls at the same time."""

    def __init__(self, session: Any, device: torch.device, threads: int = 1) -> None:
        """`session`: of ONNX Runtime, whose metadata have our list of outputs."""
        self.session = session
        self.device = device
        self.refusal = "the session is closed"  # the error of a call once `session` is None
        self._threads = threads
        self.outputs = read_outputs(session.get_modelmeta().custom_metadata_map[OUTPUTS])
        # The dtype of an input, if it is not the dtype of the column: bytes for bools.
        self.inputs = {
            graph_input.name: "uint8" if graph_input.type == "tensor(uint8)" else None
            for graph_input in session.get_inputs()
        }
        self._calls: weakref.WeakSet[OnnxCall] = weakref.WeakSet()
        self._listing = Lock()  # of `_calls`
        tell(self)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(argument) for argument in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> OnnxCall:
        """Tie arguments to the session, for many runs."""
        with self._listing:
            if self.session is None:
                raise RunError(self.refusal)
            call = OnnxCall(self, self.session.io_binding(), arguments)
            self._calls.add(call)
            return call

    def after_fork(self) -> None:
        """Make the session usable in the child of a fork, or note why it is not."""
        calls = list(self._calls)
        thread_inside = any(call.lock.locked() for call in calls)
        if self._threads > 1 or self.device.type != "cpu" or thread_inside:
            self.refusal = (
                "this session was opened before a fork, with several threads, on a GPU or with a "
                "thread inside: open it again in this process"
            )
            # Never freed, because its destructor would wait for threads that do not exist here.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))
            self.session = None
        for call in calls:
            call.lock = threading.Lock()

    def close(self) -> None:
        """Wait for running calls to end; later calls raise RunError."""
        with self._listing:
            self.session, calls = None, list(self._calls)
        for call in calls:
            call.release()


class OnnxCall(Prepared):
    """Arguments bound by address. This object keeps the memory alive; the binding does not."""

    def __init__(self, model: OnnxExecutable, binding: Any, arguments: Sequence[Span]) -> None:
        self._model = model
        self._arguments = list(arguments)
        self._binding = binding
        self.lock = threading.Lock()
        self._device = ("cpu", 0)
        if model.device.type == "cuda":
            kind = "gpu" if torch.version.hip else "cuda"
            self._device = (kind, model.device.index or 0)
        self._bind(range(len(arguments)))

    def run(self, stream: int = 0, /) -> None:
        """Run once. ONNX Runtime uses its own GPU stream. So on a GPU this call waits for `stream`
        first, and then for the end of the run."""
        session = self._enter()
        try:
            if self._device[0] != "cpu":
                torch_stream(stream, self._model.device).synchronize()
            session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            raise RunError(f"ONNX Runtime failed: {first_line(error)}") from error
        finally:
            self.lock.release()

    def _enter(self) -> Any:
        """Take the lock and return the session. RunError if another thread has the lock."""
        if not self.lock.acquire(blocking=False):
            raise RunError("another thread is running this binding")
        session = self._model.session
        if session is None:
            self.lock.release()
            raise RunError(self._model.refusal)
        return session

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments, given by their index: n and address may differ."""
        self._enter()
        try:
            for i, argument in changes.items():
                self._arguments[i] = argument
            self._bind(changes)
        finally:
            self.lock.release()

    def release(self) -> None:
        """Release the session, after a running call has ended."""
        with self.lock:
            self._binding = None

    def _bind(self, changed: Collection[int]) -> None:
        """Bind the changed inputs. Also bind the outputs that lie in a changed argument or take
        their number of rows from one."""
        for i in changed:
            name = input_name(i)
            if name in self._model.inputs:  # else the graph does not read it
                argument = self._arguments[i]
                kind = _ELEMENT_TYPES[self._model.inputs[name] or argument.dtype]
                shape = list(argument.shape)
                self._binding.bind_input(name, *self._device, kind, shape, argument.address)
        for output in self._model.outputs:
            if output.argument in changed or output.rows in changed:
                self._bind_output(output)

    def _bind_output(self, output: Output) -> None:
        """Bind an output at the address of its component, for the present number of rows."""
        n = 1 if output.rows is None else self._arguments[output.rows].shape[0]
        shape = [n if size < 0 else size for size in output.shape]
        argument = self._arguments[output.argument]
        address = argument.address
        if len(argument.shape) > 1:  # a matrix of (components, padded rows)
            address += output.component * argument.shape[1] * itemsize(argument.dtype)
        if n == 0:  # the address may be null, which ONNX Runtime refuses
            address = _NOWHERE.data_ptr()
        kind = _ELEMENT_TYPES[argument.dtype]
        self._binding.bind_output(output.name, *self._device, kind, shape, address)


def open_session(network: Path | bytes, device: torch.device, threads: int) -> Any:
    """An inference session on `device` for a file, or for its content, without a fallback to
    another device."""
    with needs_extra("cpu" if device.type == "cpu" else "cuda", EngineError):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # fatal only: other errors also raise exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    provider, settings = _provider(device, onnxruntime.get_available_providers())
    try:
        model = network if isinstance(network, bytes) else str(network)
        session = onnxruntime.InferenceSession(model, options, [(provider, settings)])
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        name = "it" if isinstance(network, bytes) else network.name
        raise EngineError(f"{name} cannot be opened as ONNX: {first_line(error)}") from error
    if provider not in session.get_providers():  # ONNX Runtime falls back to the CPU silently
        raise EngineError(
            f"ONNX Runtime did not start its {provider}: a GPU library may be missing"
        )
    session.disable_fallback()
    return session


def _provider(device: torch.device, available: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The execution provider for a device and its settings. Only the CPU's has ever been run.

    EngineError if this build of ONNX Runtime has none for the device.
    """
    if device.type == "cpu":
        return "CPUExecutionProvider", {}
    suitable = ["CUDAExecutionProvider"]
    if torch.version.hip:
        suitable = ["MIGraphXExecutionProvider", "ROCMExecutionProvider"]
    provider = next((name for name in suitable if name in available), None)
    if provider is None:
        raise EngineError(
            f"this build of ONNX Runtime has no {' or '.join(suitable)}; "
            f"it has {', '.join(available)}"
        )
    settings = {"device_id": device.index or 0}
    if provider == "CUDAExecutionProvider":  # its default is to use TF32
        settings["use_tf32"] = int(torch.backends.cuda.matmul.allow_tf32)
    return provider, settings
