"""Settings of the process that running a model needs: torch's threads, TF32, the allocator."""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engines.processes import require_openmp
from runtime.errors import LoadError
from soa.memory import Device, torch_drives_gpus
from soa.options import known_options

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_NEVER = 2**31 - 1

_lock = threading.Lock()
_tf32: list[bool] = []
"""What GPUs of this process compute float32 in, once a version has settled it."""


@known_options()
def keep_freed_memory() -> None:
    """Have the C library reuse freed memory rather than return it, for the rest of this process.

    glibc maps every large block anew, so each run of a model with large intermediates pays a page
    fault for every 4 KiB of them: on ParticleNet at 32 rows two thirds of the CPU time. For a
    process that does nothing but run models. What a model allocates then holds what was there
    before, not fresh zeros. Memory that the caller maps itself, as guarded collections are, stays
    as it is. Nothing changes without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def has_torch() -> bool:
    """Whether torch is installed here; it is not imported to find out."""
    return "torch" in sys.modules or find_spec("torch") is not None


def torch_runs_on(device: Device | torch.device) -> bool:
    """Whether torch of this host works on such a device."""
    return has_torch() if device.type == "cpu" else torch_drives_gpus()


def settle_threads(threads: int, limit: bool, production: bool) -> None:
    """Check that a run with `threads` threads is possible here; with `limit`, set torch to that.

    In production torch starts no other threads of its own. Where nobody has imported torch, it is
    not imported for that. RunError after a fork, see `require_openmp`.
    """
    require_openmp(threads)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if limit:
        torch.set_num_threads(threads)
    if production and torch.get_num_interop_threads() != 1:
        with suppress(RuntimeError):  # torch takes this setting once, before its first use
            torch.set_num_interop_threads(1)


def settle_tf32(wanted: bool, what: str) -> None:
    """Set what GPUs of this process compute float32 in, once and for all.

    By itself cuDNN takes TF32 for convolutions in float32, and a version in fp32 would silently
    lose half of its digits. `what` is the version that is being opened. LoadError if another one
    settled it otherwise.
    """
    import torch

    with _lock:
        if _tf32 and _tf32[0] is not wanted:
            one, other = ("TF32", "float32") if wanted else ("float32", "TF32")
            raise LoadError(
                f"{what} computes in {one}, and this process has opened a version in {other} on a "
                "GPU: torch has one setting for the whole process; load it in another process"
            )
        # By the older of two switches: after the newer one torch 2.13 exports no model any more.
        torch.backends.cudnn.allow_tf32 = wanted
        torch.backends.cuda.matmul.allow_tf32 = wanted
        _tf32[:] = [wanted]
