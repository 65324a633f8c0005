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
    """An input of a network trained with weaver. `features`: for each feature an expression in
    `columns`, in the form of a config's `preprocess:`. `mask`: this input is a mask; its only
    feature is above zero where there is an item. `length`: how many items the network was trained
    on, 0 if weaver does not say it. `exists`: the column from which the mask is made; None if
    weaver has no mask."""

    features: tuple[list[Any], ...]
    columns: tuple[str, ...]
    mask: bool
    length: int = 0
    exists: str | None = None


def read_weaver(path: Path, have: Collection[str]) -> tuple[dict[str, WeaverInput], list[str]]:
    """Read the inputs, by name, and the labels. `have`: the columns of the data file, which are
    used as they are even if weaver has a formula for them. Raises InitError, ConfigError.
    """
    data = read_yaml(path).data
    try:
        if "input_names" in data:  # preprocess.json
            infos = {name: data[name] for name in data["input_names"]}
            entries = {name: _list_variables(info) for name, info in infos.items()}
            lengths = {name: info.get("var_length", 0) for name, info in infos.items()}
            labels = data["output_names"]
        else:
            entries = {name: part["vars"] for name, part in data["inputs"].items()}
            lengths = {name: part.get("length", 0) for name, part in data["inputs"].items()}
            labels = data["labels"]["value"]
        inputs = {key: _read_input(key, entries[key], lengths[key], data, have) for key in entries}
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{path} is neither a data config of weaver nor a preprocess.json: {error!r}"
        raise InitError(why) from error
    except (ValueError, SyntaxError) as error:
        raise InitError(f"{path}: {error}") from error
    masks = [weaver_input for weaver_input in inputs.values() if weaver_input.mask]
    if masks:
        exists = masks[0].features[0][0]  # an expression begins with its column
        for name, weaver_input in inputs.items():
            columns = tuple(dict.fromkeys((*weaver_input.columns, exists)))
            inputs[name] = replace(weaver_input, columns=columns, exists=exists)
    return inputs, [str(label).removeprefix("label_") for label in labels]


def _list_variables(info: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the variables of an input of preprocess.json in the form of a data config: lists of
    the name and of the four numbers that standardise the variable."""
    keys = ("median", "norm_factor", "lower_bound", "upper_bound")
    return [[name, *(entry[key] for key in keys)] for name, entry in info["var_infos"].items()]


def _read_input(
    input_name: str, entries: Any, length: int, data: Mapping[str, Any], have: Collection[str]
) -> WeaverInput:
    """Converts weaver's list of variables, `entries`, to an input whose features have the formulas
    and the standardisation that `data`, the whole file, gives them. Raises ValueError."""
    formulas = data.get("new_variables") or {}
    columns: dict[str, None] = {}  # a set in the order of insertion
    features = []
    for entry in entries:
        name, *numbers = entry if isinstance(entry, list) else [entry]
        steps = _read_scaling(name, numbers, data.get("preprocess") or {})
        features.append([*_expand_formula(name, formulas, have, columns), *steps])
    mask = len(features) == 1 and input_name.endswith("mask")
    return WeaverInput(tuple(features), tuple(columns), mask, length)


def _read_scaling(name: str, written: list[Any], preprocess: Mapping[str, Any]) -> list[Any]:
    """Returns the steps of `preprocess:` that compute `clip((x - centre) * scale, low, high)`.

    The four numbers are those in weaver's own `preprocess`, else the `written` ones after the name
    of the variable, else weaver's defaults. Without a centre the variable stays as it is: [].
    Raises ValueError if the numbers were to be found in the training, since this file lacks them.
    """
    automatic = str(preprocess.get("method", "manual")).startswith("auto")
    defaults = ["auto" if automatic else None, 1, -5, 5]
    numbers = [*written[: len(defaults)], *defaults[len(written) :]]
    if stored := (preprocess.get("params") or {}).get(name):
        numbers = [stored[key] for key in ("center", "scale", "min", "max")]
    centre, scale, low, high = numbers
    if centre == "auto":
        raise ValueError(
            f"it does not have the numbers that standardise {name}: give the file that "
            "training wrote, *.auto.yaml or preprocess.json"
        )
    if centre is None:
        return []
    steps = [] if (centre, scale) == (0, 1) else [{"standardise": [centre, scale]}]
    if low > -_FAR and high < _FAR:
        steps.append({"clip": [low, high]})
    return steps


def _expand_formula(
    name: str, formulas: Mapping[str, str], have: Collection[str], columns: dict[str, None]
) -> list[Any]:
    """Returns a variable as an expression in columns, in the form of `preprocess:`, and adds these
    columns to `columns`. A variable without a formula is a column, as is one in `have`.

    A formula may use other variables, but not its own. Raises ValueError if `preprocess:` lacks an
    operation of it, and SyntaxError.
    """
    if name in have or name not in formulas:
        columns[name] = None
        return [name]
    others = {key: text for key, text in formulas.items() if key != name}

    def read(node: ast.expr) -> list[Any]:
        if isinstance(node, ast.Name):
            return _expand_formula(node.id, others, have, columns)
        steps = _convert_operation(node, read)
        if steps is None:
            raise ValueError(
                f"new_variables: {name}: {ast.unparse(node)} is no operation of preprocess: "
                f"do it in the model, or give the data a column {name}"
            )
        return steps

    return read(ast.parse(formulas[name], mode="eval").body)


def _convert_operation(node: ast.expr, read: Callable[[ast.expr], list[Any]]) -> list[Any] | None:
    """Returns an operation of a formula as steps of `preprocess:`, after the steps that `read`
    returns for its argument. Returns None if `preprocess:` has no such operation."""
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
