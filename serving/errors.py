"""The errors between a session and a server. Each message is one line."""

from __future__ import annotations

from soa.errors import SoaPipelineError


class ServingError(SoaPipelineError):
    """A version cannot be served, or a library or program for serving is missing."""

    code = "serving"


class ServerError(ServingError):
    """A local Triton does not start, is not ready in time, or has died."""

    code = "server"


class RequestError(ServingError):
    """In the server: a request does not fit the model. Other requests are answered."""

    code = "request"


class WrongVersionError(RequestError):
    """In the server: a request is for another bundle than the running one, or has another form."""

    code = "wrong-version"


class RemoteError(ServingError):
    """In the client: a request got no usable answer. No output was written."""

    code = "remote"


class ServerGoneError(RemoteError):
    """No server answers at the address, or it accepts no more requests, after all retries."""

    code = "server-gone"


class BusyError(ServerGoneError):
    """The server's queue is full, so it accepts no request now."""

    code = "busy"


class DeadlineError(RemoteError):
    """There was no answer within the deadline: the server hangs, or is too slow."""

    code = "deadline"


class RefusedError(RemoteError):
    """The server answered with an error; the message contains its text."""

    code = "server-refused"


class VersionMismatchError(RemoteError):
    """The server runs another version or bundle than the registry says, or has no such model."""

    code = "version-mismatch"


class AnswerError(RemoteError):
    """An answer is wrong: it has another name, dtype or shape, or NaN from finite inputs."""

    code = "answer"


class TooLargeError(RemoteError):
    """A request or an answer is larger than a message of gRPC may be."""

    code = "too-large"


class NowhereError(RemoteError):
    """No server or device of the site gave an answer. The message gives the reason for each."""

    code = "nowhere"
