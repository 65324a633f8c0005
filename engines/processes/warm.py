"""Processes that have imported torch already, and fork a child for each job.

Importing torch and its compilers takes seconds, forking a process that has done so milliseconds.
What a job needs besides torch is imported before the fork, and is there for the next job.
Such a process computes nothing itself: it has no OpenMP worker that a fork would lose.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait  # unlike select, of any number of open files
from pathlib import Path
from typing import Any

from engines.processes.child import command, search_path

_IMPORTED = ("torch",)
_IDLE_S = 60.0
# Variables that torch does not read when it is imported: no reason to import it again.
# torch's compilers and pyarrow set the last two in our own process when they are imported.
_READ_LATER = (
    "PIPELINE_",
    "MLFLOW_",
    "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR",
    "_RJEM_MALLOC_CONF",
)
# Where modules are, before a model's folder is added: that is told to a job.
_PATH = search_path()
NOT_BEGUN = 256
"""What `wait` returns where the process had already ended by itself, idle, when it got the job."""
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# A GPU's driver does not live through a fork, and importing torch may ask it something: there, each
# child imports for itself.
_HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


class Warm:
    """One such process: it takes one job at a time, and ends with ours or when it has none."""

    def __init__(self, environment: Mapping[str, str], imports: Iterable[str] = ()) -> None:
        self.environment = environment
        """A library may ask it when it is imported."""
        self._process = subprocess.Popen(
            command("engines.processes.warm", str(_IDLE_S), *_IMPORTED, *imports),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a child imports the same, and says why it could not
            env=dict(environment),
            start_new_session=True,
        )

    def begin(self, job: Mapping[str, Any]) -> bool:
        """Hand a job over; False where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def wait(self, timeout_s: float) -> int | None:
        """The exit code of the job's child, negative for a signal, or NOT_BEGUN; None after
        `timeout_s`."""
        assert self._process.stdout is not None
        if not wait([self._process.stdout.fileno()], timeout_s):
            return None
        line = self._process.stdout.readline()
        return int(line) if line else self._process.wait() or NOT_BEGUN

    def kill(self) -> None:
        """Kill it, with its child and all that this started; who waits gets that for an answer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let it end, as it has no job."""
        self.let_go()
        self._process.wait()

    def let_go(self) -> None:
        """Close our ends of its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def forget(self) -> None:
        """In the child of a fork, whose process it is not."""
        self.let_go()
        self._process.returncode = 0


_idle: list[Warm] = []
_busy: dict[Warm, threading.Event | None] = {}  # with what stops the thread that waits for it
_thread = threading.local()


def expect_jobs(count: int, imports: Iterable[str] = ()) -> None:
    """Start processes for jobs that are to come soon. They import torch and the modules named while
    something else is done."""
    environment = _kept(os.environ)
    for _ in range(count - sum(warm.environment == environment for warm in _idle)):
        _idle.append(Warm(environment, imports))


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a job that must be set before its process imports anything."""
    kept = {k: v for k, v in environment.items() if not k.startswith(_READ_LATER)}
    return {**kept, "PYTHONPATH": _PATH}


def begin(job: Mapping[str, Any]) -> Warm:
    """A process at work on a job. RuntimeError in a thread that is stopped."""
    environment = _kept(job["environment"])
    for warm in list(_idle):
        if warm.environment != environment:
            continue  # it ends by itself
        try:
            _idle.remove(warm)
        except ValueError:
            continue  # another thread took it
        if warm.begin(job):
            break
        warm.end()
    else:
        warm = Warm(environment)
        warm.begin(job)
    _busy[warm] = stop = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():  # asked last: no process comes between
        kill(warm)
        raise RuntimeError("stopped with all that ran side by side")
    return warm


def give_back(warm: Warm) -> None:
    """A process whose job has ended, for the next one."""
    _busy.pop(warm, None)
    _idle.append(warm)


def kill(warm: Warm) -> None:
    """Kill a process with its job and all that this started."""
    _busy.pop(warm, None)
    warm.kill()
    warm.end()


def stops_with(stop: threading.Event) -> None:
    """From now on this thread's jobs end with `end_jobs(stop)`."""
    _thread.stop = stop


def end_jobs(stop: threading.Event) -> None:
    """Kill the jobs of the threads that stop with it; they begin no other."""
    stop.set()
    for warm, theirs in list(_busy.items()):
        if theirs is stop:
            warm.kill()


def _end_all() -> None:
    while _idle:
        _idle.pop().end()


def _forget_all() -> None:
    for warm in (*_idle, *_busy):
        warm.forget()
    _idle.clear()
    _busy.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


def _import(modules: Iterable[str]) -> None:
    for name in () if _HAS_GPU else modules:
        with contextlib.suppress(ImportError):  # the child imports the same, and says why not
            importlib.import_module(name)


def _serve(idle_s: float, *imported: str) -> None:
    """Take jobs from the standard input, and do each in a child of a fork."""
    _import(imported)
    asked = sys.stdin.fileno()
    while wait([asked], idle_s):
        line = sys.stdin.readline()
        if not line:
            break
        job, server = json.loads(line), os.getpid()
        _import(job["imports"])
        pid = os.fork()
        if pid == 0:
            code = _do(job, server)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)  # at once: an ordinary end takes half a second to free all of torch
        ended = os.pidfd_open(pid)
        if ended not in wait([asked, ended]):  # who asked is no more
            os.killpg(0, signal.SIGKILL)
        os.close(ended)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _do(job: Mapping[str, Any], server: int) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it was quicker
        return 1
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (job["log"], os.O_WRONLY), (job["log"], os.O_WRONLY)]
    ):
        opened = os.open(path, flags | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[:] = job["environment"]["PYTHONPATH"].split(os.pathsep)
    from engines.processes.job import run_job

    return run_job(Path(job["job"]), Path(job["answer"]))


if __name__ == "__main__":
    _serve(float(sys.argv[1]), *sys.argv[2:])
