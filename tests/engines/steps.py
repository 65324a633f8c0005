"""Steps for the isolation tests to run in a child process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engines.errors import EngineError, first_line
from engines.processes import require_openmp


def add(a: int, b: int) -> int:
    """Also prints a line, for the log."""
    print("adding", flush=True)
    return a + b


def run_with_threads(threads: int) -> int:
    """The sum of 1 << 20 twos, which OpenMP computes with this many threads."""
    import torch

    torch.set_num_threads(threads)
    require_openmp(threads)
    return int(torch.ones(1 << 20).mul(2).sum())


def where(variable: str) -> dict[str, Any]:
    """The ids of this process and its parent, a variable of its environment, and its folder."""
    value = os.environ.get(variable)
    return {"pid": os.getpid(), "parent": os.getppid(), "value": value, "cwd": os.getcwd()}


def kill_itself() -> None:
    """Prints a line and ends by SIGSEGV."""
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def end_by_a_real_time_signal() -> None:
    """Ends by a signal for which Python has no name."""
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def ends_as_for_want_of_memory() -> None:
    """Ends by SIGKILL, which the kernel sends where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def ask_for_too_much(limit: int) -> int:
    """Asks for more memory than its own limit of the address space."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return len(bytearray(2 * limit))


def fails_for_want_of_memory() -> None:
    """Raises the error of an engine that runs out of memory."""
    error = MemoryError()
    raise EngineError(f"it failed: {first_line(error)}") from error


def read_address_zero() -> bytes:
    """A segmentation fault."""
    return ctypes.string_at(0)


def wait_for(file: str) -> str:
    """Returns when the file exists."""
    while not Path(file).exists():
        time.sleep(0.05)
    return "it came"


def graph_of(program: str) -> str:
    """The graph of a program.pt2."""
    from engines.exported import load_program

    return str(load_program(Path(program)).graph)


def hang(pids: str) -> None:
    """Starts another process, writes the ids of both, and never returns."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    partial = Path(pids).with_suffix(".partial")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.replace(pids)
    time.sleep(1000)


def raise_ours() -> None:
    """Raises an error that our code has written for users."""
    raise EngineError("model.so, line 3: this compiler is too old")


def raise_theirs() -> None:
    """Raises an error of any library."""
    raise ValueError("first line\nsecond line")


def raise_nothing_said() -> None:
    """Raises an error without a message."""
    raise ValueError


def leave() -> None:
    """Ends the process with status 3 and a message, without an answer."""
    print("the compiler gave up", file=sys.stderr, flush=True)
    os._exit(3)


def leave_silently() -> None:
    """Ends the process as if all were well, without an answer."""
    os._exit(0)


def no_json() -> object:
    """An answer that JSON cannot hold."""
    return object()
