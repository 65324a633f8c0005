"""Captures and compiles cases, runs them on rows, and compares them with eager torch.

Many cases are one network, which is quick. If it does not work, its halves are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engines import NotApplicableError
from engines.errors import first_line
from engines.lanes.planning.program import OneRow, lowered_row
from tests.engines.lanes.harness import (
    MOST,
    Compiled,
    arguments,
    compiled_row,
    one_row,
    prepared,
)
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


@dataclass(frozen=True)
class Way:
    """How cases become artifacts: by the engine with this name, on this device.

    `capture`: with torch.export, as `pipeline run` does. Without, `lanes` gets the operators of one
    row directly, which takes a twentieth of the time.
    """

    engine: str = "lanes"
    capture: bool = False
    device: str = "cpu"


def judged(cases: Sequence[Case], way: Way) -> list[Verdict]:
    """A verdict for each case. Cases that work are one artifact."""
    made: list[Verdict] = []
    networks: list[Together] = []
    for case in cases:
        try:
            networks.append(_fits(case, way.capture))
        except NotApplicableError as why:
            made.append(Verdict(case.title, "not applicable", reason(why)))
        except Exception as error:  # any other is a fault
            made.append(_failed(case, error))
    for row_wise in (False, True):
        own = [network.cases[0] for network in networks if network.row_wise == row_wise]
        made += _judged(own, way, row_wise) if own else []
    order = {case.title: place for place, case in enumerate(cases)}
    return sorted(made, key=lambda verdict: order[verdict.case])


def _fits(case: Case, capture: bool) -> Together:
    """A network of this case alone that can be traced: of all rows at once (`torch.vmap`), else one
    after the other. NotApplicableError if `lanes` has no code for it, or torch cannot trace it."""
    if all(row is None for row in case.wanted[:ORDINARY]):
        raise NotApplicableError("eager torch refuses these rows")
    try:
        network = Together([case], row_wise=False)
        row = _one_row(network)
    except Exception:  # torch has no exception type for what vmap cannot do
        network = Together([case], row_wise=True)
        try:
            row = _one_row(network)
        except Exception as error:
            raise NotApplicableError(f"torch cannot trace it: {reason(error)}") from error
    if not capture:
        lowered_row(row, arguments(network.inputs, _results(network)))
    return network


def _judged(cases: Sequence[Case], way: Way, row_wise: bool) -> list[Verdict]:
    network = Together(cases, row_wise)
    try:
        library = _captured(network, way) if way.capture else _direct(network, way.device)
        found = library(*network.inputs)
    except Exception as error:  # whatever a compiler or torch raises
        if len(cases) == 1:
            return [_failed(cases[0], error)]
        half = len(cases) // 2
        return [
            verdict
            for part in (cases[:half], cases[half:])
            for verdict in _judged(part, way, row_wise)
        ]
    return [compared(case, answers) for case, answers in network.split(found)]


def _failed(case: Case, error: Exception) -> Verdict:
    if isinstance(error, NotApplicableError):
        return Verdict(case.title, "not applicable", reason(error))
    return Verdict(case.title, "error", f"{type(error).__name__}: {first_line(error)}")


def _captured(network: Together, way: Way) -> Compiled:
    try:
        program = prepared(network, network.inputs, network.names, network.row_wise)
    except Exception as error:  # torch has no exception type for this
        raise NotApplicableError(f"torch does not export it: {reason(error)}") from error
    return program.compiled(way.engine, way.device)


def _direct(network: Together, device: str) -> Compiled:
    """An artifact of `lanes` from the network's operators at one row."""
    return compiled_row(network, network.inputs, network.names, device, not network.row_wise)


def _one_row(network: Together) -> OneRow:
    return one_row(network, network.inputs, _results(network), not network.row_wise)


def _results(network: Together) -> list[Tensor]:
    """A row of results of each dtype, without values."""
    sizes = dict.fromkeys((each.dtype for case in network.cases for each in first_row(case)), 0)
    for case in network.cases:
        for each in first_row(case):
            sizes[each.dtype] += each.numel()
    return [torch.empty(1, size, dtype=dtype) for dtype, size in sizes.items()]


def reason(error: BaseException) -> str:
    """An error's first line, without places in files, numbers of nodes and sizes."""
    text = re.sub(r" \([\w/.]+\.py:\d+( [\w.]+)?\)", "", first_line(error))
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
