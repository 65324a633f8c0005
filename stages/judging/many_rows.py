"""The share of rows in which an artifact differs from the eager model, from many rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from registry.bundle import ManyRows
from runtime.checked import Tolerance
from runtime.session import Session
from soa.signature import Signature
from stages.capture import dependence_of
from stages.judging.sensitivity import Answers, compare_in_float64, distance, row_maxima
from stages.reference import Arrays, Case, Edge, run_session

_CONFIDENCE = 0.95
_LOOKED_AT = 256  # rows outside the tolerance that are compared with the float64 model at most
_PIECES_LOOKED_AT = 4  # pieces that are compared at most, if rows are not independent
_NEARER = 0.5  # answers are nearer to float64 if they have less than this part of the distance


def upper_limit_of_share(outside: int, tried: int) -> float:
    """The share of rows outside that is not exceeded with 95 % confidence, if `outside` of `tried`
    rows were seen outside: `(0, 1000) -> 0.003`. It is the upper end of the one-sided interval of
    C. J. Clopper and E. S. Pearson (1934)."""
    if outside >= tried:
        return 1.0
    # It is the share at which the chance to see at most `outside` is 5 %: a sum of the binomial
    # distribution, in logarithms so that nothing overflows, solved by bisection.
    counts = torch.arange(outside + 1, dtype=torch.float64)
    n = torch.tensor(float(tried), dtype=torch.float64)
    log_ways = torch.lgamma(n + 1) - torch.lgamma(counts + 1) - torch.lgamma(n - counts + 1)
    low, high = outside / tried, 1.0
    for _ in range(60):  # more than the bits of a double
        share = torch.tensor((low + high) / 2, dtype=torch.float64)
        log_chances = log_ways + torch.xlogy(counts, share) + (n - counts) * torch.log1p(-share)
        if float(log_chances.logsumexp(0).exp()) > 1 - _CONFIDENCE:
            low = float(share)
        else:
            high = float(share)
    return high


@dataclass(frozen=True)
class _Piece:
    """Some of the many rows, which run together.

    `answers` are by output. `outside` tells for each row of a dimension, `(n,)`, whether any of its
    answers is outside the tolerance.
    """

    inputs: Arrays
    case: Case
    answers: Mapping[str, Answers]
    outside: Mapping[str, torch.Tensor]

    @property
    def count(self) -> int:
        """The number of rows outside the tolerance."""
        return sum(int(rows.sum()) for rows in self.outside.values())


@dataclass(frozen=True)
class _BesideFloat64:
    """The rows outside the tolerance, compared with the float64 model.

    `artifact`, `eager` and `neither` count the rows in which the artifact, the eager model or none
    of them is clearly nearer to it. `unexplained` marks, by output, the elements that rounding
    errors do not explain.
    """

    artifact: int
    eager: int
    neither: int
    unexplained: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tried:
    """How often an artifact differs from the eager model. `refusal`: why it is refused for that;
    empty if it is not."""

    record: ManyRows
    refusal: str = ""


def compare_on_many_rows(
    session: Session, pieces: Sequence[Edge], tolerances: Mapping[str, Tolerance], program: Path
) -> Tried:
    """Compare an artifact's answers with the eager model's on many rows.

    `pieces` hold the rows with the eager answers. The artifact is refused for rows that differ, if
    rounding errors do not explain them; the captured `program` is run to find this out.
    """
    signature = session.signature
    tried = 0
    differing: list[_Piece] = []
    for edge in pieces:
        answers = {
            name: Answers.of(value, edge.outputs[name], tolerances[name])
            for name, value in run_session(session, edge.inputs, edge.case).items()
        }
        outside_by_output = {name: row_maxima(answer.outside) for name, answer in answers.items()}
        outside = _largest_by_dim(signature, outside_by_output)
        piece = _Piece(edge.inputs, edge.case, answers, outside)
        tried += sum(len(rows) for rows in outside.values())
        if piece.count:
            differing.append(piece)
    count = sum(piece.count for piece in differing)
    record = ManyRows(rows=tried, outside=count, below=upper_limit_of_share(count, tried))
    if not differing:
        return Tried(record)
    return _judge_by_float64(signature, differing, record, tolerances, program)


def _largest_by_dim(
    signature: Signature, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The largest value over the outputs, for each row of each dimension.

    `values` has `(n,)` for each output. An output without rows counts as a dimension of its own,
    with one row.
    """
    largest: dict[str, torch.Tensor] = {}
    for bound in signature.outputs:
        by_row, dim = values[bound.name], bound.rows
        if bound.rowless:
            by_row, dim = by_row.amax(0, keepdim=True), bound.name
        largest[dim] = torch.maximum(largest[dim], by_row) if dim in largest else by_row
    return largest


def _judge_by_float64(
    signature: Signature,
    differing: Sequence[_Piece],
    record: ManyRows,
    tolerances: Mapping[str, Tolerance],
    program: Path,
) -> Tried:
    """Compare the first rows outside the tolerance with the float64 model, and judge by it.

    If rows are independent, only these rows are run, else the whole pieces that they are in.
    Returns `record` with the counts of the comparison, and the refusal if there is one.
    """
    plain_rows = len(signature.dims) == 1 and not signature.jagged
    plain_rows = plain_rows and not any(bound.rowless for bound in signature.outputs)
    if plain_rows and dependence_of(None, program) is None:
        pieces = [_join_rows_outside(signature, differing)]
    else:
        pieces = list(differing[:_PIECES_LOOKED_AT])
    compared = [_compare_with_float64(signature, piece, program) for piece in pieces]
    record = replace(
        record,
        artifact=sum(beside.artifact for beside in compared),
        eager=sum(beside.eager for beside in compared),
        neither=sum(beside.neither for beside in compared),
    )
    for piece, beside in zip(pieces, compared, strict=True):
        for name, bad in beside.unexplained.items():
            if int(row_maxima(bad).sum()) > tolerances[name].max_outside * record.rows:
                return Tried(record, piece.answers[name].describe_first(name, bad))
    return Tried(record)


def _join_rows_outside(signature: Signature, differing: Sequence[_Piece]) -> _Piece:
    """Make one piece of the first `_LOOKED_AT` rows outside the tolerance. If the model does not
    take so few rows, they are repeated, but count once. The signature has one row dimension."""
    (dim,) = signature.dims
    indices = [piece.outside[dim].nonzero()[:, 0] for piece in differing]
    count = min(sum(map(len, indices)), _LOOKED_AT)
    n = max(count, signature.ranges[dim].min)

    def rows_outside(values_of: Callable[[_Piece], torch.Tensor]) -> torch.Tensor:
        """Join the rows outside of all pieces, of the tensor that `values_of` gets from a piece."""
        picked = [values_of(piece)[rows] for piece, rows in zip(differing, indices, strict=True)]
        return torch.cat(picked)[torch.arange(n) % count]

    def input_column(name: str, key: str) -> torch.Tensor:
        values = differing[0].inputs[name][key]
        return rows_outside(lambda piece: piece.inputs[name][key]) if values.ndim else values

    def joined_answers(name: str) -> Answers:
        return Answers(
            artifact=rows_outside(lambda piece: piece.answers[name].artifact),
            eager=rows_outside(lambda piece: piece.answers[name].eager),
            band=rows_outside(lambda piece: piece.answers[name].band),
            apart=rows_outside(lambda piece: piece.answers[name].apart),
        )

    inputs = {
        name: {key: input_column(name, key) for key in columns}
        for name, columns in differing[0].inputs.items()
    }
    answers = {name: joined_answers(name) for name in differing[0].answers}
    return _Piece(inputs, {dim: n}, answers, {dim: torch.arange(n) < count})


def _compare_with_float64(signature: Signature, piece: _Piece, program: Path) -> _BesideFloat64:
    """Compare the artifact's and the eager model's answers with those of the float64 model.

    The distance of a row is the largest of its elements, in units of their tolerance. If the
    program does not run in float64, no row is nearer, and no row is explained.
    """
    answers = piece.answers
    model = compare_in_float64(signature, program, piece.inputs, piece.case, answers)
    if model is None:
        unexplained = {name: answer.outside for name, answer in answers.items()}
        return _BesideFloat64(0, 0, piece.count, unexplained)
    of_artifact, of_eager = {}, {}
    for name, answer in answers.items():
        of_artifact[name] = row_maxima(distance(answer.artifact, model.exact[name]) / answer.band)
        of_eager[name] = row_maxima(distance(answer.eager, model.exact[name]) / answer.band)
    artifact_nearer = eager_nearer = 0
    eager_by_dim = _largest_by_dim(signature, of_eager)
    for dim, artifact in _largest_by_dim(signature, of_artifact).items():
        eager, outside = eager_by_dim[dim], piece.outside[dim]
        artifact_nearer += int((outside & (artifact < _NEARER * eager)).sum())
        eager_nearer += int((outside & (eager < _NEARER * artifact)).sum())
    neither = piece.count - artifact_nearer - eager_nearer
    return _BesideFloat64(artifact_nearer, eager_nearer, neither, model.unexplained)
