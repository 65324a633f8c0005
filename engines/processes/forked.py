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
from engines.processes.forks import allow_openmp, end_with_parent
from engines.processes.isolation import signal_name

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_parent: Connection | None = None
"""The connection to the parent in a child that `run_in_fork` started; None in other processes."""


def report_step(step: str) -> None:
    """Tell the parent what this child begins to compute, so that the error can name it if the child
    crashes. Does nothing in a process that `run_in_fork` did not start."""
    if _parent is not None:
        _send("doing", step)


def _ignore_progress(text: str) -> None:
    """Do nothing: the `say` of a caller that does not show progress."""


def run_in_fork(subject: str, work: Callable[[F], T], say: F = _ignore_progress) -> T:  # type: ignore[assignment]
    """Call `work(say)` in a forked child, and return its result, which must be picklable.

    `work` gets a function that calls `say` in this process, to report progress or to ask a
    question. An exception of `work` is raised here. Raises CrashError if the child is killed or
    ends by itself: the message names the `subject`, such as "the model", the last step that `work`
    said, and the last one that it reported by `report_step`. Use this only for work on a CPU: a GPU
    that this process uses does not work in the child.
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
        _wait_for_exit(pid)


def _serve_until_end(
    subject: str, ours: Connection, ended: int, pid: int, say: Callable[..., Any]
) -> Any:
    """Handle the child's messages until it sends a result. Returns its value, or raises its error.

    `ours` is the connection to the child, and `ended` a file descriptor that becomes readable when
    the child ends. Raises CrashError if the child ends without a result.
    """
    step = detail = ""
    while True:
        kind, content = _receive(ours, ended)
        if kind == "say":
            if not content[0].startswith("note:"):
                step = content[0]
            detail = ""
            ours.send_bytes(pickle.dumps(say(*content)))
        elif kind == "doing":
            detail = content
        elif kind in ("stdout", "stderr"):
            getattr(sys, kind).write(content)
        elif kind == "value":
            return content
        elif kind == "error":
            raise _unpickle_error(*content)
        else:
            where = ", ".join(text for text in (step, detail) if text)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            raise _make_crash_error(subject, where, code)


def _receive(ours: Connection, ended: int) -> tuple[str, Any]:
    """Wait for the child's next message. Returns its kind and its content; the kind is "" if the
    child has ended instead."""
    if ours not in wait([ours, ended]):
        return "", None
    try:
        kind, content = pickle.loads(ours.recv_bytes())  # trusted
    except EOFError:  # the child has ended, and with it its side of the connection
        return "", None
    return kind, content


def _make_crash_error(subject: str, where: str, code: int) -> CrashError:
    """Make the error for a child that ended without a result. `where` says what it was doing, and
    `code` is its exit code, or the negative number of the signal that killed it."""
    end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
    advice = "its own code does so, without an engine: change the operation, or give other rows"
    if code == -signal.SIGKILL:
        advice = f"as the kernel does where memory runs out: {MORE_MEMORY}"
    in_brackets = f" ({where})" if where else ""
    return CrashError(f"{subject} {end}{in_brackets}: {advice}")


def _unpickle_error(pickled: bytes, text: str) -> BaseException:
    """Unpickle the child's exception. If that fails, return a RuntimeError with its `text`."""
    try:
        error = pickle.loads(pickled)  # trusted
    except Exception:  # its class is of a module that only the child has imported
        return RuntimeError(text)
    return error if isinstance(error, BaseException) else RuntimeError(text)


def _wait_for_exit(pid: int) -> None:
    """Wait until the child has ended, so that no zombie process remains."""
    with suppress(ChildProcessError):  # its exit code is known already
        os.waitpid(pid, 0)


def _ask_parent(*arguments: Any) -> Any:
    """Call the parent's `say` with these arguments, and return its answer. Work in the child gets
    this function as its `say`."""
    assert _parent is not None
    _send("say", arguments)
    return pickle.loads(_parent.recv_bytes())  # trusted


def _send(kind: str, content: Any) -> None:
    """Send a message from this child to its parent. `_serve_until_end` has the kinds of
    messages."""
    assert _parent is not None
    _parent.send_bytes(pickle.dumps((kind, content)))


class _SendingStream(TextIOBase):
    """A standard stream of the child, "stdout" or "stderr", whose text the parent prints."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def write(self, text: str, /) -> int:
        _send(self._kind, text)
        return len(text)

    def writable(self) -> bool:
        return True


def _run_child(theirs: Connection, work: Callable[[], object], one_thread: bool) -> None:
    """Do the work in the child, send its result, and end the process. `one_thread` is true if the
    parent had only one thread when it forked."""
    global _parent
    _parent = theirs
    end_with_parent()
    gc.freeze()  # connections of the parent are not closed here
    faulthandler.disable()
    sys.stdout, sys.stderr = _SendingStream("stdout"), _SendingStream("stderr")
    try:
        if one_thread:  # no thread of OpenMP is lost
            allow_openmp()
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
