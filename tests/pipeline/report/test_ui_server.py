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
from pipeline.report.ui_server import listening, site
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
    made = copy_of(empty_database.parent, folder / "store")
    for seed in (1, 2):
        data = MANIFEST | {"description": f"<b>number {seed}</b>"}
        bundles.write_bundle(folder / str(seed), as_record(Manifest, data), seed)
        version = made.register(Bundle.open(folder / str(seed)))
    made.promote(version, "production", PASSED)
    return made


@pytest.fixture(scope="module")
def get(registry: Registry) -> Iterator[Get]:
    with listening("127.0.0.1", 0) as listener:
        at = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(site(registry), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def ask(path: str, **headers: str) -> tuple[int, str]:
            request = urllib.request.Request(at + path, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        yield ask
        server.should_exit = True
        thread.join(60)


def test_models_versions_history(get: Get) -> None:
    status, models = get("/")
    assert status == 200 and 'href="/models/jets"' in models and "@production 2" in models
    status, model = get("/models/jets")
    read = check(model)
    assert status == 200 and "promotion of jets/2 to @production" in read.text
    assert model.index('href="/models/jets/2"') < model.index('href="/models/jets/1"')
    for number in (1, 2):
        status, version = get(f"/models/jets/{number}")
        assert status == 200 and f"<b>number {number}</b>" in check(version).text


def test_two_side_by_side(get: Get) -> None:
    assert 'href="/models/jets/2/beside/1"' in get("/models/jets/2")[1]
    status, both = get("/models/jets/2/beside/1")
    read = check(both)
    assert status == 200 and "<b>number 1</b>" in read.text and "<b>number 2</b>" in read.text


def test_what_is_not_there(get: Get) -> None:
    for path in ("/models/none", "/models/jets/7", "/models/jets/1/beside/9"):
        status, said = get(path)
        assert status == 404 and "Traceback" not in said
        check(said)
    assert get("/models/jets/first")[0] == 422
    assert get("/docs")[0] == 404


def test_a_name_that_others_point_here_gets_nothing(get: Get) -> None:
    assert get("/", Host="evil.example")[0] == 400  # type: ignore[call-arg]


def test_a_registry_that_is_down(registry: Registry, get: Get) -> None:
    place = Path(registry.uri.removeprefix("sqlite:///"))
    kept = place.read_bytes()
    try:
        place.write_bytes(b"this is no database" * 100)
        status, said = get("/models/jets")
        assert status == 503
        check(said)
    finally:
        place.write_bytes(kept)


def test_it_only_reads(registry: Registry, get: Get) -> None:
    before = [(v.ref, v.aliases, dict(v.tags)) for v in registry.versions("jets")]
    for path in ("/", "/models/jets", "/models/jets/1"):
        get(path)
    assert [(v.ref, v.aliases, dict(v.tags)) for v in registry.versions("jets")] == before


def test_an_address_that_is_taken() -> None:
    with listening("127.0.0.1", 0) as taken, pytest.raises(ReportError, match="--port") as refused:
        listening("127.0.0.1", taken.getsockname()[1])
    assert refused.value.code == "port" and str(refused.value).count("127.0.0.1") == 1
