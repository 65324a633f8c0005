"""Freed memory comes back to the model that freed it, not from the kernel, page by page."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BLOCKS = """
import resource
import torch
from runtime.process import keep_freed_memory

if {keep}:
    keep_freed_memory()
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(60):
    torch.ones(9 << 20)  # 36 MiB: beyond what glibc keeps by itself
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_PAGES = 60 * (36 << 20) // 4096


@pytest.mark.parametrize("keep", [False, True])
def test_large_blocks_are_not_mapped_anew_each_time(keep: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKS.format(keep=keep)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(done.stdout) < _PAGES / 2) is keep
