"""The run of a version: its files, numbers and tags in MLflow, before there is a version of it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import yaml

from registry import author, description
from registry.annex import Annex
from registry.artifacts import FOLDER, annex_place, local_folder, repository
from registry.bundle import Bundle
from registry.errors import BundleError
from registry.manifest import TargetRecord
from registry.mlmodel import MLMODEL
from registry.report_page import page
from registry.version import DIGEST, Version, tag_of

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    from registry.mlflow_access import Access

REPORT = "report.html"
"""In the run's artifacts, where MLflow's page shows it."""


def begin(client: MlflowClient, experiment: str, name: str, bundle: Bundle) -> Run:
    tags = {
        DIGEST: bundle.digest,
        "mlflow.user": author.user(),
        "mlflow.source.name": "soa-pipeline",
        "mlflow.note.content": description.markdown(bundle),
    }
    return client.create_run(experiment, run_name=f"{name} {bundle.digest[:12]}", tags=tags)


def upload(client: MlflowClient, run: Run, bundle: Bundle) -> str:
    """Copy the files, checked where the store is a folder of this host; returns their URI."""
    from mlflow.entities import Param

    client.log_artifacts(run.info.run_id, str(bundle.path), FOLDER)
    source = f"{run.info.artifact_uri.rstrip('/')}/{FOLDER}"
    local = local_folder(source)
    if local is not None and Bundle.open(local).digest != bundle.digest:
        raise BundleError(f"{bundle.path}: changed while it was being registered")
    manifest, run_id = bundle.manifest, run.info.run_id
    params = [Param(k, v) for k, v in description.parameters(manifest).items()]
    for start in range(0, len(params), 100):  # MLflow takes no more at once
        client.log_batch(run_id, params=params[start : start + 100])
    _log_targets(client, run_id, manifest.targets)
    title = f"{manifest.name}, bundle {bundle.digest[:12]}"
    client.log_text(run_id, page(title, manifest, manifest.targets, bundle.digest), REPORT)
    if MLMODEL in bundle.files:
        _log_model(client, run_id, bundle)
    return source


def _log_model(client: MlflowClient, run: str, bundle: Bundle) -> None:
    """Let MLflow's page of the run say that the folder is a model, and how to use it."""
    described = yaml.safe_load(bundle.file(MLMODEL).read_text())
    named = {key: described[key] for key in ("flavors", "utc_time_created")}
    model = {"run_id": run, "artifact_path": FOLDER} | named
    client.set_tag(run, "mlflow.log-model.history", json.dumps([model]))


def _log_targets(client: MlflowClient, run: str, targets: Mapping[str, TargetRecord]) -> None:
    """The numbers of targets, each as it is and over the rows."""
    from mlflow.entities import Metric

    now = int(datetime.now(UTC).timestamp() * 1000)
    found = [Metric(k, v, now, 0) for k, v in description.metrics(targets).items()]
    found += [Metric(k, v, now, step) for k, v, step in description.curves(targets)]
    for start in range(0, len(found), 1000):
        client.log_batch(run, found[start : start + 1000])


def upload_annex(client: MlflowClient, version: Version, annex: Annex) -> None:
    """Copy an annex beside the version's bundle. Nobody sees it before its tag is there."""
    run, place = str(version.run_id), annex_place(annex.target, annex.digest)
    client.log_artifacts(run, str(annex.path), place)
    local = local_folder(f"{client.get_run(run).info.artifact_uri.rstrip('/')}/{place}")
    if local is not None and Annex.open(local).digest != annex.digest:
        raise BundleError(f"{annex.path}: changed while it was being registered")


def describe_annex(client: MlflowClient, version: Version, bundle: Bundle, annex: Annex) -> None:
    """Numbers, report and description of what was built for a version later, as of the rest.

    For people, and after the tag that counts: best effort.
    """
    record, run = annex.record.record, str(version.run_id)
    title = f"{version.ref} on {annex.target}, annex {annex.digest[:12]}"
    text = page(title, bundle.manifest, {annex.target: record}, annex.digest)
    with contextlib.suppress(Exception):
        _log_targets(client, run, {annex.target: record})
        client.log_text(run, text, f"report.{tag_of(annex.target)}.html")
        found = client.get_model_version(version.name, str(version.number)).description or ""
        longer = description.with_target(found, annex.target, record)
        client.update_model_version(version.name, str(version.number), longer)
        client.set_tag(run, "mlflow.note.content", longer)


def discard_annex(access: Access, client: MlflowClient, version: Version, annex: Annex) -> None:
    """Leave nothing of an annex that came to nothing. Best effort, as `discard`."""
    with contextlib.suppress(Exception):
        where = client.get_run(str(version.run_id)).info.artifact_uri.rstrip("/")
        where = f"{where}/{annex_place(annex.target, annex.digest)}"
        local = local_folder(where)
        if local is None:
            repository(access, where).delete_artifacts()
            return
        shutil.rmtree(local, ignore_errors=True)
        for empty in (local.parent, local.parent.parent):
            empty.rmdir()  # fails, and should, where another annex is


def discard(client: MlflowClient, run: Run) -> None:
    """Leave no half of a version. Best effort: the error that brought us here is the news."""
    with contextlib.suppress(Exception):
        # Broken off just after the version was made (Ctrl-C, a lost answer), it owns the files.
        if client.search_model_versions(f"run_id = '{run.info.run_id}'"):
            return
        local = local_folder(run.info.artifact_uri)
        if local is not None and local.parent.name == run.info.run_id:
            shutil.rmtree(local.parent, ignore_errors=True)
        client.set_terminated(run.info.run_id, "FAILED")
