"""Converts `preprocess:` of a config to expressions, and reports each mistake with its key."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from pipeline.config.mistakes import not_among, shown
from pipeline.config.yaml_lines import Key, Problem
from soa.block import Block
from stages.model import BINARY, UNARY, Expression, Features, Operation

if TYPE_CHECKING:
    from pipeline.config.schema import ColumnConfig, PreprocessConfig


class _Mistake(Exception):
    """A wrong expression. `problem`: the key of the wrong part, and what is wrong there."""

    def __init__(self, at: Key, text: str) -> None:
        super().__init__(text)
        self.problem: Problem = (at, text)


def features_of(block: PreprocessConfig, members: list[ColumnConfig]) -> Features:
    """The expressions of a block, which `check_preprocess` must have accepted."""
    names = [member.name for member in members]
    return Features(
        tuple((member.name, tuple(member.eigen or ())) for member in members),
        tuple(_expression((), value, names) for value in block.features),
        block.exists,
        block.pad,
    )


def check_preprocess(
    at: Key, preprocess: PreprocessConfig, block: Block, members: list[ColumnConfig]
) -> Iterator[Problem]:
    """Every contradiction between the `preprocess` of one block and its columns."""
    names = [member.name for member in members]
    dtypes = {block.dtype} if block.dtype else {member.dtype or "opaque" for member in members}
    if any("float" not in dtype for dtype in dtypes):
        listed = ", ".join(sorted(dtypes))
        yield at, f"found columns of {listed}; say 'dtype: float32' for the block"
    if block.shape is not None:
        yield at, "found a shape too; the model gets (n, features) or (n, features, *eigen)"
    if any(member.scalar for member in members):
        yield at, "found a block of scalars; only columns are preprocessed"
    extents = sorted({str(list(member.eigen)) for member in members if member.eigen})
    if len(extents) > 1:
        yield at, f"found Eigen columns of {' and '.join(extents)}; they have one shape in a block"
    if preprocess.exists is not None and preprocess.exists not in names:
        yield (*at, "exists"), not_among(preprocess.exists, names)
    for i, value in enumerate(preprocess.features):
        try:
            _expression((*at, "features", i), value, names)
        except _Mistake as mistake:
            yield mistake.problem


def _expression(at: Key, written: Any, columns: Collection[str]) -> Expression:
    """Read an expression: a column, or a list of a column and operations applied in this order."""
    if isinstance(written, str):
        written, first = [written], at
    elif isinstance(written, list | tuple) and written:
        first = (*at, 0)
    else:
        raise _Mistake(at, f"found {shown(written)}; expected a column, or [column, operation, …]")
    if written[0] not in columns:
        raise _Mistake(first, not_among(written[0], columns))
    steps = [_step((*at, i), step, columns) for i, step in enumerate(written[1:], 1)]
    return Expression(written[0], tuple(steps))


def _step(at: Key, written: Any, columns: Collection[str]) -> Operation:
    """Read one operation: `log`, `clip: [-5, 5]`, or `ratio:` with a column, a number or an
    expression."""
    if isinstance(written, dict) and len(written) == 1:
        [(name, argument)] = written.items()
        at = (*at, name)
    elif isinstance(written, str):
        name, argument = written, []
    else:
        text = f"found {shown(written)}; expected one operation, such as log or clip: [-5, 5]"
        raise _Mistake(at, text)
    if name in UNARY:
        return _unary(at, name, argument)
    if name not in BINARY:
        raise _Mistake(at, not_among(name, [*UNARY, *BINARY]))
    if isinstance(argument, int | float):
        return Operation(name, operand=_number(at, argument))
    if argument == []:
        raise _Mistake(at, f"found {name} alone; write {name}: with a column or a number")
    return Operation(name, operand=_expression(at, argument, columns))


def _unary(at: Key, name: str, argument: Any) -> Operation:
    """Read the numbers of an operation on one column. `argument`: one number, or a list."""
    listed = list(argument) if isinstance(argument, list | tuple) else [argument]
    wanted = UNARY[name][1]
    if len(listed) != len(wanted):
        takes = f"[{', '.join(wanted)}]" if wanted else "none"
        count = "1 number" if len(listed) == 1 else f"{len(listed)} numbers"
        raise _Mistake(at, f"found {count} for {name}; expected {takes}")
    numbers = tuple(_number((*at, i), value) for i, value in enumerate(listed))
    if name == "clip" and numbers[0] > numbers[1]:
        raise _Mistake(at, f"found low {numbers[0]:g} above high {numbers[1]:g}")
    if name == "standardise" and numbers[1] == 0:
        raise _Mistake(at, "found scale 0, which would make every value the same")
    return Operation(name, numbers)


def _number(at: Key, value: Any) -> float:
    """A finite number; true and false are none, although Python takes them for 1 and 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Mistake(at, f"found {shown(value)}; expected a finite number")
    return float(value)
