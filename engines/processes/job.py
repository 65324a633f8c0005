"""The work of an isolated child; `python -m engines.processes.job JOB ANSWER` repeats it alone."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from engines.errors import MORE_MEMORY, NotApplicableError, is_full_disk, is_out_of_memory
from soa.errors import SoaPipelineError
from soa.files import write_whole


def run_job(job: Path, answer: Path) -> int:
    """Call the function that the file `job` names, and write its value or its error to the file
    `answer`. Returns the exit code, which is 0 in both cases."""
    data = json.loads(job.read_text())  # trusted
    module, _, name = data["function"].partition(":")
    result: dict[str, Any]
    try:
        result = {"value": getattr(importlib.import_module(module), name)(**data["payload"])}
    except Exception as error:
        result = _describe_failure(error)
    write_whole(answer, json.dumps(result))
    return 0


def _describe_failure(error: Exception) -> dict[str, Any]:
    """Make the answer for an error: one line of text, and what kind of failure it is. If the error
    is not one of ours, its traceback is printed to the log."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, SoaPipelineError):
        not_applicable = isinstance(error, NotApplicableError)
        result: dict[str, Any] = {"error": str(error), "not_applicable": not_applicable}
    else:
        result = {"error": f"{type(error).__name__}: {lines[0]}"}
        traceback.print_exception(error)
    result["full_disk"] = is_full_disk(error)
    if is_out_of_memory(error):
        result["out_of_memory"] = True
        if MORE_MEMORY not in lines[0]:  # else the error's text has the advice already
            details = f" ({lines[0]})" if lines[0] else ""
            result["error"] = f"out of memory{details}: {MORE_MEMORY}"
    return result


if __name__ == "__main__":
    sys.exit(run_job(Path(sys.argv[1]), Path(sys.argv[2])))
