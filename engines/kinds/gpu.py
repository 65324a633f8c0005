"""GPUs of both vendors, which torch drives through `torch.cuda`."""

from __future__ import annotations

from engines.errors import TargetError
from engines.target import Kind


class Cuda(Kind, kind="cuda", order=1, arch="sm_[0-9]+[a-z]?", said="cuda/sm_<NN>"):
    torch_device = "cuda"

    def here(self, index: int = 0) -> tuple[str, ...]:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            raise TargetError(f"there is no GPU {index} here: torch sees {count}")
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip is None:
            found = {"cuda": f"sm_{properties.major}{properties.minor}"}
        else:
            found = {"rocm": properties.gcnArchName.split(":")[0]}
        return tuple(arch for name, arch in found.items() if name == self.name)

    def why_not(self, arch: str) -> str:
        import torch

        if not torch.cuda.is_available():
            return "torch sees no GPU"
        return f"its GPU is {', '.join(self.here()) or 'of another kind'}"


class Rocm(Cuda, kind="rocm", order=2, arch="gfx[0-9a-f]+", said="rocm/gfx<...>"):
    pass
