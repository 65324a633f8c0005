"""The registry: bundles as versions of MLflow registered models, and the aliases on them.

Everything here is plain MLflow: a run per version in an experiment of the model's name, the bundle
as that run's artifacts, tags, metrics and aliases. MLflow's own client and web page see the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from registry import trust
from registry.bundle import SIGNATURE, Annex, Bundle, attach, record_to_json
from registry.errors import (
    NotFoundError,
    NotPromotedError,
    PromotionRefused,
    RegistryError,
)
from registry.history import (
    PREVIOUS,
    PRODUCTION,
    Event,
    HistoryWriter,
    ModelWriter,
    check_promotable,
    write_lock,
)
from registry.history import policies as policy_store
from registry.mlflow import ClientStore, description, models
from registry.promotion import Decision
from registry.ref import Ref, checked_alias
from registry.shadow import ShadowRecord
from registry.store import artifacts, upload
from registry.store.reading import Reader
from registry.trust import Trusted
from registry.version import ORIGIN, SHADOW, Version
from soa.text import in_markdown

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.promotion import Policy


class Registry(Reader):
    """A registry of models at any MLflow tracking URI; by default an SQLite file, no server.

    `uri`: else the variable PIPELINE_REGISTRY, else `pipeline-registry/registry.db`.
    `artifact_root`: folder or URI for the bundles of models that are new; else PIPELINE_ARTIFACTS,
    else `artifacts` beside the SQLite file, else what the tracking server decides.

    Making the object touches nothing. A method that only reads never creates a registry. `client`
    is for what is built on the registry, as is `writing`.
    """

    def get_ready(self) -> None:
        """Import what writing needs, and make the tables where there are none: that takes seconds,
        which other work may hide. What fails here fails again where it is needed, and says so."""
        with contextlib.suppress(RegistryError), self.client(write=True):
            pass

    def sign(
        self,
        version: Version,
        key: Path,
        password: str | None = None,
        chain: Sequence[Path] = (),
    ) -> Trusted:
        """Verify and sign the version's files; returns the public key that verifies them."""
        public = trust.sign(bundle := self.open(version), key, password, chain)
        if self.local_path(version) is None:
            artifacts.publish_signature(self, version, bundle.path / SIGNATURE)
        return public

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
            store = ClientStore(client)
            with write_lock(self, client, model):
                known = models.registered(store, model, bundle.digest)
                experiment = self.experiment(client, model)
            if known is not None:
                return known
            run = upload.begin(client, experiment, model, bundle)
            try:
                source = upload.upload(client, run, bundle)
                with write_lock(self, client, model) as lock:
                    known = models.registered(store, model, bundle.digest)
                    if known is not None:
                        upload.discard(client, run)
                        return known
                    upload.require_open(self, client, run, bundle)
                    if store.model(model) is None:
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

    def keep_report(self, version: Version, name: str, text: str) -> None:
        """Keep a page beside a version's metrics, where MLflow shows it; a failure is ignored."""
        with contextlib.suppress(Exception), self.client(write=True) as client:
            client.log_text(str(version.run_id), text, name)

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
                    upload.describe_annex(client, found, annex)
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
        """Put `previous` back in production; the version replaced becomes `previous`.

        Raises NotPromotedError if no gate ever let `previous` into production.
        """
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
            try:
                found.let_in(PRODUCTION, self.promotions(found, PRODUCTION))
            except NotPromotedError as error:
                last = writer.way_back(current)
                before = f"; {name}/{last} was in production before" if last else ""
                raise NotPromotedError(
                    f"{name}: no rollback to @{PREVIOUS}, which is {found.ref}: {error}: promote a "
                    f"version instead{before}"
                ) from error
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
            if ClientStore(client).model(name) is None:
                self.find(Ref(name))  # says which models there are
            history = HistoryWriter(client, self.experiment(client, name), name)
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
        found = models.experiment_of(self, ClientStore(client), name)
        if found is not None:
            return found
        location = self.artifact_location(name)
        return str(client.create_experiment(name, artifact_location=location))

    def set_policy(
        self, policy: Policy, model: str | None = None, reference: Path | None = None
    ) -> None:
        """Make this policy count for all promotions, or those of a model; `reference`: its file."""
        if model is not None:
            self.versions(model)  # there has to be such a model
        policy_store.keep(self, policy, model, reference)
