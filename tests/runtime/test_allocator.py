"""Freed memory is used again without page faults, as the process keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.processes import run_isolated

_BLOCKS = 10
_BYTES = 36 << 20
_PAGES = _BLOCKS * _BYTES // 4096
"""Page faults if each block is mapped anew."""


def page_faults(keep: bool) -> int:
    """Page faults for several blocks, one after the other; runs in a process of its own."""
    import resource

    import torch

    from runtime.process import keep_freed_memory

    if keep:
        keep_freed_memory()
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_BLOCKS):
        torch.ones(_BYTES // 4)  # more than glibc keeps by default
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("keep", [False, True])
def test_large_blocks_are_mapped_once_if_freed_memory_is_kept(keep: bool, tmp_path: Path) -> None:
    function = "tests.runtime.test_allocator:page_faults"
    outcome = run_isolated(function, {"keep": keep}, tmp_path, 60)
    assert outcome.ok, outcome.error
    mapped_once = int(outcome.value) < _PAGES / 2
    assert mapped_once is keep
