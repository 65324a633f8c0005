"""Captures and compiles cases, runs them on rows, and compares them with eager torch.

All cases of an operator are one network. If this network does not work, each case is tried alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engines import NotApplicableError
from engines.errors import first_line
from tests.engines.lanes.harness import MOST, Prepared, prepared
from tests.engines.lanes.samples.cases import ORDINARY, Case, Results


@dataclass
class Verdict:
    """What became of a case. `what`: right, not applicable, wrong or error.

    `special`: how its answers to special values differ from eager torch; empty if they do not.
    """

    case: str
    what: str
    why: str = ""
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


class _NotExportedError(NotApplicableError):
    """torch cannot export cases; the text says why."""


def judged(cases: Sequence[Case], name: str = "lanes") -> list[Verdict]:
    """A verdict for each case, by the engine with this name."""
    lost = [case for case in cases if all(row is None for row in case.wanted[:ORDINARY])]
    made = [Verdict(c.title, "not applicable", "eager torch refuses these rows") for c in lost]
    usable = [case for case in cases if case not in lost]
    return [*made, *_judged(usable, name)] if usable else made


def _judged(cases: Sequence[Case], name: str) -> list[Verdict]:
    try:
        return _compared(cases, name)
    except Exception as error:  # whatever a compiler or torch raises
        if len(cases) > 1:
            return [verdict for case in cases for verdict in _judged([case], name)]
        if isinstance(error, NotApplicableError):
            return [Verdict(cases[0].title, "not applicable", reason(error))]
        why = f"{type(error).__name__}: {first_line(error)}"
        return [Verdict(cases[0].title, "error", why)]


def _compared(cases: Sequence[Case], name: str) -> list[Verdict]:
    """With any number of rows if torch exports this, else captured at one row, as `pipeline run`
    does."""
    try:
        network = Together(cases, row_wise=False)
        program = _prepared(network)
    except _NotExportedError:
        network = Together(cases, row_wise=True)
        program = _prepared(network)
    found = program.compiled(name)(*network.inputs)
    return [compared(case, answers) for case, answers in network.split(found)]


def _prepared(network: Together) -> Prepared:
    try:
        return prepared(network, network.inputs, network.names, network.row_wise)
    except Exception as error:  # torch has no exception type for this
        raise _NotExportedError(f"torch does not export it: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error's first line, without places in files, numbers of nodes and sizes."""
    text = re.sub(r" \([\w/.]+\.py:\d+\)", "", first_line(error))
    return re.sub(r"\b([us]\d+|\d{3,}|0x[0-9a-f]+)\b", "…", text)[:160]


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
