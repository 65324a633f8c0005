"""Converts `preprocess:` of a config to expressions, and reports each mistake with its key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pipeline.config.mistakes import not_among, quote
from pipeline.config.yaml_lines import Key, Problem
from soa.block import Block
from stages.model import BINARY, UNARY, Expression, Features, Operation

if TYPE_CHECKING:
    from pipeline.config.schema import ColumnConfig, PreprocessConfig


class _Mistake(Exception):
    """An expression is wrong. `problem` holds the key of the wrong part and what is wrong there."""

    def __init__(self, key: Key, text: str) -> None:
        super().__init__(text)
        self.problem: Problem = (key, text)


def features_of(block: PreprocessConfig, members: list[ColumnConfig]) -> Features:
    """Converts the `preprocess` of a block to expressions. `check_preprocess` must have accepted
    it. `members`: the columns of the block, in its order."""
    names = [member.name for member in members]
    return Features(
        tuple((member.name, tuple(member.eigen or ())) for member in members),
        tuple(_read_expression((), value, names) for value in block.features),
        block.exists,
        block.pad,
    )


def check_preprocess(
    key: Key, preprocess: PreprocessConfig, block: Block, members: list[ColumnConfig]
) -> Iterator[Problem]:
    """Yields a problem for each mistake in the `preprocess` of a block, and for each contradiction
    between it and the block's columns `members`. `key`: that of `preprocess`."""
    names = [member.name for member in members]
    dtypes = {block.dtype} if block.dtype else {member.dtype or "opaque" for member in members}
    if any("float" not in dtype for dtype in dtypes):
        listed = ", ".join(sorted(dtypes))
        yield key, f"found columns of {listed}; say 'dtype: float32' for the block"
    if block.shape is not None:
        yield key, "found a shape too; the model gets (n, features) or (n, features, *eigen)"
    if any(member.scalar for member in members):
        yield key, "found a block of scalars; only columns are preprocessed"
    extents = sorted({str(list(member.eigen)) for member in members if member.eigen})
    if len(extents) > 1:
        yield key, f"found Eigen columns of {' and '.join(extents)}; they have one shape in a block"
    if preprocess.exists is not None and preprocess.exists not in names:
        yield (*key, "exists"), not_among(preprocess.exists, names)
    for i, value in enumerate(preprocess.features):
        try:
            _read_expression((*key, "features", i), value, names)
        except _Mistake as mistake:
            yield mistake.problem


def _read_expression(key: Key, written: Any, columns: Collection[str]) -> Expression:
    """Read an expression: a column, or a list of a column and operations applied in this order.
    Raises _Mistake."""
    if isinstance(written, str):
        written, column_key = [written], key
    elif isinstance(written, list | tuple) and written:
        column_key = (*key, 0)
    else:
        raise _Mistake(key, f"found {quote(written)}; expected a column, or [column, operation, …]")
    if written[0] not in columns:
        raise _Mistake(column_key, not_among(written[0], columns))
    steps = [_read_operation((*key, i), written[i], columns) for i in range(1, len(written))]
    return Expression(written[0], tuple(steps))


def _read_operation(key: Key, written: Any, columns: Collection[str]) -> Operation:
    """Read one operation: `log`, `clip: [-5, 5]`, or `ratio:` with a column, a number or an
    expression. Raises _Mistake."""
    if isinstance(written, dict) and len(written) == 1:
        [(name, argument)] = written.items()
        key = (*key, name)
    elif isinstance(written, str):
        name, argument = written, []
    else:
        text = f"found {quote(written)}; expected one operation, such as log or clip: [-5, 5]"
        raise _Mistake(key, text)
    if name in UNARY:
        return _read_unary(key, name, argument)
    if name not in BINARY:
        raise _Mistake(key, not_among(name, [*UNARY, *BINARY]))
    if isinstance(argument, int | float):
        return Operation(name, operand=_read_number(key, argument))
    if argument == []:
        raise _Mistake(key, f"found {name} alone; write {name}: with a column or a number")
    return Operation(name, operand=_read_expression(key, argument, columns))


def _read_unary(key: Key, name: str, argument: Any) -> Operation:
    """Read the operation `name`, which takes numbers only. `argument`: one number, or a list of
    them. Raises _Mistake if there are too many or too few, or if they make no sense."""
    listed = list(argument) if isinstance(argument, list | tuple) else [argument]
    _, number_names = UNARY[name]
    if len(listed) != len(number_names):
        takes = f"[{', '.join(number_names)}]" if number_names else "none"
        count = "1 number" if len(listed) == 1 else f"{len(listed)} numbers"
        raise _Mistake(key, f"found {count} for {name}; expected {takes}")
    numbers = tuple(_read_number((*key, i), value) for i, value in enumerate(listed))
    if name == "clip" and numbers[0] > numbers[1]:
        raise _Mistake(key, f"found low {numbers[0]:g} above high {numbers[1]:g}")
    if name == "standardise" and numbers[1] == 0:
        raise _Mistake(key, "found scale 0, which would make every value the same")
    return Operation(name, numbers)


def _read_number(key: Key, value: Any) -> float:
    """Returns a finite number as a float. Raises _Mistake for anything else, and for true and
    false, which Python takes for 1 and 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Mistake(key, f"found {quote(value)}; expected a finite number")
    return float(value)
