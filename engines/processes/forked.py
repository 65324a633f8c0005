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
"""In a child that `in_fork` started: the connection to its parent."""


def doing(step: str) -> None:
    """Tell the parent what this child begins to compute, for the message if it crashes there. Does
    nothing in a process that `in_fork` did not start."""
    if _parent is not None:
        _send("doing", step)


def _silent(text: str) -> None:
    """The `say` of a caller that wants no progress."""


def in_fork(subject: str, work: Callable[[F], T], say: F = _silent) -> T:  # type: ignore[assignment]
    """The result of `work(say)`, computed in a forked child; it must be possible to pickle it.

    `say` reports progress, or asks a question: it is called in this process.
    An exception of `work` is raised here. CrashError if the child was killed or ended by itself:
    its text has `subject`, such as "the model", the last line that `work` said, and what it was
    `doing`. Only for work on a CPU: a GPU that this process uses does not work in the child.
    """
    ours, theirs = Pipe()
    sys.stdout.flush()  # else the child, too, would print what is in these buffers
    sys.stderr.flush()
    one_thread = len(os.listdir("/proc/self/task")) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads exist
        pid = os.fork()
    if pid == 0:
        ours.close()
        _run_child(theirs, lambda: work(_ask_parent), one_thread)  # type: ignore[arg-type]
    theirs.close()
    ended = os.pidfd_open(pid)
    try:
        return cast(T, _serve_until_end(subject, ours, ended, pid, say))
    except BaseException:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        raise
    finally:
        ours.close()
        os.close(ended)
        _reap(pid)


def _serve_until_end(
    subject: str, ours: Connection, ended: int, pid: int, say: Callable[..., Any]
) -> Any:
    """Serve the child's messages until it ends; returns its value, or raises its error.

    `ours` is the connection to the child, `ended` a file that can be read once it has ended.
    """
    step = place = ""
    while True:
        kind, content = _message(ours, ended)
        if kind == "say":
            if not content[0].startswith("note:"):
                step = content[0]
            place = ""
            ours.send_bytes(pickle.dumps(say(*content)))
        elif kind == "doing":
            place = content
        elif kind in ("stdout", "stderr"):
            getattr(sys, kind).write(content)
        elif kind == "value":
            return content
        elif kind == "error":
            raise _unpickled_error(*content)
        else:
            where = ", ".join(text for text in (step, place) if text)
            raise _crash_error(subject, where, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _message(ours: Connection, ended: int) -> tuple[str, Any]:
    """The kind and the content of the next message; of kind "" if the child has ended."""
    if ours not in wait([ours, ended]):
        return "", None
    try:
        kind, content = pickle.loads(ours.recv_bytes())  # ours
    except EOFError:  # the child has ended, and with it its side of the connection
        return "", None
    return kind, content


def _crash_error(subject: str, where: str, code: int) -> CrashError:
    """The error of a child that sent no result. A negative `code` is the number of a signal."""
    end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
    why = "its own code does so, without an engine: change the operation, or give other rows"
    if code == -signal.SIGKILL:
        why = f"as the kernel does where memory runs out: {MORE_MEMORY}"
    place = f" ({where})" if where else ""
    return CrashError(f"{subject} {end}{place}: {why}")


def _unpickled_error(pickled: bytes, text: str) -> BaseException:
    """The child's exception, or a RuntimeError with its `text` if it cannot be read here."""
    try:
        error = pickle.loads(pickled)  # ours
    except Exception:  # its class is of a module that only the child has imported
        return RuntimeError(text)
    return error if isinstance(error, BaseException) else RuntimeError(text)


def _reap(pid: int) -> None:
    """Wait for the child, so that the kernel forgets it."""
    with suppress(ChildProcessError):  # its exit code is known already
        os.waitpid(pid, 0)


def _ask_parent(*arguments: Any) -> Any:
    """The child's `say`: the parent calls its own with these arguments, and sends the answer."""
    assert _parent is not None
    _send("say", arguments)
    return pickle.loads(_parent.recv_bytes())  # ours


def _send(kind: str, content: Any) -> None:
    """Send a message from the child; see `_serve_until_end` for the kinds."""
    assert _parent is not None
    _parent.send_bytes(pickle.dumps((kind, content)))


class _Printed(TextIOBase):
    """Sends what is printed to the parent, which prints it. `kind`: "stdout" or "stderr"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def write(self, text: str, /) -> int:
        _send(self._kind, text)
        return len(text)

    def writable(self) -> bool:
        return True


def _run_child(theirs: Connection, work: Callable[[], object], one_thread: bool) -> None:
    """Do the work, send its result, and end the process. `one_thread`: the parent had no other."""
    global _parent
    _parent = theirs
    end_with_parent()
    gc.freeze()  # connections of the parent are not closed here
    faulthandler.disable()
    sys.stdout, sys.stderr = _Printed("stdout"), _Printed("stderr")
    try:
        if one_thread:  # no thread of OpenMP is lost
            openmp_unused()
            _send_result(work)
        else:  # OpenMP starts threads anew in a new thread
            thread = threading.Thread(target=_send_result, args=(work,))
            thread.start()
            thread.join()
    finally:
        os._exit(0)


def _send_result(work: Callable[[], object]) -> None:
    """Do the work, and send its result to the parent, or the error that it raised."""
    try:
        _send("value", work())
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
        except Exception:  # it holds an object that cannot be pickled
            pickled = b""
        _send("error", (pickled, text))
