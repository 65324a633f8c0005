"""`pipeline ui`: shows the pages of a registry in a browser. It only reads."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from pipeline.errors import ReportError
from pipeline.report.difference import diff
from pipeline.report.pages import (
    Section,
    difference_page,
    model_page,
    models_page,
    render_page,
    version_page,
)
from registry.errors import NotFoundError
from registry.ref import Ref
from runtime.opening import Opening, open_version
from soa.errors import SoaPipelineError
from soa.text import plain

if TYPE_CHECKING:
    from registry.store import Registry
    from registry.version import Version

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_THIS_HOST = ("127.0.0.1", "localhost", "::1", "[::1]")
_one_at_a_time = threading.Lock()  # matplotlib has one set of settings per process


def make_site(registry: Registry, host: str = _THIS_HOST[0]) -> Any:
    """Return the pages of a registry as an application for an ASGI server.

    If `host`, where it will listen, is this computer, the application refuses requests that name
    another host. Raises ReportError if a library is missing.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import HTMLResponse
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ImportError as error:
        raise ReportError(
            f"`pipeline ui` needs {error.name}: pip install 'soa-pipeline[ui]'"
        ) from error

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if host in _THIS_HOST:  # protects from foreign pages whose name resolves here (DNS rebinding)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(_THIS_HOST))

    def answer(text: str, status: int = 200) -> HTMLResponse:
        return HTMLResponse(text, status, headers=_HEADERS)

    @app.exception_handler(SoaPipelineError)
    def show_error(_: Request, error: SoaPipelineError) -> HTMLResponse:
        """Answer with a page about an error: HTTP 404 if something does not exist, else 503."""
        missing = isinstance(error, NotFoundError)
        title = "Not found" if missing else "Not available now"
        return answer(render_page(title, [], [plain(error)], [HOME]), 404 if missing else 503)

    @app.get("/")
    def show_models() -> HTMLResponse:
        """Answer with the page of all models; if there is none, it says what to do."""
        versions_of = {model.name: registry.versions(model.name) for model in registry.list()}
        if not versions_of:
            empty = "It is empty: fill it with `pipeline run CONFIG`."
            return answer(render_page("Models", [Section(registry.shown, [empty])]))
        return answer(models_page(versions_of, registry.shown))

    @app.get("/models/{name}")
    def show_model(name: str) -> HTMLResponse:
        """Answer with the page of a model."""
        with _one_at_a_time:
            return answer(model_page(name, registry.versions(name), registry.history(name)))

    @app.get("/models/{name}/{number}")
    def show_version(name: str, number: int) -> HTMLResponse:
        """Answer with the page of a version, after its digests were checked."""
        version = registry.find(Ref(name, number))
        with _one_at_a_time:
            opened = open_version(Opening(version.ref, mode="test", registry=registry))
            events = registry.history(name)
            return answer(
                version_page(opened.bundle, version, events, _page_links(registry, version))
            )

    @app.get("/models/{name}/{second}/beside/{first}")
    def show_difference(name: str, second: int, first: int) -> HTMLResponse:
        """Answer with the page that compares two versions of a model."""
        with _one_at_a_time:
            difference = diff(registry, f"{name}/{first}", f"{name}/{second}")
        ends = ((f"{name}/{n}", f"/models/{name}/{n}") for n in (first, second))
        return answer(difference_page(difference, [HOME, *ends]))

    return app


HOME = ("all models", "/")


def _page_links(registry: Registry, version: Version) -> list[tuple[str, str]]:
    """Return the links from a version's page, as pairs of text and address.

    They lead to the first page, the model, the comparison with the version before, and MLflow's
    page if the registry is a tracking server.
    """
    name, number = version.name, version.number
    links = [HOME, (name, f"/models/{name}")]
    older = [v.number for v in registry.versions(name) if v.number < number]
    if older:
        other = max(older)
        links.append((f"beside {name}/{other}", f"/models/{name}/{number}/beside/{other}"))
    if registry.uri.startswith(("http://", "https://")):
        address = f"{registry.uri.rstrip('/')}/#/models/{name}/versions/{number}"
        links.append(("in MLflow", address))
    return links


def open_listener(host: str, port: int) -> socket.socket:
    """Open a socket that listens at an address. Raises ReportError if that is not available."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # Python repeats the address
        raise ReportError(
            f"cannot listen on {host}:{port}: {why}: give another --port", code="port"
        ) from error


def serve_site(registry: Registry, host: str, listener: socket.socket) -> None:
    """Serve the pages of a registry at `listener` until Ctrl-C. `host`: see `make_site`."""
    app = make_site(registry, host)
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
