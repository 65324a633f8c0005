"""Calls in a forked child of this process, which need not import torch again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait


def in_a_child(call: Callable[[], object]) -> str:
    """The exception that a call raises in a forked child, as text, or "nothing". The child does not
    remain."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "nothing"
        try:
            call()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as words:
        if not wait([words.fileno()], 60):
            os.kill(child, signal.SIGKILL)
        outcome = words.read() or "it hangs, or died"
    os.waitpid(child, 0)
    return outcome


def ended(call: Callable[[], object]) -> int:
    """The exit code of a child after a call: 0, 1 if it raised, negative for a signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # some callers expect a crash
        code = 1
        with contextlib.suppress(BaseException):
            call()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
