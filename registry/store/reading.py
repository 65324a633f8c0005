"""Reading a registry: models, versions, their bundles and their history."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from registry import trust
from registry.bundle import Annex, Bundle, attach, open_folder
from registry.errors import NotFoundError, RegistryError, TrustError
from registry.history import Event, History, as_settled, promotions_of
from registry.history import policies as policy_store
from registry.mlflow import Access, Store, StoredModel, models
from registry.ref import NAME_PATTERN, Ref, parse_ref
from registry.store import bundle_files
from registry.store.host_cache import Cache, cache_root
from registry.trust import Trusted
from registry.version import Promotion, Version

if TYPE_CHECKING:
    from registry.promotion import SourcedPolicy


@dataclass(frozen=True)
class ModelSummary:
    """One registered model. `versions`: the number of its versions."""

    name: str
    description: str
    versions: int
    latest: Version
    aliases: Mapping[str, int]


class Reader(Access):
    """The methods that read a registry. None of them changes or creates a registry."""

    def list(self) -> Sequence[ModelSummary]:
        """Return all models that have a version of soa-pipeline, sorted by name.

        Like all methods, it raises NoRegistryError if there is no registry.

        Examples
        --------
        >>> [(model.name, model.versions) for model in registry.list()]
        [('jet-tagger', 4)]
        """
        summaries = []
        with self.reading() as store:
            for model in store.models():
                # A model with another kind of name is not ours, even if it has our tags.
                if not re.fullmatch(NAME_PATTERN, model.name):
                    continue
                ours = models.our_versions(store, model)
                if ours:
                    summary = ModelSummary(
                        model.name, model.description, len(ours), ours[-1], model.aliases
                    )
                    summaries.append(summary)
        return sorted(summaries, key=lambda summary: summary.name)

    def versions(self, name: str) -> Sequence[Version]:
        """Return all versions of a model that soa-pipeline registered, oldest first.

        Examples
        --------
        >>> [version.number for version in registry.versions("jet-tagger")]
        [1, 2, 3, 4]
        """
        with self._model(name) as (store, model):
            return models.our_versions(store, model)

    def find(self, ref: str | Ref) -> Version:
        """Find `name/3`, `name@alias`, or `name` for the latest version. Raises NotFoundError.

        Examples
        --------
        >>> registry.find("jet-tagger@staging").ref
        'jet-tagger/4'
        """
        parsed = parse_ref(ref) if isinstance(ref, str) else ref
        if isinstance(parsed, Path):
            raise RegistryError(f"{ref}: the path of a folder, a version of the registry is needed")
        with self._model(parsed.name) as (store, model):
            aliases = model.aliases
            if parsed.alias is not None and parsed.alias not in aliases:
                known = ", ".join(f"@{alias}" for alias in sorted(aliases)) or "none"
                raise NotFoundError(
                    f"{parsed}: {parsed.name} has no such alias; its aliases: {known}"
                )
            number = parsed.version if parsed.alias is None else aliases[parsed.alias]
            if number is None:
                ours = models.our_versions(store, model)
                if not ours:
                    raise NotFoundError(f"{parsed}: the model has no versions")
                return ours[-1]
            by_number = {version.number: version for version in store.versions(parsed.name)}
            if number not in by_number:
                known = models.ranges_text(sorted(by_number))
                raise NotFoundError(f"{parsed}: no such version; there are: {known}")
            return Version.of(by_number[number], aliases)

    def local_path(self, version: Version) -> Path | None:
        """Return the version's folder in the artifact store; None if that is not on this host."""
        return bundle_files.existing_folder(version)

    def fetch(self, version: Version, dest: str | Path) -> Bundle:
        """Copy the version's bundle and its annexes to the new folder `dest`, and verify them.

        If that fails, `dest` is not created.

        Examples
        --------
        >>> registry.fetch(registry.find("jet-tagger/1"), "fetched").manifest.name
        'jet-tagger'
        """
        bundle_files.fetch(self, version, Path(dest))
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
        """Open the version's bundle: in the store if that is on this host, else in the cache.

        `cache`: the cache's folder; default: see `registry.store.host_cache.cache_root`. Cached
        files are verified like all others, stay as long as the bundle is in use, and are fetched
        again if they are damaged. `annexes`: only those of these targets; None: all.
        `in_place=False`: use the cache even if the store is on this host. `fetch=False`: do not
        fetch files; raises NotCachedError if they are missing.

        Examples
        --------
        >>> version = registry.find("jet-tagger/1")
        >>> registry.open(version).digest == version.digest
        True
        """
        host_cache = Cache(cache_root(cache))
        source = bundle_files.Source(self, version, host_cache, in_place, fetch)
        targets = [target for target in version.annexes if annexes is None or target in annexes]
        bundle = source.open(Bundle, target=None, verify=verify)
        return attach(bundle, [source.open(Annex, target, verify) for target in targets])

    def require_signature(
        self, version: Version, bundle: Bundle, keys: Sequence[Trusted], *, fetch: bool = True
    ) -> Trusted:
        """Return the key in `keys` that signed the version, or raise TrustError.

        As `registry.trust.require_signature`; but if the check fails for cached files, the store's
        signature is fetched and checked, since it may be newer, unless `fetch` is False.
        """
        try:
            return trust.require_signature(bundle, keys, version.ref)
        except TrustError:
            if not fetch or bundle.path == self.local_path(version):
                raise
            newest = bundle_files.read_signature(self, version)
            if newest is not None:
                trust.put_signature(newest, bundle.path)
            return trust.require_signature(bundle, keys, version.ref)

    def history(self, name: str) -> Sequence[Event]:
        """Return every event of a model, oldest first.

        An event that a killed writer left open has the state in which the next writer will close
        it.

        Examples
        --------
        >>> for event in registry.history("jet-tagger"):
        ...     print(event.kind, event.version, event.alias)
        promotion 3 production
        promotion 1 production
        promotion 4 staging
        """
        with self._model(name) as (store, model):
            experiment = models.find_experiment(self, store, name)
            if experiment is None:
                return []
            events = History(store, experiment, name).events()
            return as_settled(store, events, model.aliases)

    def promotions(self, version: Version, alias: str) -> Sequence[Promotion]:
        """Return the promotions of a version to `alias`, oldest first, from its model's history.

        The version's tag has the time of its promotion. Promotions of that time are returned, or if
        the history has none, all its promotions to the alias. Without the tag there are none.

        Examples
        --------
        >>> version = registry.find("jet-tagger/1")
        >>> [promotion.number for promotion in registry.promotions(version, "production")]
        [1]
        """
        if version.promotion(alias) is None:
            return []
        with self.reading() as store:
            experiment = store.experiment(version.name)  # also a deleted experiment
            if experiment is None:
                return []
            history = History(store, experiment.id, version.name)
            return promotions_of(store, history, version, alias)

    def policies(
        self, model: str | None = None, into: Path | None = None
    ) -> Sequence[SourcedPolicy]:
        """Return the policies of this registry: the one for every model, and that for `model`.

        Their reference sets are copied into the folder `into`, unless that is None.

        Examples
        --------
        >>> list(registry.policies("jet-tagger"))
        []
        """
        return policy_store.policies_in_force(
            self, None if model is None else Ref(model).name, into
        )

    @contextlib.contextmanager
    def _model(self, name: str) -> Iterator[tuple[Store, StoredModel]]:
        """Yield the store and a model in it. Raises a NotFoundError that lists all models."""
        name = Ref(name).name
        with self.reading() as store:
            model = store.model(name)
            if model is None:
                known = ", ".join(summary.name for summary in self.list()) or "none"
                raise NotFoundError(f"{name}: no such model in {self.shown}; its models: {known}")
            yield store, model
