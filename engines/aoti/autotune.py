"""The `aoti-autotune` engine: AOTInductor with matrix products of its own, timed while it compiles.

A candidate beside `aoti`, since neither wins everywhere: without a call into the BLAS library tiny
events take half the time, while large ones may take more. It compiles longer, and the packed
weights lie inside the library, where processes do not share them.
"""

from __future__ import annotations

from engines.aoti.engine import AotiEngine

ENGINE = AotiEngine("aoti-autotune", {"max_autotune": True})
