"""Reads a model, and finds the names of its inputs from its description or its code."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import InitError
from stages.model import (
    ModelSource,
    Takes,
    advise_on_file,
    as_torch,
    build_model,
    is_program,
    read_state,
)

_KINDS = {".pt2": "program", ".onnx": "onnx"}
_KINDS |= dict.fromkeys((".ts", ".pt", ".pth"), "torchscript")
_KINDS |= dict.fromkeys((".json", ".ubj", ".txt"), "trees")


@dataclass(frozen=True)
class Port:
    """An argument of forward. `width`: values per row, 0 if the model's file does not say it.
    `dtype`: None if unknown. `columns`: the names used in training, if known."""

    name: str
    needed: bool = True
    width: int = 0
    dtype: str | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model. `entry`: the `model:` of its config. `ports` is empty if forward names no inputs.
    `takes`: whether forward takes tensors, or one dict or list of them."""

    entry: dict[str, Any]
    module: torch.nn.Module
    ports: tuple[Port, ...]
    takes: Takes = "tensors"
    notes: tuple[str, ...] = ()
    """Sentences about what differs from the model as it was given."""

    @property
    def dtype(self) -> str:
        """The dtype of its first floating-point weight, which it probably computes in."""
        floats = (v.dtype for v in self.module.state_dict().values() if v.is_floating_point())
        return str(next(floats, torch.float32)).removeprefix("torch.")


def read_model(spec: str, folder: Path, weights: Path | None, kwargs: Mapping[str, Any]) -> Model:
    """Read the model of `file.py:callable`, `module:callable` or a file. Paths in `Model.entry` are
    relative to `folder`. Raises InitError, SourceError."""
    kind = _kind(spec)
    source = ModelSource(**{kind: _place(spec)}, kwargs=kwargs)
    entry: dict[str, Any] = {kind: _place_in(folder, spec)}
    notes: list[str] = []
    module = build_model(source, notes.append)
    as_torch(module)  # raises now, not in `run`, for unknown operators of ONNX
    if kind == "program":
        _check_rows(module, spec)
    if weights is not None:
        prefix = _prefix(read_state(weights), module.state_dict())
        module = build_model(replace(source, weights=weights, weights_prefix=prefix))
        entry["weights"] = os.path.relpath(weights, folder)
        if prefix:
            entry["weights_prefix"] = prefix
    return replace(model_of(module, entry), notes=tuple(notes))


def _kind(spec: str) -> str:
    """The field of ModelSource for a model. Raises InitError if it is none that can be read."""
    if spec.rpartition(":")[0]:
        return "factory"
    path = Path(spec)
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise InitError(
            advise_on_file(path)
            or f"{spec}: a model is file.py:callable or module:callable, which makes a torch "
            f"module, or a file of {', '.join(_KINDS)}; weights alone go to --weights"
        )
    return "program" if kind == "torchscript" and is_program(path) else kind


def _place(spec: str) -> Any:
    """The model for ModelSource: a file's path, or a callable, whose file has an absolute path."""
    file, _, name = spec.rpartition(":")
    if not file:
        return Path(spec)
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else spec


def _place_in(folder: Path, spec: str) -> str:
    """The model for a config in `folder`, with a path relative to it."""
    file, _, name = spec.rpartition(":")
    if not file:
        return os.path.relpath(spec, folder)
    return f"{os.path.relpath(file, folder)}:{name}" if file.endswith(".py") else spec


def _check_rows(program: Any, spec: str) -> None:
    """Raise InitError if no input of a program has a free number of rows."""
    inputs = [node.meta["val"].shape for node in program.graph.find_nodes(op="placeholder")]
    if inputs and all(isinstance(size, int) for shape in inputs for size in shape[:1]):
        raise InitError(
            f"{spec} is for exactly {inputs[0][0] if inputs[0] else 1} rows: export it with a free "
            "first dimension, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) for one input"
        )


def model_of(module: torch.nn.Module, entry: dict[str, Any]) -> Model:
    """A model with what its description or its code says about its inputs. `entry`: see `Model`."""
    ports = tuple(_ports(module))
    needed = [port.name for port in ports if port.needed]
    if isinstance(module, torch.jit.ScriptModule) or len(needed) != 1:
        return Model(entry, module, ports)
    if keys := _keys(module, needed[0]):
        return Model({**entry, "takes": "dict"}, module, tuple(map(Port, keys)), "dict")
    parameter = str(inspect.signature(module.forward).parameters.get(needed[0], ""))
    if re.search(r":\s*(typing\.)?(list|List|Sequence|tuple|Tuple)\[", parameter):  # its type hint
        return Model({**entry, "takes": "list"}, module, (), "list")
    return Model(entry, module, ports)


def _keys(module: torch.nn.Module, argument: str) -> list[str]:
    """The keys that `forward` reads from an argument that is a dict, in their order there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    except (OSError, TypeError, SyntaxError):  # no source, as in TorchScript
        return []
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    reads.sort(key=lambda node: (node.lineno, node.col_offset))  # `walk` goes level by level
    keys: list[str] = []
    for node in reads:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)):
                if name == argument and key not in keys:
                    keys.append(key)
    return keys


def _prefix(state: Iterable[str], own: Mapping[str, Any]) -> str:
    """The prefix of the names in `state` that the model's own names lack; "" if there is none.

    Every name has it, so it stands before the model's first name too.
    """
    keys, first_name = set(state), next(iter(own), "")
    candidates = {key.removesuffix(first_name) for key in keys if key.endswith(first_name)}
    fitting = [p for p in candidates if {key.removeprefix(p) for key in keys} == {*own}]
    return min(fitting, default="")


def _width(shape: Sequence[Any]) -> int:
    """The number of features in a shape (rows, features); 0 if it is not known."""
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 0


def _ports(module: Any) -> Iterator[Port]:
    """The inputs of a model, by its kind: ONNX, trees, TorchScript, a program, or a module."""
    if hasattr(module, "session"):  # ONNX Runtime's
        for node in module.session.get_inputs():
            element = node.type.removeprefix("tensor(").removesuffix(")")
            dtype = {"float": "float32", "double": "float64"}.get(element, element)
            yield Port(node.name, True, _width(node.shape), dtype)
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
    """The positional arguments of a module's `forward`."""
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield Port(name, parameter.default is parameter.empty)
