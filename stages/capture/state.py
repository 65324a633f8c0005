"""Does a model keep state in Python: do its answers depend on the calls before?

The graph shows writes into buffers, but not what a first call leaves in an attribute, as in
`if self.scale is None: self.scale = float(len(x))`. A cache that changes no answer is no such
state.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from soa.signature import Signature
from stages.reference import Arrays, Case, run_eager, take_rows

_OF_TORCH = vars(torch.nn.Module()).keys()  # attributes that each module has
_NOTHING = object()  # stands for an attribute that does not exist


class Attributes:
    """The attributes and buffers that a model's modules have now. Lists, dicts and sets are copied;
    what they contain is not, and neither are tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._of = [(place, _copies(place)) for m in modules for place in (vars(m), m._buffers)]

    def changed(self) -> list[str]:
        """The names of the attributes that are other objects now, or contain other ones."""
        return [
            name
            for place, before in self._of
            for name in {**before, **_copies(place)}
            if _ids(before.get(name, _NOTHING)) != _ids(place.get(name, _NOTHING))
        ]

    def restore(self) -> None:
        """Give the modules these attributes again."""
        for place, before in self._of:
            for name in _copies(place).keys() - before.keys():
                del place[name]
            place.update(_copies(before))


def depends_on_calls(
    model: torch.nn.Module, signature: Signature, inputs: Arrays, case: Case, fresh: Attributes
) -> bool:
    """Whether the answers to a case are others if the model's first call has few rows, or all rows
    in reverse order.

    `fresh` are the attributes of the model before its first call; `inputs` are as for `capture`.
    """
    ranges = signature.ranges.items()
    few = {dim: max(rows.min, min(2, rows.max)) for dim, rows in ranges}
    most = {dim: rows.proven for dim, rows in ranges}
    backwards = inputs
    if not signature.jagged:  # else the offsets would be out of order
        order = {dim: torch.arange(n).flip(0) for dim, n in most.items()}
        backwards = take_rows(signature, inputs, order)
    answers = []
    for arrays, first in ((inputs, few), (backwards, most)):
        fresh.restore()
        run_eager(model, signature, arrays, first)
        answers.append(run_eager(model, signature, inputs, case))
    return not all(
        torch.allclose(value.double(), answers[1][name].double(), 1e-3, 1e-5, equal_nan=True)
        for name, value in answers[0].items()
    )


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those of a module's attributes that are not torch's own, with copies of the containers."""
    return {
        name: copy(value) if isinstance(value, dict | list | set) else value
        for name, value in attributes.items()
        if name not in _OF_TORCH
    }


def _ids(value: Any) -> list[int]:
    """The identities of a value, or of what a container has in it."""
    if isinstance(value, dict):
        return [*map(id, value), *map(id, value.values())]
    return [*map(id, value)] if isinstance(value, list | set) else [id(value)]
