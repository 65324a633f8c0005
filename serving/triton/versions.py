"""Several versions of a model in one server, which gives them one configuration.

Its parameters `digest` and `target` describe the version that was there first. If there are
several, those of version 4, for example, are also there as `digest:4` and `target:4`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.triton.config import DIGEST, REQUESTS, TARGET

_PER_VERSION = (DIGEST, TARGET)
"""The parameters that each version in one configuration may have of its own."""


def read_fact(config: Any, key: str, number: int | str | None = None) -> str:
    """Return a parameter of a `ModelConfig`; "" if it is not there.

    `number`: return the parameter of this version if it has one of its own.
    """
    for name in (f"{key}:{number}", key):
        if name in config.parameters:
            return str(config.parameters[name].string_value)
    return ""


def difference_of_requests(served: Any, new: Any) -> str | None:
    """Return in what the requests to two `ModelConfig`s of a model differ, as part of a message.

    None if they do not differ, so that one configuration can serve both.
    """
    new_requests = _requests(new)
    for name, value in _requests(served).items():
        if value != new_requests[name]:
            return name
    return None


def config_with_version(served: Any, others: Sequence[int], new: Any) -> Any:
    """Make the `ModelConfig` that serves a new version beside versions that are served already.

    `new`: the configuration of the new version alone. `others`: the numbers of the other versions,
    at least one, which `served` describes. `new` and `served` are not changed.
    """
    (number,) = new.version_policy.specific.versions
    config = _copy(new)
    config.version_policy.specific.versions[:] = [*others, number]
    for key in _PER_VERSION:
        for other in others:
            config.parameters[f"{key}:{other}"].string_value = read_fact(served, key, other)
        config.parameters[f"{key}:{number}"].string_value = read_fact(new, key)
        config.parameters[key].string_value = read_fact(served, key, others[0])
    if served.model_warmup != new.model_warmup:  # another number of rows may not fit the others
        config.ClearField("model_warmup")
    return config


def config_without_version(served: Any, left: Sequence[int], number: int) -> Any:
    """Make the `ModelConfig` that no longer serves the version `number` of `served`.

    `left`: the numbers of the versions that it still serves, at least one. `served` is not changed.
    """
    config = _copy(served)
    config.version_policy.specific.versions[:] = left
    for key in _PER_VERSION:
        config.parameters[key].string_value = read_fact(served, key, left[0])
        config.parameters.pop(f"{key}:{number}", None)
    return config


def version_files(model: Path, numbers: Sequence[int]) -> dict[str, Path]:
    """Return the files of versions in a model's folder, by their paths there."""
    files = (file for number in numbers for file in (model / str(number)).rglob("*"))
    return {str(file.relative_to(model)): file for file in files if file.is_file()}


def _requests(config: Any) -> dict[str, object]:
    """Return all that the requests to a model depend on, by the names for a message."""
    inputs, outputs = (
        [(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in tensors]
        for tensors in (config.input, config.output)
    )
    return {
        "inputs": inputs,
        "outputs": outputs,
        "forms of requests": read_fact(config, REQUESTS),
        "largest batches": config.max_batch_size,
    }


def _copy(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    copied = type(message)()
    copied.CopyFrom(message)
    return copied
