"""CPU time of processes, from Linux's /proc: a server's, and that of everything on the machine."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The ids of all descendants. A process that ends meanwhile is left out."""
    parents: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            fields = _fields(folder / "stat")
            if fields:
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def cpu_s(pid: int) -> float:
    """CPU time of the process's threads that are still alive, in seconds."""
    total = 0
    for thread in (_PROC / str(pid) / "task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def machine_cpu_s() -> float:
    """The busy time of all CPUs since the machine started in seconds, rounded to clock ticks."""
    first = (_PROC / "stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, interrupts, soft, *_ = (int(ticks) for ticks in first[1:])
    return (user + nice + system + interrupts + soft) / _TICKS


def _fields(stat: Path) -> list[str]:
    """The fields after the name, which may contain blanks and brackets."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []
