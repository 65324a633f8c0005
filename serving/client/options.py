"""Options of the connection between a remote session and its server."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.errors import ServingError
from soa.options import COUNT, NUMBER, TEXT, check_fields, of_type

SCHEME = "triton://"

LARGEST = 2**31 - 1
"""The largest message of gRPC, in bytes."""

HEADERS = 1 << 14
"""A generous estimate of the size of a message without its arrays, in bytes."""


@dataclass(frozen=True)
class Tls:
    """The PEM files of an encrypted connection.

    Without `root_certificates`, the certificates of the system are used. A client that must
    identify itself needs `private_key` and `certificate_chain`. Raises ServingError for only one of
    these two.
    """

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    def __post_init__(self) -> None:
        """Raise ServingError for a key without its certificates, or the other way round."""
        pair = ("private_key", "certificate_chain")
        for named, missing in (pair, pair[::-1]):
            if getattr(self, named) is not None and getattr(self, missing) is None:
                raise ServingError(f"TLS with {named} and no {missing}: name both, or neither")


_FIELD_KINDS = {
    "deadline_s": NUMBER,
    "retries": COUNT,
    "in_flight": COUNT,
    "shared_memory": of_type("True, False, or text", bool, str),
    "compression": TEXT,
    "tls": of_type("Tls(…)", Tls).or_none,
    "message_bytes": COUNT,
}


@dataclass(frozen=True)
class RemoteOptions:
    """Settings of the communication with a server. Raises ServingError for a value out of range.

    `deadline_s`: the time limit of a call with all its retries. `retries`: the number of further
    attempts if there is no connection, if it broke, or if the server's queue is full; running a
    model twice is harmless.

    `in_flight`: the largest number of requests of `run_async` at the same time. `shared_memory`:
    pass arrays through system memory that client and server share, so both must be on one host.
    `message_bytes`: the largest message; if the rows are independent, more rows than fit are sent
    in several messages. `allow_nan`: accept NaN answers to inputs without NaN or infinity.

    Examples
    --------
    >>> pipeline.RemoteOptions(deadline_s=2, retries=1).in_flight
    8
    """

    deadline_s: float = 10.0
    retries: int = 3
    in_flight: int = 8
    shared_memory: bool | str = False
    compression: Literal["none", "gzip", "deflate"] = "none"
    tls: Tls | None = None
    allow_nan: bool = False
    message_bytes: int = LARGEST

    def __post_init__(self) -> None:
        """Raise ServingError for a value that cannot be used."""
        check_fields(ServingError, "RemoteOptions", self, _FIELD_KINDS)
        if not 0 < self.deadline_s < math.inf or self.retries < 0 or self.in_flight < 1:
            raise ServingError(
                f"deadline_s={self.deadline_s:g}, retries={self.retries}, "
                f"in_flight={self.in_flight}: they must be above 0, at least 0 and at least 1"
            )
        if not HEADERS < self.message_bytes <= LARGEST:
            raise ServingError(
                f"message_bytes={self.message_bytes}: it must be above {HEADERS}, and at most "
                f"{LARGEST}"
            )
        if self.compression not in ("none", "gzip", "deflate"):
            raise ServingError(f"compression {self.compression!r}: use none, gzip or deflate")
        if str(self.shared_memory).startswith("cuda"):
            raise ServingError(
                f"shared_memory={self.shared_memory!r}: GPU memory is no longer shared: use True, "
                "with collections on the CPU"
            )
        if self.shared_memory not in (True, False, "system"):
            raise ServingError(f"shared_memory={self.shared_memory!r}: use True or False")

    @property
    def cuda(self) -> None:
        """Always None: GPU memory is no longer shared. This property ends with version 1."""


def address_of(url: str) -> str:
    """Return the `host:port` in `triton://host:port`. Raises ServingError for another form.

    `host` is a name, an IPv4 address, or an IPv6 address in brackets.
    """
    address = url.removeprefix(SCHEME)
    host, _, port = address.rpartition(":")
    plain_host = re.fullmatch(r"[^\s/:@?#\[\]]+|\[[0-9A-Fa-f:.]+\]", host)
    # int() also takes "+1", "1_0", and the digits of other scripts.
    digits = re.fullmatch(r"[0-9]{1,5}", port)
    valid = plain_host and digits and 0 < int(port) < 1 << 16
    if not url.startswith(SCHEME) or not valid:
        raise ServingError(f"{url!r} is not the address of a server: write triton://HOST:PORT")
    return address
