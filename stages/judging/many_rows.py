"""The share of rows in which an artifact differs from the eager model, from many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from registry.bundle import ManyRows
from runtime.checked import Tolerance
from runtime.session import Session
from soa.signature import Signature
from stages.capture import dependence_of
from stages.judging.sensitivity import Answers, distance, in_float64, of_rows
from stages.reference import Arrays, Case, Edge, session_answers

_CONFIDENCE = 0.95
_LOOKED_AT = 256  # rows outside that are compared with the float64 model
_PIECES_LOOKED_AT = 4  # if a row needs the other rows of its piece
_NEARER = 0.5  # nearer: at most so many times the distance of the other


def share_below(outside: int, tried: int) -> float:
    """The upper end of the one-sided interval of 95 % for a share, of which `outside` of `tried`
    were seen (C. J. Clopper and E. S. Pearson, 1934)."""
    if outside >= tried:
        return 1.0
    seen = torch.arange(outside + 1, dtype=torch.float64)
    n = torch.tensor(float(tried), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(seen + 1) - torch.lgamma(n - seen + 1)
    low, high = outside / tried, 1.0
    for _ in range(60):
        share = torch.tensor((low + high) / 2, dtype=torch.float64)
        chances = ways + torch.xlogy(seen, share) + (n - seen) * torch.log1p(-share)
        if float(chances.logsumexp(0).exp()) > 1 - _CONFIDENCE:
            low = float(share)
        else:
            high = float(share)
    return high


@dataclass(frozen=True)
class _Piece:
    """A piece of rows: inputs, answers, and by dimension the rows outside the tolerance, `(n,)`."""

    inputs: Arrays
    case: Case
    answers: Mapping[str, Answers]
    outside: Mapping[str, torch.Tensor]

    @property
    def count(self) -> int:
        return sum(int(each.sum()) for each in self.outside.values())


@dataclass(frozen=True)
class _Seen:
    """Of the rows outside: how many have the artifact, the eager model, or neither nearer to
    float64; and the elements, by output, that rounding does not explain."""

    artifact: int
    eager: int
    neither: int
    unexplained: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tried:
    """How often an artifact differs from the eager model, and why it is refused; empty if not."""

    record: ManyRows
    refusal: str = ""


def tried_on(
    session: Session, pieces: Sequence[Edge], tolerances: Mapping[str, Tolerance], program: Path
) -> Tried:
    """Compare an artifact with the eager model on many rows.

    A row that differs is a reason to refuse if rounding errors of the model, run as `program`, do
    not explain it.
    """
    signature = session.signature
    tried = 0
    differing: list[_Piece] = []
    for edge in pieces:
        answers = {
            name: Answers.of(value, edge.outputs[name], tolerances[name])
            for name, value in session_answers(session, edge.inputs, edge.case).items()
        }
        outside = _by_dim(signature, {k: of_rows(a.outside) for k, a in answers.items()})
        piece = _Piece(edge.inputs, edge.case, answers, outside)
        tried += sum(len(each) for each in outside.values())
        differing += [piece] if piece.count else []
    count = sum(piece.count for piece in differing)
    record = ManyRows(rows=tried, outside=count, below=share_below(count, tried))
    if not differing:
        return Tried(record)
    return _looked_at(signature, differing, record, tolerances, program)


def _by_dim(signature: Signature, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The largest value over the outputs, for each row of each dimension. An output without rows
    is one row of its own."""
    largest: dict[str, torch.Tensor] = {}
    for bound in signature.outputs:
        mine, dim = values[bound.name], bound.rows
        if bound.rowless:
            mine, dim = mine.amax(0, keepdim=True), bound.name
        largest[dim] = torch.maximum(largest[dim], mine) if dim in largest else mine
    return largest


def _looked_at(
    signature: Signature,
    differing: Sequence[_Piece],
    record: ManyRows,
    tolerances: Mapping[str, Tolerance],
    program: Path,
) -> Tried:
    """Compare rows outside, or the first of them, with the float64 model."""
    alone = len(signature.dims) == 1 and not any(b.rowless for b in signature.outputs)
    if alone and not signature.jagged and dependence_of(None, program) is None:
        pieces = [_joined(signature, differing)]
    else:
        pieces = list(differing[:_PIECES_LOOKED_AT])
    seen = [_beside_float64(signature, piece, program) for piece in pieces]
    record = replace(
        record,
        artifact=sum(each.artifact for each in seen),
        eager=sum(each.eager for each in seen),
        neither=sum(each.neither for each in seen),
    )
    for piece, each in zip(pieces, seen, strict=True):
        for name, bad in each.unexplained.items():
            if int(of_rows(bad).sum()) > tolerances[name].max_outside * record.rows:
                return Tried(record, piece.answers[name].sentence(name, bad))
    return Tried(record)


def _joined(signature: Signature, differing: Sequence[_Piece]) -> _Piece:
    """The rows outside, without the others; repeated if the model takes no such few rows."""
    (dim,) = signature.dims
    places = [piece.outside[dim].nonzero()[:, 0] for piece in differing]
    count = min(sum(map(len, places)), _LOOKED_AT)
    n = max(count, signature.ranges[dim].min)

    def of_all(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        picked = [part[at] for part, at in zip(parts, places, strict=True)]
        return torch.cat(picked)[torch.arange(n) % count]

    first = differing[0]
    inputs = {
        name: {
            key: of_all([piece.inputs[name][key] for piece in differing]) if values.ndim else values
            for key, values in columns.items()
        }
        for name, columns in first.inputs.items()
    }
    answers = {
        name: Answers(
            found=of_all([piece.answers[name].found for piece in differing]),
            wanted=of_all([piece.answers[name].wanted for piece in differing]),
            band=of_all([piece.answers[name].band for piece in differing]),
            apart=of_all([piece.answers[name].apart for piece in differing]),
        )
        for name in first.answers
    }
    return _Piece(inputs, {dim: n}, answers, {dim: torch.arange(n) < count})


def _beside_float64(signature: Signature, piece: _Piece, program: Path) -> _Seen:
    """Compare both answers with the float64 model's. If the program does not run in float64,
    nothing is nearer, and nothing is explained."""
    answers = piece.answers
    model = in_float64(signature, program, piece.inputs, piece.case, answers)
    if model is None:
        unexplained = {name: each.outside for name, each in answers.items()}
        return _Seen(0, 0, piece.count, unexplained)
    mine, theirs = {}, {}
    for name, each in answers.items():
        mine[name] = of_rows(distance(each.found, model.exact[name]) / each.band)
        theirs[name] = of_rows(distance(each.wanted, model.exact[name]) / each.band)
    artifact = eager = 0
    far = _by_dim(signature, theirs)
    for dim, near in _by_dim(signature, mine).items():
        rows_outside = piece.outside[dim]
        artifact += int((rows_outside & (near < _NEARER * far[dim])).sum())
        eager += int((rows_outside & (far[dim] < _NEARER * near)).sum())
    return _Seen(artifact, eager, piece.count - artifact - eager, model.unexplained)
