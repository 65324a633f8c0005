"""Settings of a process that runs models: torch's threads, TF32, the allocator, regular writes."""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engines.processes import require_openmp
from runtime.errors import LoadError
from soa.memory import Device, torch_drives_gpus
from soa.text import logger

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_NEVER = 2**31 - 1  # a threshold in bytes that is never reached
_EVERY_S = 10.0  # the time between two writes of `write_regularly`

log = logger("soa-pipeline")

_lock = threading.Lock()
_tf32: list[bool] = []
"""Whether GPUs of this process use TF32; empty until the first version is opened on a GPU."""


def keep_freed_memory() -> None:
    """Have the C library reuse freed memory rather than return it, for the rest of this process.

    glibc maps every large block anew, so a model with large intermediate tensors causes a page
    fault for every 4 KiB of them in each run: on ParticleNet at 32 rows two thirds of the CPU time.
    Use this in a process that only runs models. Memory that a model allocates then holds old
    content instead of zeros. Memory that the caller maps itself, such as guarded collections, is
    not affected. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def write_regularly(write: Callable[[], None], what: str) -> None:
    """Call `write` every ten seconds in a new thread, and once more when this process ends.

    An OSError of `write` is logged. `what`: the subject of that message, such as "telemetry".
    """

    def write_or_log() -> None:
        """Call `write`; an OSError is logged only, since the next call tries again."""
        try:
            write()
        except OSError as error:
            log.warning("%s cannot be written: %s", what, error)

    ended = threading.Event()

    def write_until_end() -> None:
        """Write regularly, until `ended` is set; the thread runs this."""
        while not ended.wait(_EVERY_S):
            write_or_log()

    def write_last() -> None:
        """End the thread, and write once more; called when the process ends."""
        ended.set()
        write_or_log()

    from multiprocessing import util

    # Twice, because children of multiprocessing end without calling what atexit has. A Finalize
    # runs only once, and not later: then the program may have removed the folder.
    atexit.register(util.Finalize(None, write_last, exitpriority=0))
    threading.Thread(target=write_until_end, daemon=True).start()


def has_torch() -> bool:
    """Whether torch is installed here. The check does not import torch."""
    return "torch" in sys.modules or find_spec("torch") is not None


def torch_runs_on(device: Device | torch.device) -> bool:
    """Whether torch is installed here and works on such a device."""
    return has_torch() if device.type == "cpu" else torch_drives_gpus()


def settle_threads(threads: int, limit: bool, production: bool) -> None:
    """Check that this process can run with `threads` threads, and set torch's threads.

    `limit`: torch gets exactly this number. `production`: torch gets only one inter-op thread. If
    torch is not imported yet, this does not import it, and sets nothing. Raises RunError after a
    fork, see `require_openmp`.
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
    """Set once, for this whole process, whether its GPUs compute float32 in TF32.

    By default cuDNN uses TF32 for float32 convolutions, and a version in fp32 would silently lose
    half of its digits. `what`: the name of the version that is opened, for the error. Raises
    LoadError if another version needed the other setting.
    """
    import torch

    with _lock:
        if _tf32 and _tf32[0] is not wanted:
            own, other = ("TF32", "float32") if wanted else ("float32", "TF32")
            raise LoadError(
                f"{what} computes in {own}, and this process has opened a version in {other} on a "
                "GPU: torch has one setting for the whole process; load it in another process"
            )
        # torch has an older and a newer switch. If the newer one is used, torch 2.13 cannot export.
        torch.backends.cudnn.allow_tf32 = wanted
        torch.backends.cuda.matmul.allow_tf32 = wanted
        _tf32[:] = [wanted]
