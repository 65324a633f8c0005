"""Files of weights, and how a network gets them."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.files import check_zip
from stages.errors import SourceError


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read a state dict from safetensors, or from a torch.save file that holds only plain data.

    For a checkpoint, it takes the only entry that is a state dict.
    """
    if not path.is_file():
        raise SourceError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        check_zip(path)
        with quiet_torch():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        pickled = re.search(r"GLOBAL (\S+)", str(error))
        what = "it is no file that torch.save writes"
        if pickled:
            what = f"there is a pickled {pickled[1]} in it, which may run code as it loads"
        raise SourceError(
            f"{path} holds no readable weights: {what}; {_SAVE.format('model.state_dict()')}"
        ) from error
    except Exception as error:
        raise SourceError(f"{path} holds no readable weights: {first_line(error)}") from error
    if _is_state(state):
        return state  # type: ignore[no-any-return]
    entries = state if isinstance(state, dict) else {}
    states = [key for key, value in entries.items() if _is_state(value)]
    if len(states) == 1:
        return entries[states[0]]  # type: ignore[no-any-return]
    if states:
        raise SourceError(
            f"{path} holds {len(states)} state dicts ({_some(states)}); "
            + _SAVE.format(f"torch.load(file)[{states[0]!r}]")
        )
    have = _some([str(key) for key in entries]) or f"a {type(state).__name__}"
    raise SourceError(
        f"{path} is not a state dict (names to tensors): found {have}; "
        + _SAVE.format("model.state_dict()")
    )


_SAVE = "save the state dict by itself: torch.save({}, 'weights.pt')"


def _is_state(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(v, torch.Tensor) for v in value.values())
    )


def load_weights(model: torch.nn.Module, path: Path, prefix: str) -> None:
    """Load a file strictly; `prefix` is cut from its keys. The SourceError says which names or
    shapes do not fit."""
    state = {key.removeprefix(prefix): value for key, value in read_state(path).items()}
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unexpected = sorted(state.keys() - own.keys())
    wrong = [
        f"{key} is {list(state[key].shape)}, the model has {list(own[key].shape)}"
        for key in sorted(own.keys() & state.keys())
        if state[key].shape != own[key].shape
    ]
    problems = [f"missing {_some(missing)}"] if missing else []
    problems += [f"not in the model: {_some(unexpected)}"] if unexpected else []
    problems += [_some(wrong)] if wrong else []
    first = {key.partition(".")[0] for key in state}
    if len(first) == 1 and {key.partition(".")[2] for key in state} == own.keys():
        problems.append(f"write weights_prefix: {first.pop()}.")
    if problems:
        raise SourceError(f"{path} does not fit the model: {'; '.join(problems)}")
    model.load_state_dict(state)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
