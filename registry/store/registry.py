"""The registry: bundles as versions of MLflow registered models, and the aliases on them.

Everything here is plain MLflow: a run per version in an experiment of the model's name, the bundle
as that run's artifacts, tags, metrics and aliases. MLflow's own client and web page see the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry import trust
from registry.bundle import SIGNATURE, Annex, Bundle, attach, open_folder, record_to_json
from registry.errors import NotFoundError, PromotionRefused, RegistryError, TrustError
from registry.history import (
    PREVIOUS,
    PRODUCTION,
    Event,
    History,
    ModelWriter,
    as_settled,
    check_promotable,
    promotion_of,
    write_lock,
)
from registry.history import policies as policy_store
from registry.mlflow import (
    ORIGIN,
    SHADOW,
    Access,
    Promotion,
    ShadowRecord,
    Version,
    description,
    models,
)
from registry.promotion import Asked, Decision, Policy
from registry.ref import NAME_PATTERN, Ref, checked_alias, parse_ref
from registry.store import artifacts, upload
from registry.store.cache import Cache, cache_root
from registry.trust import Trusted
from soa.text import in_markdown

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


class Registry(Access):
    """Any MLflow tracking URI; by default an SQLite file in the working folder, without a server.

    `uri`: else the variable PIPELINE_REGISTRY, else `pipeline-registry/registry.db`.
    `artifact_root`: folder or URI for the bundles of models that are new; else PIPELINE_ARTIFACTS,
    else `artifacts` beside the SQLite file, else what the tracking server decides.

    Making one touches nothing. A method that only reads never creates a registry. `client` is for
    what is built on the registry, as is `writing`.
    """

    # Reading

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

    # Files

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

    def sign(
        self,
        version: Version,
        key: Path,
        password: str | None = None,
        chain: Sequence[Path] = (),
    ) -> Trusted:
        """Sign the version's files, which are verified first; returns the key it is good for."""
        public = trust.sign(bundle := self.open(version), key, password, chain)
        if self.local_path(version) is None:
            artifacts.publish_signature(self, version, bundle.path / SIGNATURE)
        return public

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

    # Writing

    def register(
        self,
        bundle: Bundle,
        name: str | None = None,
        annexes: Sequence[Annex] = (),
        origin: str | None = None,
    ) -> Version:
        """A new version with the bundle's files; or the version that already has this digest.

        The files go first and the version comes last, with all its `annexes`: there is never a
        version without its files. A failure in between leaves a run marked FAILED; a process that
        is killed leaves a run that goes on, and files (`registry.housekeeping.garbage`). Files are
        copied without the lock: of two that register one bundle at once, one finds the other's
        version. `origin`: see `registry.housekeeping.pushing`.
        """
        model = Ref(name or bundle.manifest.name).name
        bundle.verify()
        # Without the annexes that lie in its folder: they were built for another version.
        bundle = attach(Bundle.open(bundle.path, verify=False), annexes)
        with self.client(write=True) as client:
            with write_lock(self, client, model):
                known = models.registered(client, model, bundle.digest)
                experiment = self.experiment(client, model)
            if known is not None:
                return known
            run = upload.begin(client, experiment, model, bundle)
            try:
                source = upload.upload(client, run, bundle)
                with write_lock(self, client, model) as lock:
                    known = models.registered(client, model, bundle.digest)
                    if known is not None:
                        upload.discard(client, run)
                        return known
                    upload.require_open(self, client, run, bundle)
                    if models.model_of(client, model) is None:
                        client.create_registered_model(
                            model,
                            description=in_markdown(bundle.manifest.description)[:5000] or None,
                        )
                    client.set_terminated(run.info.run_id, "FINISHED")
                    lock.check()
                    made = client.create_model_version(
                        model,
                        source,
                        run_id=run.info.run_id,
                        tags=description.tags(bundle) | ({ORIGIN: origin} if origin else {}),
                        description=description.markdown(bundle),
                    )
            except BaseException:
                upload.discard(client, run)
                raise
            return self.find(Ref(model, int(made.version)))

    def add_target(self, version: Version, annex: Annex) -> Version:
        """Add to a version what was built for one more target; its bundle stays as it is.

        The files go first and the tag that names them comes last. Of two that build one target at
        once, one is told that the other was quicker, and leaves nothing; a process that is killed
        leaves files that nothing names, or a target that is whole.
        """
        version.require_free(annex.target)
        with self.client(write=True) as client:
            bundle = self.open(version, verify=False, annexes=())
            attach(bundle, [annex])
            annex.verify()
            try:
                upload.upload_annex(client, str(version.run_id), annex)
                with self._changing(version) as (writer, found):
                    found.require_free(annex.target)
                    upload.require_annex(self, client, str(version.run_id), annex)
                    built, engine = {annex.target: annex.digest}, str(annex.record.record.chosen)
                    writer.apply(writer.event("build", found, annexes=built, engine=engine))
                    upload.describe_annex(client, found, bundle, annex)
            except BaseException:
                self._discard(client, version, annex)
                raise
        return self._again(version)

    def _discard(self, client: MlflowClient, version: Version, annex: Annex) -> None:
        """Take back the files of an annex, unless the version has it all the same."""
        with contextlib.suppress(Exception), write_lock(self, client, version.name):
            has = {v.number: v.annexes.get(annex.target) for v in self.versions(version.name)}
            if has.get(version.number) != annex.digest:  # or the version was removed meanwhile
                upload.discard_annex(self, client, version, annex)

    def set_alias(self, version: Version, alias: str) -> Version:
        """Point an alias at a version, without a gate: not for `production` and `previous`."""
        if alias in (PRODUCTION, PREVIOUS):
            raise RegistryError(
                f"{version.ref}: only a promotion or a rollback moves the alias '{alias}'"
            )
        checked_alias(alias)
        with self._changing(version) as (writer, found):
            writer.apply(writer.event("alias", found, alias))
            return self._again(version)

    def promote(
        self,
        version: Version,
        alias: str,
        decisions: Sequence[Decision],
        *,
        replacing: int | None = None,
        policies: Sequence[str] = (),
        annexes: Collection[str] = (),
        reason: str = "",
    ) -> Version:
        """Move `alias` to the version if every gate lets it pass; else PromotionRefused.

        The version replaced in `production` becomes `previous`. The history records promotions and
        refusals; a refusal changes nothing else. `replacing`: the number of the version that the
        gates compared with, 0 for none; refused if another one has come into its place since.
        `policies`: the origins of those that the gates went by; this registry's must be among them.
        `annexes`: the targets built later that the gates saw too; those that an earlier promotion
        to this alias let pass stay. `reason`: for the history.
        """
        check_promotable(alias)
        with self._changing(version) as (writer, found):
            asked = (
                *decisions,
                *writer.still_in_place(alias, replacing),
                *(
                    Decision("policy", False, "not asked", p.origin, f"{p.origin}, was not asked")
                    for p in self.policies(version.name)
                    if p.origin not in policies
                ),
            )
            passed = bool(decisions) and all(d.lets_pass for d in asked)
            before = writer.promotion(found.number, alias) if found.annexes else None
            seen = {*annexes, *(before.annexes if before else ())}
            event = writer.event(
                "promotion" if passed else "refusal",
                found,
                alias,
                decisions=asked,
                policies=tuple(policies),
                reason=reason,
                annexes={t: digest for t, digest in found.annexes.items() if t in seen},
            )
            if not passed:
                writer.record(event)
                raise PromotionRefused(f"{version.ref} to @{alias}", asked)
            writer.apply(event)
            return self._again(version)

    def rollback(self, name: str, reason: str = "") -> Version:
        """Put `previous` back in production; the version replaced becomes `previous`."""
        with self._model(name):
            pass  # an unknown name is said before anything is written
        with self.writing(name) as writer:
            current, back = writer.aliases.get(PRODUCTION), writer.aliases.get(PREVIOUS)
            if back is None or current is None:
                gap = PREVIOUS if back is None else PRODUCTION
                raise NotFoundError(f"{name}: nothing to roll back to: no version is @{gap}")
            if back == current:
                raise RegistryError(
                    f"{name}: @{PREVIOUS} is the version in production, {name}/{back}"
                )
            found = self.find(Ref(name, back))
            writer.apply(writer.event("rollback", found, PRODUCTION, reason=reason))
            return self._again(found)

    def approve(self, version: Version, approver: str, reason: str = "") -> Event:
        """Record that `approver` wants this version, of this digest, in production."""
        if not approver.strip() or not approver.isprintable() or len(approver) > 100:
            raise RegistryError(f"{approver!r} cannot be a name: up to 100 characters on a line")
        with self._changing(version) as (writer, found):
            event = writer.event("approval", found, reason=reason, approver=approver)
            return writer.record(event)

    def add_shadow(self, record: ShadowRecord) -> None:
        """Add to what is known of a version's shadows beside the one in production.

        RegistryError where the version has other files by now.
        """
        with self._changing(self.find(record.version)) as (writer, found):
            if found.digest != record.digest:
                raise RegistryError(f"{found.ref}: the record is of a shadow with other files")
            key = SHADOW + record.production.rpartition("/")[2]
            whole = record.plus(each for tag, each in found.shadows.items() if tag == key)
            writer.tag(found.number, key, record_to_json(whole))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[ModelWriter]:
        """The writer of a model, under its lock, with everything before it settled."""
        with (
            self.client(write=True) as client,
            write_lock(self, client, name) as lock,
        ):
            if models.model_of(client, name) is None:
                self.find(Ref(name))  # says which models there are
            history = History(client, self.experiment(client, name), name)
            writer = ModelWriter(client, name, history, lock)
            writer.settle()
            yield writer

    @contextlib.contextmanager
    def _changing(self, version: Version) -> Iterator[tuple[ModelWriter, Version]]:
        """With the version as it is now."""
        with self.writing(version.name) as writer:
            yield writer, self._again(version)

    def _again(self, version: Version) -> Version:
        return self.find(Ref(version.name, version.number))

    def experiment(self, client: MlflowClient, name: str) -> str:
        """The id of MLflow's experiment of a model, made if there is none."""
        found = models.experiment_of(self, client, name)
        if found is not None:
            return found
        location = self.artifact_location(name)
        return str(client.create_experiment(name, artifact_location=location))

    # Looking back

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
        """The promotions to `alias` that have happened to the version by the history of its own
        model, oldest first: those of the time that its tag names, if there are any; none without
        that tag."""
        said = version.promotion(alias)
        if said is None or not self.exists:
            return []
        with self.client() as client:
            experiment = client.get_experiment_by_name(version.name)  # deleted ones are read too
            if experiment is None:
                return []
            history = History(client, experiment.experiment_id, version.name)

            def happened(second: datetime | None) -> list[Promotion]:
                events = history.promotions(second)
                aliases = dict.fromkeys(version.aliases, version.number)
                return [
                    promotion_of(event)
                    for event in as_settled(client, events, aliases)
                    if (event.alias, event.version, event.state) == (alias, version.number, "done")
                ]

            # A promotion that was cut short has left its tag, and the one before still counts.
            return happened(said.time) or happened(None)

    # Policies

    def set_policy(
        self, policy: Policy, model: str | None = None, reference: Path | None = None
    ) -> None:
        """Let every promotion of a model, or of all, ask for this too; `reference`: its file."""
        if model is not None:
            self.versions(model)  # there has to be such a model
        policy_store.keep(self, policy, model, reference)

    def policies(self, model: str | None = None, into: Path | None = None) -> Sequence[Asked]:
        """What this registry asks for: of every model, and of `model`."""
        return policy_store.kept(self, model, into)

    # Looking up

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
