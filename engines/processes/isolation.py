"""Runs risky steps in a child process, so that a crash or a hang there is an ordinary result.

`run_isolated("module:function", payload, ...)` calls the function with the payload (plain data) in
a child process (see `warm.py`) with a time limit. In the given folder it writes `log.txt` and the
script `reproduce.sh`, which repeats only this step.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import MORE_MEMORY
from engines.processes.child_command import command, search_path
from engines.processes.warm import (
    NOT_BEGUN,
    begin,
    end_jobs,
    give_back,
    kill,
    raise_if_stopped,
    stop_thread_with,
)

_NO_MEMORY = "candidate-out-of-memory"
_MOST_JOBS = 4  # at the same time
_LEAST_FREE = 1 << 16
"""A disk with fewer free bytes counts as full if a child left no answer."""


@dataclass(frozen=True)
class Outcome:
    """How an isolated step ended: with the value that it returned, or with an error."""

    value: Any
    error: str | None
    log: Path
    script: Path
    killed: bool = False
    """True if the time limit or a lack of memory ended the step. A repetition may succeed."""
    not_applicable: bool = False
    """True if the step reported that it does not support the model or target."""
    code: str = "candidate-failed"
    """The code of the error; see docs/reference/refusals.md."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def trace(self) -> str:
        """A text that says where the log and the script lie on this host."""
        return f"log: {self.log}, repeat with: {self.script}"


def run_isolated(
    function: str,
    payload: Mapping[str, Any],
    folder: Path,
    timeout_s: float,
    imports: Sequence[str] = (),
) -> Outcome:
    """Call `function` ("module:name") with `**payload` in a child process, and return how it ended.

    A failure in the child raises no exception here, with one exception: OSError (ENOSPC) if a disk
    is full. `payload` and the returned value must be JSON. `imports` names modules that take long
    to import: they are imported once for many children. The child and all processes that it started
    are killed after `timeout_s` seconds, on Ctrl-C here, and when this process is killed.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job, answer, log = folder / "job.json", folder / "answer.json", folder / "log.txt"
    job.write_text(json.dumps({"function": function, "payload": dict(payload)}, indent=1))
    answer.unlink(missing_ok=True)
    log.write_bytes(b"")
    path = search_path()
    script = folder / "reproduce.sh"
    _write_script(script, job, answer, path)
    request = {
        "job": str(job),
        "answer": str(answer),
        "log": str(log),
        "folder": os.getcwd(),
        "environment": {**os.environ, "PYTHONPATH": path},
        "imports": list(imports),
    }
    code = _run_request(request, timeout_s)
    if code is None:
        error = f"no answer within {timeout_s:g} s"
        return Outcome(None, error, log, script, killed=True, code="candidate-timeout")
    return _read_outcome(answer, code, log, script)


def _run_request(request: Mapping[str, Any], timeout_s: float) -> int | None:
    """Run a job in a child. Returns its exit code, which is the negative number of a signal that
    killed it, or None if it was killed here because it took more than `timeout_s` seconds."""
    while True:
        process = begin(request)
        try:
            code = process.wait(timeout_s)
        except BaseException:
            kill(process)
            raise
        raise_if_stopped(process)
        if code is None:
            kill(process)
            return None
        give_back(process)
        if code != NOT_BEGUN:  # else another process does the job
            return code


@contextmanager
def open_job_pool() -> Iterator[ThreadPoolExecutor]:
    """Open a pool of threads that call `run_isolated` at the same time: one for each core, at most
    4.

    An exception inside the block, such as Ctrl-C, kills the processes that the pool runs.
    """
    stop = threading.Event()
    threads = min(len(os.sched_getaffinity(0)), _MOST_JOBS)
    pool = ThreadPoolExecutor(threads, initializer=lambda: stop_thread_with(stop))
    try:
        yield pool
    except BaseException:  # may come while the pool starts a thread that it then does not know
        end_jobs(stop)
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; `signal 40` for one that has no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_outcome(answer: Path, code: int, log: Path, script: Path) -> Outcome:
    """Make the Outcome of a child from its exit code and from the file with its answer, if it wrote
    one. Raises OSError if a disk is full."""
    if not answer.exists():
        _require_free_disk({answer.parent, Path(tempfile.gettempdir())})
    if code == -signal.SIGKILL:
        error = f"killed by SIGKILL, as the kernel does where memory runs out: {MORE_MEMORY}"
        return Outcome(None, error, log, script, killed=True, code=_NO_MEMORY)
    if code < 0:
        error = f"killed by {signal_name(-code)}"
        return Outcome(None, error, log, script, code="candidate-crashed")
    try:
        data = json.loads(answer.read_text())  # trusted
    except (OSError, ValueError):
        lines = log.read_text(errors="replace").strip().splitlines()  # trusted
        last_line = lines[-1] if lines else "nothing in its log"
        error = f"exit code {code} without an answer: {last_line}"
        return Outcome(None, error, log, script, code="candidate-crashed")
    if data.get("full_disk", False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(answer.parent))
    no_memory = data.get("out_of_memory", False)
    return Outcome(
        data.get("value"), data.get("error"), log, script, killed=no_memory,
        not_applicable=data.get("not_applicable", False),
        code=_NO_MEMORY if no_memory else Outcome.code,
    )  # fmt: skip


def _require_free_disk(folders: Iterable[Path]) -> None:
    """Raise OSError if a disk with one of the folders is full. A child may end because it cannot
    write its answer, or because its memory lies in a file on that disk."""
    for folder in folders:
        if shutil.disk_usage(folder).free < _LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _write_script(script: Path, job: Path, answer: Path, path: str) -> None:
    """Write a shell script that repeats the job alone. `path` is the PYTHONPATH that it needs."""
    step = command("engines.processes.job", str(job), str(answer))
    script.write_text(
        "#!/bin/sh\n# Repeats this one step alone; its answer is written beside this file.\n"
        f"export PYTHONPATH={shlex.quote(path)}\nexec {shlex.join(step)}\n"
    )
    script.chmod(0o755)
