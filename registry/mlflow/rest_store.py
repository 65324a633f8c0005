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
_MLFLOW_ONLY = (
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
    """Return whether variables or plugins ask for something that only MLflow's client does."""
    insecure = _read_flag("MLFLOW_TRACKING_INSECURE_TLS", "false")
    if insecure and os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
        return True  # a user's mistake: MLflow reports it
    if any(os.environ.get(name) for name in _MLFLOW_ONLY):
        return True
    return any(entry_points(group=group) for group in _PLUGINS)


@contextlib.contextmanager
def open_server(uri: str) -> Iterator[RestStore | None]:
    """Yield a store that asks the server at `uri`, or None if MLflow's client must be used.

    That is so if requests need what this file does not implement: an authentication plugin, AWS
    signatures, workspaces, or headers or stores of an MLflow plugin.
    """
    if _needs_mlflow():
        yield None
        return
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    limit = int(_read_number("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 7))
    retries = Retry(
        total=limit, connect=limit, read=limit, redirect=limit, status=limit,
        status_forcelist=_PASSING,
        allowed_methods=None,
        backoff_factor=_read_number("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", 2),
        backoff_jitter=_read_number("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", 1),
        respect_retry_after_header=_read_flag("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "true"),
    )  # fmt: skip
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retries))
        yield RestStore(session, uri)


class RestStore:
    """A `Store` that sends HTTP requests. `Store` says what the methods return.

    `session`: an open `requests.Session`, which the caller closes.
    """

    def __init__(self, session: Any, uri: str) -> None:
        self._session, self._uri = session, uri.rstrip("/")
        timeout_s = _read_number("MLFLOW_HTTP_REQUEST_TIMEOUT", 120)
        self._options = {**request_options(), "timeout": timeout_s}

    def model(self, name: str) -> StoredModel | None:
        """Return the model of that name, or None, also for a prompt, which the server gives too."""
        answer = self._request_or_none("registered-models/get", name=name)
        if answer is None or PROMPT in _parse_tags(answer["registered_model"]):
            return None
        return _parse_model(answer["registered_model"])

    def models(self) -> list[StoredModel]:
        """Return all models. The server leaves prompts out."""
        query = {"max_results": 100}
        models = self._search("GET", "registered-models/search", "registered_models", query)
        return [_parse_model(model) for model in models]

    def versions(self, name: str) -> list[StoredVersion]:
        """Return all versions of a model. The server leaves those of prompts out."""
        query = {"filter": f"name = '{name}'", "max_results": 10_000}
        versions = self._search("GET", "model-versions/search", "model_versions", query)
        return [_parse_version(version) for version in versions]

    def version(self, name: str, number: int) -> StoredVersion | None:
        """Return one version of a model; None also for that of a prompt, which the server gives."""
        answer = self._request_or_none("model-versions/get", name=name, version=number)
        version = None if answer is None else _parse_version(answer["model_version"])
        return None if version is None or PROMPT in version.tags else version

    def experiment(self, name: str) -> StoredExperiment | None:
        """Return the experiment of that name, or None. The server also finds a deleted one."""
        answer = self._request_or_none("experiments/get-by-name", experiment_name=name)
        if answer is None:
            return None
        experiment = answer["experiment"]
        active = experiment["lifecycle_stage"] == "active"
        return StoredExperiment(str(experiment["experiment_id"]), active)

    def runs(self, query: RunQuery) -> list[StoredRun]:
        """Return the runs that `query` asks for, also deleted ones."""
        body: dict[str, Any] = {
            "experiment_ids": [query.experiment],
            "filter": query.filter,
            "run_view_type": "ALL",
            "order_by": query.order_by,
            "max_results": query.limit or PAGE,
        }
        runs = self._search("POST", "runs/search", "runs", body)
        return [_parse_run(run) for run in islice(runs, query.limit)]

    def _search(
        self, method: str, path: str, field: str, query: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Yield the objects in the `field` of each page of an answer.

        A page is requested only when its first object is needed.
        """
        argument = "params" if method == "GET" else "json"
        while True:
            page = self._request(method, path, **{argument: query})
            yield from page.get(field, ())
            if not page.get("next_page_token"):
                return
            query = {**query, "page_token": page["next_page_token"]}

    def _request_or_none(self, path: str, **query: Any) -> Any | None:
        """Return the server's answer, or None if the object that is asked for does not exist."""
        try:
            return self._request("GET", path, params=query)
        except RestError as error:
            if error.error_code == _MISSING:
                return None
            raise

    def _request(self, method: str, path: str, **content: Any) -> Any:
        """Send a request to MLflow's server and return its JSON answer. Raises RestError.

        `content`: the argument of `requests` for it, `params` or `json`.
        """
        url = f"{self._uri}/{_API}/{path}"
        response = self._session.request(method, url, **self._options, **content)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if isinstance(answer, dict) and response.status_code == 200:
            return answer
        if not isinstance(answer, dict):
            answer = {"message": f"HTTP {response.status_code}, and no JSON, for {response.url}"}
        code = answer.get("error_code", f"HTTP_{response.status_code}")
        raise RestError(f"{code}: {answer.get('message')}", str(code))


def request_options() -> dict[str, Any]:
    """Return the arguments of `requests` for every request, from MLflow's environment variables."""
    insecure = _read_flag("MLFLOW_TRACKING_INSECURE_TLS", "false")
    return {
        "headers": _authorization_header(),
        "verify": os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or not insecure,
        "cert": os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"),
        "allow_redirects": _read_flag("MLFLOW_ALLOW_HTTP_REDIRECTS", "true"),
    }


def _authorization_header() -> dict[str, str]:
    """Return the authorization header as MLflow makes it; it may be empty.

    User and password, from variables or MLflow's file, take precedence over a token.
    """
    file = configparser.ConfigParser(interpolation=None)
    file.read(Path.home() / ".mlflow" / "credentials")
    saved = file["mlflow"] if file.has_section("mlflow") else {}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or saved.get("mlflow_tracking_username")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD") or saved.get("mlflow_tracking_password")
    if user and password:
        text = base64.standard_b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {text}"}
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return {}


def _read_number(name: str, default: float) -> float:
    """Read a number from an environment variable. Raises RegistryError for another text."""
    text = os.environ.get(name, str(default))
    try:
        return float(text)
    except ValueError:
        raise RegistryError(f"{name}={text}: a number is needed") from None


def _read_flag(name: str, default: str) -> bool:
    """Return whether an environment variable is `true` or `1`, as MLflow reads it."""
    return os.environ.get(name, default).lower() in _TRUE


def _parse_model(model: Mapping[str, Any]) -> StoredModel:
    """Return our record of a `registered_model`. The server leaves out fields that are empty."""
    aliases = {str(entry["alias"]): int(entry["version"]) for entry in model.get("aliases", ())}
    return StoredModel(str(model["name"]), model.get("description", ""), aliases)


def _parse_version(version: Mapping[str, Any]) -> StoredVersion:
    """Return our record of a `model_version`. The server leaves out fields that are empty."""
    return StoredVersion(
        str(version["name"]),
        int(version["version"]),
        created=int(version["creation_timestamp"]),
        run_id=version.get("run_id", ""),
        source=str(version.get("source")),
        tags=_parse_tags(version),
    )


def _parse_run(run: Mapping[str, Any]) -> StoredRun:
    """Return our record of a `run`. One that has not ended has no `end_time`."""
    info = run["info"]
    start, end = info.get("start_time"), info.get("end_time")
    return StoredRun(
        str(info["run_id"]),
        str(info["status"]),
        start=None if start is None else int(start),
        end=None if end is None else int(end),
        tags=_parse_tags(run["data"]),
    )


def _parse_tags(tagged: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of an object's tags, by key."""
    return {str(tag["key"]): str(tag.get("value", "")) for tag in tagged.get("tags", ())}
