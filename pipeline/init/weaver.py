"""The inputs of a network trained with weaver: its data config (YAML) or preprocess.json.

Variables, their formulas and their standardisation become columns and `preprocess:` expressions.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import read_yaml
from pipeline.errors import InitError

_CALLS = ("log", "log1p", "abs", "sqrt", "square")
_BINARY: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "ratio",
}  # fmt: skip
_FAR = 1e30  # weaver writes 1e32 for "no bound"


@dataclass(frozen=True)
class WeaverInput:
    """An input of weaver. `features`: an expression in `columns` for each feature, as in a config.
    `mask`: its only feature is above zero where there is an item. `exists`: the column of the mask,
    if there is one. `length`: how many items the network was trained on."""

    features: tuple[list[Any], ...]
    columns: tuple[str, ...]
    mask: bool
    length: int = 0
    exists: str | None = None


def read_weaver(path: Path, have: Collection[str]) -> tuple[dict[str, WeaverInput], list[str]]:
    """Read the inputs, by name, and the labels. `have`: the columns of the data file; for these no
    formula is needed. Raises InitError, ConfigError.
    """
    data = read_yaml(path).data
    try:
        if "input_names" in data:  # preprocess.json
            keys = ("median", "norm_factor", "lower_bound", "upper_bound")
            infos = {name: data[name] for name in data["input_names"]}
            entries = {
                name: [[v, *(i[key] for key in keys)] for v, i in info["var_infos"].items()]
                for name, info in infos.items()
            }
            lengths = {name: info.get("var_length", 0) for name, info in infos.items()}
            labels = data["output_names"]
        else:
            entries = {name: each["vars"] for name, each in data["inputs"].items()}
            lengths = {name: each.get("length", 0) for name, each in data["inputs"].items()}
            labels = data["labels"]["value"]
        inputs = {name: _input(name, entries[name], lengths[name], data, have) for name in entries}
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{path} is neither a data config of weaver nor a preprocess.json: {error!r}"
        raise InitError(why) from error
    except (ValueError, SyntaxError) as error:
        raise InitError(f"{path}: {error}") from error
    masks = [each for each in inputs.values() if each.mask]
    if masks:
        exists = masks[0].features[0][0]
        for name, each in inputs.items():
            columns = tuple(dict.fromkeys((*each.columns, exists)))
            inputs[name] = replace(each, columns=columns, exists=exists)
    return inputs, [str(label).removeprefix("label_") for label in labels]


def _input(
    input_name: str, entries: Any, length: int, data: Mapping[str, Any], have: Collection[str]
) -> WeaverInput:
    """An input from weaver's list of variables, with their formulas and standardisation."""
    formulas = data.get("new_variables") or {}
    prepared = {"method": "manual", "params": None, **(data.get("preprocess") or {})}
    automatic = str(prepared["method"]).startswith("auto")
    columns: dict[str, None] = {}
    features = []
    for entry in entries:
        name, *said = entry if isinstance(entry, list) else [entry]
        numbers = [*said, *["auto" if automatic else None, 1, -5, 5][len(said) :]]
        if stored := (prepared["params"] or {}).get(name):
            numbers = [stored[key] for key in ("center", "scale", "min", "max")]
        centre, scale, low, high = numbers[:4]
        if centre == "auto":
            raise ValueError(
                f"it does not have the numbers that standardise {name}: give the file that "
                "training wrote, *.auto.yaml or preprocess.json"
            )
        value = _formula(name, formulas, have, columns)
        if centre is not None:  # clip((x - centre) * scale, low, high)
            if (centre, scale) != (0, 1):
                value.append({"standardise": [centre, scale]})
            if low > -_FAR and high < _FAR:
                value.append({"clip": [low, high]})
        features.append(value)
    mask = len(features) == 1 and input_name.endswith("mask")
    return WeaverInput(tuple(features), tuple(columns), mask, length)


def _formula(
    name: str, formulas: Mapping[str, str], have: Collection[str], columns: dict[str, None]
) -> list[Any]:
    """A variable as an expression in columns. Adds the columns that it uses to `columns`."""
    if name in have or name not in formulas:
        columns[name] = None
        return [name]
    others = {key: text for key, text in formulas.items() if key != name}

    def read(node: ast.expr) -> list[Any]:
        if isinstance(node, ast.Name):
            return _formula(node.id, others, have, columns)
        steps = _operation(node, read)
        if steps is None:
            raise ValueError(
                f"new_variables: {name}: {ast.unparse(node)} is no operation of preprocess: "
                f"do it in the model, or give the data a column {name}"
            )
        return steps

    return read(ast.parse(formulas[name], mode="eval").body)


def _operation(node: ast.expr, read: Callable[[ast.expr], list[Any]]) -> list[Any] | None:
    """An operation as steps of `preprocess`, after the steps that `read` returns for its argument.
    None if `preprocess` has no such operation."""
    match node:
        case ast.BinOp(op=ast.Pow(), left=left, right=ast.Constant(value=2)):
            return [*read(left), "square"]
        case ast.BinOp(op=op, left=left, right=ast.Constant(value=int() | float() as number)):
            return [*read(left), {_BINARY[type(op)]: number}] if type(op) in _BINARY else None
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return [*read(left), {_BINARY[type(op)]: read(right)}]
        case ast.Call(func=ast.Attribute(attr="ones_like"), args=[x]):
            return [*read(x), {"above": 0}]
        case ast.Call(func=ast.Attribute(attr="hypot"), args=[x, y]):
            return [*read(x), "square", {"add": [*read(y), "square"]}, "sqrt"]
        case ast.Call(func=ast.Attribute(attr=call), args=[x]) if call in _CALLS:
            return [*read(x), call]
    return None
