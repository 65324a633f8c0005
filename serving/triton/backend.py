"""The code that answers requests in Triton's Python backend, with plain arrays.

Triton's dynamic batcher gives several requests at once. Their rows are joined, tensor by tensor,
and written into the columns of one SoA collection. The artifact runs once, and the rows of its
outputs are divided among the requests. The work for each request is kept small, because it
dominates the time of a batch. If rows depend on each other (stages/capture/independence.py), each
request runs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from runtime.session import Binding, Session
from serving.errors import RequestError, WrongVersionError
from serving.triton.arrays import Arrays, Tensors
from serving.wire import Form, Parts, Wire, WireTensor, library_of, locate_columns
from soa.errors import SoaPipelineError
from soa.memory import Collection, argument_tensors

Values = Any
"""A NumPy array or a torch tensor."""

_SMALLEST = 16  # the capacity of the smallest buffers, in rows
_FAILURES = (SoaPipelineError, RuntimeError, ValueError, MemoryError)
_SHAPES = 1024  # the number of request shapes for which the check's result is kept

Shapes = tuple[tuple[Any, tuple[int, ...]], ...]
"""Dtype and shape of each input, in the wire's order."""


class Request(NamedTuple):
    """A request of a client. `inputs`: arrays by tensor name.

    `digest` and `form`: the bundle and the form that the client expects, if it sends them. The form
    must be checked, because `rows` and `blocks` have the same tensor names, and may have the same
    shapes.
    """

    inputs: Mapping[str, Values]
    digest: str | None = None
    form: str | None = None


@dataclass(slots=True)
class _Job:
    """A request that passed the checks.

    `rows`: its row counts by dimension. `answers`: its outputs; if the request is cut, those of
    each piece. `error`: if it is set, it is the answer instead.
    """

    request: Request
    rows: Mapping[str, int]
    answers: list[dict[str, Values]] = field(default_factory=list)
    error: RequestError | None = None


class _Piece(NamedTuple):
    """A part of a job: `rows` rows from row `start` on."""

    job: _Job
    start: int
    rows: int


@dataclass(slots=True)
class _Run:
    """The pieces of jobs that one run of the artifact computes. `rows`: the sum of their rows."""

    pieces: list[_Piece] = field(default_factory=list)
    rows: int = 0


class Core:
    """Answers requests with one session. Triton calls it from one thread at a time.

    `requests`: the form of the requests. `merge`: rows of several requests may share a run. The
    capacity of a buffer is a power of two of rows, or the compiled maximum; buffers are made when
    first needed, and kept. Each answer is in new memory.

    On a GPU, requests and answers are tensors that stay on the device, and the answers are complete
    when `answer` returns. A request with NumPy arrays gets an answer with NumPy arrays.
    """

    def __init__(
        self,
        session: Session,
        *,
        merge: bool,
        digest: str | None = None,
        requests: Form = "columns",
        arrays: Arrays | None = None,
    ) -> None:
        """Prepare for requests of this form. No buffer is made yet. Raises ServingError."""
        if arrays is None:
            on_cpu = session.device.type == "cpu"
            arrays = Arrays() if on_cpu else Tensors(torch.device(session.device))
        self._arrays = arrays
        self.wire = Wire.of(session.signature, requests)
        self._input_names = [tensor.name for tensor in self.wire.inputs]
        self._input_set = set(self._input_names)
        # The check depends only on a request's dtypes and shapes, which are often the same.
        self._rows_of = lru_cache(maxsize=_SHAPES)(self._rows_by_shapes)
        self._session = session
        self._merge = merge
        self._digest = digest
        self._form = requests
        self._places = {
            **locate_columns(session.signature, self.wire.inputs, "input"),
            **locate_columns(session.signature, self.wire.outputs, "output"),
        }
        self._buffers: dict[tuple[int, ...], tuple[dict[str, Parts], Binding]] = {}
        """By the capacities of the dimensions: the columns by tensor name, and their binding."""

    def answer(self, requests: Sequence[Request]) -> list[dict[str, Values] | RequestError]:
        """Answer requests; returns one entry for each, in order.

        An entry is the outputs by tensor name, or the error of the request.
        """
        if not isinstance(self._arrays, Tensors):
            return self._answer(requests)
        answers = self._answer([_with_tensors(request) for request in requests])
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            has_arrays = not any(
                isinstance(array, torch.Tensor) for array in request.inputs.values()
            )
            if has_arrays and isinstance(answer, dict):
                answers[i] = {name: values.cpu().numpy() for name, values in answer.items()}
        return answers

    def _answer(self, requests: Sequence[Request]) -> list[dict[str, Values] | RequestError]:
        """Answer requests: in common runs if rows may be merged, else one by one."""
        checked = [self._make_job(request) for request in requests]
        jobs = [job for job in checked if isinstance(job, _Job)]
        if self._merge:
            for run in self._plan_runs(jobs):
                self._run_merged(run)
        else:
            for job in jobs:
                self._run_alone(job)
        return [job if isinstance(job, RequestError) else self._job_result(job) for job in checked]

    def _job_result(self, job: _Job) -> dict[str, Values] | RequestError:
        """Return a job's outputs by tensor name, joined if the request was cut, or its error."""
        if job.error is not None:
            return job.error
        if len(job.answers) == 1:
            return job.answers[0]
        join = self._arrays.library.concatenate
        return {name: join([part[name] for part in job.answers]) for name in job.answers[0]}

    def _make_job(self, request: Request) -> _Job | RequestError:
        """Check a request. Returns its job, or the error that the client gets for an answer."""
        if request.digest is not None and request.digest != self._digest:
            return WrongVersionError(
                f"asked for bundle {request.digest[:12]}, this server runs "
                f"{(self._digest or 'unknown')[:12]}"
            )
        if request.form is not None and request.form != self._form:
            return WrongVersionError(
                f"the request is of the form {request.form}, this server takes {self._form}"
            )
        inputs = request.inputs
        if missing := self._input_set - inputs.keys():
            return RequestError(f"the request misses {min(missing)}")
        if extra := inputs.keys() - self._input_set:
            return RequestError(f"the request has an unknown {min(extra)}")
        arrays = [inputs[name] for name in self._input_names]
        try:
            shapes = tuple([(array.dtype, array.shape) for array in arrays])
            return _Job(request, self._rows_of(shapes))
        except RequestError as error:
            return error

    def _rows_by_shapes(self, shapes: Shapes) -> Mapping[str, int]:
        """Return the row counts by dimension of a request with inputs of these dtypes and shapes.

        Raises RequestError if they do not fit the model.
        """
        rows: dict[str, int] = {}
        for tensor, (dtype, shape) in zip(self.wire.inputs, shapes, strict=True):
            if dtype != (wanted := self._arrays.dtype(tensor)):
                raise RequestError(f"input {tensor.name} is {dtype}, the model takes {wanted}")
            n = tensor.rows_in(shape)
            if shape != tensor.shape(n):
                raise RequestError(
                    f"input {tensor.name} has shape {tuple(shape)}, the model takes "
                    f"{tensor.described}"
                )
            if not tensor.scalar and rows.setdefault(tensor.rows, n) != n:
                raise RequestError(
                    f"input {tensor.name} has {n} rows, another of {tensor.rows!r} has "
                    f"{rows[tensor.rows]}"
                )
        for dim in self._session.signature.dims:
            self._check_range(dim, rows)
        return rows

    def _check_range(self, dim: str, rows: Mapping[str, int]) -> None:
        """Raise RequestError if the row count of `dim` is missing, or outside the compiled range.

        If a request may be cut, each of its pieces must be within the range.
        """
        limits = self._session.signature.ranges[dim]
        if dim not in rows:
            raise RequestError(f"no input has rows of {dim!r}: its count is not known")
        n = rows[dim]
        pieces = max(1, -(-n // limits.max)) if self._merge else 1  # the division is rounded up
        if not limits.min * pieces <= n <= limits.max * pieces:
            raise RequestError(
                f"{dim} = {n} is outside the compiled range {limits.min} … {limits.max}"
            )

    def _plan_runs(self, jobs: Sequence[_Job]) -> list[_Run]:
        """Distribute the requests over runs, in order. The model has only one row dimension.

        Only a request with more rows than the compiled maximum is cut, into even pieces.
        """
        (dim,) = self._session.signature.dims
        limit = self._session.signature.ranges[dim].max
        runs: list[_Run] = []
        for job in jobs:
            for start, stop in _even_cuts(job.rows[dim], limit):
                rows = stop - start
                if not runs or runs[-1].rows + rows > limit:
                    runs.append(_Run())
                runs[-1].pieces.append(_Piece(job, start, rows))
                runs[-1].rows += rows
        return runs

    def _run_merged(self, run: _Run) -> None:
        """Run the pieces of several requests at once, and give each job its rows of the answer."""
        (dim,) = self._session.signature.dims
        try:
            inputs = {name: _views_of_rows(name, run.pieces) for name in self._input_names}
            outputs = self._run(inputs, {dim: run.rows})
        except _FAILURES as error:
            for piece in run.pieces:
                piece.job.error = _request_error(error)
            return
        start = 0
        for piece in run.pieces:
            stop = start + piece.rows
            piece.job.answers.append({name: rows[start:stop] for name, rows in outputs.items()})
            start = stop

    def _run_alone(self, job: _Job) -> None:
        """Run one request by itself, and give its job the answer, or the error of the run."""
        try:
            inputs = {name: [values] for name, values in job.request.inputs.items()}
            job.answers.append(self._run(inputs, job.rows))
        except _FAILURES as error:
            job.error = _request_error(error)

    def _run(
        self, inputs: Mapping[str, Sequence[Values]], rows: Mapping[str, int]
    ) -> dict[str, Values]:
        """Run the artifact once, and return the outputs by tensor name, in new memory.

        `inputs`: by tensor name, the arrays whose rows are joined. `rows`: by dimension, how many
        rows these have together.
        """
        columns, binding = self._bind_buffers(rows)
        for tensor in self.wire.inputs:
            values = [self._arrays.on_device(array) for array in inputs[tensor.name]]
            _write_joined(tensor, columns[tensor.name], values, rows[tensor.rows])
        binding(rows)
        answers = {}
        for tensor in self.wire.outputs:
            view_or_copy = tensor.gather(columns[tensor.name], 0, rows[tensor.rows])
            answers[tensor.name] = self._arrays.copy(view_or_copy)
        self._arrays.wait()
        return answers

    def _bind_buffers(self, rows: Mapping[str, int]) -> tuple[dict[str, Parts], Binding]:
        """Return buffers with room for the rows, and the binding to them.

        The buffers are the physical columns by tensor name. They are made if no earlier run of this
        size has made them.
        """
        signature = self._session.signature
        capacity = {}
        for dim in signature.dims:
            power_of_two = 1 << (rows[dim] - 1).bit_length()  # the smallest with room for the rows
            capacity[dim] = min(signature.ranges[dim].max, max(_SMALLEST, power_of_two))
        key = tuple(capacity.values())
        if key not in self._buffers:
            collections = {
                name: Collection(layout, capacity[signature.rows_of[name]], self._session.device)
                for name, layout in signature.layouts.items()
            }
            memory = self._arrays.views(argument_tensors(signature, collections, capacity))
            columns = {name: place.parts(memory) for name, place in self._places.items()}
            binding = self._session.bind(
                {name: collections[name] for name in signature.input_collections},
                {name: collections[name] for name in signature.output_collections},
            )
            self._buffers[key] = (columns, binding)
        return self._buffers[key]


def _with_tensors(request: Request) -> Request:
    """Return the request with each array copied into a tensor. Tensors stay the same."""
    inputs = {
        name: array if isinstance(array, torch.Tensor) else torch.tensor(array)
        for name, array in request.inputs.items()
    }
    return request._replace(inputs=inputs)


def _even_cuts(n: int, limit: int) -> Iterable[tuple[int, int]]:
    """Cut n rows into as few parts as the limit allows, of even size.

    Returns (start, stop) of each: for 7 rows and limit 3, (0, 2), (2, 4), (4, 7).
    """
    if n <= limit:
        return ((0, n),)
    parts = -(-n // limit)  # rounded up
    return pairwise([n * i // parts for i in range(parts + 1)])


def _views_of_rows(name: str, pieces: Sequence[_Piece]) -> list[Values]:
    """Return the pieces' rows of the input `name`, as views of the requests' arrays."""
    views = []
    for job, start, rows in pieces:
        values = job.request.inputs[name]
        views.append(values if rows == len(values) else values[start : start + rows])
    return views


def _write_joined(tensor: WireTensor, columns: Parts, values: Sequence[Values], n: int) -> None:
    """Write the rows of several arrays, one after the other, into the columns of a tensor.

    `n`: how many rows they have together. Each value is copied only once if the columns are
    adjacent in memory, or if there is only one array.
    """
    if len(values) == 1:
        tensor.scatter(columns, 0, values[0])
    elif (view := tensor.window(columns, 0, n)) is not None:
        library_of(view).concatenate(values, out=view)
    else:
        tensor.scatter(columns, 0, library_of(values[0]).concatenate(values))


def _request_error(error: Exception) -> RequestError:
    """Convert an error of a run to an answer: the first line of its text, or its type's name."""
    lines = str(error).strip().splitlines()
    return RequestError(lines[0] if lines else type(error).__name__)
