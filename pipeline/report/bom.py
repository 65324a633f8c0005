"""A version for other tools: a bill of materials (CycloneDX 1.6), and provenance (SLSA).

Both say only what the sealed manifest and `SHA256SUMS` say, and equal bundles give equal documents.
So neither is stored: a copy that somebody altered differs from what is printed again. Targets that
were built later are not in them.

They are written here because the Python library of CycloneDX has no model cards (its version 11).
"""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote

from registry.bundle import SUMS, Bundle


def bill_of_materials(bundle: Bundle) -> dict[str, Any]:
    """Return the CycloneDX document of a bundle, as JSON data.

    It lists the model with its card, the files with their digests, and the libraries and the
    compiler that built the artifacts. `bundle` must have no annexes, which were never sealed in it.
    """
    manifest, built = bundle.manifest, bundle.manifest.provenance
    data = {manifest.reference} | ({manifest.labelled.file} if manifest.labelled else set())
    files = []
    for name, digest in _sealed_files(bundle):
        kind = "data" if name in data else "file"
        files.append(_component(kind, name, hashes=[{"alg": "SHA-256", "content": digest}]))
    tools = [  # excluded: not inside
        _component("library", name, version=version, purl=_purl_of(name, version), scope="excluded")
        for name, version in sorted(built.tools.items())
    ]
    model = _component(
        "machine-learning-model",
        manifest.name,
        version=bundle.digest,
        description=manifest.description,
        pedigree={"commits": [{"uid": built.git_commit}] if built.git_commit else []},
        modelCard={"modelParameters": {"datasets": [{"ref": f"data/{n}"} for n in sorted(data)]}},
    )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{bundle.digest}").urn,
        "version": 1,
        "metadata": {"timestamp": built.created, "component": model},
        "components": files + tools,
    }


def build_provenance(bundle: Bundle) -> dict[str, Any]:
    """Return an in-toto statement, as JSON data, that says how every file of a bundle was built.

    `bundle` must have no annexes, which were never sealed in it.
    """
    built, labelled = bundle.manifest.provenance, bundle.manifest.labelled
    builder = _purl_of("soa-pipeline", built.tools.get("soa-pipeline", "unknown"))
    tools = sorted(built.tools.items())
    dependencies: list[dict[str, Any]] = [{"uri": _purl_of(*tool)} for tool in tools]
    if built.git_commit is not None:
        dependencies.append({"name": "config", "digest": {"gitCommit": built.git_commit}})
    if labelled is not None:
        dependencies.append({"name": labelled.source, "digest": {"sha256": labelled.sha256}})
    build = {
        "buildType": f"{builder}#run",
        "externalParameters": {"config": built.config},
        "internalParameters": {"host": built.host, "uncommitted_changes": bool(built.git_dirty)},
        "resolvedDependencies": dependencies,
    }
    run = {"builder": {"id": builder}, "metadata": {"finishedOn": built.created}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file, "digest": {"sha256": d}} for file, d in _sealed_files(bundle)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": build, "runDetails": run},
    }


def _component(kind: str, name: str, **fields: object) -> dict[str, Any]:
    """Return a component of CycloneDX. Other components refer to it by its kind and name."""
    return {"type": kind, "bom-ref": f"{kind}/{name}", "name": name, **fields}


def _sealed_files(bundle: Bundle) -> list[tuple[str, str]]:
    """Return the name and sha256 of each file, sorted by name. The seal is one of these files."""
    return sorted({**bundle.files, SUMS: bundle.digest}.items())


def _purl_of(name: str, version: str) -> str:
    """Return the package URL of a tool, such as `pkg:pypi/torch@2.9.1`. All but g++ are of PyPI."""
    package = "generic/g%2B%2B" if name == "g++" else f"pypi/{quote(name.lower(), safe='')}"
    return f"pkg:{package}@{quote(version, safe='')}"
