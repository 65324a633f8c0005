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
from engines.processes import Lock, repair_after_fork
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
# Outputs with 0 rows are bound here, because ONNX Runtime refuses a null address.
_MEMORY_OF_EMPTY_OUTPUTS = torch.zeros(16)


class OnnxRuntimeEngine(Engine, engine="onnxruntime", order=50):
    """Exports to ONNX, and runs the graph by ONNX Runtime."""

    anywhere = True
    imports = ("torch.onnx", "onnxscript")
    in_place_of = "lanes"

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Compile with the option `opset`, which torch chooses if it is not given. Raises
        EngineError for another option, or if `opset` is no whole number."""
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
        """Open an ONNX file. Raises EngineError also if another tool made it."""
        session = open_session(file, device, threads)
        if OUTPUTS not in session.get_modelmeta().custom_metadata_map:
            raise EngineError(
                f"{file.name} does not say which columns it writes: another tool made it"
            )
        return OnnxExecutable(session, device, threads)


class OnnxExecutable(Executable):
    """An opened session. Different prepared calls may run in several threads at the same time."""

    def __init__(self, session: Any, device: torch.device, threads: int = 1) -> None:
        """`session` is one of ONNX Runtime whose metadata have our list of outputs."""
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
        self._listing = Lock()  # held while `_calls` or `session` changes
        repair_after_fork(self)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.prepare([span_of(argument) for argument in arguments]).run()

    def prepare(self, arguments: Sequence[Span]) -> OnnxCall:
        """Tie arguments to the session, for many runs. Raises RunError if the session is closed."""
        with self._listing:
            if self.session is None:
                raise RunError(self.refusal)
            call = OnnxCall(self, self.session.io_binding(), arguments)
            self._calls.add(call)
            return call

    def after_fork(self) -> None:
        """Make the session usable in the child of a fork, or record in `refusal` why it is not."""
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
        """Close the session after the running calls have ended. Later calls raise RunError."""
        with self._listing:
            self.session, calls = None, list(self._calls)
        for call in calls:
            call.release()


class OnnxCall(Prepared):
    """Arguments that are bound by address. This object keeps their memory alive, as ONNX Runtime's
    own binding does not."""

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
        """Run once. On a GPU, ONNX Runtime uses a stream of its own. So this call first waits for
        `stream`, and returns when the run has ended. Raises RunError if the run fails."""
        session = self._lock_session()
        try:
            if self._device[0] != "cpu":
                torch_stream(stream, self._model.device).synchronize()
            session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            raise RunError(f"ONNX Runtime failed: {first_line(error)}") from error
        finally:
            self.lock.release()

    def _lock_session(self) -> Any:
        """Take the lock and return the session. Raises RunError, without the lock, if another
        thread has it or if the session is closed."""
        if not self.lock.acquire(blocking=False):
            raise RunError("another thread is running this binding")
        session = self._model.session
        if session is None:
            self.lock.release()
            raise RunError(self._model.refusal)
        return session

    def replace(self, changes: Mapping[int, Span]) -> None:
        """Replace the memory of some arguments, given by their index. Only the number of rows and
        the address may differ."""
        self._lock_session()
        try:
            for i, argument in changes.items():
                self._arguments[i] = argument
            self._bind(changes)
        finally:
            self.lock.release()

    def release(self) -> None:
        """Drop the binding, and with it the session, after a running call has ended."""
        with self.lock:
            self._binding = None

    def _bind(self, changed: Collection[int]) -> None:
        """Bind the arguments with the indices `changed`: as inputs, and as the outputs that lie in
        one of them or take their number of rows from one."""
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
        """Bind an output at the address of its component in the argument, for the current number of
        rows."""
        n = 1 if output.rows is None else self._arguments[output.rows].shape[0]
        shape = [n if size < 0 else size for size in output.shape]
        argument = self._arguments[output.argument]
        address = argument.address
        if len(argument.shape) > 1:  # a matrix of (components, padded rows)
            address += output.component * argument.shape[1] * itemsize(argument.dtype)
        if n == 0:  # the address may be null, which ONNX Runtime refuses
            address = _MEMORY_OF_EMPTY_OUTPUTS.data_ptr()
        kind = _ELEMENT_TYPES[argument.dtype]
        self._binding.bind_output(output.name, *self._device, kind, shape, address)


def open_session(network: Path | bytes, device: torch.device, threads: int) -> Any:
    """Open an ONNX file, or its content, as an inference session on `device`. A run may use
    `threads` threads. Raises EngineError if ONNX Runtime cannot open it on this device: it does not
    fall back to another one."""
    with needs_extra("cpu" if device.type == "cpu" else "cuda", EngineError):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # fatal only: other errors also raise exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    provider, settings = _choose_provider(device, onnxruntime.get_available_providers())
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


def _choose_provider(device: torch.device, available: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Choose ONNX Runtime's execution provider for a device. Returns its name and its settings.

    Of these, only the CPU's has ever been run. Raises EngineError if none for the device is in
    `available`, the providers of this build of ONNX Runtime.
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
