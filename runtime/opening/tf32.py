"""TF32 on a CUDA GPU: a setting of the whole process, so all of its sessions must agree.

By itself cuDNN takes TF32 for convolutions in float32. A version in fp32 whose process lets another
one use TF32 would silently lose half of its digits.
"""

from __future__ import annotations

import threading

import torch

from runtime.errors import LoadError

_lock = threading.Lock()
_settled: list[bool] = []


def settle_tf32(wanted: bool, what: str) -> None:
    """Set what GPUs of this process compute float32 in, once and for all.

    `what` is the version that is being opened. LoadError if another one settled it otherwise.
    """
    with _lock:
        if _settled and _settled[0] is not wanted:
            one, other = ("TF32", "float32") if wanted else ("float32", "TF32")
            raise LoadError(
                f"{what} computes in {one}, and this process has opened a version in {other} on a "
                "GPU: torch has one setting for the whole process; load it in another process"
            )
        # By the older of two switches: after the newer one torch 2.13 exports no model any more.
        torch.backends.cudnn.allow_tf32 = wanted
        torch.backends.cuda.matmul.allow_tf32 = wanted
        _settled[:] = [wanted]
