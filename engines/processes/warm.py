"""Processes that have already imported torch, and fork a child for each job.

Importing torch and its compilers takes seconds; forking a process that has imported them takes
milliseconds. Other modules of a job are imported before the fork, so that the next job has them,
too. These processes compute nothing themselves, so they have no OpenMP threads that a fork loses.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait  # unlike select, works with many open files
from pathlib import Path
from typing import Any

from engines.processes.child_command import command, search_path
from engines.processes.forks import allow_openmp, end_with_parent

_IMPORTED = ("torch",)
_IDLE_S = 60.0
# Environment variables that torch does not read at import, so that a change needs no new process.
# torch's compilers and pyarrow set the last two in our process when they are imported.
_READ_LATER = (
    "PIPELINE_",
    "MLFLOW_",
    "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR",
    "_RJEM_MALLOC_CONF",
)
# The PYTHONPATH of the processes, without the folder of a model. A job's own path has that folder.
_PYTHONPATH = search_path()
NOT_BEGUN = 256
"""The result of `Warm.wait` if the process had ended before the job came, since it was idle."""
# A GPU's driver does not work after a fork, and the import of torch may call the driver. So on a
# host with a GPU, each child imports torch itself.
_HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


class Warm:
    """A process that has imported torch and forks a child for a job, one job at a time. It ends
    with our process, or after it has had no job for `_IDLE_S` seconds."""

    def __init__(self, environment: Mapping[str, str], imports: Iterable[str] = ()) -> None:
        self.environment = environment
        """The environment variables of the process, which libraries may read when they are
        imported."""
        self._process = subprocess.Popen(
            command("engines.processes.warm", str(_IDLE_S), *_IMPORTED, *imports),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a child imports the same modules and reports errors
            env=dict(environment),
            start_new_session=True,
        )

    def begin(self, job: Mapping[str, Any]) -> bool:
        """Send a job to the process. Returns False if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end of the job. Returns the exit code of its child (the negative number of a
        signal that killed it), NOT_BEGUN, or None if `timeout_s` seconds have passed."""
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], timeout_s):
            return None
        line = self._process.stdout.readline()
        if line:
            return int(line)
        # The process itself has ended: by a signal, or with 0 since it had been idle for too long.
        return self._process.wait() or NOT_BEGUN

    def kill(self) -> None:
        """Kill the process, its child and all processes that the child started. `wait` then returns
        -SIGKILL in the thread that waits."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Close the pipes, so that the process ends, and wait for it. It must have no job."""
        self.close_pipes()
        self._process.wait()

    def close_pipes(self) -> None:
        """Close our ends of the pipes to the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def forget(self) -> None:
        """Drop the process without waiting for it. For a forked child of ours, which is not its
        parent."""
        self.close_pipes()
        self._process.returncode = 0  # else Popen would wait for it


_idle: list[Warm] = []
_busy: dict[Warm, threading.Event | None] = {}  # each with the event that stops its thread
_thread = threading.local()


def expect_jobs(count: int, imports: Iterable[str] = ()) -> None:
    """Start processes for `count` jobs that will come soon, unless there are idle ones. They import
    torch and `imports` while this process goes on."""
    environment = _environment_at_import(os.environ)
    for _ in range(count - sum(warm.environment == environment for warm in _idle)):
        _idle.append(Warm(environment, imports))


def _environment_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job's environment that must be set before its process imports anything."""
    early = {name: value for name, value in environment.items() if not name.startswith(_READ_LATER)}
    return {**early, "PYTHONPATH": _PYTHONPATH}


def begin(job: Mapping[str, Any]) -> Warm:
    """Start a job in an idle process, or in a new one. Returns the process. Raises RuntimeError in
    a thread that `end_jobs` has stopped."""
    environment = _environment_at_import(job["environment"])
    warm = _take_idle(environment)
    while warm is not None and not warm.begin(job):
        warm.end()
        warm = _take_idle(environment)
    if warm is None:
        warm = Warm(environment)
        warm.begin(job)
    _busy[warm] = getattr(_thread, "stop", None)
    raise_if_stopped(warm)  # called last, so that `end_jobs` misses no process
    return warm


def _take_idle(environment: Mapping[str, str]) -> Warm | None:
    """Take an idle process with this environment out of the idle ones. Returns None if there is
    none. Processes with another environment are left: they end by themselves."""
    for warm in list(_idle):
        if warm.environment != environment:
            continue
        try:
            _idle.remove(warm)
        except ValueError:  # another thread took it
            continue
        return warm
    return None


def raise_if_stopped(warm: Warm) -> None:
    """Raise RuntimeError in a thread that `end_jobs` has stopped, and kill the process before."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        kill(warm)
        raise RuntimeError("stopped together with the other jobs of its pool")


def give_back(warm: Warm) -> None:
    """Put a process whose job has ended among the idle ones, so that it can take another job."""
    _busy.pop(warm, None)
    _idle.append(warm)


def kill(warm: Warm) -> None:
    """Kill a process, its job and all processes that the job started, and wait for its end."""
    _busy.pop(warm, None)
    warm.kill()
    warm.end()


def stop_thread_with(stop: threading.Event) -> None:
    """Let `end_jobs(stop)` end the jobs of this thread from now on."""
    _thread.stop = stop


def end_jobs(stop: threading.Event) -> None:
    """Kill the jobs of all threads in which `stop_thread_with(stop)` was called. These threads can
    start no other jobs."""
    stop.set()
    for warm, event in list(_busy.items()):
        if event is stop:
            warm.kill()


def _end_all() -> None:
    """End the idle processes. Python calls this when this process ends."""
    while _idle:
        _idle.pop().end()


def _forget_all() -> None:
    """Drop all processes. Python calls this in a forked child, which is not their parent."""
    for warm in (*_idle, *_busy):
        warm.forget()
    _idle.clear()
    _busy.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


def collect_garbage_seldom() -> None:
    """Make Python look for cyclic garbage less often. An export makes a million objects that stay,
    and at Python's own threshold it searches them again and again."""
    gc.set_threshold(50_000, 20, 100)


def _import(modules: Iterable[str]) -> None:
    """Import modules before a fork, so that the children need not. Does nothing on a host with a
    GPU."""
    if _HAS_GPU:
        return
    for name in modules:
        with contextlib.suppress(ImportError):  # the child imports the same and reports the error
            importlib.import_module(name)


def _serve(idle_s: float, *imported: str) -> None:
    """Read jobs from the standard input and run each in a forked child, whose exit code is written
    to the standard output. `imported` are modules to import first.

    The process ends when its input does, or after `idle_s` seconds without a job.
    """
    collect_garbage_seldom()
    _import(imported)
    gc.freeze()  # what is imported stays
    jobs = sys.stdin.fileno()
    while wait([jobs], idle_s):
        line = sys.stdin.readline()
        if not line:
            break
        job, server = json.loads(line), os.getpid()  # trusted
        _import(job["imports"])
        pid = os.fork()
        if pid == 0:
            code = _run_in_child(job, server)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)  # a normal exit would take half a second to free all of torch
        ended = os.pidfd_open(pid)
        if ended not in wait([jobs, ended]):  # the parent has closed the pipe or ended
            os.killpg(0, signal.SIGKILL)
        os.close(ended)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _run_in_child(job: Mapping[str, Any], server: int) -> int:
    """Run a job in the forked child, with the job's log, environment and working folder.

    Returns the exit code. `server` is the number of the process that forked the child.
    """
    end_with_parent()
    if os.getppid() != server:  # it ended before that took effect
        return 1
    stdin = os.open(os.devnull, os.O_RDONLY)
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    for source, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.close(stdin)
    os.close(log)
    # In a new thread a job would not need this, but malloc would return freed memory there.
    allow_openmp()
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[:] = job["environment"]["PYTHONPATH"].split(os.pathsep)
    from engines.processes.job import run_job

    return run_job(Path(job["job"]), Path(job["answer"]))


if __name__ == "__main__":
    _serve(float(sys.argv[1]), *sys.argv[2:])
