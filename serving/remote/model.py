"""The executable of a remote session: one server, in whichever form it takes requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from engines.base import Executable
from engines.processes import OwnProcess
from serving.client import HEADERS
from serving.errors import AnswerError, RefusedError, VersionMismatchError
from serving.remote.exchange import Exchange, Progress
from serving.triton import DIGEST, REQUESTS
from serving.wire import Array, Form, WireTensor
from soa.signature import Signature

if TYPE_CHECKING:
    from serving.client import Client

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """How a server runs a model. `merge`: it puts the rows of several requests together."""

    target: str
    requests: Form
    merge: bool


class RemoteModel(Executable):
    """Argument tensors to a server, answers into them.

    Nothing is written unless the whole answer is in order. `name` and `version` are Triton's. How
    the server takes requests is found by a look at it, and `follow` is told.
    """

    device = torch.device("cpu")
    """Where its arguments lie."""

    def __init__(
        self, signature: Signature, client: Client, name: str, version: str, digest: str
    ) -> None:
        self.client = client
        self.options = client.options
        self._signature = signature
        self._exchange: Exchange | None = None
        self._name, self._version, self._digest = name, version, digest
        self._process = OwnProcess()
        self._regions: Any = self._shared_regions()

    def _shared_regions(self) -> Any:
        if not self.options.shared_memory:
            return None
        from serving.client import Regions

        return Regions(self.client)

    def follow(self, served: Served) -> None:
        """From now on, speak as that server wants it. Raises ServingError where nobody can."""
        now = self._exchange
        if now is None or (now.form, now.merge) != (served.requests, served.merge):
            self._exchange = Exchange.of(self._signature, served.requests, served.merge)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self._process.require()
        with self.client.one_deadline():
            self._run(arguments)

    def _run(self, arguments: Sequence[torch.Tensor]) -> None:
        progress = Progress(arguments)
        while not progress.done:
            self.ask(progress)
        progress.write()

    def ask(self, progress: Progress) -> None:
        """Answer the rows that are left, or as many of them as a message carries.

        Raises RemoteError, and then what was answered before is still there.
        """
        with self.client.one_deadline():
            self._ask_next(progress)

    def _ask_next(self, progress: Progress) -> None:
        exchange = self._current()
        left = progress.left(self._signature.dims)
        shared = self._regions is not None and all_filled(exchange, left)
        rows = left if shared else self._fitting(exchange, left)
        given = exchange.gather(progress.arguments, progress.at, rows)
        if shared:
            found = self._known(lambda: self._ask_shared(exchange, given, rows))
        else:
            found = self._ask(exchange, given, rows)
        self._check_values(exchange, found, given, progress.at)
        progress.take(exchange, None if rows == left else sum(rows.values()), found)

    def _current(self) -> Exchange:
        """One for the whole of a message: a look at the server may change it."""
        if self._exchange is None:
            raise VersionMismatchError(f"{self}: nobody has asked yet how it takes requests")
        return self._exchange

    def _known(self, ask: Callable[[], T]) -> T:
        """Once more with new regions where the server knows those there are no longer."""
        try:
            return ask()
        except (RefusedError, VersionMismatchError) as error:
            if "shared memory region" not in str(error):
                raise
            self._regions.forget()  # a new server knows none of them
            return ask()

    def _fitting(self, exchange: Exchange, left: Mapping[str, int]) -> Mapping[str, int]:
        """The rows of the next message; raises TooLargeError where they belong together."""
        rows = exchange.fitting(left, self.options.message_bytes - HEADERS)
        if rows is None:
            size = exchange.nbytes(left) + HEADERS
            raise self.client.too_large(size, "a message, whose rows may not be taken apart,")
        return rows

    def close(self) -> None:
        if not self._process.here():
            return  # all of it is the parent's
        if self._regions is not None:
            self._regions.close()
        self.client.close()

    def _request(self, exchange: Exchange, rows: Mapping[str, int]) -> Any:
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelInferRequest(model_name=self._name, model_version=self._version)
        request.parameters[DIGEST].string_param = self._digest
        request.parameters[REQUESTS].string_param = exchange.form
        for t in exchange.wire.inputs:
            request.inputs.add(name=t.name, datatype=t.datatype, shape=t.shape(rows[t.rows]))
        for t in exchange.wire.outputs:
            request.outputs.add(name=t.name)
        return request

    def _ask(
        self, exchange: Exchange, given: Mapping[str, Array], rows: Mapping[str, int]
    ) -> dict[str, Array]:
        request = self._request(exchange, rows)
        request.raw_input_contents.extend(given[t.name].tobytes() for t in exchange.wire.inputs)
        answer = self.client.infer(request)
        self._check_shapes(exchange, answer, rows)
        if len(answer.raw_output_contents) != len(answer.outputs):
            raise AnswerError(f"{self}: {len(answer.raw_output_contents)} arrays in the answer")
        found: dict[str, Array] = {}
        for described, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            t = exchange.outputs[described.name]
            if len(raw) != t.nbytes(rows[t.rows]):
                raise AnswerError(
                    f"{self}: output {t.name} has {len(raw)} bytes, needed are "
                    f"{t.nbytes(rows[t.rows])}"
                )
            found[t.name] = np.frombuffer(raw, t.dtype).reshape(t.shape(rows[t.rows]))
        return found

    def _ask_shared(
        self, exchange: Exchange, given: Mapping[str, Array], rows: Mapping[str, int]
    ) -> dict[str, Array]:
        """The same with the arrays in shared memory. The answer is a copy of it."""
        request = self._request(exchange, rows)
        places = exchange.places(rows)
        with self._regions.taken(places.size) as region:

            def view(t: WireTensor) -> Array:
                array: Array = region.memory[places.of[t.name]].view(t.dtype)
                return array.reshape(t.shape(rows[t.rows]))

            places.name_in(request, region.name)
            for t in exchange.wire.inputs:
                view(t)[...] = given[t.name]
            self._check_shapes(exchange, self.client.infer(request, region.doubt), rows)
            return {t.name: view(t).copy() for t in exchange.wire.outputs}

    def _check_shapes(self, exchange: Exchange, answer: Any, rows: Mapping[str, int]) -> None:
        names = [described.name for described in answer.outputs]
        wanted = list(exchange.outputs)
        if sorted(names) != sorted(wanted):
            raise AnswerError(
                f"{self}: the answer has outputs {', '.join(names) or 'none'}, the model has "
                f"{', '.join(wanted)}"
            )
        for described in answer.outputs:
            t = exchange.outputs[described.name]
            found = (described.datatype, tuple(described.shape))
            if found != (t.datatype, t.shape(rows[t.rows])):
                raise AnswerError(
                    f"{self}: output {t.name} is {found[0]} {found[1]}, needed is {t.datatype} "
                    f"{t.shape(rows[t.rows])}"
                )

    def _check_values(
        self, exchange: Exchange, found: Mapping[str, Array], given: Mapping[str, Array], at: int
    ) -> None:
        """Of the rows from row `at` of the request on."""
        if self.options.allow_nan:
            return
        for name, values in found.items():
            if values.dtype.kind != "f" or not np.isnan(values).any():
                continue
            if all(np.isfinite(v).all() for v in given.values() if v.dtype.kind == "f"):
                nan = np.isnan(values)
                by_row = nan.T if exchange.outputs[name].rows_last else nan
                row = at + int(by_row.reshape(len(by_row), -1).any(axis=1).argmax())
                raise AnswerError(
                    f"{self}: output {name} is NaN at row {row}, and no input is NaN or Inf"
                )

    def __str__(self) -> str:
        return f"server {self.client.address}, {self._name}/{self._version or 'any'}"


def all_filled(exchange: Exchange, rows: Mapping[str, int]) -> bool:
    """Triton takes no empty array from shared memory."""
    return all(t.nbytes(rows[t.rows]) for t in exchange.tensors)
