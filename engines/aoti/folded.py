"""The `aoti-folded` engine: AOTInductor on a program with less to compute.

Linear layers move in front of the gathers and repeats that feed them (engines/aoti/hoisting.py).
Where there are convolutions, Inductor freezes the program too: batch norms and activations go into
the convolutions, whose weights are packed as oneDNN wants them, inside the library. A candidate
beside `aoti`, since rounding differs and a packed convolution costs tens of microseconds however
few its rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engines.aoti.engine import AotiEngine
from engines.aoti.hoisting import hoist_linear
from engines.errors import EngineError

aten = torch.ops.aten

_CONVOLUTIONS = frozenset(
    [
        aten.conv1d.default,
        aten.conv1d.padding,
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv3d.default,
        aten.conv3d.padding,
        aten.convolution.default,
    ]
)


class FoldedEngine(AotiEngine):
    def rewritten(self, program: torch.export.ExportedProgram) -> Mapping[str, Any]:
        hoisted = hoist_linear(program)
        if any(node.target in _CONVOLUTIONS for node in program.graph.nodes):
            return {"freezing": True}
        if not hoisted:
            raise EngineError(
                "nothing to fold: the program has no convolution, and no linear layer behind a "
                "gather or a repeat; aoti makes the same"
            )
        return {}


ENGINE = FoldedEngine("aoti-folded", {})
