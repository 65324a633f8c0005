"""Which line of the user's model it was: from an error, a graph, or torch's own diagnosis."""

from __future__ import annotations

import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from engines.errors import out_of_memory


def mutation_line(exported: ExportedProgram) -> str:
    """` at file:line (code)` of the first in-place operation in the graph, or nothing."""
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            found = _user_frame(node.meta.get("stack_trace") or "")
            if found:
                return f" at {found}"
    return ""


def why_not_exported(
    model: torch.nn.Module, arguments: list[torch.Tensor], shapes: Any, error: Exception
) -> str:
    """Why export refused the model, and where: from the error, else from draft_export."""
    text = str(error)
    place = _user_frame(text) or _draft_frame(model, arguments, shapes)
    where = f" at {place}" if place else ""
    if "Constraints violated" in text or "specialized" in text:
        detail = re.search(r"specialized it to be a constant \((\d+)\)", text)
        guard = re.search(r"generated guard (.+?)\.?$", text, re.MULTILINE)
        cause = (
            f"it fixes the row count to {detail[1]}"
            if detail
            else f"it takes another path unless {_readable(guard[1])}"
            if guard
            else "it depends on the row count"
        )
        return (
            f"the model does not work at every row count{where}: {cause}. "
            "Take sizes from the input (x.shape[0]), or narrow rows: in the config"
        )
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return (
            f"the model takes a path that depends on the data{where}: "
            "use torch.where (or torch.cond) instead of Python's if"
        )
    return f"the model does not export{where}: {first_line(error)}"


def _draft_frame(model: torch.nn.Module, arguments: list[torch.Tensor], shapes: Any) -> str:
    """The line draft_export blames first, from its findings rather than from its printed report.

    The report names a file only the first time a process mentions it; its findings hold an index
    into torch's table of names.
    """
    from torch._logging.structured import INTERN_TABLE

    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            draft = torch.export.draft_export(model, tuple(arguments), dynamic_shapes=shapes)
    except Exception as error:
        return _user_frame(str(error))
    names = {number: name for name, number in INTERN_TABLE.items()}
    for finding in getattr(getattr(draft, "_report", None), "failures", []):
        for frame in reversed(finding.data.get("user_stack") or finding.data.get("stack") or []):
            file = str(names.get(frame["filename"], frame["filename"]))
            if not _is_library(file):
                code = f" ({frame['loc'].strip()})" if frame.get("loc") else ""
                return f"{file}:{frame['line']}{code}"
    return ""


def _readable(guard: str) -> str:
    return re.sub(r"L\[['\"](\w+)['\"]\]\.size\(\)\[0\]", r"the row count of \1", guard)


# Torch's own files, ours, and code without a file.
_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_FRAME = re.compile(r'File "?([^",\n]+)"?, (?:line|lineno) (\d+), in (\w+)(?:\n\s+(\S.*))?')


def _user_frame(text: str) -> str:
    """`file:line (code)` of the last frame in `text` that is not torch's own."""
    frames = [m for m in _FRAME.finditer(text) if not _is_library(m[1])]
    if not frames:
        return ""
    file, line, _, code = frames[-1].groups()
    return f"{file}:{line}" + (f" ({code.strip()})" if code and code.strip() != ":" else "")


def _is_library(file: str) -> bool:
    return file.startswith(_NOT_THE_MODEL)


def where_raised(error: Exception) -> str:
    """`file:line` of the innermost frame of the model's own code."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not _is_library(file):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place or "in the model"


def first_line(error: Exception) -> str:
    """The first line of what it says; that memory ran out, where it says so in many words."""
    if out_of_memory(error):
        return "out of memory; give it more, or build for fewer rows (rows: max)"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
