"""What a registry says and gives: models, versions, their bundles and their history."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import trust
from registry.bundle import Annex, Bundle, attach, open_folder
from registry.errors import NotFoundError, RegistryError, TrustError
from registry.history import (
    Event,
    History,
    as_settled,
    promotions_of,
)
from registry.history import policies as policy_store
from registry.mlflow import (
    Access,
    Promotion,
    Version,
    models,
)
from registry.promotion import Asked
from registry.ref import NAME_PATTERN, Ref, parse_ref
from registry.store import artifacts
from registry.store.cache import Cache, cache_root
from registry.trust import Trusted

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True)
class ModelSummary:
    """One registered model. `versions` counts them."""

    name: str
    description: str
    versions: int
    latest: Version
    aliases: Mapping[str, int]


class Reader(Access):
    """Every method only reads; none creates a registry."""

    def list(self) -> Sequence[ModelSummary]:
        """All models that have a version of ours, by name."""
        if not self.exists:
            return []
        found = []
        with self.client() as client:
            for model in models.all_pages(client.search_registered_models):
                # One of another name cannot be ours, whatever was copied into it.
                named = re.fullmatch(NAME_PATTERN, model.name)
                if ours := models.our_versions(client, model) if named else []:
                    text, aliases = model.description or "", models.aliases_of(model)
                    found.append(ModelSummary(model.name, text, len(ours), ours[-1], aliases))
        return sorted(found, key=lambda summary: summary.name)

    def versions(self, name: str) -> Sequence[Version]:
        """All versions of ours of a model, oldest first."""
        with self._model(name) as (client, model):
            return models.our_versions(client, model)

    def find(self, ref: str | Ref) -> Version:
        """`name/3`, `name@alias`, or `name` for the latest version."""
        wanted = parse_ref(ref) if isinstance(ref, str) else ref
        if isinstance(wanted, Path):
            raise RegistryError(f"{ref}: the path of a folder, a version of the registry is needed")
        with self._model(wanted.name) as (client, model):
            aliases = models.aliases_of(model)
            if wanted.alias is not None and wanted.alias not in aliases:
                have = ", ".join(f"@{alias}" for alias in sorted(aliases)) or "none"
                raise NotFoundError(
                    f"{wanted}: {wanted.name} has no such alias; its aliases: {have}"
                )
            number = wanted.version if wanted.alias is None else aliases[wanted.alias]
            if number is None:
                ours = models.our_versions(client, model)
                if not ours:
                    raise NotFoundError(f"{wanted}: the model has no versions")
                return ours[-1]
            there = {int(v.version): v for v in models.mlflow_versions(client, wanted.name)}
            if number not in there:
                have = models.ranges(sorted(there))
                raise NotFoundError(f"{wanted}: no such version; there are: {have}")
            return Version.from_mlflow(there[number], aliases)

    def local_path(self, version: Version) -> Path | None:
        """The version's bundle folder itself, where the artifact store is a folder on this host."""
        return artifacts.existing_folder(version)

    def fetch(self, version: Version, dest: str | Path) -> Bundle:
        """Copy the version's bundle and its annexes to the new folder `dest`, verified, or
        nothing."""
        artifacts.fetch(self, version, Path(dest))
        return open_folder(dest, verify=False)

    def open(
        self,
        version: Version,
        *,
        verify: bool = True,
        cache: str | Path | None = None,
        annexes: Collection[str] | None = None,
        in_place: bool = True,
        fetch: bool = True,
    ) -> Bundle:
        """The version's bundle, in place if it is on this host, else from a cache by digest.

        `cache`: its folder, else as `registry.store.cache.cache_root` says. A file in it is
        verified like any other, stays as long as somebody has the bundle, and is fetched again if
        it is damaged. `annexes`: of which targets; None: all. `in_place=False`: from the cache
        also what is on this host. `fetch=False`: the store is not asked; NotCachedError where
        files would have to be fetched.
        """
        place = Cache(cache_root(cache))
        source = artifacts.Source(self, version, place, in_place, fetch)
        wanted = [t for t in version.annexes if annexes is None or t in annexes]
        bundle = source.open(Bundle, None, verify)
        return attach(bundle, [source.open(Annex, target, verify) for target in wanted])

    def require_signature(
        self, version: Version, bundle: Bundle, keys: Sequence[Trusted], *, fetch: bool = True
    ) -> Trusted:
        """As in `registry.trust`, also where a cache has had the files since before they were
        signed: then the store is asked for the signature, unless `fetch` is False."""
        try:
            return trust.require_signature(bundle, keys)
        except TrustError:
            if not fetch or bundle.path == self.local_path(version):
                raise
            newest = artifacts.signature_of(self, version)
            if newest is not None:
                trust.put_signature(newest, bundle.path)
            return trust.require_signature(bundle, keys)

    def history(self, name: str) -> Sequence[Event]:
        """Every event of a model, oldest first; it writes nothing.

        One that a killed writer left open is given as the next writer will close it.
        """
        with self._model(name) as (client, model):
            experiment = models.experiment_of(self, client, name)
            if experiment is None:
                return []
            events = History(client, experiment, name).events()
            return as_settled(client, events, models.aliases_of(model))

    def promotions(self, version: Version, alias: str) -> Sequence[Promotion]:
        """The promotions of this version to `alias`, oldest first, from the history of its model.

        The version has a tag with the time of its promotion. Only promotions of that time count;
        without the tag there are none.
        """
        if version.promotion(alias) is None or not self.exists:
            return []
        with self.client() as client:
            experiment = client.get_experiment_by_name(version.name)  # deleted ones are read too
            if experiment is None:
                return []
            history = History(client, experiment.experiment_id, version.name)
            return promotions_of(client, history, version, alias)

    def policies(self, model: str | None = None, into: Path | None = None) -> Sequence[Asked]:
        """What this registry asks for: of every model, and of `model`."""
        return policy_store.kept(self, model, into)

    @contextlib.contextmanager
    def _model(self, name: str) -> Iterator[tuple[MlflowClient, Any]]:
        """MLflow's client and its RegisteredModel, or a NotFoundError that lists the models."""
        name = Ref(name).name
        if not self.exists:
            raise NotFoundError(f"{name}: nothing is registered in {self.shown} yet")
        with self.client() as client:
            model = models.model_of(client, name)
            if model is None:
                have = ", ".join(summary.name for summary in self.list()) or "none"
                raise NotFoundError(f"{name}: no such model in {self.shown}; its models: {have}")
            yield client, model
