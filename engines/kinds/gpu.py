"""GPUs of both vendors, which torch uses through `torch.cuda`.

If torch is not built for GPUs, NVIDIA's driver gives the architecture. AMD's driver cannot: its
number is the same for gfx908 and gfx90a.
"""

from __future__ import annotations

from engines.errors import RunError, TargetError
from engines.target import Kind
from soa.memory import torch_drives_gpus


class Cuda(Kind, kind="cuda", order=1, arch="sm_[0-9]+[a-z]?", said="cuda/sm_<NN>"):
    """NVIDIA's GPUs."""

    torch_device = "cuda"

    def here(self, index: int = 0) -> tuple[str, ...]:
        """The architecture of GPU `index` of this host, if it is a GPU of this kind, else nothing.
        Raises TargetError if there is no such GPU."""
        if not torch_drives_gpus():
            return self._ask_driver(index)
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise TargetError(f"there is no GPU {index} here: torch sees {count}")
        properties = torch.cuda.get_device_properties(index)
        kind, arch = "cuda", f"sm_{properties.major}{properties.minor}"
        if torch.version.hip is not None:
            kind, arch = "rocm", properties.gcnArchName.split(":")[0]
        return (arch,) if kind == self.name else ()

    def _ask_driver(self, index: int) -> tuple[str, ...]:
        """As `here`, but asks NVIDIA's driver, for hosts whose torch drives no GPUs."""
        from engines.native import gpus

        try:
            architectures = gpus()
        except RunError as error:
            raise TargetError(f"there is no GPU {index} here: torch sees 0, and {error}") from None
        if index >= len(architectures):
            raise TargetError(
                f"there is no GPU {index} here: torch sees 0, and NVIDIA's driver "
                f"{len(architectures)}"
            )
        return (f"sm_{architectures[index]}",) if self.name == "cuda" else ()

    def torch_runs(self) -> bool:
        return torch_drives_gpus()

    def why_not(self, arch: str) -> str:
        """Say why this host cannot run `arch`: by its GPU, or by the lack of one."""
        try:
            return f"its GPU is {', '.join(self.here()) or 'of another kind'}"
        except TargetError:
            driver = "" if torch_drives_gpus() else ", nor does a driver"
            return f"torch sees no GPU{driver}"


class Rocm(Cuda, kind="rocm", order=2, arch="gfx[0-9a-f]+", said="rocm/gfx<...>"):
    """AMD's GPUs, which torch calls `cuda`, too."""
