"""The run of a version: its files, numbers and tags in MLflow, before there is a version of it."""

from __future__ import annotations

import contextlib
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from registry import author, description
from registry.annex import Annex
from registry.artifacts import FOLDER, annex_place, local_folder, repository
from registry.bundle import Bundle
from registry.errors import BundleError
from registry.version import DIGEST, Version

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    from registry.mlflow_access import Access


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
    from mlflow.entities import Metric, Param

    client.log_artifacts(run.info.run_id, str(bundle.path), FOLDER)
    source = f"{run.info.artifact_uri.rstrip('/')}/{FOLDER}"
    local = local_folder(source)
    if local is not None and Bundle.open(local).digest != bundle.digest:
        raise BundleError(f"{bundle.path}: changed while it was being registered")
    now = int(datetime.now(UTC).timestamp() * 1000)
    metrics = [Metric(k, v, now, 0) for k, v in description.metrics(bundle.manifest).items()]
    params = [Param(k, v) for k, v in description.parameters(bundle.manifest).items()]
    for start in range(0, max(len(metrics), len(params)), 100):  # MLflow takes 100 params
        part = slice(start, start + 100)
        client.log_batch(run.info.run_id, metrics[part], params[part])
    return source


def upload_annex(client: MlflowClient, version: Version, annex: Annex) -> None:
    """Copy an annex beside the version's bundle. Nobody sees it before its tag is there."""
    run, place = str(version.run_id), annex_place(annex.target, annex.digest)
    client.log_artifacts(run, str(annex.path), place)
    local = local_folder(f"{client.get_run(run).info.artifact_uri.rstrip('/')}/{place}")
    if local is not None and Annex.open(local).digest != annex.digest:
        raise BundleError(f"{annex.path}: changed while it was being registered")


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
