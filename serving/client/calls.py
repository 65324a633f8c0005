"""Calls to a Triton server over gRPC: one deadline, retries, and one typed error for each failure.

tritonclient's stub is used directly, without its client class: the methods of that class are not
safe for several threads, and its errors lose gRPC's status code.
"""

from __future__ import annotations

import contextlib
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from serving.client.options import HEADERS, LARGEST, RemoteOptions, Tls
from serving.errors import (
    BusyError,
    DeadlineError,
    RefusedError,
    RemoteError,
    ServerGoneError,
    ServingError,
    TooLargeError,
    VersionMismatchError,
)
from soa.files import read_plain

_FIRST_PAUSE_S = 0.05  # before the first retry; doubled for each further one
_SHORTEST_S = 0.001  # the shortest time limit of an attempt; gRPC's must be above 0
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.use_local_subchannel_pool", 1),  # each session has a separate connection
    ("grpc.enable_http_proxy", 0),  # a web proxy refuses other ports
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class _ThreadDeadline(threading.local):
    """The end of the thread's `one_deadline`, on the monotonic clock; infinite outside of one."""

    until = math.inf


class Client:
    """A connection to `address` (host:port). Any number of threads may call it at once."""

    def __init__(self, address: str, options: RemoteOptions) -> None:
        """Open the connection. Raises ServingError for certificates that cannot be used."""
        self.address = address
        self.options = options
        self._closed = False
        self._channel: Any = None
        self._thread = _ThreadDeadline()
        self._credentials = None if options.tls is None else _read_credentials(options.tls)
        self.reconnect()

    def reconnect(self) -> None:
        """Open a new connection. Requests in progress on the old one fail.

        Use it if a connection is dead but was not closed, for example after a proxy or a route was
        removed: TCP needs a quarter of an hour to notice that.
        """
        old = self._channel
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self.address, self._credentials, _CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        if old is not None:
            old.close()
        if self._closed:  # another thread has closed it meanwhile
            self._channel.close()

    @contextlib.contextmanager
    def one_deadline(self) -> Iterator[None]:
        """Let all calls of this thread in the `with` block share one deadline.

        If blocks are nested, the deadline of the outermost one counts.
        """
        if self._thread.until < math.inf:
            yield
            return
        self._thread.until = time.monotonic() + self.options.deadline_s
        try:
            yield
        finally:
            self._thread.until = math.inf

    def infer(self, request: Any, before_retry: Callable[[], object] | None = None) -> Any:
        """Send a ModelInferRequest and return the ModelInferResponse; raises RemoteError.

        `before_retry` is called before each retry: the server may still work on the previous
        attempt.
        """
        size = request.ByteSize()
        if size > self.options.message_bytes:
            raise self.too_large_error(size, "a request")
        return self._call(self._stub.ModelInfer, request, before_retry=before_retry)

    def too_large_error(self, size: int, what: str) -> TooLargeError:
        """Return the error for a message that is too large.

        `what`: what has `size` bytes, such as "a request".
        """
        return TooLargeError(
            f"server {self.address}: {what} of {size} bytes is more than a message carries "
            f"({self.options.message_bytes}): send fewer rows at once, or use shared memory"
        )

    def ask_config(self, name: str, version: str, within_s: float | None = None) -> Any:
        """Ask the server for Triton's ModelConfig of a model. Raises RemoteError.

        `version`: a number, or "" for any. `within_s` replaces the deadline of the options.
        """
        request = service_pb2.ModelConfigRequest(name=name, version=version)
        return self._call(self._stub.ModelConfig, request, within_s).config

    def ask_ready(self, name: str, version: str, within_s: float) -> bool:
        """Ask the server whether a model is ready; returns the answer. Raises RemoteError.

        This does not ask whether the server itself is ready: while it loads any model, and after
        any model failed to load, it is not, but it answers requests to the others.
        """
        request = service_pb2.ModelReadyRequest(name=name, version=version)
        return bool(self._call(self._stub.ModelReady, request, within_s).ready)

    def ask_versions(self, name: str) -> list[int]:
        """Ask the server which versions of a model it serves now; returns their numbers, ascending.

        The list is empty if it has no such model. Raises RemoteError for other failures.
        """
        request = service_pb2.ModelMetadataRequest(name=name)
        try:
            numbers = self._call(self._stub.ModelMetadata, request).versions
        except VersionMismatchError:  # it has no such model
            return []
        return sorted(int(version) for version in numbers if version.isdecimal())

    def load(self, name: str, config: Any, files: Mapping[str, Path]) -> None:
        """Send a model's ModelConfig and files to the server, which serves it when this returns.

        If it serves the model already, it loads these versions beside the others, then changes over
        at once; requests that it has accepted are answered by the version that they were sent to.
        `files`: by path in the model's folder.

        Raises RemoteError if the load failed: then it serves what it served before. The request is
        not sent again, since after an outage nobody knows whether the server has loaded the model.
        """
        from google.protobuf import json_format

        size = HEADERS + sum(file.stat().st_size for file in files.values())
        if size > self.options.message_bytes:
            raise self.too_large_error(size, f"the model {name}")
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        text = json_format.MessageToJson(config, preserving_proto_field_name=True)
        request.parameters["config"].string_param = text
        for path, file in files.items():
            request.parameters[f"file:{path}"].bytes_param = file.read_bytes()  # trusted
        self._call(self._stub.RepositoryModelLoad, request, retries=0)

    def unload(self, name: str) -> None:
        """Let the server accept no more requests to a model. Requests that it has accepted are
        answered. Raises RemoteError."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        self._call(self._stub.RepositoryModelUnload, request, retries=0)

    def share(self, name: str, key: str, size: int) -> None:
        """Register a region of system shared memory with the server; raises RemoteError.

        `name`: the region's name in the server. `key`: that of the memory. `size`: in bytes.
        """
        self._call(
            self._stub.SystemSharedMemoryRegister,
            service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size),
        )

    def unshare(self, name: str) -> Any:
        """Ask the server to forget a region, without waiting for the answer.

        Returns gRPC's future of the answer, or None if the connection is closed.
        """
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        try:
            method = self._stub.SystemSharedMemoryUnregister
            return method.future(request, timeout=self.options.deadline_s)
        except ValueError:  # raised by gRPC for a closed channel
            return None

    def close(self) -> None:
        """Close the connection; calls in progress fail. May be called again."""
        self._closed = True
        self._channel.close()

    def _call(
        self,
        method: Any,
        request: Any,
        within_s: float | None = None,
        before_retry: Callable[[], object] | None = None,
        retries: int | None = None,
    ) -> Any:
        """Call a method of the server, and again after an outage, as long as the deadline allows.

        `method`: a method of the stub. `within_s` and `retries` replace those of the options; the
        deadline of `one_deadline` counts, too. `before_retry` is called before each retry. Raises
        RemoteError.
        """
        retries = self.options.retries if retries is None else retries
        within_s = self.options.deadline_s if within_s is None else within_s
        until = min(time.monotonic() + within_s, self._thread.until)
        attempt = 0
        while True:
            try:
                return method(
                    request,
                    timeout=max(until - time.monotonic(), _SHORTEST_S),
                    compression=_COMPRESSION[self.options.compression],
                )
            except grpc.RpcError as error:
                pause = _FIRST_PAUSE_S * 2**attempt
                outage = error.code() is grpc.StatusCode.UNAVAILABLE
                too_late = time.monotonic() + pause >= until
                if not outage or attempt >= retries or too_late:
                    raise self._remote_error(error, attempt + 1, within_s) from None
            except ValueError as error:  # raised by gRPC for a closed channel
                raise ServerGoneError(f"{self.address}: the session is closed ({error})") from None
            attempt += 1
            if before_retry is not None:
                before_retry()
            time.sleep(pause)

    def _remote_error(self, error: Any, attempts: int, within_s: float) -> RemoteError:
        """Convert an error of gRPC to one of ours. `within_s`: the time limit, for the message."""
        code, details = error.code(), (error.details() or "").strip().split("\n")[0]
        where = f"server {self.address}"
        if "explicit model load / unload is not allowed" in details:
            return RefusedError(
                f"{where}: it loads no models: start it with --model-control-mode=explicit"
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            kind = BusyError if "maximum queue size" in details else ServerGoneError
            return kind(f"{where}: no answer after {attempts} attempts: {details}")
        if code is grpc.StatusCode.CANCELLED:
            return ServerGoneError(f"{where}: the connection was given up")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{where}: no answer within {within_s:g} s")
        if code is grpc.StatusCode.NOT_FOUND:
            return VersionMismatchError(f"{where}: {details}")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TooLargeError(f"{where}: {details}")
        return RefusedError(f"{where}: {details} ({code.name.lower()})")


def _read_credentials(tls: Tls) -> Any:
    """Read the PEM files, and return gRPC's credentials. Raises ServingError for a bad file."""
    files = (tls.root_certificates, tls.private_key, tls.certificate_chain)
    try:
        root, key, chain = (
            None if file is None else read_plain(file, links=True) for file in files
        )
    except OSError as error:
        raise ServingError(f"{error.filename}: {error.strerror}") from None
    _check_pem(tls)
    return grpc.ssl_channel_credentials(root, key, chain)


def _check_pem(tls: Tls) -> None:
    """Check the PEM files with OpenSSL. Raises ServingError, which says what is wrong.

    gRPC itself would use the system's certificates instead of an empty file, and report other bad
    files as a failed handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    files = str(tls.root_certificates)
    try:
        if tls.root_certificates is not None:
            context.load_verify_locations(tls.root_certificates)
        if tls.certificate_chain is not None and tls.private_key is not None:
            files = f"{tls.certificate_chain} with {tls.private_key}"
            # The password is "": without one, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(tls.certificate_chain, tls.private_key, lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = str(getattr(error, "reason", None) or "no key that opens without a password")
        raise ServingError(f"{files}: not PEM that TLS can use: {reason.lower()}") from None
