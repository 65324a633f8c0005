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
from engines.lanes.planning.program import OneRow, lower_row
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
        self.tensors: list[Tensor] = []  # the inputs of all cases, each once
        self.places: list[list[int]] = []
        for case in cases:
            self.places.append([self._place(tensor) for tensor in case.inputs])

    def _place(self, tensor: Tensor) -> int:
        """The place of a tensor among the network's inputs; cases of a sample share theirs."""
        for place, known in enumerate(self.tensors):
            if known is tensor:
                return place
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs as matrices (rows, elements of a row)."""
        return [tensor.reshape(MOST, -1) for tensor in self.tensors]

    @property
    def names(self) -> list[str]:
        """The dtypes of the results, in the order in which they first occur."""
        dtypes = [result.dtype for case in self.cases for result in first_row(case)]
        return [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)]

    def forward(self, *matrices: Tensor) -> tuple[Tensor, ...]:
        shaped = [
            matrix.reshape(matrix.shape[0], *tensor.shape[1:])
            for matrix, tensor in zip(matrices, self.tensors, strict=True)
        ]
        columns: dict[torch.dtype, list[Tensor]] = {}
        for case, places in zip(self.cases, self.places, strict=True):
            rows = [shaped[place] for place in places]
            results = (
                self._by_row(case, rows) if self.row_wise else torch.vmap(case.function)(*rows)
            )
            for result in results:
                columns.setdefault(result.dtype, []).append(result.reshape(result.shape[0], -1))
        return tuple(torch.cat(own, 1) if len(own) > 1 else own[0] for own in columns.values())

    def _by_row(self, case: Case, rows: Sequence[Tensor]) -> list[Tensor]:
        """Each result of a case for all rows, computed one after the other."""
        results = [case.function(*row) for row in zip(*rows, strict=True)]
        return [torch.stack(of_all_rows) for of_all_rows in zip(*results, strict=True)]

    def split(self, answers: dict[str, Tensor]) -> Iterator[tuple[Case, list[Tensor]]]:
        """Each case with its part of the answers, in the shapes of eager torch."""
        used = dict.fromkeys(answers, 0)
        for case in self.cases:
            own: list[Tensor] = []
            for result in first_row(case):
                name = str(result.dtype).removeprefix("torch.")
                begin, count = used[name], result.numel()
                used[name] += count
                matrix = answers[name].reshape(len(answers[name]), -1)
                own.append(matrix[:, begin : begin + count].reshape(-1, *result.shape))
            yield case, own


def first_row(case: Case) -> Results:
    """The results for the first row that eager torch computes."""
    return next(results for results in case.wanted if results is not None)


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
    verdicts: list[Verdict] = []
    networks: list[Together] = []
    for case in cases:
        try:
            networks.append(_traceable(case, way.capture))
        except Exception as error:  # any but NotApplicableError is a fault
            verdicts.append(_failed(case, error))
    for row_wise in (False, True):
        own = [network.cases[0] for network in networks if network.row_wise == row_wise]
        if own:
            verdicts += _judged(own, way, row_wise)
    order = {case.title: place for place, case in enumerate(cases)}
    return sorted(verdicts, key=lambda verdict: order[verdict.case])


def _traceable(case: Case, capture: bool) -> Together:
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
        lower_row(row, arguments(network.inputs, _results(network)))
    return network


def _judged(cases: Sequence[Case], way: Way, row_wise: bool) -> list[Verdict]:
    """The verdicts on cases that are one network; if it fails, those on its halves."""
    network = Together(cases, row_wise)
    try:
        library = _captured(network, way) if way.capture else _direct(network, way.device)
        answers = library(*network.inputs)
    except Exception as error:  # whatever a compiler or torch raises
        if len(cases) == 1:
            return [_failed(cases[0], error)]
        half = len(cases) // 2
        return [
            verdict
            for part in (cases[:half], cases[half:])
            for verdict in _judged(part, way, row_wise)
        ]
    return [compared(case, own) for case, own in network.split(answers)]


def _failed(case: Case, error: Exception) -> Verdict:
    """The verdict on a case that did not compile or run."""
    if isinstance(error, NotApplicableError):
        return Verdict(case.title, "not applicable", reason(error))
    return Verdict(case.title, "error", f"{type(error).__name__}: {first_line(error)}")


def _captured(network: Together, way: Way) -> Compiled:
    """An artifact of the network's exported program."""
    try:
        program = prepared(network, network.inputs, network.names, network.row_wise)
    except Exception as error:  # torch has no exception type for this
        raise NotApplicableError(f"torch does not export it: {reason(error)}") from error
    return program.compiled(way.engine, way.device)


def _direct(network: Together, device: str) -> Compiled:
    """An artifact of `lanes` from the network's operators at one row."""
    return compiled_row(network, network.inputs, network.names, device, not network.row_wise)


def _one_row(network: Together) -> OneRow:
    """The network's operators at one row."""
    return one_row(network, network.inputs, _results(network), not network.row_wise)


def _results(network: Together) -> list[Tensor]:
    """A row of results of each dtype, without values."""
    sizes: dict[torch.dtype, int] = {}
    for case in network.cases:
        for result in first_row(case):
            sizes[result.dtype] = sizes.get(result.dtype, 0) + result.numel()
    return [torch.empty(1, size, dtype=dtype) for dtype, size in sizes.items()]


def reason(error: BaseException) -> str:
    """An error's first line, without places in files, numbers of nodes and sizes."""
    text = re.sub(r" \([\w/.]+\.py:\d+( [\w.]+)?\)", "", first_line(error))
    return re.sub(r"\b([us]\d+|\d{3,}|0x[0-9a-f]+)\b", "…", text)[:160]


def compared(case: Case, answers: Sequence[Tensor]) -> Verdict:
    """The verdict on a case's answers to all rows."""
    verdict = Verdict(case.title, "right")
    for row, wanted in enumerate(case.wanted):
        for place, right in enumerate(wanted or ()):
            answer = answers[place][row]
            if row >= ORDINARY and right.is_floating_point():
                verdict.special += _classes(answer, right, row)
                continue
            if why := _why_wrong(case, row, place, answer, right):
                return Verdict(case.title, "wrong", f"row {row}, result {place}: {why}")
    verdict.special = verdict.special[:3]
    return verdict


def _why_wrong(case: Case, row: int, place: int, answer: Tensor, wanted: Tensor) -> str:
    """How an answer differs from eager torch's. Empty if it does not, or if it is as near to the
    answer in float64, up to a factor."""
    if not wanted.is_floating_point():
        off = answer != wanted
        return _first(off, answer, wanted) if off.any() else ""
    scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    relative = 1e-5 if wanted.dtype == torch.float32 else 4 * torch.finfo(wanted.dtype).eps
    allowed = relative * (10 * wanted.abs() + scale) + 1e-7
    same = (answer == wanted) | (answer.isnan() & wanted.isnan())
    off = ~(same | ((answer - wanted).abs() <= allowed))
    if not off.any():
        return ""
    precise = case.precise(row)
    if precise is not None and precise[place].shape == wanted.shape:
        exact = precise[place]
        own, eager = (answer - exact).abs(), (wanted - exact).abs()
        off &= ~(own <= 4 * eager.nan_to_num(0.0, 0.0, 0.0).max() + allowed)
    return _first(off, answer, wanted) if off.any() else ""


def _first(off: Tensor, answer: Tensor, wanted: Tensor) -> str:
    """The first number that is off, and the wanted one."""
    place = tuple(off.nonzero()[0].tolist()) if off.dim() else ()
    return f"{answer[place].item():.9g} for {wanted[place].item():.9g} at {list(place)}"


def _classes(answer: Tensor, wanted: Tensor, row: int) -> list[str]:
    """How the classes of numbers differ; empty if they do not."""
    off = _class(answer) != _class(wanted)
    return [f"row {row}: {_first(off, answer, wanted)}"] if off.any() else []


def _class(x: Tensor) -> Tensor:
    """A number for each class: 0 numbers, 2 and 3 zeros, 4 and 5 infinities, by sign, 6 NaN."""
    x = x.double()
    sign = torch.signbit(x).long()
    classes = torch.where(x == 0, 2 + sign, torch.zeros_like(sign))
    classes = torch.where(x.isinf(), 4 + sign, classes)
    return torch.where(x.isnan(), 6, classes)
