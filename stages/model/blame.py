"""Find the line of the user's model that failed: from an error, a graph, or torch's diagnosis."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from engines.errors import first_line
from soa.dtypes import dtype_name
from soa.signature import Signature


def find_written_state(exported: ExportedProgram) -> list[str]:
    """The names of the buffers and parameters into which an exported program writes."""
    signature = exported.graph_signature
    specs = [spec for spec in signature.output_specs if "MUTATION" in spec.kind.name]
    changed = [str(spec.target) for spec in specs]
    return [name for name in changed if name not in signature.user_inputs]


def mutation_line(exported: ExportedProgram) -> str:
    """Where the model calls the first in-place operation of the graph, as ` at file:line (code)`;
    empty if the graph has none, or its line is not known."""
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            frame = _last_user_frame(node.meta.get("stack_trace") or "")
            if frame:
                return f" at {frame}"
    return ""


def why_not_run(
    model: torch.nn.Module,
    signature: Signature,
    arguments: list[torch.Tensor],
    error: Exception,
) -> str:
    """A sentence that says why the eager model fails on its reference inputs with `error`, and
    where. If dtypes clash, it also says which ones, and what to change."""
    reason = first_line(error)
    message = f"the model fails on its reference inputs ({where_raised(error)}): {reason}"
    if not re.search(r"dtype|scalar type|Input type", reason):
        return message
    parameters = [(name, p.dtype) for name, p in model.named_parameters() if p.is_floating_point()]
    layer_of = {dtype: name for name, dtype in parameters}  # the last layer of each dtype
    if len(layer_of) > 1:
        layers = " and ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in layer_of.items())
        return f"{message}. Its own layers differ: {layers}; convert the model to one (.float())"
    inputs = list(zip(signature.inputs, arguments, strict=True))
    inputs.sort(key=lambda pair: not pair[1].is_floating_point())  # an integer may be an index
    for dtype, layer in layer_of.items():
        for bound, tensor in inputs:
            if tensor.dtype != dtype:
                own_name = dtype_name(dtype)
                return (
                    f"{message}. It computes in {own_name} ({layer}) and gets the input "
                    f"{bound.name!r} as {dtype_name(tensor.dtype)}: write dtype: {own_name} there, "
                    "or convert one of the two in the model"
                )
    return message


def why_not_exported(
    model: torch.nn.Module, arguments: list[torch.Tensor], shapes: Any, error: Exception
) -> str:
    """A sentence that says why torch.export refused the model with `error`, where in the model's
    code the cause is, and what to do. `arguments` and `shapes` are those of that export."""
    message = str(error)
    blamed = _Blamed(_last_user_frame(message))
    if not blamed.place:
        blamed = _blame_by_draft(model, arguments, shapes)
    where = f" at {blamed.place}" if blamed.place else ""
    if "data-dependent" in message or "DataDependent" in type(error).__name__:
        cures = [advice for file, advice in _KNOWN.items() if file in blamed.place]
        cure = cures[0] if cures else _IN_TENSORS
        return (
            f"the model takes a path that depends on the data{where}: a value out of a tensor "
            "decides there (by if, int(), .item(), a loop or a size), and an artifact is one graph "
            f"for all data. {cure}"
        )
    if "Constraints violated" in message or "specialized" in message:
        why = _why_rows_are_fixed(message, blamed.as_number)
        return f"the model does not work at every row count{where}: {why}"
    cure = f". {_PADDED}" if _is_of_packed_sequence(error) else ""
    location = where or f" ({where_raised(error)})"
    return f"the model does not export{location}: {first_line(error)}{cure}"


def _why_rows_are_fixed(text: str, as_number: bool) -> str:
    """Sentences that say how the model depends on the row count, and what to do. `text` is the text
    of torch's error; `as_number` is as in `_Blamed`."""
    constant = re.search(r"specialized it to be a constant \((\d+)\)", text)
    guard = re.search(r"generated guard (.+?)\.?$", text, re.MULTILINE)
    if constant and as_number:
        return (
            "Python takes the row count for a plain number there (in a loop over rows, len(), "
            f"int() or math), which fixes it to {constant[1]}. Work on all rows at once, with "
            "tensor operations and with x.shape[0] as it is (x.shape[0] ** 0.5 for math.sqrt)"
        )
    cause = "it depends on the row count"
    if constant:
        cause = f"it fixes the row count to {constant[1]}"
    elif guard:
        cause = f"it takes another path unless {_readable_guard(guard[1])}"
    return f"{cause}. Take sizes from the input (x.shape[0]), or narrow rows: in the config"


_IN_TENSORS = (
    "Keep it in tensors (torch.where for if), or write the number in the code (as num_classes= of "
    "one_hot)"
)
_PADDED = (
    "A packed sequence has as many steps as its data: give the layer the padded sequence itself, "
    "and take its output at the last step that exists, y[torch.arange(len(y)), length - 1]"
)
# Options of published networks that avoid the problem.
_KNOWN = {
    "weaver/nn/model/ParticleTransformer.py": "Build it with trim=False and "
    "pair_embed_sparse_eval=(False, False), which change no answer (trim=False alone before "
    "weaver-core 0.5): model: kwargs: {trim: false, pair_embed_sparse_eval: [false, false]}",
}


@dataclass(frozen=True)
class _Blamed:
    """The line of the model at fault, as `file:line (code)`; empty if it is not known.

    `as_number`: Python code uses a size as a plain number there. If false, an operation of torch
    needs two sizes to be equal.
    """

    place: str
    as_number: bool = False


def _blame_by_draft(model: torch.nn.Module, arguments: list[torch.Tensor], shapes: Any) -> _Blamed:
    """Find the line at fault by torch's draft_export, which exports in spite of problems and
    records each: the innermost line of the model in the first record that has one.

    The records are read, not the printed report, which names a file only the first time that a
    process mentions it. In the records, a file is an index into torch's table of names.
    """
    from torch._logging.structured import INTERN_TABLE

    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), _logs_closed():
            draft = torch.export.draft_export(model, tuple(arguments), dynamic_shapes=shapes)
    except Exception as error:
        return _Blamed(_last_user_frame(str(error)))
    name_of = {number: name for name, number in INTERN_TABLE.items()}

    def file_of(frame: dict[str, Any]) -> str:
        return str(name_of.get(frame["filename"], frame["filename"]))

    for finding in getattr(getattr(draft, "_report", None), "failures", []):
        stack = finding.data.get("stack") or []
        frames = finding.data.get("user_stack") or stack
        of_model = [frame for frame in frames if not _is_library(file_of(frame))]
        if of_model:
            innermost = of_model[-1]
            # A loop over a tensor calls unbind; else the model's own line asked for the number.
            unbound = any(frame.get("name") == "unbind" for frame in stack)
            as_number = bool(stack) and (unbound or not _is_library(file_of(stack[-1])))
            place = _describe_line(file_of(innermost), innermost["line"], innermost.get("loc"))
            return _Blamed(place, as_number)
    return _Blamed("")


def _describe_line(file: str, line: object, code: str | None) -> str:
    """A line of code as `file:line (code)`; as `file:line` if its code is not known."""
    code = (code or "").strip().rstrip(":")
    return f"{file}:{line}" + (f" ({code})" if code else "")


@contextmanager
def _logs_closed() -> Iterator[None]:
    """Close the logs that draft_export opens inside the block, and remove them from the temporary
    folder, also after an error, since torch does neither. The logs stay if TORCH_TRACE is set: then
    the user wants them."""
    from torch.export import _draft_export as draft_module

    logs: list[Any] = []
    open_log: Any = draft_module.CaptureStructuredTrace

    def open_and_remember() -> Any:
        logs.append(open_log())
        return logs[-1]

    draft_module.CaptureStructuredTrace = open_and_remember  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        draft_module.CaptureStructuredTrace = open_log  # type: ignore[misc]
        for log in logs:
            path = log._stream_path
            log.close()
            if path is not None and "TORCH_TRACE" not in os.environ:
                Path(path).unlink(missing_ok=True)


def _readable_guard(guard: str) -> str:
    """A guard of torch with words for the sizes in it: `L['x'].size()[0] == 4` becomes
    `the row count of x == 4`."""
    return re.sub(r"L\[['\"](\w+)['\"]\]\.size\(\)\[0\]", r"the row count of \1", guard)


# Torch's own files, our files, and code without a file.
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_FRAME = re.compile(r'File "?([^",\n]+)"?, (?:line|lineno) (\d+), in (\w+)(?:\n\s+(\S.*))?')


def _last_user_frame(text: str) -> str:
    """The last frame in a traceback's text that is neither torch's nor ours, as
    `file:line (code)`; empty if there is none."""
    frames = [frame for frame in _FRAME.finditer(text) if not _is_library(frame[1])]
    if not frames:
        return ""
    file, line, _, code = frames[-1].groups()
    return _describe_line(file, line, code)


class _Result(NamedTuple):
    """An operation of torch, the digest of its result, and the place in the model that called
    it."""

    operation: str
    digest: str
    place: str


class _Operations(TorchDispatchMode):
    """A mode that records the result of each operation of torch in `results`, in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = {id(layer): name for name, layer in model.named_modules() if name}
        self.results: list[_Result] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, which torch passes to this method, and record its result."""
        result = func(*args, **(kwargs or {}))
        plain = isinstance(result, torch.Tensor) and result.layout == torch.strided
        if plain and "empty" not in func.name():  # an empty tensor has arbitrary content
            content = result.contiguous().flatten().view(torch.uint8).numpy()
            digest = hashlib.sha256(content.data).hexdigest()
            self.results.append(_Result(func.name(), digest, self._find_caller()))
        return result

    def _find_caller(self) -> str:
        """A phrase with the innermost layer and line of the model from which the operation that
        runs now was called: `layer 'norm' (LayerNorm) at model.py:12`."""
        layer = line = ""
        frame: FrameType | None = sys._getframe(2)  # beyond this method and __torch_dispatch__
        while frame is not None and not (layer and line):
            code = frame.f_code
            if not line and not _is_library(code.co_filename):
                line = f" at {code.co_filename}:{frame.f_lineno}"
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if not layer and id(owner) in self.layers:  # it is the `self` of a layer's method
                layer = f"layer {self.layers[id(owner)]!r} ({type(owner).__name__})"
            frame = frame.f_back
        return f"{layer or 'the model itself'}{line}"


def find_difference(model: torch.nn.Module, ask: Callable[[], object]) -> str:
    """Run the model twice by `ask`, and return a sentence about the first operation whose result is
    another one in the second run."""
    runs = []
    for _ in range(2):
        with _Operations(model) as run, torch.no_grad():
            ask()
        runs.append(run.results)
    for first, second in zip(*runs, strict=False):
        if (first.operation, first.digest) != (second.operation, second.digest):
            return f"the first operation that differs is {first.operation} in {first.place}"
    return "the operation that differs was not found"


def _is_library(file: str) -> bool:
    """Whether a code's file name is that of a file of torch or of ours, or of no file at all."""
    return file.startswith(_NOT_THE_MODEL)


def where_raised(error: Exception) -> str:
    """The innermost frame of the model's own code in the error's traceback, as `file:line`; the
    text "in the model" if there is none."""
    place = "in the model"
    for frame, line in walk_tb(error.__traceback__):
        if not _is_library(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def _is_of_packed_sequence(error: Exception) -> bool:
    """Whether torch raised the error as it made a PackedSequence, or in a recurrent layer that got
    one (then a frame has `batch_sizes`)."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_filename.endswith("/torch/nn/utils/rnn.py")
        or frame.f_locals.get("batch_sizes") is not None
        for frame in frames
    )
