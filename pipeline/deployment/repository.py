"""Writes a promoted version as a Triton model repository, and checks the answers of a server."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engines.target import Target, choose_target, for_sessions
from pipeline.config import BuiltFrom
from pipeline.promotion import pull
from registry.bundle import Bundle
from registry.store import Registry
from runtime.checked import recorded_tolerances
from runtime.opening import Opened, Opening, copy_artifact, open_program, open_version, withheld
from runtime.session import Session
from serving.client import RemoteOptions, address_of
from serving.errors import ServerError, ServingError
from serving.native import Backend, ProgramExecutable, engine_for, make_native
from serving.remote import connect
from serving.triton import (
    BLOCKS_ALONE,
    BUNDLE,
    Service,
    preferred_sizes,
    why_merging_does_not_pay,
    write_native_repository,
    write_repository,
)
from serving.wire import Form, Wire, mergeable
from soa.signature import Signature
from stages.capture import dependence_of, rows_are_independent
from stages.judging import validate_session
from stages.reference import Reference
from stages.reports import ValidationReport

_CALL_S = 60.0  # deadline of a call: enough for the largest batch of a large model


@dataclasses.dataclass(frozen=True)
class Deployed:
    """A model that was written into a Triton model repository.

    `folder`: the model's folder there. `why_alone`: the reason why the server runs each request
    alone; None if it merges several requests into one run.
    """

    service: Service
    folder: Path
    bundle: Bundle
    why_alone: str | None


def deploy(
    registry: Registry,
    ref: str,
    out: Path,
    *,
    devices: Sequence[str] = ("cpu",),
    instances: int = 1,
    queue_delay_us: int = 0,
    target: str | None = None,
    requests: Form = "columns",
    backend: Backend = "python",
    merge: bool | None = None,
    replace: bool = False,
) -> Deployed:
    """Write the model repository `out/<name>/` for Triton, from a version in production or from a
    folder that `pipeline pull` made of one.

    The version must have the signatures that this host and the registry's policies require. The
    model serves one `target`, which production must be allowed to use; None means the best one for
    `devices`. `merge`: whether several requests share a run; None means that they do if rows are
    independent and the version's benchmark shows a gain. With a `backend` other than "python", the
    model file for that backend is first validated on the whole reference.

    Raises ServingError, LoadError or the registry's errors; then no files are left.
    """
    opened = open_version(Opening(ref, registry=registry))
    name, number, bundle = opened.name, opened.number, opened.bundle
    if number is None:
        raise ServingError(f"{bundle.path}: its note of promotion names no version")
    manifest = bundle.manifest
    served = _choose_served_target(opened, devices, target)
    signature = opened.signature
    Wire.of(signature, requests)  # raises an error if requests cannot have that form
    why_unmergeable = BLOCKS_ALONE if requests == "blocks" else _find_merge_obstacle(opened)
    if why_unmergeable and merge:
        raise ServingError(f"{name}: --merge cannot be: {why_unmergeable}")
    if why_unmergeable or merge:  # merging is impossible, or the caller asked for it
        why_alone = why_unmergeable
    elif merge is None:
        why_alone = why_merging_does_not_pay(manifest, served)
    else:
        why_alone = "--alone"
    service = Service(
        name=name,
        number=number,
        digest=bundle.digest,
        target=served,
        signature=signature,
        merge=why_unmergeable is None,
        batching=why_alone is None,
        preferred=preferred_sizes(manifest, served),
        devices=tuple(devices),
        instances=instances,
        queue_delay_us=queue_delay_us,
        requests=requests,
        backend=backend,
    )
    if backend != "python":
        with tempfile.TemporaryDirectory(prefix="soa-native-") as scratch:
            file = _make_validated_file(opened, service, Path(scratch))
            folder = write_native_repository(out, service, file, replace=replace)
    else:
        copy_bundle = partial(_copy_bundle, registry, opened, served)
        folder = write_repository(out, service, copy_bundle, replace=replace)
    return Deployed(service, folder, bundle, why_alone)


def _copy_bundle(registry: Registry, opened: Opened, target: str, folder: Path) -> Bundle:
    """Copy the files of a version into the new `folder`, open the copy as the server will, and
    return it. ServingError if the copy lacks `target`. A server on another host may still refuse
    the copy, if that host requires other signatures."""
    if opened.version is not None:
        pull(registry, opened.version.ref, folder)
    else:
        shutil.copytree(opened.bundle.path, folder)
    copied = open_version(Opening(folder))
    if target not in copied.bundle.manifest.targets:
        raise ServingError(f"{folder}: {target} is not there{withheld(copied)}")
    return copied.bundle


def _make_validated_file(opened: Opened, service: Service, scratch: Path) -> Path:
    """Make the model file for one of Triton's own backends in the folder `scratch`, and return its
    path. ServingError if its answers on the reference are out of tolerance."""
    signature, wire, bundle = service.signature, service.wire, opened.bundle
    engine = engine_for(service.backend, bundle, service.target)
    artifact = copy_artifact(opened, service.target, engine, scratch / "artifact")
    native = make_native(artifact, service.backend, signature, wire, scratch)
    session = Session(signature, ProgramExecutable(signature, wire, native.program))
    report = _validate_on_reference(session, service.backend, bundle, signature)
    if not report.valid:
        raise ServingError(
            f"the model for Triton's {service.backend} backend is not written, since its answers "
            f"are not the reference's: {report.reason}"
        )
    return native.file


def check_answers(
    url: str, deployed: Deployed, options: RemoteOptions | None = None
) -> ValidationReport:
    """Send the whole reference of a deployed model to the server at `url`, and return a report that
    compares the answers with the stored ones, as a validation does.

    Raises ServerError if an answer is out of the version's tolerances.
    """
    folder = deployed.folder / str(deployed.service.number) / BUNDLE
    # The model itself answers NaN to some rows of the reference. The client must let NaN through,
    # so that the comparison can judge these rows.
    options = dataclasses.replace(options or RemoteOptions(), deadline_s=_CALL_S, allow_nan=True)
    session = connect(open_version(Opening(folder)), address_of(url), options)
    try:
        report = _validate_on_reference(
            session, "triton", deployed.bundle, deployed.service.signature
        )
    finally:
        session.close()
    if not report.valid:
        raise ServerError(f"the server's answers are not the reference's: {report.reason}")
    return report


def _validate_on_reference(
    session: Session, name: str, bundle: Bundle, signature: Signature
) -> ValidationReport:
    """Validate a session's answers on the version's reference, with its tolerances. `name` is what
    the report calls the session: a backend, or "triton"."""
    return validate_session(
        session,
        name,
        reference=Reference.load(bundle.file(bundle.manifest.reference), signature),
        tolerances=recorded_tolerances(bundle.manifest),
        classifiers=frozenset(bundle.manifest.classifiers),
        program=bundle.file(bundle.manifest.program),
        special_values=BuiltFrom(bundle.manifest).gates.special_values,
    )


def _choose_served_target(opened: Opened, devices: Sequence[str], wanted: str | None) -> str:
    """Choose the target to serve on `devices`: the `wanted` one; else the only verified one; else
    the best for this host. ServingError if no verified target fits."""
    manifest = opened.bundle.manifest
    verified = [name for name, record in manifest.targets.items() if record.status == "verified"]
    kind = "cpu" if set(devices) == {"cpu"} else "cuda"
    served = [name for name in verified if for_sessions(Target.parse(name))]
    fitting = [name for name in served if Target.parse(name).torch_device == kind]
    if not fitting or wanted not in (None, *fitting):
        missing = f"no verified target {wanted}" if wanted else "no verified target"
        raise ServingError(
            f"{manifest.name} has {missing} for {', '.join(devices)}; it has: "
            f"{', '.join(verified) or 'none'}{withheld(opened)}"
        )
    if wanted is not None:
        return wanted
    if len(fitting) == 1:
        return fitting[0]
    return choose_target(fitting, kind)


def _find_merge_obstacle(opened: Opened) -> str | None:
    """Return the reason why requests may not share a run, or None if they may. If the recorded
    facts do not tell, the portable program is run on the reference, to see whether the answer of
    a row depends on other rows."""
    signature, bundle = opened.signature, opened.bundle
    if not mergeable(signature):
        return "it has scalars or several row dimensions"
    manifest = bundle.manifest
    if dependence := dependence_of(manifest.capture.dependence, bundle.file(manifest.program)):
        return f"the answer of a row may depend on the other rows: {dependence}"
    inputs = Reference.load(bundle.file(manifest.reference), signature).inputs
    session = Session(signature, open_program(opened, torch.device("cpu")))
    if rows_are_independent(session, inputs, recorded_tolerances(manifest)):
        return None
    return "the answer of a row depends on the other rows"
