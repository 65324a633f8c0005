"""The registry: bundles as versions of MLflow registered models, and the aliases on them.

Everything here is plain MLflow: one run for each version, in an experiment with the model's name,
the bundle as that run's artifacts, tags, metrics and aliases. MLflow's client and web page see the
same data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from registry import trust
from registry.bundle import SIGNATURE, Annex, Bundle, attach, record_to_json
from registry.errors import NotFoundError, NotPromotedError, RegistryError
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
from registry.promotion import Decision, PromotionRefused
from registry.ref import Ref, check_alias
from registry.shadow_record import ShadowRecord
from registry.store import bundle_files, upload
from registry.store.reading import Reader
from registry.trust import Trusted
from registry.version import ORIGIN, SHADOW, Version

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from registry.promotion import Policy


class Registry(Reader):
    """A registry of models at any MLflow tracking URI; by default an SQLite file, no server.

    `uri`: by default the variable PIPELINE_REGISTRY, else `pipeline-registry/registry.db`.
    `artifact_root`: folder or URI for the bundles of new models; by default PIPELINE_ARTIFACTS,
    else `artifacts` next to the SQLite file, else the tracking server decides.

    Creating the object has no effect on the registry. Methods that only read never create one.
    `client` and `writing` are for code that extends the registry.

    Examples
    --------
    >>> registry = pipeline.Registry()
    >>> registry.find("jet-tagger@production")
    Version(jet-tagger/1 @production: cpu/x86-64-v... exported verified)
    """

    def sign(
        self, version: Version, key: Path, password: str | None = None, chain: Sequence[Path] = ()
    ) -> Trusted:
        """Verify and sign the version's files; return the public key that verifies them.

        `key`, `password` and `chain`: as in `registry.trust.sign`. Raises TrustError.
        """
        bundle = self.open(version)
        public = trust.sign(bundle, key, password, chain)
        if self.local_path(version) is None:
            bundle_files.publish_signature(self, version, bundle.path / SIGNATURE)
        return public

    def register(
        self,
        bundle: Bundle,
        name: str | None = None,
        annexes: Sequence[Annex] = (),
        origin: str | None = None,
    ) -> Version:
        """Create a version with the bundle's files, or return the one that has this digest.

        The files and the `annexes` are copied first, and the version is created last, so there is
        never a version without its files. A failure in between leaves a run marked FAILED; a killed
        process leaves an open run with files (see `registry.housekeeping.garbage`). The files are
        copied without the lock. If two processes register the same bundle at once, the second one
        returns the version of the first. `origin`: see `registry.housekeeping.pushing`.

        Examples
        --------
        >>> bundle = registry.open(registry.find("jet-tagger/1"))
        >>> registry.register(bundle, name="another-name").ref
        'another-name/1'
        """
        model = Ref(name or bundle.manifest.name).name
        bundle.verify()
        # Annexes in the bundle's folder are ignored: they were built for another version.
        bundle = attach(Bundle.open(bundle.path, verify=False), annexes)
        with self.client(write=True) as client:
            store = ClientStore(client)
            with write_lock(self, client, model):
                known = models.find_registered(store, model, bundle.digest)
                experiment = self.experiment(client, model)
            if known is not None:
                return known
            run = upload.begin_run(client, experiment, model, bundle)
            try:
                source = upload.upload(client, run, bundle)
                with write_lock(self, client, model) as lock:
                    known = models.find_registered(store, model, bundle.digest)
                    if known is not None:
                        upload.discard(client, run)
                        return known
                    upload.require_open(self, client, run, bundle)
                    models.ensure_model(client, model, bundle.manifest.description)
                    client.set_terminated(run.info.run_id, "FINISHED")
                    lock.check()
                    created = client.create_model_version(
                        model,
                        source,
                        run_id=run.info.run_id,
                        tags=description.tags(bundle) | ({ORIGIN: origin} if origin else {}),
                        description=description.markdown(bundle),
                    )
            except BaseException:
                upload.discard(client, run)
                raise
            return self.find(Ref(model, int(created.version)))

    def keep_report(self, version: Version, name: str, text: str) -> None:
        """Store a page as the file `name` in a version's run; a failure is ignored."""
        with contextlib.suppress(Exception), self.client(write=True) as client:
            client.log_text(str(version.run_id), text, name)

    def add_target(self, version: Version, annex: Annex) -> Version:
        """Add an annex, the files of one more target, to a version. Its bundle does not change.

        The files are copied first, and the tag that names them is set last. If two processes add
        the same target at once, the slower one gets an error and its files are removed. A killed
        process leaves either files that no tag names, or a complete target.
        """
        version.require_free(annex.target)
        with self.client(write=True) as client:
            bundle = self.open(version, verify=False, annexes=())
            attach(bundle, [annex])  # raises if the annex does not fit the bundle
            annex.verify()
            try:
                upload.upload_annex(client, str(version.run_id), annex)
                with self._changing(version) as (writer, current):
                    current.require_free(annex.target)
                    upload.require_annex(self, client, str(version.run_id), annex)
                    built, engine = {annex.target: annex.digest}, str(annex.record.record.chosen)
                    writer.apply(writer.new_event("build", current, annexes=built, engine=engine))
                    upload.add_annex_to_pages(client, current, annex)
            except BaseException:
                self._discard_annex(client, version, annex)
                raise
        return self._read_again(version)

    def _discard_annex(self, client: MlflowClient, version: Version, annex: Annex) -> None:
        """Remove the files of an annex, unless the version has that annex after all.

        A failure is ignored: the caller raises an error of its own.
        """
        with contextlib.suppress(Exception), write_lock(self, client, version.name):
            by_number = {current.number: current for current in self.versions(version.name)}
            current = by_number.get(version.number)  # None: the version was removed
            if current is None or current.annexes.get(annex.target) != annex.digest:
                upload.discard_annex(self, client, version, annex)

    def set_alias(self, version: Version, alias: str) -> Version:
        """Move an alias to a version without gates. `production` and `previous` are refused.

        Examples
        --------
        >>> registry.set_alias(registry.find("jet-tagger/2"), "candidate").aliases
        ('candidate',)
        """
        if alias in (PRODUCTION, PREVIOUS):
            raise RegistryError(
                f"{version.ref}: only a promotion or a rollback moves the alias '{alias}'"
            )
        check_alias(alias)
        with self._changing(version) as (writer, current):
            writer.apply(writer.new_event("alias", current, alias))
            return self._read_again(version)

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
        """Move `alias` to the version if all gates let it pass; else raise PromotionRefused.

        The version replaced in `production` becomes `previous`. The history records promotions and
        refusals; a refusal changes nothing else. `replacing`: the number of the version that the
        gates compared with, 0 for none; the promotion is refused if the alias has moved since.
        `policies`: the origins of the policies that the gates applied; they must include those of
        this registry. `annexes`: targets built later that the gates checked too; targets of an
        earlier promotion to this alias stay promoted. `reason`: a text for the history.
        """
        check_promotable(alias)
        with self._changing(version) as (writer, current):
            every_decision = (
                *decisions,
                *writer.refuse_if_moved(alias, replacing),
                *self._refuse_unasked_policies(version.name, policies),
            )
            # Without any decision of a gate nothing was judged.
            passed = bool(decisions) and all(decision.lets_pass for decision in every_decision)
            earlier = writer.last_promotion(current.number, alias) if current.annexes else None
            seen = {*annexes, *(earlier.annexes if earlier else ())}
            event = writer.new_event(
                "promotion" if passed else "refusal",
                current,
                alias,
                decisions=every_decision,
                policies=tuple(policies),
                reason=reason,
                annexes={t: digest for t, digest in current.annexes.items() if t in seen},
            )
            if not passed:
                writer.record(event)
                raise PromotionRefused(f"{version.ref} to @{alias}", every_decision)
            writer.apply(event)
            return self._read_again(version)

    def _refuse_unasked_policies(self, model: str, origins: Sequence[str]) -> Sequence[Decision]:
        """Return a refusal for each policy of this registry whose origin is not in `origins`."""
        return [
            Decision("policy", False, "not asked", asked.origin, f"{asked.origin}, was not asked")
            for asked in self.policies(model)
            if asked.origin not in origins
        ]

    def rollback(self, name: str, reason: str = "") -> Version:
        """Put `previous` back in production; the version replaced becomes `previous`.

        Raises NotPromotedError if no gate ever let `previous` into production.

        Examples
        --------
        >>> registry.rollback("jet-tagger", reason="fewer top jets than expected").ref
        'jet-tagger/3'
        """
        with self._model(name):
            pass  # raises for an unknown name before anything is written
        with self.writing(name) as writer:
            in_production, previous = writer.aliases.get(PRODUCTION), writer.aliases.get(PREVIOUS)
            if previous is None or in_production is None:
                missing = PREVIOUS if previous is None else PRODUCTION
                raise NotFoundError(f"{name}: nothing to roll back to: no version is @{missing}")
            if previous == in_production:
                raise RegistryError(
                    f"{name}: @{PREVIOUS} is the version in production, {name}/{previous}"
                )
            target = self.find(Ref(name, previous))
            try:
                target.let_in(PRODUCTION, self.promotions(target, PRODUCTION))
            except NotPromotedError as error:
                earlier = writer.find_way_back(in_production)
                advice = f"; {name}/{earlier} was in production before" if earlier else ""
                raise NotPromotedError(
                    f"{name}: no rollback to @{PREVIOUS}, which is {target.ref}: {error}: promote "
                    f"a version instead{advice}"
                ) from error
            writer.apply(writer.new_event("rollback", target, PRODUCTION, reason=reason))
            return self._read_again(target)

    def approve(self, version: Version, approver: str, reason: str = "") -> Event:
        """Record that `approver` approves this version, with this digest, for production.

        Raises RegistryError if `approver` cannot be a name.

        Examples
        --------
        >>> registry.approve(registry.find("jet-tagger/2"), "ada", reason="good plots").kind
        'approval'
        """
        if not approver.strip() or not approver.isprintable() or len(approver) > 100:
            raise RegistryError(f"{approver!r} cannot be a name: up to 100 characters on a line")
        with self._changing(version) as (writer, current):
            event = writer.new_event("approval", current, reason=reason, approver=approver)
            return writer.record(event)

    def add_shadow(self, record: ShadowRecord) -> None:
        """Add the results of a shadow to those that the registry has for the same two versions.

        The withdrawal of a canary is also recorded in the history, as a refusal. Raises
        RegistryError if the digest of the version is not that of the record.
        """
        with self._changing(self.find(record.version)) as (writer, current):
            if current.digest != record.digest:
                raise RegistryError(f"{current.ref}: the record is of a shadow with other files")
            key = SHADOW + record.production.rpartition("/")[2]
            earlier = [shadow for tag, shadow in current.shadows.items() if tag == key]
            writer.tag(current.number, key, record_to_json(record.plus(earlier)))
            if record.withdrawals:
                why = f"withdrawn as a canary beside {record.production}: {record.withdrawn}"
                writer.record(writer.new_event("refusal", current, PRODUCTION, reason=why))

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[ModelWriter]:
        """Yield the writer of a model, under the model's lock, after it settled earlier events."""
        with self.client(write=True) as client, write_lock(self, client, name) as lock:
            if ClientStore(client).model(name) is None:
                self.find(Ref(name))  # says which models there are
            history = HistoryWriter(client, self.experiment(client, name), name)
            writer = ModelWriter(client, name, history, lock)
            writer.settle()
            yield writer

    @contextlib.contextmanager
    def _changing(self, version: Version) -> Iterator[tuple[ModelWriter, Version]]:
        """Yield the writer of a version's model, under its lock, and the version as it is now."""
        with self.writing(version.name) as writer:
            yield writer, self._read_again(version)

    def _read_again(self, version: Version) -> Version:
        """Return the version as the registry describes it now."""
        return self.find(Ref(version.name, version.number))

    def experiment(self, client: MlflowClient, name: str) -> str:
        """Return the id of a model's MLflow experiment, which is created if it does not exist."""
        return models.ensure_experiment(self, client, name, name)

    def set_policy(
        self, policy: Policy, model: str | None = None, reference: Path | None = None
    ) -> None:
        """Set the policy for all promotions, or for those of `model` alone.

        `reference`: the file that `policy.reference` names.

        Examples
        --------
        >>> from registry.promotion import Policy
        >>> registry.set_policy(Policy(max_slowdown=1.5), model="jet-tagger")
        >>> len(registry.policies("jet-tagger"))
        1
        """
        if model is not None:
            self.versions(model)  # raises NotFoundError if there is no such model
        policy_store.set_policy(self, policy, model, reference)
