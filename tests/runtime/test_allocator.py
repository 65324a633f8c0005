"""Freed memory is used again without page faults, as the process keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.processes import run_isolated

_BLOCKS = 10
_PAGES = _BLOCKS * (36 << 20) // 4096


def faults(keep: bool) -> int:
    """Page faults for several blocks, one after the other; runs in a process of its own."""
    import resource

    import torch

    from runtime.process import keep_freed_memory

    if keep:
        keep_freed_memory()
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_BLOCKS):
        torch.ones(9 << 20)  # 36 MiB: more than glibc keeps by default
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("keep", [False, True])
def test_large_blocks_are_not_mapped_anew_each_time(keep: bool, tmp_path: Path) -> None:
    outcome = run_isolated("tests.runtime.test_allocator:faults", {"keep": keep}, tmp_path, 60)
    assert outcome.ok, outcome.error
    assert (int(outcome.value) < _PAGES / 2) is keep
