"""`python without_torch.py LIBRARY N [global]`: runs PointwiseFirst's artifact with NumPy alone.

Prints the outputs' digest, and whether torch or libtorch is in this process. With `global`, it
first loads libtorch's symbols for the whole process, as in a program that is linked with libtorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

from engines.native import NativeExecutable
from runtime.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column

library, n = Path(sys.argv[1]), int(sys.argv[2])
if "global" in sys.argv:
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    ctypes.CDLL(str(Path(torch.origin).parent / "lib/libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
layouts = {
    "jets": Layout([column(name, "float32") for name in "abcdef"]),
    "tags": Layout([column(name, "float32") for name in "xyz"]),
}
signature = Signature.build(
    layouts,
    [Block("features", "jets", tuple("abcdef"))],
    [Block("probabilities", "tags", tuple("xyz"))],
    {"n": RowRange(0, 5000, ())},
)
jets, tags = Collection(layouts["jets"], n), Collection(layouts["tags"], n)
for i, name in enumerate("abcdef"):
    jets[name][:] = np.sin(np.arange(n, dtype=np.float64) * (i + 1)).astype(np.float32) * 5
Session(signature, NativeExecutable(library, "cpu")).bind(jets, tags)()
digest = hashlib.sha256(b"".join(tags[name].tobytes() for name in "xyz")).hexdigest()
mapped = "libtorch" in Path("/proc/self/maps").read_text()
total = float(sum(tags[name].sum(dtype=np.float64) for name in "xyz"))
print(json.dumps({"digest": digest, "total": total, "torch": "torch" in sys.modules or mapped}))
