"""What a model takes and gives: as far as it says so, else by trying shapes on it."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from engines.errors import first_line
from pipeline.errors import InitError
from soa.dtypes import torch_dtype
from stages.errors import SourceError
from stages.model import ModelSource, as_torch, build_model, read_state, where_raised

Option = tuple[tuple[int, ...], str]
"""The shape of one row of an input, and its dtype."""
ROWS = 11  # of a trial: few models have such an extent of their own
_KINDS = {".pt2": "program", ".onnx": "onnx"}
_KINDS |= dict.fromkeys((".ts", ".pt", ".pth"), "torchscript")
_KINDS |= dict.fromkeys((".json", ".ubj", ".txt"), "trees")


@dataclass(frozen=True)
class Port:
    """An argument of forward: `width` of a flat row and `dtype` where the file says them; `columns`
    are the names that it was trained with."""

    name: str
    needed: bool = True
    width: int = 0
    dtype: str | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """`said` is the config's `model:`. No ports: forward does not say what it takes."""

    said: dict[str, Any]
    module: torch.nn.Module
    ports: tuple[Port, ...]

    @property
    def dtype(self) -> str:
        """What it computes in."""
        floats = (v.dtype for v in self.module.state_dict().values() if v.is_floating_point())
        return str(next(floats, torch.float32)).removeprefix("torch.")


def read_model(spec: str, folder: Path, weights: Path | None, kwargs: Mapping[str, Any]) -> Model:
    """The model of `file.py:callable`, `module:callable` or a file, to be said from `folder`.

    Raises InitError, SourceError.
    """
    file, _, name = spec.rpartition(":")
    kind = "factory" if file else _KINDS.get(Path(spec).suffix)
    if kind is None:
        raise InitError(
            f"{spec}: a model is file.py:callable or module:callable, which makes a torch module, "
            f"or a file of {', '.join(_KINDS)}; weights alone go to --weights"
        )
    given: dict[str, Any] = {kind: spec if file else Path(spec)}
    said: dict[str, Any] = {kind: spec if file else os.path.relpath(spec, folder)}
    if file.endswith(".py"):
        given = {kind: f"{Path(file).resolve()}:{name}"}
        said = {kind: f"{os.path.relpath(file, folder)}:{name}"}
    given |= {"kwargs": kwargs} if kwargs else {}
    try:
        module = build_model(ModelSource(**given))
        as_torch(module)  # else `run` refuses the operators of ONNX that are not known
    except SourceError as error:
        advice = "; weights alone go to --weights, with file.py:callable as the model"
        raise SourceError(f"{error}{advice if kind == 'torchscript' else ''}") from error
    if weights is not None:
        prefix = _prefix(read_state(weights), module.state_dict())
        module = build_model(ModelSource(**given, weights=weights, weights_prefix=prefix))
        said |= {"weights": os.path.relpath(weights, folder)}
        said |= {"weights_prefix": prefix} if prefix else {}
    return Model(said, module, tuple(_ports(module)))


def _prefix(state: Iterable[str], own: Mapping[str, Any]) -> str:
    """What stands in front of the names of weights that are else the model's."""
    keys, one = set(state), next(iter(own), "")
    found = {key.removesuffix(one) for key in keys if key.endswith(one)}
    return min((p for p in found if {key.removeprefix(p) for key in keys} == {*own}), default="")


def _width(shape: Sequence[Any]) -> int:
    """Of rows of features; 0 where that is not known."""
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 0


def _ports(module: Any) -> Iterator[Port]:
    if hasattr(module, "session"):  # ONNX Runtime's
        for each in module.session.get_inputs():
            kind = each.type.removeprefix("tensor(").removesuffix(")")
            dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
            yield Port(each.name, True, _width(each.shape), dtype)
    elif hasattr(module, "names") and hasattr(module, "features"):  # boosted trees
        yield Port("features", True, module.features, None, tuple(module.names))
    elif isinstance(module, torch.jit.ScriptModule):
        for argument in module.forward.schema.arguments[1:]:  # type: ignore[attr-defined]
            yield Port(argument.name, not argument.has_default_value())
    elif isinstance(module, torch.fx.GraphModule):  # an exported program
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            dtype = str(value.dtype).removeprefix("torch.")
            yield Port(node.name, True, _width(value.shape), dtype)
    else:
        yield from _parameters(module)


def _parameters(module: Any) -> Iterator[Port]:
    """Those of a module's `forward` that are given by their place."""
    for name, given in inspect.signature(module.forward).parameters.items():
        if given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD):
            yield Port(name, given.default is given.empty)


def answers(module: torch.nn.Module, options: Sequence[Option], n: int) -> dict[str, torch.Tensor]:
    """The outputs by name, for n rows of random numbers, of zeros where they are whole."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.rand((n, *s), generator=draw).to(torch_dtype(dtype)) for s, dtype in options]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = module(*inputs)
    if isinstance(found, tuple | list):
        names: Sequence[str] = [f"output{i}" for i in range(len(found))]
        if session := getattr(module, "session", None):  # ONNX Runtime's
            names = [each.name for each in session.get_outputs()]
        elif len(names) == 1:
            names = ["output"]
        return dict(zip(getattr(found, "_fields", names), found, strict=True))
    return found if isinstance(found, dict) else {"output": found}


def why_not(module: torch.nn.Module, options: Sequence[Option], n: int = ROWS) -> str:
    """Why it does not run on such inputs; empty where it does."""
    try:
        answers(module, options, n)
    except Exception as error:
        return f"{first_line(error)} ({where_raised(error)})"
    return ""


def fitting(
    module: torch.nn.Module, choices: Sequence[Sequence[Option]], seconds: float = 30
) -> tuple[int, ...] | None:
    """Which option of each input makes it run, those in front first; None after so long."""
    until = time.monotonic() + seconds
    places = product(*(range(len(options)) for options in choices))
    for place in sorted(islice(places, 100_000), key=sum):
        if not why_not(module, [options[i] for options, i in zip(choices, place, strict=True)]):
            return place
        if time.monotonic() > until:
            break
    return None
