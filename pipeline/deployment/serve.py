"""Serve: is what a server answers what the version's reference says?"""

from __future__ import annotations

from pipeline.deployment.repository import Deployed
from runtime.loader import tolerances_of
from runtime.opening import Opening
from serving.client import RemoteOptions
from serving.errors import ServerError
from serving.local import Fleet, TritonServer
from serving.remote import connect
from stages.reference import Reference
from stages.validation import ValidationReport, validate_session

_CALL_S = 60.0  # the largest batch of a large model


def check_answers(server: TritonServer | Fleet, deployed: Deployed) -> ValidationReport:
    """Send the whole reference through the server, by the rules that validate an artifact.

    Raises ServerError where an answer is out of the version's tolerances.
    """
    bundle = deployed.bundle
    folder = deployed.folder / str(deployed.service.number) / "bundle"
    session = connect(Opening(folder), server.url, RemoteOptions(deadline_s=_CALL_S))
    try:
        report = validate_session(
            session,
            "triton",
            Reference.load(bundle.file(bundle.manifest.reference), deployed.service.signature),
            tolerances_of(bundle.manifest),
            frozenset(bundle.manifest.classifiers),
        )
    finally:
        session.close()
    if not report.valid:
        raise ServerError(f"the server's answers are not the reference's: {report.reason}")
    return report
