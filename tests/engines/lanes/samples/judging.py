"""Captures and compiles cases, runs them on rows, and compares them with eager torch.

Many cases are one network. If an engine is not applicable to it, each case is tried on its own: with
any number of rows (`torch.vmap`), then at exactly one row.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from engines import NotApplicableError
from engines.errors import first_line
from tests.engines.lanes.harness import MOST, Prepared, prepared
from tests.engines.lanes.samples.cases import ORDINARY, Case, Results


@dataclass
class Verdict:
    """What became of a case. `what`: right, not applicable, not exported, wrong or error.

    `special`: how its answers to special values differ from eager torch; empty if they do not.
    """

    case: str
    what: str
    why: str = ""
    captured: str = "any n"
    special: list[str] = field(default_factory=list)


class Together(nn.Module):
    """The results of all cases as one matrix for each dtype, with a row for each row.

    `row_wise`: rows are computed one after the other, for a capture at one row.
    """

    def __init__(self, cases: Sequence[Case], row_wise: bool) -> None:
        super().__init__()
        self.cases, self.row_wise = cases, row_wise
        self.given: list[Tensor] = []
        self.places: list[list[int]] = []
        for case in cases:
            self.places.append([self._place(each) for each in case.inputs])

    def _place(self, tensor: Tensor) -> int:
        for place, given in enumerate(self.given):
            if given is tensor:
                return place
        self.given.append(tensor)
        return len(self.given) - 1

    @property
    def inputs(self) -> list[Tensor]:
        return [each.reshape(MOST, -1) for each in self.given]

    @property
    def names(self) -> list[str]:
        """The dtypes of the results, in the order in which they first occur."""
        found = [each.dtype for case in self.cases for each in first_row(case)]
        return [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(found)]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        shaped = [
            each.reshape(each.shape[0], *own.shape[1:])
            for each, own in zip(given, self.given, strict=True)
        ]
        columns: dict[torch.dtype, list[Tensor]] = {}
        for case, places in zip(self.cases, self.places, strict=True):
            rows = [shaped[place] for place in places]
            made = self._by_row(case, rows) if self.row_wise else torch.vmap(case.function)(*rows)
            for each in made:
                columns.setdefault(each.dtype, []).append(each.reshape(each.shape[0], -1))
        return tuple(torch.cat(each, 1) if len(each) > 1 else each[0] for each in columns.values())

    def _by_row(self, case: Case, rows: Sequence[Tensor]) -> list[Tensor]:
        made = [case.function(*row) for row in zip(*rows, strict=True)]
        return [torch.stack(each) for each in zip(*made, strict=True)]

    def split(self, found: dict[str, Tensor]) -> Iterator[tuple[Case, list[Tensor]]]:
        """Each case with its part of the answers, in the shapes of eager torch."""
        used = dict.fromkeys(found, 0)
        for case in self.cases:
            own: list[Tensor] = []
            for each in first_row(case):
                name = str(each.dtype).removeprefix("torch.")
                begin, count = used[name], each.numel()
                used[name] += count
                matrix = found[name].reshape(len(found[name]), -1)
                own.append(matrix[:, begin : begin + count].reshape(-1, *each.shape))
            yield case, own


def first_row(case: Case) -> Results:
    """The results for the first row that eager torch computes."""
    return next(each for each in case.wanted if each is not None)


class _NotExportedError(Exception):
    """torch cannot export cases; the text says why."""


def judged(cases: Sequence[Case], name: str = "lanes") -> list[Verdict]:
    """A verdict for each case, by the engine with this name."""
    usable = [case for case in cases if any(row is not None for row in case.wanted[:ORDINARY])]
    lost = [case for case in cases if case not in usable]
    made = [Verdict(c.title, "not exported", "eager torch refuses these rows") for c in lost]
    if not usable:
        return made
    try:
        return [*made, *_compared(usable, name, row_wise=False)]
    except Exception:  # some of the cases: found below
        return [*made, *_one_by_one(usable, name)]


def _one_by_one(cases: Sequence[Case], name: str) -> list[Verdict]:
    """The verdicts, where the cases do not work as one network with any number of rows."""
    try:
        return _compared(cases, name, row_wise=True)
    except Exception as error:
        if len(cases) == 1:
            return [_alone(cases[0], name, error)]
    middle = (len(cases) + 1) // 2
    return [*_one_by_one(cases[:middle], name), *_one_by_one(cases[middle:], name)]


def _alone(case: Case, name: str, error: Exception) -> Verdict:
    """The verdict on a case that does not work at one row: it is tried with any number of rows."""
    if not isinstance(error, NotApplicableError):
        try:
            (verdict,) = _compared([case], name, row_wise=False)
            if isinstance(error, _NotExportedError):
                return verdict
        except NotApplicableError as why:
            return Verdict(case.title, "not applicable", reason(why))
        except _NotExportedError:
            pass
        except Exception as why:
            error = why
    if isinstance(error, NotApplicableError):
        return Verdict(case.title, "not applicable", reason(error))
    if isinstance(error, _NotExportedError):
        return Verdict(case.title, "not exported", str(error))
    return Verdict(case.title, "error", f"{type(error).__name__}: {first_line(error)}")


def _compared(cases: Sequence[Case], name: str, row_wise: bool) -> list[Verdict]:
    network = Together(cases, row_wise)
    program = _prepared(network)
    with cheap_compiler():
        library = program.compiled(name)
    found = library(*network.inputs)
    made = [compared(case, answers) for case, answers in network.split(found)]
    return [replace(each, captured="one row" if row_wise else "any n") for each in made]


def _prepared(network: Together) -> Prepared:
    try:
        return prepared(network, network.inputs, network.names, network.row_wise)
    except Exception as error:  # torch has no exception type for this
        raise _NotExportedError(reason(error)) from error


def reason(error: BaseException) -> str:
    """An error's first line, without places in files, numbers of nodes and sizes."""
    text = re.sub(r" \([\w/.]+\.py:\d+\)", "", first_line(error))
    return re.sub(r"\b([us]\d+|\d{3,}|0x[0-9a-f]+)\b", "…", text)[:160]


@contextmanager
def cheap_compiler() -> Iterator[None]:
    """Inside the block g++ optimises less (-O1), which takes half the time."""
    before = os.environ.get("CXX")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "g++"
        script.write_text(f'#!/bin/sh\nexec {before or "g++"} "$@" -O1\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        os.environ["CXX"] = str(script)
        try:
            yield
        finally:
            os.environ.pop("CXX") if before is None else os.environ.update(CXX=before)


def compared(case: Case, found: Sequence[Tensor]) -> Verdict:
    """The verdict on a case's answers to all rows."""
    verdict = Verdict(case.title, "right")
    for row, wanted in enumerate(case.wanted):
        for place, right in enumerate(wanted or ()):
            answer = found[place][row]
            if row >= ORDINARY and right.is_floating_point():
                verdict.special += _classes(answer, right, row)
                continue
            if why := _why_wrong(case, row, place, answer, right):
                return Verdict(case.title, "wrong", f"row {row}, result {place}: {why}")
    verdict.special = verdict.special[:3]
    return verdict


def _why_wrong(case: Case, row: int, place: int, found: Tensor, wanted: Tensor) -> str:
    """How an answer differs from eager torch's. Empty if it does not, or if it is as near to the
    answer in float64, up to a factor."""
    if not wanted.is_floating_point():
        off = found != wanted
        return _first(off, found, wanted) if off.any() else ""
    scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    relative = 1e-5 if wanted.dtype == torch.float32 else 4 * torch.finfo(wanted.dtype).eps
    allowed = relative * (10 * wanted.abs() + scale) + 1e-7
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    off = ~(same | ((found - wanted).abs() <= allowed))
    if not off.any():
        return ""
    precise = case.precise(row)
    if precise is not None and precise[place].shape == wanted.shape:
        exact = precise[place]
        own, eager = (found - exact).abs(), (wanted - exact).abs()
        off &= ~(own <= 4 * eager.nan_to_num(0.0, 0.0, 0.0).max() + allowed)
    return _first(off, found, wanted) if off.any() else ""


def _first(off: Tensor, found: Tensor, wanted: Tensor) -> str:
    where = tuple(off.nonzero()[0].tolist()) if off.dim() else ()
    return f"{found[where].item():.9g} for {wanted[where].item():.9g} at {list(where)}"


def _classes(found: Tensor, wanted: Tensor, row: int) -> list[str]:
    """How the classes of numbers differ: NaN, the infinities, zeros with their signs, numbers."""
    one, other = _class(found), _class(wanted)
    off = one != other
    return [f"row {row}: {_first(off, found, wanted)}"] if off.any() else []


def _class(x: Tensor) -> Tensor:
    x = x.double()
    sign = torch.signbit(x).long()
    found = torch.where(x == 0, 2 + sign, torch.zeros_like(sign))
    found = torch.where(x.isinf(), 4 + sign, found)
    return torch.where(x.isnan(), 6, found)
