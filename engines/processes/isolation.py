"""Risky steps in a process of their own: a crash or a hang there is a result, not our end.

`run_isolated("module:function", payload, ...)` calls the function with the payload (plain data) in
a fresh interpreter, under a time limit. The folder it gets keeps `log.txt` and `reproduce.sh`,
which repeats exactly that step alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import MORE_MEMORY, out_of_memory
from soa.errors import SoaPipelineError

_PARENT = "SOA_PIPELINE_PARENT"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class Outcome:
    """How an isolated step ended: its returned value, or why it has none."""

    value: Any
    error: str | None
    log: Path
    script: Path
    killed: bool = False
    """By the time limit or for want of memory: it may end otherwise next time."""

    @property
    def ok(self) -> bool:
        return self.error is None


def run_isolated(
    function: str,
    payload: Mapping[str, Any],
    folder: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Call `function` (as "module:name") with `**payload` in a child; never raises for its failure.

    `payload` and the returned value are JSON. The child and all it started are killed at
    `timeout_s` seconds, and on Ctrl-C here; the child also when this process is killed.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job, answer, log = folder / "job.json", folder / "answer.json", folder / "log.txt"
    script = folder / "reproduce.sh"
    job.write_text(json.dumps({"function": function, "payload": dict(payload)}, indent=1))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "engines.processes.isolation", str(job), str(answer)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    extra = {"PYTHONPATH": path, **(env or {})}
    _write_script(script, command, extra)
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **extra, _PARENT: str(os.getpid())},
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            return Outcome(None, f"no answer within {timeout_s:g} s", log, script, killed=True)
        except BaseException:
            _kill(child)
            raise
    return _read_answer(answer, code, log, script)


def _read_answer(answer: Path, code: int, log: Path, script: Path) -> Outcome:
    if code < 0:
        found = signal.Signals(-code)
        why = f"killed by {found.name}"
        if found is signal.SIGKILL:
            why += f", as the kernel does where memory runs out: {MORE_MEMORY}"
        return Outcome(None, why, log, script, killed=found is signal.SIGKILL)
    try:
        data = json.loads(answer.read_text())
    except (OSError, ValueError):
        lines = log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "nothing in its log"
        return Outcome(None, f"exit code {code} without an answer: {last}", log, script)
    return Outcome(
        data.get("value"), data.get("error"), log, script, killed=data.get("out_of_memory", False)
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _write_script(script: Path, command: list[str], env: Mapping[str, str]) -> None:
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in env.items())
    script.write_text(
        "#!/bin/sh\n# Repeats this one step alone; its answer is written beside this file.\n"
        f"{exports}exec {shlex.join(command)}\n"
    )
    script.chmod(0o755)


def _end_with_parent() -> None:
    """Have the kernel kill us when the thread that waits for us ends. Not when repeated by hand."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it was quicker
        sys.exit(1)


def _main(job: Path, answer: Path) -> int:
    _end_with_parent()
    data = json.loads(job.read_text())
    module, _, name = data["function"].partition(":")
    result: dict[str, Any]
    try:
        result = {"value": getattr(importlib.import_module(module), name)(**data["payload"])}
    except Exception as error:  # the log has the traceback, the answer its last line
        text = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {text[0]}"}
        if isinstance(error, SoaPipelineError):
            result = {"error": str(error)}
        else:
            traceback.print_exc()
        if out_of_memory(error):
            result["out_of_memory"] = True
            if MORE_MEMORY not in text[0]:  # else what failed has said it
                said = f" ({text[0]})" if text[0] else ""
                result["error"] = f"out of memory{said}: {MORE_MEMORY}"
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(answer)
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2])))
