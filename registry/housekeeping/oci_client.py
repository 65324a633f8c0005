"""One repository of an OCI registry, through oras-py.

oras reads the passwords that `docker login` has stored, gets tokens, and uploads in one piece or in
chunks. It is changed here where it would repeat a failed request for two minutes, wait for an
answer without end, keep a token that has expired or that only lets it read, or let a registry send
a password to any place without TLS.
"""

from __future__ import annotations

import contextlib
import io
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
from registry.mlflow import error_text
from soa.errors import SoaPipelineError

ANSWER_S = 120.0
"""How long to wait for an answer; a registry may take a minute to store a large file."""
RETRIES = urllib3.Retry(total=3, backoff_factor=0.3, respect_retry_after_header=False)
IN_CHUNKS = 64 << 20
"""Larger files, in bytes, are uploaded in chunks; smaller ones are held in memory."""
LARGEST_MANIFEST = 4 << 20
"""In bytes, as the specification of OCI says."""
THIS_HOST = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked without TLS."""
_PIECE = 1 << 18

logging.getLogger("oras").addHandler(logging.NullHandler())  # else its warnings are printed


class Repository(oras.provider.Registry):  # type: ignore[misc]
    """The repository `name` at `host`, and the artifact there with this digest, else this tag.

    Raises RegistryError with a message of one line; a RegistryUnavailableError if a later try may
    work.
    """

    def __init__(self, host: str, name: str, tag: str | None, digest: str | None) -> None:
        super().__init__(host, insecure=urlsplit(f"//{host}").hostname in THIS_HOST)
        self.shown = f"oci://{host}/{name}"
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Adapter(max_retries=RETRIES))
        self.session.headers["Accept-Encoding"] = "identity"  # digests are of plain bytes
        self.container = oras.container.Container("repository", registry=host)
        self.container.repository, self.digest = name, digest
        self._manifest = f"{self.prefix}://{self.container.manifest_url(digest or tag)}"
        self.session.auth = lambda request: request  # else requests takes passwords of ~/.netrc
        with self._translate_errors():
            self._log_in(host)

    def _log_in(self, host: str) -> None:
        """Take the password that `docker login` stored for the host.

        It is used in the way that the registry asks for: basic authentication, or by default a
        token for each request.
        """
        answer = self.session.get(f"{self.prefix}://{host}/v2/")
        basic = answer.headers.get("WWW-Authenticate", "").lower().startswith("basic")
        if basic:
            self.auth = oras.auth.get_auth_backend("basic", self.session)
            self.auth.set_basic_auth("", "")  # if none is stored
        try:
            self.auth.load_configs(self.container)
        except Exception as error:  # oras does not check the file
            why = f"~/.docker/config.json cannot be used: {error_text(error)}"
            raise RegistryError(f"{self.shown}: {why}") from error
        if basic:  # at once: a registry may close the connection instead of taking a large file
            self.headers.update(self.auth.get_auth_header())

    def read_manifest(self, media_type: str) -> bytes:
        """Read the artifact's manifest, at most its first LARGEST_MANIFEST bytes."""
        with self._open_body(self._manifest, Accept=media_type) as raw:
            return bytes(raw.read(LARGEST_MANIFEST, decode_content=False))

    def put_manifest(self, content: bytes, media_type: str) -> None:
        """Store the artifact's manifest. From then on the tag names this artifact."""
        self.do_request(self._manifest, "PUT", data=content, headers={"Content-Type": media_type})

    def upload(self, file: Path, layer: Mapping[str, Any]) -> None:
        """Upload a file, unless the registry has it. `layer`: its descriptor."""
        in_chunks = layer["size"] > IN_CHUNKS
        with self._translate_errors():
            self.upload_blob(str(file), self.container, dict(layer), do_chunked=in_chunks)

    def upload_bytes(self, content: bytes, layer: Mapping[str, Any]) -> None:
        """Do what `upload` does for content in memory, by way of a temporary file."""
        with self._translate_errors(), tempfile.NamedTemporaryFile(prefix="soa-oci-") as file:
            file.write(content)
            file.flush()
            self.upload(Path(file.name), layer)

    def read_pieces(self, digest: str) -> Iterator[bytes]:
        """Yield the content of a blob in pieces of at most `_PIECE` bytes."""
        url = f"{self.prefix}://{self.container.get_blob_url(digest)}"
        with self._open_body(url) as raw:
            yield from raw.stream(_PIECE, decode_content=False)

    @contextlib.contextmanager
    def _open_body(self, url: str, **headers: str) -> Iterator[Any]:
        """Request a URL and yield the body of the answer, as urllib3 gives it.

        Raises NotFoundError if there is nothing at the URL.
        """
        answer = self.do_request(url, headers=self.headers | headers, stream=True)
        with self._translate_errors(), answer:
            if answer.status_code == 404:
                raise NotFoundError(f"{self.shown}: there is no {url.rpartition('/')[2]}")
            yield answer.raw

    def do_request(self, url: str, *arguments: Any, **options: Any) -> requests.Response:
        """Send a request and return the answer; this replaces oras's method.

        An answer with an error is raised as RegistryError, except HTTP 404, which is returned. An
        expired token is replaced once.
        """
        send = oras.provider.Registry.do_request.__wrapped__  # without its repetitions
        with self._translate_errors():
            answer: requests.Response = send(self, url, *arguments, **options)
            if answer.status_code == 401 and getattr(self.auth, "token", None):
                self.auth.token = None  # it has expired, or is for reading only
                answer = send(self, url, *arguments, **options)
        if answer.ok or answer.status_code == 404:
            return answer
        body = " ".join(answer.text[:200].split())
        why = f"{self.shown}: HTTP {answer.status_code} {body or answer.reason}"
        if answer.status_code in (401, 403):
            raise _login_error(why)
        if answer.status_code == 429 or answer.status_code >= 500:
            raise RegistryUnavailableError(why)
        raise RegistryError(why)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of the connection and wrong answers in the block into RegistryErrors."""
        try:
            yield
        except SoaPipelineError:
            raise
        except (requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError) as error:
            raise RegistryUnavailableError(f"{self.shown}: {error_text(error)}") from error
        except Exception as error:  # oras does not check answers
            why = f"{self.shown}: an answer is wrong: {error_text(error)}"
            if "authentication" in why:
                raise _login_error(why) from error
            raise RegistryError(why) from error


class _Adapter(HTTPAdapter):
    """Sends requests that have a time limit, and that leave this host by TLS only.

    Of an answer that is not streamed, or is an error, only as much is read as a manifest may have.
    """

    def send(self, request: Any, **options: Any) -> requests.Response:  # type: ignore[override]
        """Do what `HTTPAdapter.send` does. Raises RegistryError for another host without TLS."""
        url = urlsplit(request.url)
        if url.scheme != "https" and url.hostname not in THIS_HOST:
            raise RegistryError(f"{url.scheme}://{url.netloc}: not asked, as it is without TLS")
        answer = super().send(request, **(options | {"timeout": ANSWER_S}))
        if not options["stream"] or answer.status_code >= 400:
            content = answer.raw.read(LARGEST_MANIFEST, decode_content=True)
            answer.close()
            answer.raw = io.BytesIO(content)
        return answer


def _login_error(answer: str) -> RegistryError:
    """Return the error for an `answer` that refuses the user, with what can be done about it."""
    cure = "`docker login`, or what else writes ~/.docker/config.json, stores a user and a password"
    return RegistryError(f"{answer}: {cure}", code="registry-login")
