"""A server of Triton's protocol in this process, with real gRPC, which can be told to misbehave."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from runtime.session.session import Session
from serving.errors import RequestError, WrongVersionError
from serving.triton.backend import Core, Request
from serving.triton.config import Service, config_message

Fault = Callable[[Any, Any], Any]
"""`fault(answer, context)`: the answer to send in its place; `context` is that of gRPC."""

NAN = b"\0\0\xc0\x7f"


def aborts(code: grpc.StatusCode, message: str, times: float = math.inf) -> Fault:
    """Every answer, or only the first `times` of them, is an error."""
    left = times

    def fault(answer: Any, context: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            context.abort(code, message)  # raises
        return answer

    return fault


def changed(index: int, **fields: Any) -> Fault:
    """Another `name`, `datatype`, `shape` or content (`raw`) of one output."""

    def fault(answer: Any, context: Any) -> Any:
        described = answer.outputs[index]
        if "raw" in fields:
            answer.raw_output_contents[index] = fields["raw"]
        if "shape" in fields:
            described.shape[:] = fields["shape"]
        for name in fields.keys() & {"name", "datatype"}:
            setattr(described, name, fields[name])
        return answer

    return fault


def nan(index: int, rows: Iterable[int] | None = None) -> Fault:
    """NaN in an output, in all its elements or in some."""

    def fault(answer: Any, context: Any) -> Any:
        values = np.frombuffer(answer.raw_output_contents[index], np.float32).copy()
        values[slice(None) if rows is None else [*rows]] = np.nan
        answer.raw_output_contents[index] = values.tobytes()
        return answer

    return fault


def without_the_last(answer: Any, context: Any) -> Any:
    """A fault: the content of the last output is missing."""
    del answer.raw_output_contents[-1]
    return answer


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers like our backend in Triton. `fault(answer, context)` may change an answer."""

    def __init__(self, session: Session, service: Service) -> None:
        self.session, self.service = session, service
        self.core = Core(
            session, merge=service.merge, digest=service.digest, requests=service.requests
        )
        self.fault: Fault = lambda answer, context: answer
        self.ready = True
        self.requests = 0
        self.rows: list[int] = []
        """The rows of each answered request."""
        self._lock = threading.Lock()

    def ServerReady(self, request: Any, context: Any) -> Any:
        """As a Triton that loads another model."""
        return service_pb2.ServerReadyResponse(ready=False)

    def ModelReady(self, request: Any, context: Any) -> Any:
        version = (self.service.name, str(self.service.number))
        is_served = (request.name, request.version) == version
        return service_pb2.ModelReadyResponse(ready=is_served and self.ready)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        number = str(self.service.number)
        return service_pb2.ModelMetadataResponse(name=self.service.name, versions=[number])

    def ModelConfig(self, request: Any, context: Any) -> Any:
        if request.name != self.service.name or request.version not in (
            "", str(self.service.number)
        ):  # fmt: skip
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}/{request.version}")
        return service_pb2.ModelConfigResponse(config=config_message(self.service))

    def ModelInfer(self, request: Any, context: Any) -> Any:
        with self._lock:
            self.requests += 1
            dtypes = {array.name: array.dtype for array in self.core.wire.inputs}
            inputs = {
                described.name: np.frombuffer(raw, dtypes[described.name]).reshape(described.shape)
                for described, raw in zip(request.inputs, request.raw_input_contents, strict=True)
            }
            digest, form = (request.parameters[key].string_param for key in ("digest", "requests"))
            (result,) = self.core.answer([Request(inputs, digest, form)])
        if isinstance(result, WrongVersionError):
            context.abort(grpc.StatusCode.NOT_FOUND, str(result))
        if isinstance(result, RequestError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(result))
        assert isinstance(result, dict)  # `abort` raises
        first = self.core.wire.inputs[0]
        self.rows.append(first.rows_in(inputs[first.name].shape))
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        for array in self.core.wire.outputs:
            values = result[array.name]
            answer.outputs.add(name=array.name, datatype=array.datatype, shape=values.shape)
            answer.raw_output_contents.append(values.tobytes())
        return self.fault(answer, context)

    def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @contextmanager
    def listening(self, address: str = "127.0.0.1:0", credentials: Any = None) -> Iterator[str]:
        """Serves while the block runs, with `credentials` by TLS; gives `triton://host:port`."""
        server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        server.start()
        try:
            yield f"triton://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
