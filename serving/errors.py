"""Errors between a session and a server, each with one clear line."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class ServingError(SoaPipelineError):
    """A version that cannot be served, or a missing library or program that serving needs."""

    code = "serving"


class ServerError(ServingError):
    """A local Triton that does not start, is not ready in time, or has died."""

    code = "server"


class RequestError(ServingError):
    """In the server: one request that does not fit the model. Other requests are answered."""

    code = "request"


class WrongVersionError(RequestError):
    """In the server: a request for another bundle than the one that runs, or in another form."""

    code = "wrong-version"


class RemoteError(ServingError):
    """In the client: a request without a usable answer. No output was written."""

    code = "remote"


class ServerGoneError(RemoteError):
    """No server answers at the address, or it accepts no more requests, after all retries."""

    code = "server-gone"


class BusyError(ServerGoneError):
    """The server's queue is full, so it accepts no request now."""

    code = "busy"


class DeadlineError(RemoteError):
    """No answer within the deadline: the server hangs, or is too slow."""

    code = "deadline"


class RefusedError(RemoteError):
    """The server answered with an error; the text is the server's."""

    code = "server-refused"


class VersionMismatchError(RemoteError):
    """The server runs another version or bundle than the registry says, or has no such model."""

    code = "version-mismatch"


class AnswerError(RemoteError):
    """An answer that cannot be right: a wrong name, dtype or shape, or NaN from sound inputs."""

    code = "answer"


class TooLargeError(RemoteError):
    """A request or an answer that is larger than gRPC can send."""

    code = "too-large"


class NowhereError(RemoteError):
    """No server or device of the site gave an answer. The text says why for each."""

    code = "nowhere"
