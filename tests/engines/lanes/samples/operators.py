"""torch's own list of operators with samples."""

from __future__ import annotations

from typing import Any

import torch


def operators() -> list[Any]:
    """torch.testing's `op_db`. Its import forbids to set torch's flags, for the whole process, which
    other tests and `torch.export` do: allowed again here."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # type: ignore[attr-defined]
    return list(op_db)
