"""The work of an isolated child; `python -m engines.processes.job JOB ANSWER` repeats it alone."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from engines.errors import MORE_MEMORY, NotApplicableError, full_disk, out_of_memory
from soa.errors import SoaPipelineError
from soa.files import write_whole


def run_job(job: Path, answer: Path) -> int:
    """Call the function named in the file `job`, and write its value or error to `answer`."""
    data = json.loads(job.read_text())  # ours
    module, _, name = data["function"].partition(":")
    result: dict[str, Any]
    try:
        result = {"value": getattr(importlib.import_module(module), name)(**data["payload"])}
    except Exception as error:  # the log gets the traceback, the answer one line
        text = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {text[0]}"}
        if isinstance(error, SoaPipelineError):
            result = {
                "error": str(error),
                "not_applicable": isinstance(error, NotApplicableError),
            }
        else:
            traceback.print_exc()
        result["full_disk"] = full_disk(error)
        if out_of_memory(error):
            result["out_of_memory"] = True
            if MORE_MEMORY not in text[0]:  # else the error's text has the advice already
                details = f" ({text[0]})" if text[0] else ""
                result["error"] = f"out of memory{details}: {MORE_MEMORY}"
    write_whole(answer, json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_job(Path(sys.argv[1]), Path(sys.argv[2])))
