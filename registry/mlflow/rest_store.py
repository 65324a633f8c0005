"""A `Store` that uses the public REST API of an MLflow server.

Requests are sent as MLflow's client sends them: by `requests`, with the same retries. They use
MLflow's variables (MLFLOW_TRACKING_USERNAME, _PASSWORD, _TOKEN, _INSECURE_TLS, _SERVER_CERT_PATH,
_CLIENT_CERT_PATH, MLFLOW_HTTP_REQUEST_*), its file `~/.mlflow/credentials`, and the proxies and
certificates that `requests` takes from the environment. If a request needs code of MLflow or of its
plugins (see `open_server`), MLflow's client is used instead.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

from registry.errors import RegistryError
from registry.mlflow.store_protocol import (
    PAGE,
    PROMPT,
    RunQuery,
    StoredExperiment,
    StoredModel,
    StoredRun,
    StoredVersion,
)

_API = "api/2.0/mlflow"
_MISSING = "RESOURCE_DOES_NOT_EXIST"
_PASSING = (408, 429, 500, 502, 503, 504)  # temporary errors: MLflow's client sends again
_OURS_NOT = (
    "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_WORKSPACE",
    "MLFLOW_ENABLE_WORKSPACES",
    "DATABRICKS_RUNTIME_VERSION",
)
_PLUGINS = (
    "mlflow.request_header_provider",
    "mlflow.tracking_store",
    "mlflow.model_registry_store",
)
_TRUE = ("true", "1")


class RestError(OSError):
    """The server refused a request. `error_code`: MLflow's code of the error."""

    def __init__(self, text: str, error_code: str) -> None:
        super().__init__(text)
        self.error_code = error_code


def _needs_mlflow() -> bool:
    insecure = _is_true("MLFLOW_TRACKING_INSECURE_TLS", "false")
    if insecure and os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
        return True  # a user's mistake: MLflow reports it
    if any(os.environ.get(name) for name in _OURS_NOT):
        return True
    return any(entry_points(group=group) for group in _PLUGINS)


@contextlib.contextmanager
def open_server(uri: str) -> Iterator[RestStore | None]:
    """The store, or None if requests need what this file does not implement: an authentication
    plugin, AWS signatures, workspaces, or headers or stores of an MLflow plugin."""
    if _needs_mlflow():
        yield None
        return
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    most = int(_number("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 7))
    retries = Retry(
        total=most, connect=most, read=most, redirect=most, status=most,
        status_forcelist=_PASSING,
        allowed_methods=None,
        backoff_factor=_number("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", 2),
        backoff_jitter=_number("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", 1),
        respect_retry_after_header=_is_true("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "true"),
    )  # fmt: skip
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retries))
        yield RestStore(session, uri)


class RestStore:
    """A `Store` that sends HTTP requests."""

    def __init__(self, session: Any, uri: str) -> None:
        self._session, self._uri = session, uri.rstrip("/")
        self._how = {**settings(), "timeout": _number("MLFLOW_HTTP_REQUEST_TIMEOUT", 120)}

    def model(self, name: str) -> StoredModel | None:
        answer = self._get("registered-models/get", name=name)
        if answer is None or PROMPT in _tags(answer["registered_model"]):
            return None
        return _model(answer["registered_model"])

    def models(self) -> list[StoredModel]:
        place, asked = "registered-models/search", {"max_results": 100}
        return [_model(each) for each in self._pages("GET", place, "registered_models", asked)]

    def versions(self, name: str) -> list[StoredVersion]:
        asked = {"filter": f"name = '{name}'", "max_results": 10_000}
        pages = self._pages("GET", "model-versions/search", "model_versions", asked)
        return [_version(each) for each in pages]

    def version(self, name: str, number: int) -> StoredVersion | None:
        answer = self._get("model-versions/get", name=name, version=number)
        version = None if answer is None else _version(answer["model_version"])
        return None if version is None or PROMPT in version.tags else version

    def experiment(self, name: str) -> StoredExperiment | None:
        answer = self._get("experiments/get-by-name", experiment_name=name)
        if answer is None:
            return None
        known = answer["experiment"]
        return StoredExperiment(str(known["experiment_id"]), known["lifecycle_stage"] == "active")

    def runs(self, query: RunQuery) -> list[StoredRun]:
        asked: dict[str, Any] = {
            "experiment_ids": [query.experiment],
            "filter": query.filter,
            "run_view_type": "ALL",
            "order_by": query.order_by,
            "max_results": query.limit or PAGE,
        }
        pages = self._pages("POST", "runs/search", "runs", asked)
        return [_run(each) for each in islice(pages, query.limit)]

    def _pages(self, method: str, place: str, what: str, asked: Mapping[str, Any]) -> Iterator[Any]:
        """The objects `what` of every page, each of which is asked for when it is needed."""
        sent = "params" if method == "GET" else "json"
        while True:
            page = self._answer(method, place, **{sent: asked})
            yield from page.get(what, ())
            if not page.get("next_page_token"):
                return
            asked = {**asked, "page_token": page["next_page_token"]}

    def _get(self, place: str, **asked: Any) -> Any | None:
        """The server's answer, or None if the requested object does not exist."""
        try:
            return self._answer("GET", place, params=asked)
        except RestError as error:
            if error.error_code == _MISSING:
                return None
            raise

    def _answer(self, method: str, place: str, **sent: Any) -> Any:
        """The JSON answer of MLflow's server. Raises RestError."""
        answer = self._session.request(method, f"{self._uri}/{_API}/{place}", **self._how, **sent)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if isinstance(content, dict) and answer.status_code == 200:
            return content
        if not isinstance(content, dict):
            content = {"message": f"HTTP {answer.status_code}, and no JSON, for {answer.url}"}
        code = content.get("error_code", f"HTTP_{answer.status_code}")
        raise RestError(f"{code}: {content.get('message')}", str(code))


def settings() -> dict[str, Any]:
    """Arguments of `requests` for every request, from MLflow's environment variables."""
    insecure = _is_true("MLFLOW_TRACKING_INSECURE_TLS", "false")
    return {
        "headers": _authorization(),
        "verify": os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or not insecure,
        "cert": os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"),
        "allow_redirects": _is_true("MLFLOW_ALLOW_HTTP_REDIRECTS", "true"),
    }


def _authorization() -> dict[str, str]:
    """The authorization header, as MLflow makes it: user and password take precedence over a
    token."""
    file = configparser.ConfigParser(interpolation=None)
    file.read(Path.home() / ".mlflow" / "credentials")
    known = file["mlflow"] if file.has_section("mlflow") else {}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or known.get("mlflow_tracking_username")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD") or known.get("mlflow_tracking_password")
    if user and password:
        text = base64.standard_b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {text}"}
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return {}


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        return float(text)
    except ValueError:
        raise RegistryError(f"{name}={text}: a number is needed") from None


def _is_true(name: str, default: str) -> bool:
    return os.environ.get(name, default).lower() in _TRUE


def _model(found: Mapping[str, Any]) -> StoredModel:
    aliases = {str(e["alias"]): int(e["version"]) for e in found.get("aliases", ())}
    return StoredModel(str(found["name"]), found.get("description", ""), aliases)


def _version(found: Mapping[str, Any]) -> StoredVersion:
    return StoredVersion(
        str(found["name"]),
        int(found["version"]),
        created=int(found["creation_timestamp"]),
        run_id=found.get("run_id", ""),
        source=str(found.get("source")),
        tags=_tags(found),
    )


def _run(found: Mapping[str, Any]) -> StoredRun:
    info = found["info"]
    start, end = info.get("start_time"), info.get("end_time")
    return StoredRun(
        str(info["run_id"]),
        str(info["status"]),
        start=None if start is None else int(start),
        end=None if end is None else int(end),
        tags=_tags(found["data"]),
    )


def _tags(found: Mapping[str, Any]) -> dict[str, str]:
    return {str(each["key"]): str(each.get("value", "")) for each in found.get("tags", ())}
