"""C++ headers of networks, for a user's own code. Any host that has the compilers makes them.

A header is proven by a library of this host's level that includes it. A session takes it only if it
is named.
"""

from __future__ import annotations

from engines.target import Kind


class SourceText(
    Kind,
    kind="source",
    order=3,
    arch="cpp|cuda|hip",
    said="source/cpp, source/cuda, source/hip",
):
    """C++ headers: for CPUs, for CUDA and for HIP. Any host makes them."""

    torch_device = "cpu"
    engines = ("lanes",)
    for_sessions = False

    def here(self, index: int = 0) -> tuple[str, ...]:
        return ("cpp", "cuda", "hip")

    def why_not(self, arch: str) -> str:
        return "its headers are cpp, cuda and hip"
