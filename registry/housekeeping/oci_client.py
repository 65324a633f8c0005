"""One repository of an OCI registry, through oras-py.

oras reads the passwords that `docker login` has stored, gets tokens, and uploads in one piece or in
chunks. This file changes four things. oras would repeat a failed request for two minutes, wait for
an answer without end, and keep a token that has expired or that only lets it read. And a registry
could send a password or a token to any place without TLS.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import oras.auth
import oras.container
import oras.provider
import requests
import urllib3
from requests.adapters import HTTPAdapter

from registry.errors import NotFoundError, RegistryError, RegistryUnavailableError
from registry.mlflow import reason

ANSWER_S = 120.0
"""How long to wait for an answer; a registry may take a minute to store a large file."""
RETRIES = urllib3.Retry(
    3, backoff_factor=0.3, status_forcelist=(429, 502, 503, 504), raise_on_status=False,
    respect_retry_after_header=False,
)  # fmt: skip
IN_CHUNKS = 64 << 20
"""Larger files, in bytes, are uploaded in chunks; smaller ones are held in memory."""
LARGEST_MANIFEST = 4 << 20
"""In bytes, as the specification of OCI says."""
_PIECE = 1 << 18

logging.getLogger("oras").addHandler(logging.NullHandler())  # else its warnings are printed


class Repository:
    """The repository `name` at `host`. Raises RegistryError with a message of one line; a
    RegistryUnavailableError if a later try may work."""

    def __init__(self, host: str, name: str) -> None:
        self.shown = f"oci://{host}/{name}"
        here = is_loopback(urlsplit(f"//{host}").hostname)
        self._client = _Client(host, insecure=here)
        for scheme in ("http://", "https://"):
            self._client.session.mount(scheme, _Adapter(max_retries=RETRIES))
        self._client.session.headers["Accept-Encoding"] = "identity"  # digests are of plain bytes
        self._container = oras.container.Container("repository", registry=host)
        self._container.repository = name
        self._url = f"{self._client.prefix}://{host}/v2/"
        with self._errors():
            self._log_in(host)

    def manifest(self, reference: str) -> bytes | None:
        """The content of a manifest by tag or digest; None if there is none."""
        kinds = ", ".join(oras.defaults.default_manifest_accepted_media_types)
        with self._answer(f"manifests/{reference}", headers={"Accept": kinds}) as answer:
            if answer is None:
                return None
            content: bytes = answer.raw.read(LARGEST_MANIFEST + 1, decode_content=False)
        if len(content) > LARGEST_MANIFEST:
            raise RegistryError(f"{self.shown}: the manifest of {reference} has more than 4 MiB")
        return content

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> Mapping[str, str]:
        """Store a manifest under a tag or its digest; return the headers of the answer."""
        url = f"{self._url}{self._container.api_prefix}/manifests/{reference}"
        with self._errors():
            answer = self._client.do_request(
                url, "PUT", data=content, headers={"Content-Type": media_type}
            )
            self._require(answer, f"PUT of the manifest {reference}")
        return answer.headers

    def upload(self, source: Path, layer: Mapping[str, Any]) -> bool:
        """Store a file that the registry lacks; False if it has it. `layer`: its descriptor."""
        with self._errors():
            answer = self._client.upload_blob(
                str(source), self._container, dict(layer), do_chunked=layer["size"] > IN_CHUNKS
            )
            self._require(answer, f"upload of {source}")
        return answer.request is not None  # oras makes an answer of its own if there is no upload

    def upload_bytes(self, content: bytes, layer: Mapping[str, Any]) -> bool:
        with tempfile.NamedTemporaryFile(prefix="soa-oci-") as file:
            file.write(content)
            file.flush()
            return self.upload(Path(file.name), layer)

    @contextlib.contextmanager
    def blob(self, digest: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The content of a blob: the byte with which it begins, `start` or 0, and its pieces."""
        span = {"Range": f"bytes={start}-"} if start else {}
        with self._answer(f"blobs/{digest}", headers=span) as answer:
            if answer is None:
                raise NotFoundError(f"{self.shown}: {digest[:19]}… is not there any more")
            begin = start if answer.status_code == 206 else 0
            yield begin, answer.raw.stream(_PIECE, decode_content=False)

    @contextlib.contextmanager
    def _answer(self, place: str, **given: Any) -> Iterator[requests.Response | None]:
        """The answer to a GET, whose body is not read yet; None if there is no such thing."""
        with self._errors():
            url = f"{self._url}{self._container.api_prefix}/{place}"
            with self._client.do_request(url, stream=True, **given) as answer:
                if answer.status_code != 404:
                    self._require(answer, f"GET of {place}")
                yield answer if answer.status_code != 404 else None

    def _require(self, answer: requests.Response, what: str) -> None:
        if not 200 <= answer.status_code < 300:
            raise RegistryError(f"{self.shown}: {what}: {_said(answer)}")

    def _log_in(self, host: str) -> None:
        """Find out which kind of login the registry asks for, and read the stored password."""
        client = self._client
        answer = client.session.get(self._url, verify=client._tls_verify)
        asked = answer.headers.get("WWW-Authenticate", "") if answer.status_code == 401 else ""
        basic = asked.lower().startswith("basic")
        if basic:
            client.auth = oras.auth.get_auth_backend(
                "basic", client.session, client.prefix == "http"
            )
        try:
            client.auth.load_configs(self._container)
        except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
            raise RegistryError(
                f"~/.docker/config.json has no password for {host} that can be read: {error}"
            ) from error
        if basic and not getattr(client.auth, "_basic_auth", None):
            raise no_login(self.shown, _said(answer))
        # A function, even one that adds nothing, keeps requests from adding passwords of ~/.netrc.
        headers = client.auth.get_auth_header() if basic else {}
        client.session.auth = _only_to(host, headers)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except requests.exceptions.SSLError as error:
            raise RegistryError(
                f"{self.shown}: no trusted certificate ({reason(error)}); REQUESTS_CA_BUNDLE names "
                "the file of another authority"
            ) from error
        except (requests.exceptions.ConnectionError, requests.exceptions.Timeout,
                urllib3.exceptions.HTTPError) as error:  # fmt: skip
            raise RegistryUnavailableError(f"{self.shown}: {reason(error)}") from error
        except (requests.exceptions.RequestException, ValueError) as error:
            raise RegistryError(f"{self.shown}: {reason(error)}") from error


class _Client(oras.provider.Registry):  # type: ignore[misc]
    def do_request(
        self,
        url: str,
        method: str = "GET",
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        json: Any = None,
        stream: bool = False,
    ) -> requests.Response:
        def ask() -> requests.Response:
            once = oras.provider.Registry.do_request.__wrapped__  # without its repetitions
            try:
                answer: requests.Response = once(
                    self, url, method, data, dict(headers or {}), json, stream
                )
            except ValueError as error:
                if str(error) == "Cannot respond to request for authentication.":
                    raise no_login(url, "no token") from error
                raise
            return answer

        answer = ask()
        if answer.status_code == 401 and getattr(self.auth, "token", None):
            self.auth.token = None  # it has expired, or is for reading only
            answer = ask()
        if answer.status_code in (401, 403):
            raise no_login(url, _said(answer))
        if answer.status_code == 429 or answer.status_code >= 500:
            raise RegistryUnavailableError(f"{url}: {_said(answer)}")
        return answer


class _Adapter(HTTPAdapter):
    """Each request has a time limit, and leaves this host by TLS only, wherever it is sent. Of an
    answer that is not streamed, or is an error, only so much is read as a manifest may have."""

    def send(
        self, request: Any, stream: bool = False, timeout: Any = None, *given: Any, **more: Any
    ) -> requests.Response:
        place = urlsplit(request.url)
        if place.scheme != "https" and not is_loopback(place.hostname):
            raise RegistryError(f"{place.scheme}://{place.netloc}: not asked, as it is without TLS")
        answer = super().send(request, stream, ANSWER_S, *given, **more)
        if not stream or answer.status_code >= 400:
            content = answer.raw.read(LARGEST_MANIFEST, decode_content=True)
            answer.close()
            answer.raw = io.BytesIO(content)
        return answer


def is_loopback(host: str | None) -> bool:
    """True for a name or an address that never leaves this host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def no_login(where: str, why: str) -> RegistryError:
    return RegistryError(
        f"{where}: not allowed ({why}): `docker login`, or another program that writes "
        "~/.docker/config.json, stores a user and a password",
        code="registry-login",
    )


def _only_to(host: str, headers: Mapping[str, str]) -> Any:
    def add(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if urlsplit(request.url or "").netloc == host:
            request.headers.update(headers)
        return request

    return add


def _said(answer: requests.Response) -> str:
    """The status of an answer, and what its body says about the error."""
    with contextlib.suppress(Exception):  # it may be of any form, or break off
        first = answer.json()["errors"][0]
        return f"HTTP {answer.status_code}, {first['code']}: {str(first['message'])[:200]}"
    return f"HTTP {answer.status_code} {answer.reason or ''}".rstrip()
