"""Try a model and an artifact: does each row's answer depend on this row only?

The graph of a program shows it first, at capture (engines/exported/row_dependence.py). If it does
not, the eager model is tried with many numbers of rows, in other orders, beside other rows. Then
the artifact is tested: some of the reference's rows, alone and in another order, must give the
answers that they gave among the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

from engines.errors import first_line
from runtime.checked import Tolerance, compare, default_tolerance
from runtime.session import Session
from soa.dtypes import dtype_name
from soa.signature import Signature
from stages.errors import CaptureError
from stages.reference import Arrays, run_eager, run_session, take_rows

SEE_EACH_OTHER = "the rows see each other, so it cannot run on some of them at a time"

_ROWS = 256  # the most rows with which an artifact is tried
_EVERY = 64  # all numbers of rows up to this one are tried
_MOST_CONSTANTS = 32  # the most integers of the model's code that are tried


def how_rows_depend(model: torch.nn.Module, signature: Signature, inputs: Arrays) -> str | None:
    """Try whether the eager model's answer to a row depends on other rows or on their number.

    Returns a phrase that says how it does, or the model's error; None if the trial finds nothing.
    The signature has one row dimension. For each number of rows, rows of the reference `inputs` are
    drawn in another order, so that a row lies beside other rows each time. In a second run most
    rows are scaled, and the others must keep their answers.
    """
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    generator = torch.Generator().manual_seed(1)
    among_all = run_eager(model, signature, inputs, {dim: rows.proven})
    allowed = {
        name: default_tolerance(dtype_name(value.dtype)) for name, value in among_all.items()
    }
    for n in _numbers_of_rows(model, max(rows.min, 1), rows.proven):
        chosen = torch.randperm(rows.proven, generator=generator)[:n]
        for unscaled in dict.fromkeys((n, 1 + n // 8)):  # all rows, then an eighth of them
            arrays = _scale_rows(take_rows(signature, inputs, {dim: chosen}), unscaled)
            try:
                answers = run_eager(model, signature, arrays, {dim: n})
            except CaptureError as error:
                return first_line(error)
            if why := _find_difference(answers, among_all, chosen[:unscaled], allowed):
                beside = "" if unscaled == n else " beside rows with other values"
                return f"{why} among {n} rows{beside}"
    return None


def rows_are_independent(
    session: Session, inputs: Arrays, tolerances: Mapping[str, Tolerance]
) -> bool:
    """Try an artifact: whether each row's answer depends on this row only, within the tolerances.

    Rows of the reference run alone and in another order, and must give the answers that they give
    among all. `inputs[collection][column]` has the largest n of rows; up to `_ROWS` are used. False
    too if the signature does not allow tiles, or has too few rows for a trial.
    """
    signature = session.signature
    if signature.tile_kinds is None:
        return False
    (dim,) = signature.dims
    low, high = signature.ranges[dim].min, min(signature.ranges[dim].max, _ROWS)
    part = max(low, high // 3, 1)  # about a third of the rows runs without the others
    if part >= high:  # no part of the rows can be tried
        return False

    def answers(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return run_session(session, take_rows(signature, inputs, {dim: rows}), {dim: len(rows)})

    in_order = torch.arange(high)
    shuffled = torch.randperm(high, generator=torch.Generator().manual_seed(1))
    among_all = answers(in_order)
    trials = [shuffled[:part], shuffled, in_order[-part:], shuffled[-part:]]
    return not any(_find_difference(answers(rows), among_all, rows, tolerances) for rows in trials)


def _numbers_of_rows(model: torch.nn.Module, low: int, high: int) -> list[int]:
    """The numbers of rows to try, ascending, from `low` to `high`.

    These are all small numbers, some primes, and numbers around powers of two, around the largest,
    and around the integers in the model's own code, where it may take another path.
    """
    constants = sorted(_integers_in_code(model))[:_MOST_CONSTANTS]
    powers = [2**exponent for exponent in range(6, high.bit_length() + 1)]
    around = [n + step for n in (*powers, *constants, high) for step in (-1, 0, 1)]
    primes = (101, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771)
    numbers = {*range(low, _EVERY + 1), *around, *primes, *(2 * n for n in constants)}
    return sorted(n for n in numbers if low <= n <= high)


def _integers_in_code(model: torch.nn.Module) -> set[int]:
    """Find the integers above `_EVERY` in the model's Python code.

    The code is that of the methods of its own classes, of functions that its modules hold as
    attributes, and of the functions that these call by a global name. Torch's code is left out.
    """
    attributes: list[Any] = []
    for module in model.modules():
        if not _is_of_torch(type(module)):
            attributes += [*vars(type(module)).values(), *vars(module).values()]
    functions = [value for value in attributes if isinstance(value, FunctionType)]
    seen: set[FunctionType] = set()
    constants: set[int] = set()
    while functions:
        function = functions.pop()
        if function in seen or _is_of_torch(function):
            continue
        seen.add(function)
        for code in _nested_codes(function.__code__):
            integers = [value for value in code.co_consts if isinstance(value, int)]
            constants |= {value for value in integers if value > _EVERY}
            called = [function.__globals__.get(name) for name in code.co_names]
            functions += [value for value in called if isinstance(value, FunctionType)]
    return constants


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of all functions that are defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _is_of_torch(named: type | FunctionType) -> bool:
    """Whether a class or function is torch's own."""
    return named.__module__.split(".")[0] == "torch"


def _scale_rows(rows: Arrays, unscaled: int) -> Arrays:
    """Scale the floats of all rows after the first `unscaled`, in place. Returns `rows`."""
    for columns in rows.values():
        for values in columns.values():
            if values.dim() and values.is_floating_point():
                values[unscaled:] *= -3  # another sign, and another size
    return rows


def _find_difference(
    part: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    tolerances: Mapping[str, Tolerance],
) -> str | None:
    """How answers to some rows differ from the answers that the same rows had among all rows.

    `part` are the answers to some rows, of which the first are compared. `rows` are the indices of
    these in `whole`. Returns a phrase about the first output that differs by more than its
    tolerance; None if all agree.
    """
    for name, answers in part.items():
        allowed = tolerances[name]
        compared = compare(answers[: len(rows)], whole[name][rows], allowed, classifier=False)
        if compared.outside > allowed.max_outside:
            return f"answers of output {name!r} differ by up to {compared.max_abs:.2g}"
    return None
