"""The registry: bundles as versions of MLflow registered models, and the aliases on them.

Everything here is plain MLflow: a run per version in an experiment of the model's name, the bundle
as that run's artifacts, tags, metrics and aliases. MLflow's own client and web page see the same.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import artifacts, description
from registry.artifacts import local_folder
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError, PromotionRefused, RegistryError
from registry.mlflow_access import Access
from registry.reference import Ref, parse_ref
from registry.version import DIGEST, PROMOTION, ROLLED_BACK, Promotion, Version

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

    from registry.promotion import Decision

PRODUCTION = "production"
PREVIOUS = "previous"
STAGING = "staging"

_FOLDER = "bundle"  # in the run's artifacts


@dataclass(frozen=True)
class ModelSummary:
    """One registered model. `versions` counts them."""

    name: str
    description: str
    versions: int
    latest: Version
    aliases: Mapping[str, int]


class Registry:
    """Any MLflow tracking URI; by default an SQLite file in the working folder, without a server.

    `uri`: else the variable PIPELINE_REGISTRY, else `pipeline-registry/registry.db`.
    `artifact_root`: folder or URI for the bundles of models that are new; else PIPELINE_ARTIFACTS,
    else `artifacts` beside the SQLite file, else what the tracking server decides.

    Making one touches nothing. A method that only reads never creates a registry.
    """

    def __init__(self, uri: str | None = None, artifact_root: str | Path | None = None) -> None:
        self._access = Access(uri, artifact_root)

    @property
    def uri(self) -> str:
        """Absolute, and possibly with a password."""
        return self._access.uri

    def __repr__(self) -> str:
        return f"Registry({self._access.shown!r})"

    # Reading

    def list(self) -> Sequence[ModelSummary]:
        """All models that have a version of ours, by name."""
        if not self._access.exists:
            return []
        with self._access.client() as client:
            models = _all_pages(client.search_registered_models)
            summaries = (self._summary(client, model) for model in models)
            return sorted((s for s in summaries if s is not None), key=lambda s: s.name)

    def versions(self, name: str) -> Sequence[Version]:
        """All versions of ours of a model, oldest first."""
        with self._model(name) as (client, model):
            return _our_versions(client, model)

    def find(self, ref: str | Ref) -> Version:
        """`name/3`, `name@alias`, or `name` for the latest version."""
        wanted = parse_ref(ref) if isinstance(ref, str) else ref
        if isinstance(wanted, Path):
            raise RegistryError(f"{ref}: the path of a folder, a version of the registry is needed")
        with self._model(wanted.name) as (client, model):
            aliases = _aliases(model)
            if wanted.alias is not None and wanted.alias not in aliases:
                have = ", ".join(f"@{alias}" for alias in sorted(aliases)) or "none"
                raise NotFoundError(
                    f"{wanted}: {wanted.name} has no such alias; its aliases: {have}"
                )
            number = wanted.version if wanted.alias is None else aliases[wanted.alias]
            if number is None:
                ours = _our_versions(client, model)
                if not ours:
                    raise NotFoundError(f"{wanted}: the model has no versions")
                return ours[-1]
            found = [v for v in _mlflow_versions(client, wanted.name) if int(v.version) == number]
            if not found:
                numbers = sorted(int(v.version) for v in _mlflow_versions(client, wanted.name))
                raise NotFoundError(f"{wanted}: no such version; there are: {_ranges(numbers)}")
            return Version.from_mlflow(found[0], aliases)

    # Files

    def local_path(self, version: Version) -> Path | None:
        """The version's bundle folder itself, where the artifact store is a folder on this host."""
        return artifacts.existing_folder(version)

    def fetch(self, version: Version, dest: str | Path) -> Bundle:
        """Copy the version's bundle to the new folder `dest`, whole and verified or not at all."""
        artifacts.fetch(self._access, version, Path(dest))
        return Bundle.open(dest, verify=False)

    def open(
        self, version: Version, *, verify: bool = True, cache: str | Path | None = None
    ) -> Bundle:
        """The version's bundle, in place if it is on this host, else from a cache by digest.

        `cache`: else the variable PIPELINE_CACHE, else `~/.cache/soa-pipeline`. What lies in the
        cache is verified like everything else.
        """
        path = self.local_path(version) or artifacts.cached(self._access, version, cache)
        bundle = Bundle.open(path, verify=verify)
        artifacts.require_digest(bundle, version)
        return bundle

    # Writing

    def register(self, bundle: Bundle, name: str | None = None) -> Version:
        """A new version with the bundle's files; or the version that already has this digest.

        The files go first and the version comes last: there is never a version without its files.
        A failure in between leaves a run marked FAILED and, in a local store, no files.
        """
        model = Ref(name or bundle.manifest.name).name
        bundle.verify()
        with self._access.client(write=True) as client:
            if (known := _model_of(client, model)) is not None:
                for version in _our_versions(client, known):
                    if version.digest == bundle.digest:
                        return version
            run = client.create_run(
                self._experiment(client, model),
                run_name=f"{model} {bundle.digest[:12]}",
                tags=_run_tags(bundle),
            )
            try:
                source = self._upload(client, run, bundle)
                if known is None:
                    client.create_registered_model(
                        model, description=bundle.manifest.description[:5000] or None
                    )
                client.set_terminated(run.info.run_id, "FINISHED")
                made = client.create_model_version(
                    model,
                    source,
                    run_id=run.info.run_id,
                    tags=description.tags(bundle),
                    description=description.markdown(bundle),
                )
            except BaseException:
                _discard(client, run)
                raise
            return self.find(Ref(model, int(made.version)))

    def set_alias(self, version: Version, alias: str) -> Version:
        """Point an alias at a version, without a gate: not for `production` and `previous`."""
        if alias in (PRODUCTION, PREVIOUS):
            raise RegistryError(
                f"{version.ref}: only a promotion or a rollback moves the alias '{alias}'"
            )
        _checked_alias(alias)
        with self._access.client(write=True) as client:
            self.find(Ref(version.name, version.number))
            client.set_registered_model_alias(version.name, alias, str(version.number))
            return self.find(Ref(version.name, version.number))

    def promote(self, version: Version, alias: str, decisions: Sequence[Decision]) -> Version:
        """Move `alias` to the version if every gate passed; else PromotionRefused, nothing changed.

        The version replaced in `production` becomes `previous`. Who, when and the decisions are
        kept with the version, see `Version.promotion`.
        """
        if not decisions or not all(decision.passed for decision in decisions):
            raise PromotionRefused(f"{version.ref} to @{alias}", decisions)
        if alias == PREVIOUS:
            raise RegistryError(f"{version.ref}: '{PREVIOUS}' follows from promotions, not by one")
        record = Promotion(_checked_alias(alias), _who(), _now(), (*decisions,))
        with self._access.client(write=True) as client:
            self.find(Ref(version.name, version.number))
            self._tag(client, version, PROMOTION + alias, record.to_json())
            if alias == PRODUCTION:
                self._put_in_production(client, version.name, version.number)
            else:
                client.set_registered_model_alias(version.name, alias, str(version.number))
            return self.find(Ref(version.name, version.number))

    def rollback(self, name: str) -> Version:
        """Put `previous` back in production; the version replaced becomes `previous`."""
        with self._model(name) as (_, model):
            aliases = _aliases(model)
        current, back = aliases.get(PRODUCTION), aliases.get(PREVIOUS)
        if back is None or current is None:
            gap = PREVIOUS if back is None else PRODUCTION
            raise NotFoundError(f"{name}: nothing to roll back to: no version is @{gap}")
        if back == current:
            raise RegistryError(f"{name}: @{PREVIOUS} is the version in production, {name}/{back}")
        with self._access.client(write=True) as client:
            target = self.find(Ref(name, back))
            note = json.dumps({"by": _who(), "at": _now(), "to": target.ref}, sort_keys=True)
            self._tag(client, self.find(Ref(name, current)), ROLLED_BACK, note)
            self._put_in_production(client, name, back)
            return self.find(Ref(name, back))

    def _put_in_production(self, client: MlflowClient, name: str, number: int) -> None:
        aliases = _aliases(client.get_registered_model(name))
        current, before = aliases.get(PRODUCTION), aliases.get(PREVIOUS)
        if current == number:
            return
        # `previous` first: broken off in between, production still is what it was.
        if current is not None:
            client.set_registered_model_alias(name, PREVIOUS, str(current))
        try:
            client.set_registered_model_alias(name, PRODUCTION, str(number))
        except BaseException:
            with contextlib.suppress(Exception):
                if before is not None:
                    client.set_registered_model_alias(name, PREVIOUS, str(before))
                elif current is not None:
                    client.delete_registered_model_alias(name, PREVIOUS)
            raise

    def _upload(self, client: MlflowClient, run: Run, bundle: Bundle) -> str:
        from mlflow.entities import Metric, Param

        client.log_artifacts(run.info.run_id, str(bundle.path), _FOLDER)
        source = f"{run.info.artifact_uri.rstrip('/')}/{_FOLDER}"
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

    def _experiment(self, client: MlflowClient, name: str) -> str:
        found = client.get_experiment_by_name(name)
        if found is None:
            location = self._access.artifact_location(name)
            return str(client.create_experiment(name, artifact_location=location))
        if found.lifecycle_stage != "active":
            raise RegistryError(
                f"registry {self._access.shown}: MLflow's experiment {name!r} is deleted: restore "
                f"it with 'mlflow experiments restore -x {found.experiment_id}'"
            )
        return str(found.experiment_id)

    def _tag(self, client: MlflowClient, version: Version, key: str, value: str) -> None:
        client.set_model_version_tag(version.name, str(version.number), key, value)

    # Looking up

    def _summary(self, client: MlflowClient, model: Any) -> ModelSummary | None:
        ours = _our_versions(client, model)
        if not ours:
            return None
        text = model.description or ""
        return ModelSummary(model.name, text, len(ours), ours[-1], _aliases(model))

    @contextlib.contextmanager
    def _model(self, name: str) -> Iterator[tuple[MlflowClient, Any]]:
        """MLflow's client and its RegisteredModel, or a NotFoundError that lists the models."""
        name = Ref(name).name
        if not self._access.exists:
            raise NotFoundError(f"{name}: nothing is registered in {self._access.shown} yet")
        with self._access.client() as client:
            model = _model_of(client, name)
            if model is None:
                have = ", ".join(summary.name for summary in self.list()) or "none"
                raise NotFoundError(
                    f"{name}: no such model in {self._access.shown}; its models: {have}"
                )
            yield client, model


def _model_of(client: MlflowClient, name: str) -> Any | None:
    """MLflow's RegisteredModel, or None if there is no such."""
    try:
        return client.get_registered_model(name)
    except Exception as error:
        if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _all_pages(search: Callable[..., Any], *arguments: str) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        page = search(*arguments, page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def _mlflow_versions(client: MlflowClient, name: str) -> list[Any]:
    return _all_pages(client.search_model_versions, f"name = '{name}'")


def _our_versions(client: MlflowClient, model: Any) -> list[Version]:
    aliases = _aliases(model)
    found = [v for v in _mlflow_versions(client, model.name) if DIGEST in v.tags]
    return sorted((Version.from_mlflow(v, aliases) for v in found), key=lambda v: v.number)


def _aliases(model: Any) -> dict[str, int]:
    return {str(alias): int(number) for alias, number in model.aliases.items()}


def _ranges(numbers: Sequence[int]) -> str:
    """`1-4, 6`"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts) or "none"


def _run_tags(bundle: Bundle) -> dict[str, str]:
    return {
        DIGEST: bundle.digest,
        "mlflow.user": _user(),
        "mlflow.source.name": "soa-pipeline",
        "mlflow.note.content": description.markdown(bundle),
    }


def _discard(client: MlflowClient, run: Run) -> None:
    """Leave no half of a version. Best effort: the error that brought us here is the news."""
    with contextlib.suppress(Exception):
        # Broken off just after the version was made (Ctrl-C, a lost answer), it owns the files.
        if client.search_model_versions(f"run_id = '{run.info.run_id}'"):
            return
        local = local_folder(run.info.artifact_uri)
        if local is not None and local.parent.name == run.info.run_id:
            shutil.rmtree(local.parent, ignore_errors=True)
        client.set_terminated(run.info.run_id, "FAILED")


def _checked_alias(alias: str) -> str:
    # MLflow keeps the last two for itself, and would say so only after the first change is made.
    taken = alias.lower() == "latest" or re.fullmatch(r"[vV][0-9]+", alias)
    if taken or not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", alias):
        raise RegistryError(
            f"{alias!r} cannot be an alias: use A-Z a-z 0-9 _ -, but not 'latest' or 'v1'"
        )
    return alias


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _who() -> str:
    return f"{_user()}@{socket.gethostname()}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
