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
from engines.processes.forks import end_with_parent, openmp_unused

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
# PYTHONPATH before a model's folder is added. A job gets its full path with its environment.
_PATH = search_path()
NOT_BEGUN = 256
"""The result of `wait` if the process, being idle, had already ended when it got the job."""
# A GPU's driver does not work after a fork, and the import of torch may call the driver. So on a
# host with a GPU, each child imports torch itself.
_HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


class Warm:
    """A process that has imported torch. It takes one job at a time. It ends with our process, or
    after it has had no job for `_IDLE_S` seconds."""

    def __init__(self, environment: Mapping[str, str], imports: Iterable[str] = ()) -> None:
        self.environment = environment
        """The process's environment, which libraries may read at import."""
        self._process = subprocess.Popen(
            command("engines.processes.warm", str(_IDLE_S), *_IMPORTED, *imports),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a child imports the same modules and reports errors
            env=dict(environment),
            start_new_session=True,
        )

    def begin(self, job: Mapping[str, Any]) -> bool:
        """Send a job to the process. False if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def wait(self, timeout_s: float) -> int | None:
        """The exit code of the job's child, negative for a signal; NOT_BEGUN; or None if
        `timeout_s` seconds have passed."""
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], timeout_s):
            return None
        line = self._process.stdout.readline()
        if line:
            return int(line)
        # It has ended itself: killed by a signal, or with 0 since it had been idle for long.
        return self._process.wait() or NOT_BEGUN

    def kill(self) -> None:
        """Kill the process, its child and all processes that the child started. A thread in `wait`
        then gets -SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Close the pipes, so that the process ends, and wait for it. It must have no job."""
        self.let_go()
        self._process.wait()

    def let_go(self) -> None:
        """Close our ends of its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def forget(self) -> None:
        """Drop the process in a forked child, which is not its parent."""
        self.let_go()
        self._process.returncode = 0  # else Popen would wait for it


_idle: list[Warm] = []
_busy: dict[Warm, threading.Event | None] = {}  # with the event that stops the waiting thread
_thread = threading.local()


def expect_jobs(count: int, imports: Iterable[str] = ()) -> None:
    """Start processes for `count` jobs that will come soon. They import torch and `imports` while
    this process goes on."""
    environment = _read_at_import(os.environ)
    for _ in range(count - sum(warm.environment == environment for warm in _idle)):
        _idle.append(Warm(environment, imports))


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a job that must be set before its process imports anything."""
    early = {name: value for name, value in environment.items() if not name.startswith(_READ_LATER)}
    return {**early, "PYTHONPATH": _PATH}


def begin(job: Mapping[str, Any]) -> Warm:
    """Start a job; returns the process that runs it. RuntimeError in a thread that is stopped."""
    environment = _read_at_import(job["environment"])
    warm = _idle_one(environment)
    while warm is not None and not warm.begin(job):
        warm.end()
        warm = _idle_one(environment)
    if warm is None:
        warm = Warm(environment)
        warm.begin(job)
    _busy[warm] = getattr(_thread, "stop", None)
    unless_stopped(warm)  # called last, so that `end_jobs` misses no process
    return warm


def _idle_one(environment: Mapping[str, str]) -> Warm | None:
    """Take an idle process with this environment; None if there is none. A process with another one
    ends by itself."""
    for warm in list(_idle):
        if warm.environment != environment:
            continue
        try:
            _idle.remove(warm)
        except ValueError:  # another thread took it
            continue
        return warm
    return None


def unless_stopped(warm: Warm) -> None:
    """Kill the process and raise RuntimeError in a thread that is stopped."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        kill(warm)
        raise RuntimeError("stopped together with the other jobs of its pool")


def give_back(warm: Warm) -> None:
    """Return a process whose job has ended, so that it can take the next job."""
    _busy.pop(warm, None)
    _idle.append(warm)


def kill(warm: Warm) -> None:
    """Kill a process, its job and all processes that the job started."""
    _busy.pop(warm, None)
    warm.kill()
    warm.end()


def stops_with(stop: threading.Event) -> None:
    """From now on this thread's jobs end with `end_jobs(stop)`."""
    _thread.stop = stop


def end_jobs(stop: threading.Event) -> None:
    """Kill the jobs of the threads that `stops_with(stop)` was called in; they start no other."""
    stop.set()
    for warm, event in list(_busy.items()):
        if event is stop:
            warm.kill()


def _end_all() -> None:
    """End the idle processes, when this process ends."""
    while _idle:
        _idle.pop().end()


def _forget_all() -> None:
    """Drop all processes, in a forked child."""
    for warm in (*_idle, *_busy):
        warm.forget()
    _idle.clear()
    _busy.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


def collect_seldom() -> None:
    """Look for cyclic garbage less often: an export makes a million objects that stay, and at
    Python's own threshold they are searched again and again."""
    gc.set_threshold(50_000, 20, 100)


def _import(modules: Iterable[str]) -> None:
    """Import modules before a fork, except on a host with a GPU."""
    if _HAS_GPU:
        return
    for name in modules:
        with contextlib.suppress(ImportError):  # the child imports the same and reports the error
            importlib.import_module(name)


def _serve(idle_s: float, *imported: str) -> None:
    """Read jobs from the standard input, and run each in a forked child. Write the child's exit
    code to the standard output. Ends when the input does, or after `idle_s` seconds without a job.
    """
    collect_seldom()
    _import(imported)
    gc.freeze()  # what is imported stays
    jobs = sys.stdin.fileno()
    while wait([jobs], idle_s):
        line = sys.stdin.readline()
        if not line:
            break
        job, server = json.loads(line), os.getpid()  # ours
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
    """Run a job in the forked child: its files, environment and folder, then its function.

    Returns the exit code. `server` is the process that forked the child.
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
    openmp_unused()
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[:] = job["environment"]["PYTHONPATH"].split(os.pathsep)
    from engines.processes.job import run_job

    return run_job(Path(job["job"]), Path(job["answer"]))


if __name__ == "__main__":
    _serve(float(sys.argv[1]), *sys.argv[2:])
