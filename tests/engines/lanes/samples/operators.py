"""torch's own list of operators with samples."""

from __future__ import annotations

from typing import Any

import torch


def operators() -> list[Any]:
    """torch.testing's `op_db`. Its import forbids to set torch's flags in this process, which other
    tests and `torch.export` do: that is undone."""
    from torch.testing._internal.common_methods_invocations import op_db

    own = torch.backends.flags_frozen.__globals__  # the module object may be another
    own["__allow_nonbracketed_mutation_flag"] = True
    return list(op_db)
