"""What the kernel saw opened: every open(2) of a folder's files, from Python, C++ or the linker."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections import Counter
from pathlib import Path

_ACCESS, _CLOSE, _OPEN, _IS_DIRECTORY, _OVERFLOW = 0x1, 0x18, 0x20, 0x40000000, 0x4000
_EVENT = struct.Struct("iIII")


class Opens:
    """inotify on every folder below `root`.

    Reads and closes are watched so that two opens are two events: the kernel merges equal ones.
    """

    def __init__(self, root: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders: dict[int, Path] = {}
        for folder, _, _ in os.walk(root):
            watch = libc.inotify_add_watch(
                self._handle, os.fsencode(folder), _ACCESS | _CLOSE | _OPEN
            )
            assert self._handle >= 0 and watch >= 0, os.strerror(ctypes.get_errno())
            self._folders[watch] = Path(folder).relative_to(root)

    def forget(self) -> None:
        """What was opened so far does not count; of that, events may be lost."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._handle, 1 << 16):
                pass

    def since(self) -> Counter[str]:
        """How often each file was opened since this was last asked, or `forget` called."""
        found: Counter[str] = Counter()
        while True:
            try:
                events = os.read(self._handle, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                assert not mask & _OVERFLOW
                if mask & _OPEN and not mask & _IS_DIRECTORY:
                    found[(self._folders[watch] / os.fsdecode(name)).as_posix()] += 1

    def close(self) -> None:
        os.close(self._handle)
