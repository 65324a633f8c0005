"""The MLflow run of a version: its files, metrics and tags, written before the version exists."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from registry import stamp
from registry.bundle import SUMS, Annex, Bundle, TargetRecord, write_atomically
from registry.errors import BundleError
from registry.mlflow import MLMODEL, description, summarize_model
from registry.store.bundle_files import (
    FOLDER,
    annex_path,
    copy_sealed,
    local_folder,
    remove_files,
    sealed_names,
    stored_sizes,
)
from registry.version import DIGEST, Version, tag_of

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    from registry.mlflow import Access

UPLOADING = "soa.uploading."
"""The beginning of a run's tag for each annex whose upload was begun. `TARGET.DIGEST` follows; the
value is the time (UTC)."""


def begin_run(client: MlflowClient, experiment: str, name: str, bundle: Bundle) -> Run:
    """Create the run of a new version of model `name`, and leave it open: its status is RUNNING."""
    tags = {
        DIGEST: bundle.digest,
        "mlflow.user": stamp.user(),
        "mlflow.source.name": "soa-pipeline",
        "mlflow.note.content": description.markdown(bundle),
    }
    return client.create_run(experiment, run_name=f"{name} {bundle.digest[:12]}", tags=tags)


def upload(client: MlflowClient, run: Run, bundle: Bundle) -> str:
    """Copy the files of a bundle and its annexes into the artifact store; return the bundle's URI.

    Parameters and metrics are logged, too. Copies are checked if the store is a folder of this
    host.
    """
    from mlflow.entities import Param

    run_id = run.info.run_id
    source = _copy_to_store(client, run_id, bundle, FOLDER)
    manifest = bundle.manifest
    params = [Param(name, text) for name, text in description.parameters(manifest).items()]
    for start in range(0, len(params), 100):  # MLflow accepts at most 100 at once
        client.log_batch(run_id, params=params[start : start + 100])
    _log_metrics(client, run_id, manifest.targets)
    if MLMODEL in bundle.files:
        # Then MLflow's page of the run shows that the folder is a model, and how to use it.
        model = {"run_id": run_id, "artifact_path": FOLDER} | summarize_model(manifest)
        client.set_tag(run_id, "mlflow.log-model.history", json.dumps([model]))
    for annex in bundle.annexes.values():
        upload_annex(client, run_id, annex)
    return source


def upload_annex(client: MlflowClient, run: str, annex: Annex) -> None:
    """Copy an annex next to the run's bundle. It has no effect until a version's tag names it."""
    client.set_tag(run, f"{UPLOADING}{tag_of(annex.target)}.{annex.digest}", stamp.now())
    _copy_to_store(client, run, annex, annex_path(annex.target, annex.digest))


def _copy_to_store(client: MlflowClient, run: str, sealed: Bundle | Annex, path: str) -> str:
    """Copy a sealed folder to `path` among the artifacts of a run; return its URI there.

    If the store is a folder of this host, the copy is atomic, and another process may copy the same
    folder. Otherwise the files are copied one by one.
    """
    uri = f"{client.get_run(run).info.artifact_uri.rstrip('/')}/{path}"
    local = local_folder(uri)
    if local is None:
        for name in sealed_names(sealed):
            subfolder = f"{path}/{name}".rpartition("/")[0]
            client.log_artifact(run, str(sealed.path / name), subfolder)
    else:
        try:
            if not local.is_dir():
                with write_atomically(local) as partial:
                    copy_sealed(sealed, partial)
        except BundleError:
            if not local.is_dir():  # else another process was faster
                raise
    # Check the copy, or if the store is not a local folder, the original files once more.
    if type(sealed).open(local or sealed.path).digest != sealed.digest:
        raise BundleError(f"{sealed.path}: changed while it was being registered")
    return uri


def _log_metrics(client: MlflowClient, run: str, targets: Mapping[str, TargetRecord]) -> None:
    """Log the metrics of targets; `description.metrics` describes their names."""
    from mlflow.entities import Metric

    now = stamp.milliseconds(datetime.now(UTC))
    metrics = [Metric(name, value, now, step) for name, value, step in description.metrics(targets)]
    for start in range(0, len(metrics), 1000):  # MLflow accepts at most 1000 at once
        client.log_batch(run, metrics[start : start + 1000])


def require_annex(access: Access, client: MlflowClient, run: str, annex: Annex) -> None:
    """Raise BundleError if a file of an annex is not in the store.

    To be called before a tag or a version names the annex.
    """
    path = annex_path(annex.target, annex.digest)
    sizes = stored_sizes(access, f"{client.get_run(run).info.artifact_uri.rstrip('/')}/{path}")
    if missing := sorted({*annex.files, SUMS} - sizes.keys()):
        raise BundleError(
            f"{annex.path}: {missing[0]} is not in the registry any more: it took so long that "
            "`pipeline registry gc` took it for abandoned; run the command again"
        )


def require_open(access: Access, client: MlflowClient, run: Run, bundle: Bundle) -> None:
    """Raise BundleError if the run of a registration is not open, or if an annex lacks a file.

    `pipeline registry gc` ends a run before it removes the files.
    """
    if client.get_run(run.info.run_id).info.status != "RUNNING":
        raise BundleError(
            f"{bundle.path}: it took so long to be registered that `pipeline registry gc` took it "
            "for abandoned; run the command again"
        )
    for annex in bundle.annexes.values():
        require_annex(access, client, run.info.run_id, annex)


def add_annex_to_pages(client: MlflowClient, version: Version, annex: Annex) -> None:
    """Add the metrics and the description of an annex to MLflow's pages of a version.

    The tag that adds the target is already set, so a failure is ignored.
    """
    record, run = annex.record.record, str(version.run_id)
    with contextlib.suppress(Exception):
        _log_metrics(client, run, {annex.target: record})
        # MLflow's entity is read again: `Version` has no description.
        text = client.get_model_version(version.name, str(version.number)).description or ""
        longer = description.append_target(text, annex.target, record)
        client.update_model_version(version.name, str(version.number), longer)
        client.set_tag(run, "mlflow.note.content", longer)


def discard_annex(access: Access, client: MlflowClient, version: Version, annex: Annex) -> None:
    """Remove the files of an annex that was not added to its version."""
    uri = client.get_run(str(version.run_id)).info.artifact_uri.rstrip("/")
    remove_files(access, f"{uri}/{annex_path(annex.target, annex.digest)}")


def discard(client: MlflowClient, run: Run) -> None:
    """Remove the files of a version that was not created; a failure is ignored."""
    with contextlib.suppress(Exception):
        # The version may exist all the same (Ctrl-C or a lost answer): then it needs the files.
        if client.search_model_versions(f"run_id = '{run.info.run_id}'"):
            return
        local = local_folder(run.info.artifact_uri)
        if local is not None and local.parent.name == run.info.run_id:
            shutil.rmtree(local.parent, ignore_errors=True)
        client.set_terminated(run.info.run_id, "FAILED")
