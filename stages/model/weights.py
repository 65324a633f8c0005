"""Reads files of weights, and loads them into a network."""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from engines.errors import first_line
from engines.exported import quiet_torch
from soa.files import check_zip
from stages.errors import SourceError


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read a state dict: tensors on the CPU, by name.

    The file is safetensors, or one that torch.save wrote and that holds plain data only: a state
    dict, or a checkpoint with exactly one in it. Raises SourceError for any other file.
    """
    if not path.is_file():
        raise SourceError(f"no weights at {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        check_zip(path)
        with quiet_torch():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        pickled = re.search(r"GLOBAL (\S+)", str(error))
        why = "it is no file that torch.save writes"
        if pickled:
            why = f"there is a pickled {pickled[1]} in it, which may run code as it loads"
        raise SourceError(
            f"{path} holds no readable weights: {why}; {_SAVE.format('model.state_dict()')}"
        ) from error
    except Exception as error:
        raise SourceError(f"{path} holds no readable weights: {first_line(error)}") from error
    return _find_state(content, path)


def _find_state(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict in what a file at `path` held: the content itself, or the only entry of it
    that is a state dict. Raises SourceError if there is none or several."""
    if _is_state(content):
        return content  # type: ignore[no-any-return]
    entries = content if isinstance(content, dict) else {}
    states = [key for key, value in entries.items() if _is_state(value)]
    if len(states) == 1:
        return entries[states[0]]  # type: ignore[no-any-return]
    if states:
        raise SourceError(
            f"{path} holds {len(states)} state dicts ({_list_some(states)}); "
            + _SAVE.format(f"torch.load(file)[{states[0]!r}]")
        )
    contents = _list_some([str(key) for key in entries]) or f"a {type(content).__name__}"
    raise SourceError(
        f"{path} is not a state dict (names to tensors): found {contents}; "
        + _SAVE.format("model.state_dict()")
    )


_SAVE = "save the state dict by itself: torch.save({}, 'weights.pt')"


def _is_state(value: object) -> bool:
    """Whether a value is a dict of at least one entry, and all its values are tensors."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(entry, torch.Tensor) for entry in value.values())


def load_weights(model: torch.nn.Module, path: Path, prefix: str) -> None:
    """Load the weights in a file into `model`, in place; `prefix` is cut from their names.

    The names and shapes must be exactly those of the model. If not, raises a SourceError that says
    which do not fit.
    """
    state = {key.removeprefix(prefix): value for key, value in read_state(path).items()}
    model_state = model.state_dict()
    missing = sorted(model_state.keys() - state.keys())
    unexpected = sorted(state.keys() - model_state.keys())
    wrong_shapes = [
        f"{key} is {list(state[key].shape)}, the model has {list(model_state[key].shape)}"
        for key in sorted(model_state.keys() & state.keys())
        if state[key].shape != model_state[key].shape
    ]
    problems: list[str] = []
    if missing:
        problems.append(f"missing {_list_some(missing)}")
    if unexpected:
        problems.append(f"not in the model: {_list_some(unexpected)}")
    if wrong_shapes:
        problems.append(_list_some(wrong_shapes))
    first_parts = {key.partition(".")[0] for key in state}
    if len(first_parts) == 1 and {key.partition(".")[2] for key in state} == model_state.keys():
        problems.append(f"write weights_prefix: {first_parts.pop()}.")
    if problems:
        raise SourceError(f"{path} does not fit the model: {'; '.join(problems)}")
    model.load_state_dict(state)


def _list_some(names: list[str]) -> str:
    """The first three names, and how many more there are: `a, b, c and 4 more`."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
