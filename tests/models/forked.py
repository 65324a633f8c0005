"""Calls in a forked child of this process, which need not import torch again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait


def in_a_child(what: Callable[[], object]) -> str:
    """The exception that a call raises in a forked child, as text. The child does not remain."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as words:
        if not wait([words.fileno()], 60):
            os.kill(child, signal.SIGKILL)
        said = words.read() or "it hangs, or died"
    os.waitpid(child, 0)
    return said


def ended(what: Callable[[], object]) -> int:
    """The exit code of a child after a call: 0, 1 if it raised, negative for a signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # some callers expect a crash
        code = 1
        with contextlib.suppress(BaseException):
            what()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
