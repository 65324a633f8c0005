"""`pipeline ui`: a registry in a browser, which is only read."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from pipeline.errors import ReportError
from pipeline.report.ui_server import make_site, open_listener
from registry.bundle.bundle import Bundle
from registry.bundle.manifest import Manifest
from registry.store.registry import Registry
from soa.records import as_record
from tests.fuzz.test_records import MANIFEST
from tests.models import bundles
from tests.models.bundles import PASSED
from tests.models.versions import copy_of
from tests.pipeline.report.test_pages import check

Get = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Registry:
    """jets/1, and jets/2 in production."""
    folder = tmp_path_factory.mktemp("site")
    store = copy_of(empty_database.parent, folder / "store")
    for seed in (1, 2):
        data = MANIFEST | {"description": f"<b>number {seed}</b>"}
        bundles.write_bundle(folder / str(seed), as_record(Manifest, data), seed)
        version = store.register(Bundle.open(folder / str(seed)))
    store.promote(version, "production", PASSED)
    return store


@pytest.fixture(scope="module")
def get(registry: Registry) -> Iterator[Get]:
    """Asks a server on this host for a path, and returns the status and the text."""
    with open_listener("127.0.0.1", 0) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(make_site(registry), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def ask(path: str, **headers: str) -> tuple[int, str]:
            request = urllib.request.Request(address + path, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        yield ask
        server.should_exit = True
        thread.join(60)


def test_models_versions_history(get: Get) -> None:
    """Each page leads to the next: models, the model with its history, each version."""
    status, models = get("/")
    assert status == 200 and 'href="/models/jets"' in models and "@production 2" in models
    status, model = get("/models/jets")
    assert status == 200 and "promotion of jets/2 to @production" in check(model).text
    assert model.index('href="/models/jets/2"') < model.index('href="/models/jets/1"')
    for number in (1, 2):
        status, version = get(f"/models/jets/{number}")
        assert status == 200 and f"<b>number {number}</b>" in check(version).text


def test_a_version_leads_to_its_differences_from_another(get: Get) -> None:
    assert 'href="/models/jets/2/beside/1"' in get("/models/jets/2")[1]
    status, page = get("/models/jets/2/beside/1")
    text = check(page).text
    assert status == 200 and "<b>number 1</b>" in text and "<b>number 2</b>" in text


@pytest.mark.parametrize("path", ["/models/none", "/models/jets/7", "/models/jets/1/beside/9"])
def test_what_does_not_exist_has_a_page_that_says_so(get: Get, path: str) -> None:
    status, page = get(path)
    assert status == 404 and "Traceback" not in page
    check(page)


@pytest.mark.parametrize(("path", "status"), [("/models/jets/first", 422), ("/docs", 404)])
def test_other_paths_are_refused(get: Get, path: str, status: int) -> None:
    """A version has a number; FastAPI's own pages are not served."""
    assert get(path)[0] == status


def test_a_name_that_others_point_here_gets_nothing(get: Get) -> None:
    assert get("/", Host="evil.example")[0] == 400  # type: ignore[call-arg]


def test_a_registry_that_is_down_is_no_error_of_the_server(registry: Registry, get: Get) -> None:
    database = Path(registry.uri.removeprefix("sqlite:///"))
    content = database.read_bytes()
    try:
        database.write_bytes(b"this is no database" * 100)
        status, page = get("/models/jets")
        assert status == 503
        check(page)
    finally:
        database.write_bytes(content)


def test_pages_change_nothing_in_the_registry(registry: Registry, get: Get) -> None:
    before = [(v.ref, v.aliases, dict(v.tags)) for v in registry.versions("jets")]
    for path in ("/", "/models/jets", "/models/jets/1"):
        get(path)
    assert [(v.ref, v.aliases, dict(v.tags)) for v in registry.versions("jets")] == before


def test_an_address_that_is_taken_is_refused_with_the_option_for_another() -> None:
    with (
        open_listener("127.0.0.1", 0) as taken,
        pytest.raises(ReportError, match="--port") as refused,
    ):
        open_listener("127.0.0.1", taken.getsockname()[1])
    assert refused.value.code == "port" and str(refused.value).count("127.0.0.1") == 1
