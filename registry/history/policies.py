"""Policies kept in the registry: for all of its models, or for one.

Each policy that was ever set is an MLflow run of the experiment "soa-pipeline policy" (no model can
have that name), with its reference set as an artifact. The last finished run counts, so a run whose
writer was killed never does. Nothing is overwritten: MLflow's page lists who set what, and when.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from registry import stamp
from registry.errors import NoRegistryError, RegistryError
from registry.history.lock import write_lock
from registry.mlflow import ClientStore, RunQuery, Store, StoredRun, models
from soa.files import digest_of
from soa.text import plain

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.mlflow import Access
    from registry.promotion import Policy, SourcedPolicy

_EXPERIMENT = "soa-pipeline policy"
_SCOPE = "soa.policy.scope"
_TEXT = "soa.policy"
_SHA256 = "soa.policy.reference"
_EVERY_MODEL = "*"
_LONGEST = 5000  # of a policy as JSON, in characters


def set_policy(access: Access, policy: Policy, model: str | None, reference: Path | None) -> None:
    """Make `policy` the one for all promotions of `model`, or if that is None, of all models.

    `reference`: the file of the policy's reference set, which is copied into the registry.
    """
    text, readable = policy.model_dump_json(exclude_defaults=True), policy.model_dump_json(indent=1)
    if len(text) > _LONGEST:
        raise RegistryError(f"the policy is longer than {_LONGEST} characters: shorten it")
    with access.client(write=True) as client:
        with write_lock(access, client, _EXPERIMENT):
            folder = "soa-pipeline.policy"
            experiment = models.ensure_experiment(access, client, _EXPERIMENT, folder)
        run = client.create_run(
            experiment,
            run_name=f"policy of {model or 'every model'}",
            tags={
                _SCOPE: model or _EVERY_MODEL,
                _TEXT: text,
                _SHA256: "" if reference is None else digest_of(reference),
                "mlflow.user": plain(stamp.user_at_host()),
                "mlflow.source.name": "soa-pipeline",
                "mlflow.note.content": plain(f"```json\n{readable}\n```", "\n"),
            },
        )
        if reference is not None:
            client.log_artifact(run.info.run_id, str(reference))
        _finish_as_last(access, client, experiment, model, run.info.run_id)


def _finish_as_last(
    access: Access, client: MlflowClient, experiment: str, model: str | None, run: str
) -> None:
    """Give the run of a policy an end later than those of the model's other policies.

    The run that ends last counts. The lock is taken only now, because copying a reference set
    before may be slow.
    """
    with write_lock(access, client, _EXPERIMENT) as lock:
        last = _last_run(ClientStore(client), experiment, model)
        now = stamp.milliseconds(datetime.now(UTC))
        # A finished run has an end, so `or 0` is only for the types.
        end = now if last is None else max(now, (last.end or 0) + 1)
        lock.check()
        client.set_terminated(run, "FINISHED", end_time=end)


def policies_in_force(
    access: Access, model: str | None, into: Path | None = None
) -> list[SourcedPolicy]:
    """Return the registry's policy and that of `model`, as far as they are set.

    Their reference sets are copied into the folder `into` and their digests are checked; if `into`
    is None, they are not copied.
    """
    try:
        with access.reading() as store:
            experiment = models.find_experiment(access, store, _EXPERIMENT)
            if experiment is None:
                return []
            scopes = [None] if model is None else [None, model]
            runs = [_last_run(store, experiment, scope) for scope in scopes]
            return [_read_policy(access, run, into) for run in runs if run is not None]
    except NoRegistryError:
        return []  # the first `run` makes the registry


def _last_run(store: Store, experiment: str, model: str | None) -> StoredRun | None:
    """Return the run that holds the policy of `model`, or if that is None, of every model.

    Returns None if no such policy was set.
    """
    # Deleted runs count too: deleting a run on MLflow's page does not cancel the policy.
    scope = model or _EVERY_MODEL
    query = RunQuery(experiment, _SCOPE, scope, status="FINISHED", order="end_time DESC", limit=1)
    return next(iter(store.runs(query)), None)


def _read_policy(access: Access, run: StoredRun, into: Path | None) -> SourcedPolicy:
    """Read the policy that a run holds, and its origin. Raises RegistryError if it is damaged.

    Its reference set is copied into a new folder in `into`, unless that is None.
    """
    # Imported here: these need pydantic, which a lookup should not load if no policy is set.
    from pydantic import ValidationError

    from registry.promotion import Policy, ReferenceFile, SourcedPolicy

    scope = run.tags[_SCOPE]
    owner = "the registry's policy" if scope == _EVERY_MODEL else f"the registry's for {scope}"
    try:
        ended = stamp.time_of(run.end or 0)
    except (ValueError, OverflowError) as error:
        raise RegistryError(f"{owner}, MLflow's run {run.id}: {error}") from error
    set_at = ended.isoformat(timespec="milliseconds")  # so that two policies never share an origin
    origin = f"{owner}, set by {run.tags.get('mlflow.user', 'somebody')} at {set_at}"
    try:
        policy = Policy.model_validate_json(run.tags[_TEXT])
    except (KeyError, ValidationError) as error:
        raise RegistryError(
            f"{origin}, cannot be read (MLflow's run {run.id}): update soa-pipeline, or "
            "set it again"
        ) from error
    if into is None or policy.reference is None:
        return SourcedPolicy(policy, origin)
    folder = into / run.id  # two policies may name files alike
    folder.mkdir()
    name = Path(policy.reference).name
    with access.client() as client:
        path = Path(client.download_artifacts(run.id, name, str(folder)))
    sha256 = digest_of(path)
    if sha256 != run.tags.get(_SHA256):
        raise RegistryError(f"{origin}: its reference set is not the file that was named")
    return SourcedPolicy(policy, origin, ReferenceFile(path, sha256))
