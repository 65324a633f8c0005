"""Reads `program.pt2` without running code that the file contains.

`torch.export.load` can run such code in several ways:
- It unpickles without restriction in six places: weights and constants marked `use_pickle`, opaque
  and custom objects, sample inputs that `weights_only` refuses, files from before torch 2.8.
- It opens native code in the archive, and imports modules named in the description of a tree.
- It evaluates the text of guards and of shape expressions (sympy's `sympify` is `eval`).
- It writes names into the source of the module that it makes.
Our programs need none of this. So all of it is refused or dropped, in every archive. The bytes that
are checked are the bytes that are loaded. torch itself checks that a program calls only torch's
operators. This file does not restrict what those operators can do.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError, first_line
from engines.exported import leaves as leaves  # a program may call its operator
from soa.files import read_plain
from soa.records import parse_json

_MODEL_FILE = "models/model.json"
_SAMPLES_FILE = "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_ALLOWED_FILES = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)"
    r"|\.format_version|\.storage_alignment"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+"
    + "".join(f"|{re.escape(name)}" for name in (_MODEL_FILE, _SAMPLES_FILE, *_CONFIGS))
)
_ALLOWED_NAME = re.compile(r"[\w.]*", re.ASCII)
_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict")
# Names that torch writes in a shape expression (`sympy.srepr`), besides torch's own functions.
_SYMPY = frozenset(
    [
        "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Abs",
        "And", "Or", "Not", "Xor", "Eq", "Ne", "Ge", "Gt", "Le", "Lt", "Equality", "Unequality",
        "GreaterThan", "StrictGreaterThan", "LessThan", "StrictLessThan", "Piecewise",
        "ExprCondPair", "true", "false", "floor", "ceiling", "oo",
    ]
)  # fmt: skip
_SYNTAX = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.UnaryOp, ast.USub,
)  # fmt: skip
_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
# sympy is slow with numbers that are much larger than a size, and with products of many sums.
_MOST_BITS = 1024
_SYMBOL_BITS = 64  # those of a size
_MOST_CHARACTERS = 4000


def load_program(file: Path) -> torch.export.ExportedProgram:
    """Return the program in `file`, which is read only once.

    Raises EngineError if the file cannot be read, or holds anything that `_require_safe` refuses.
    """
    from torch.export.pt2_archive._package import load_pt2

    try:
        content = read_plain(file, links=True, largest=None)
    except OSError as error:
        raise EngineError(f"{file.name} cannot be read: {error.strerror}") from error
    try:
        _require_safe(content)
        # Not torch.export.load, which also tries older formats, and these are pickles.
        program = load_pt2(BytesIO(content)).exported_programs["model"]
    except Exception as error:  # the errors of torch have no common base class
        raise EngineError(
            f"{file.name} is not a program torch can load: {first_line(error)}"
        ) from error
    program._guards_code = []  # Python code, which torch executes if guards are on; ours are off
    return program


def _require_safe(content: bytes) -> None:
    """Raise an error if the archive `content` holds anything that torch would run or unpickle."""
    reader = torch._C.PyTorchFileReader(BytesIO(content))  # the parser that `load_pt2` uses, too
    _require_records(reader.get_all_records())
    _require_no_pickle(reader)
    allowed = _SYMPY | _torch_functions()
    for key, value in _keys_and_texts(parse_json(reader.get_record(_MODEL_FILE))):
        if key == "expr_str":
            _require_expression(value, allowed)
        elif key in ("in_spec", "out_spec"):
            _require_tree(value)
        elif key.endswith(("name", "names", "target")):
            _require_name(value)


def _require_records(records: Sequence[str]) -> None:
    """Raise EngineError if the archive has a file that programs do not have, or one name twice.

    `records` are the names of its files.
    """
    for name in records:
        if not _ALLOWED_FILES.fullmatch(name):
            raise EngineError(f"the archive holds {name!r}, which is no part of a program")
    if len(set(records)) != len(records):
        raise EngineError("the archive holds a name twice")


def _require_no_pickle(reader: Any) -> None:
    """Raise an error if torch would unpickle weights, constants or sample inputs freely.

    Sample inputs always are a pickle. They may hold only what torch's `weights_only` allows.
    """
    for name in _CONFIGS:
        for key, payload in parse_json(reader.get_record(name))["config"].items():
            if payload["use_pickle"] is not False:
                raise EngineError(f"{key!r} is a pickle, which could run code")
            _require_name(key)
            _require_name(payload["path_name"])
    samples = reader.get_record(_SAMPLES_FILE)
    if samples:
        # This raises for samples that torch would otherwise unpickle without restriction.
        torch.load(BytesIO(samples), weights_only=True)


def _keys_and_texts(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in JSON data as a pair (key, text), and every key as ("name", key).

    A text in a list has the key of the list: `{"a": ["b"]}` gives ("name", "a"), ("a", "b").
    """
    if isinstance(data, str):
        yield key, data
    elif isinstance(data, list):
        for item in data:
            yield from _keys_and_texts(item, key)
    elif isinstance(data, dict) and key != "metadata":  # torch does not use the texts of these
        for name, item in data.items():
            yield "name", name
            yield from _keys_and_texts(item, name)


def _require_name(text: str) -> None:
    """Raise EngineError unless `text` has only letters, digits, `_` and dots.

    torch writes such names into source code, which it then executes.
    """
    if not _ALLOWED_NAME.fullmatch(text):
        raise EngineError(f"{text[:40]!r} is not a name")


def _require_expression(text: str, allowed: frozenset[str]) -> None:
    """Raise EngineError unless `text` is a shape expression that torch can evaluate safely.

    It may have numbers, symbols and the functions in `allowed`, and must be quick to evaluate.
    """
    if len(text) > _MOST_CHARACTERS:
        raise EngineError(f"{text[:40]!r}… is too long for a shape")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise EngineError(f"{text[:40]!r} is not a shape") from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_symbol = isinstance(node, ast.Name) and id(node) not in called and _is_symbol(node.id)
        if not is_symbol and not _is_allowed(node, allowed):
            raise EngineError(f"{text[:40]!r} is not a shape")
    if _most_bits(tree.body) > _MOST_BITS:
        raise EngineError(f"{text[:40]!r} is too large a number for a shape")


def _is_allowed(node: ast.AST, allowed: frozenset[str]) -> bool:
    """Return whether a shape expression may have this node of its syntax tree.

    A Name must be in `allowed`; the caller has accepted the names of symbols already.
    """
    if isinstance(node, ast.Name):
        return node.id in allowed
    if isinstance(node, ast.keyword) and node.arg != "precision":
        return isinstance(getattr(node.value, "value", None), bool)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) or _is_symbol(node.value)
    return isinstance(node, _SYNTAX)


def _most_bits(node: ast.expr) -> float:
    """Return an upper bound for the number of bits that an expression's value has.

    A symbol, and a number that is written as text, counts as 64 bits. The bits of a product add up.
    A sum has at most one bit more for each of its terms; so has any other function, since its
    result is no larger than its arguments.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return math.log2(abs(node.value) + 1)
    if isinstance(node, ast.UnaryOp):
        return _most_bits(node.operand)
    if not isinstance(node, ast.Call):
        return _SYMBOL_BITS
    bits = [_most_bits(argument) for argument in node.args]
    # `precision` in `Float(…, precision=53)` is a number of bits. Other keywords are booleans.
    precisions = [keyword.value for keyword in node.keywords if keyword.arg == "precision"]
    bits += [2 ** min(_most_bits(precision), 64) for precision in precisions]
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _POWERS:
        if len(node.args) != 2:
            return math.inf
        # The exponent's value is below 2 ** its bits. (64 is enough to be more than `_MOST_BITS`.)
        return bits[0] * 2 ** min(bits[1], 64)
    if name == "Mul":
        return sum(bits)
    return max(bits, default=0) + len(bits)


def _is_symbol(value: object) -> bool:
    """Return whether a value is a symbol's name, such as `s77` and `u0`, or a number as text.

    torch writes a number as text in `Float('0.5', precision=53)`.
    """
    return isinstance(value, str) and bool(
        re.fullmatch(r"[a-zA-Z]{1,4}\d+|-?\d+\.?\d*(e[-+]?\d{1,3})?", value)
    )


def _require_tree(text: str) -> None:
    """Raise EngineError unless all containers in the tree of the arguments are known.

    `text` is the tree as JSON; empty if there is none. torch would import the module that an
    unknown container names.
    """
    if text:
        _, root = parse_json(text)
        _require_node(root)


def _require_node(node: Any) -> None:
    """Raise EngineError if a node of the tree, or one below it, is an unknown container."""
    if node["type"] not in (None, *_CONTAINERS):
        raise EngineError(f"{str(node['type'])[:40]!r} is not a kind of container")
    if not re.fullmatch(r'null|\[\]|\["\w+"(, "\w+")*\]', node["context"] or "null"):
        raise EngineError(f"{str(node['context'])[:40]!r} are not names")
    for child in node["children_spec"]:
        _require_node(child)


def _torch_functions() -> frozenset[str]:
    """Return the names of the functions that torch itself defines for shape expressions."""
    from torch.utils._sympy import functions

    return frozenset(functions.__all__)
