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
    """An argument of the model's `forward`. `needed`: it has no default value. `width`: the number
    of values per row, 0 if unknown. `dtype`: None if unknown. `columns`: the names of the columns
    in the training, if known."""

    name: str
    needed: bool = True
    width: int = 0
    dtype: str | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model. `entry`: the value of `model:` in its config. `ports`: the inputs, empty if forward
    names none. `takes`: whether forward takes tensors, or one dict or list of them."""

    entry: dict[str, Any]
    module: torch.nn.Module
    ports: tuple[Port, ...]
    takes: Takes = "tensors"
    notes: tuple[str, ...] = ()
    """Sentences about what differs from the model as it was given."""

    @property
    def dtype(self) -> str:
        """The dtype in which it probably computes: that of its first floating-point weight."""
        dtypes = (w.dtype for w in self.module.state_dict().values() if w.is_floating_point())
        return str(next(dtypes, torch.float32)).removeprefix("torch.")


def read_model(spec: str, folder: Path, weights: Path | None, kwargs: Mapping[str, Any]) -> Model:
    """Read the model that `spec` names: `file.py:callable`, `module:callable` or a file.

    `folder`: where the config will be; paths in `Model.entry` are relative to it. `weights`,
    `kwargs`: for a callable. Raises InitError, SourceError.
    """
    kind = _find_kind(spec)
    source = ModelSource(**{kind: _locate(spec)}, kwargs=kwargs)
    entry: dict[str, Any] = {kind: _locate_from(folder, spec)}
    notes: list[str] = []
    module = build_model(source, notes.append)
    as_torch(module)  # raises now, not in `run`, for unknown operators of ONNX
    if kind == "program":
        _require_free_rows(module, spec)
    if weights is not None:
        prefix = _find_prefix(read_state(weights), module.state_dict())
        module = build_model(replace(source, weights=weights, weights_prefix=prefix))
        entry["weights"] = os.path.relpath(weights, folder)
        if prefix:
            entry["weights_prefix"] = prefix
    return replace(describe_model(module, entry), notes=tuple(notes))


def _find_kind(spec: str) -> str:
    """Returns the field of `ModelSource` that a model goes to, such as `factory` or `onnx`. Raises
    InitError if it is of no kind that can be read."""
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


def _locate(spec: str) -> Any:
    """Returns the model as `ModelSource` takes it: the path of a file, or a callable as text. The
    path of a callable's Python file is made absolute."""
    file, _, name = spec.rpartition(":")
    if not file:
        return Path(spec)
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else spec


def _locate_from(folder: Path, spec: str) -> str:
    """Returns the model as text for a config in `folder`, with a path relative to this folder."""
    file, _, name = spec.rpartition(":")
    if not file:
        return os.path.relpath(spec, folder)
    return f"{os.path.relpath(file, folder)}:{name}" if file.endswith(".py") else spec


def _require_free_rows(program: Any, spec: str) -> None:
    """Raises InitError if a program was exported for one number of rows only, in all its inputs."""
    inputs = [node.meta["val"].shape for node in program.graph.find_nodes(op="placeholder")]
    if inputs and all(isinstance(size, int) for shape in inputs for size in shape[:1]):
        raise InitError(
            f"{spec} is for exactly {inputs[0][0] if inputs[0] else 1} rows: export it with a free "
            "first dimension, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},) for one input"
        )


def describe_model(module: torch.nn.Module, entry: dict[str, Any]) -> Model:
    """Returns a `Model` with what the module's file or code says about its inputs."""
    ports = tuple(_read_ports(module))
    needed = [port.name for port in ports if port.needed]
    if isinstance(module, torch.jit.ScriptModule) or len(needed) != 1:
        return Model(entry, module, ports)
    if keys := _find_dict_keys(module, needed[0]):
        return Model({**entry, "takes": "dict"}, module, tuple(map(Port, keys)), "dict")
    with_hint = str(inspect.signature(module.forward).parameters.get(needed[0], ""))
    if re.search(r":\s*(typing\.)?(list|List|Sequence|tuple|Tuple)\[", with_hint):
        return Model({**entry, "takes": "list"}, module, (), "list")
    return Model(entry, module, ports)


def _find_dict_keys(module: torch.nn.Module, argument: str) -> list[str]:
    """Returns the keys that the code of `forward` reads from `argument`, as in `argument["x"]`, in
    the order of their first use. [] if there are none or if the code cannot be found."""
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


def _find_prefix(state: Iterable[str], own: Mapping[str, Any]) -> str:
    """Returns what stands before the model's `own` names of weights in a file with the names
    `state`: `net.` if the model's `fc.bias` is `net.fc.bias` there. "" if there is no such prefix.
    """
    # Every name has the prefix, so any end of a name that is the model's first name shows it.
    keys, first_name = set(state), next(iter(own), "")
    candidates = {key.removesuffix(first_name) for key in keys if key.endswith(first_name)}
    prefixes = [p for p in candidates if {key.removeprefix(p) for key in keys} == {*own}]
    return min(prefixes, default="")


def _count_features(shape: Sequence[Any]) -> int:
    """Returns the number of features of a shape (rows, features); 0 if the shape is another one or
    does not say it."""
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 0


def _read_ports(module: Any) -> Iterator[Port]:
    """Yields the inputs of a model, which may be ONNX, trees, TorchScript, a program, or a
    module."""
    if hasattr(module, "session"):  # ONNX Runtime's
        for node in module.session.get_inputs():
            element = node.type.removeprefix("tensor(").removesuffix(")")
            dtype = {"float": "float32", "double": "float64"}.get(element, element)
            yield Port(node.name, width=_count_features(node.shape), dtype=dtype)
    elif hasattr(module, "names") and hasattr(module, "features"):  # boosted trees
        yield Port("features", width=module.features, columns=tuple(module.names))
    elif isinstance(module, torch.jit.ScriptModule):
        for argument in module.forward.schema.arguments[1:]:  # type: ignore[attr-defined]
            yield Port(argument.name, needed=not argument.has_default_value())
    elif isinstance(module, torch.fx.GraphModule):  # an exported program
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            dtype = str(value.dtype).removeprefix("torch.")
            yield Port(node.name, width=_count_features(value.shape), dtype=dtype)
    else:
        yield from _read_parameters(module)


def _read_parameters(module: Any) -> Iterator[Port]:
    """Yields the positional arguments of a module's `forward`."""
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield Port(name, needed=parameter.default is parameter.empty)
