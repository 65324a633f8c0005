"""Runs a user's code in a forked child, so that a crash there is an ordinary error.

A fork takes milliseconds, and the child has all modules and objects of this process. Text that the
child prints, and its progress, go through a pipe to this process.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import TextIOBase
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar, cast

from engines.errors import MORE_MEMORY, CrashError
from engines.processes.forks import end_with_parent, openmp_unused
from engines.processes.isolation import signal_name

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_parent: Connection | None = None


def doing(what: str) -> None:
    """Tell the parent what this child begins to compute, for the message if it crashes there. Does
    nothing in a process that `in_fork` did not start."""
    if _parent is not None:
        _send("doing", what)


def _silent(text: str) -> None:
    """The `say` of a caller that wants no progress."""


def in_fork(what: str, work: Callable[[F], T], say: F = _silent) -> T:  # type: ignore[assignment]
    """The result of `work(say)`, computed in a forked child; it must be possible to pickle it.

    `say` reports progress, or asks a question: it is called in this process.
    An exception of `work` is raised here. CrashError if the child was killed or ended by itself:
    its text has `what`, the last line that `work` said, and what it was `doing`. Only for work on a
    CPU: a GPU that this process uses does not work in the child.
    """
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    alone = len(os.listdir("/proc/self/task")) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads exist
        pid = os.fork()
    if pid == 0:
        ours.close()
        _begin(theirs, lambda: work(_say), alone)  # type: ignore[arg-type]
    theirs.close()
    ended = os.pidfd_open(pid)
    try:
        return cast(T, _answer(what, ours, ended, pid, say))
    except BaseException:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        raise
    finally:
        ours.close()
        os.close(ended)
        _reap(pid)


def _answer(what: str, ours: Connection, ended: int, pid: int, say: Callable[..., Any]) -> Any:
    """Serve the child's messages until it ends; returns its value, or raises its error."""
    step = place = ""
    while True:
        kind, value = _message(ours, ended)
        if kind == "say":
            step, place = (step if value[0].startswith("note:") else value[0]), ""
            ours.send_bytes(pickle.dumps(say(*value)))
        elif kind == "doing":
            place = value
        elif kind in ("stdout", "stderr"):
            getattr(sys, kind).write(value)
        elif kind == "value":
            return value
        elif kind == "error":
            raise _error(*value)
        else:
            where = ", ".join(filter(None, (step, place)))
            raise _crash(what, where, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _message(ours: Connection, ended: int) -> tuple[str, Any]:
    """The kind and the content of the next message; of kind "" if the child has ended."""
    with suppress(EOFError):
        if ours in wait([ours, ended]):
            kind, value = pickle.loads(ours.recv_bytes())  # ours
            return kind, value
    return "", None


def _crash(what: str, where: str, code: int) -> CrashError:
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
    why = "its own code does so, without an engine: change the operation, or give other rows"
    if code == -signal.SIGKILL:
        why = f"as the kernel does where memory runs out: {MORE_MEMORY}"
    return CrashError(f"{what} {how}{f' ({where})' if where else ''}: {why}")


def _error(pickled: bytes, text: str) -> BaseException:
    try:
        error = pickle.loads(pickled)  # ours
    except Exception:  # its class is of a module that only the child has imported
        error = None
    return error if isinstance(error, BaseException) else RuntimeError(text)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # its exit code is known already
        os.waitpid(pid, 0)


def _say(*given: Any) -> Any:
    assert _parent is not None
    _send("say", given)
    return pickle.loads(_parent.recv_bytes())  # ours


def _send(kind: str, value: Any) -> None:
    assert _parent is not None
    _parent.send_bytes(pickle.dumps((kind, value)))


class _Printed(TextIOBase):
    """Sends what is printed to the parent, which prints it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def write(self, text: str, /) -> int:
        _send(self._kind, text)
        return len(text)

    def writable(self) -> bool:
        return True


def _begin(theirs: Connection, work: Callable[[], object], alone: bool) -> None:
    """Do the work, send its result, and end the process."""
    global _parent
    _parent = theirs
    end_with_parent()
    gc.freeze()  # connections of the parent are not closed here
    faulthandler.disable()
    sys.stdout, sys.stderr = _Printed("stdout"), _Printed("stderr")
    try:
        if alone:  # no thread of OpenMP is lost
            openmp_unused()
            _do(work)
        else:  # OpenMP starts threads anew in a new thread
            thread = threading.Thread(target=_do, args=(work,))
            thread.start()
            thread.join()
    finally:
        os._exit(0)


def _do(work: Callable[[], object]) -> None:
    """Send the result of the work to the parent, or the error that it raised."""
    try:
        _send("value", work())
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        _send("error", (pickled, text))
