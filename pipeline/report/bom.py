"""A version for other tools: a bill of materials (CycloneDX 1.6), and provenance (SLSA).

Both say only what the sealed manifest and `SHA256SUMS` say, and equal bundles give equal documents.
So neither is stored: a copy that somebody altered differs from what is printed again. Targets that
were built later are not in them.

They are written here because the Python library of CycloneDX has no model cards (its version 11).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from registry.bundle import SUMS, Bundle, Manifest
from soa.signature import BoundBlock, Signature

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"


def bill_of_materials(bundle: Bundle) -> dict[str, Any]:
    """The model with its card, its files with digests, and the libraries and compiler that built
    it."""
    bundle = Bundle.open(bundle.path, verify=False)
    manifest, made = bundle.manifest, bundle.manifest.provenance
    files = list(_file_components(bundle))
    tools = [
        {
            "type": "application" if name == "g++" else "library",
            "bom-ref": f"tool/{name}",
            "name": name,
            "version": version,
            "purl": _purl(name, version),
            "scope": "excluded",  # it was used to build, and is not inside
        }
        for name, version in sorted({**made.tools, "python": made.python}.items())
    ]
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": manifest.name,
        "version": bundle.digest,
        "description": manifest.description,
        "hashes": _hashes(bundle.digest),
        "modelCard": _card(manifest, files),
        "pedigree": {"commits": [{"uid": made.git_commit}] if made.git_commit else []},
        "properties": [
            {"name": "soa-pipeline:config_sha256", "value": made.config_sha256},
            {"name": "soa-pipeline:uncommitted_changes", "value": str(bool(made.git_dirty))},
        ],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{bundle.digest}").urn,
        "version": 1,
        "metadata": {"timestamp": made.created, "component": model},
        "components": files + tools,
        "dependencies": [{"ref": "model", "dependsOn": [each["bom-ref"] for each in files]}],
    }


def build_provenance(bundle: Bundle) -> dict[str, Any]:
    """An in-toto statement about every file of the bundle: how it was built."""
    bundle = Bundle.open(bundle.path, verify=False)
    made = bundle.manifest.provenance
    builder = _purl("soa-pipeline", made.tools.get("soa-pipeline", "unknown"))
    sources: list[dict[str, Any]] = []
    if made.git_commit is not None:
        sources.append({"name": "config", "digest": {"gitCommit": made.git_commit}})
    if (labelled := bundle.manifest.labelled) is not None:
        sources.append({"name": labelled.source, "digest": {"sha256": labelled.sha256}})
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": digest}} for name, digest in _sealed(bundle)
        ],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{builder}#run",
                "externalParameters": {"config": made.config},
                "internalParameters": {
                    "config_sha256": made.config_sha256,
                    "uncommitted_changes": bool(made.git_dirty),
                    "host": made.host,
                    "python": made.python,
                },
                "resolvedDependencies": sources
                + [{"uri": _purl(*each)} for each in sorted(made.tools.items())],
            },
            "runDetails": {
                "builder": {"id": builder},
                "metadata": {"finishedOn": made.created},
            },
        },
    }


def _sealed(bundle: Bundle) -> Iterator[tuple[str, str]]:
    yield from sorted({**bundle.files, SUMS: bundle.digest}.items())


def _file_components(bundle: Bundle) -> Iterator[dict[str, Any]]:
    manifest = bundle.manifest
    said = {manifest.reference: "the model's own answers, with which artifacts are compared"}
    for target, record in manifest.targets.items():
        for engine, candidate in record.candidates.items():
            chosen = ", chosen" if engine in record.engines() else ""
            text = f"artifact of {engine} for {target}: {candidate.status}{chosen}"
            said |= dict.fromkeys(candidate.files, text)
    data = {manifest.reference}
    if manifest.labelled is not None:
        data.add(manifest.labelled.file)
        said[manifest.labelled.file] = f"labelled rows of {manifest.labelled.source}"
    for name, digest in _sealed(bundle):
        yield {
            "type": "data" if name in data else "file",
            "bom-ref": f"file/{name}",
            "name": name,
            "hashes": _hashes(digest),
            **({"description": said[name]} if name in said else {}),
            **({"data": [{"type": "dataset", "name": name}]} if name in data else {}),
        }


def _card(manifest: Manifest, files: list[dict[str, Any]]) -> dict[str, Any]:
    """The model card: its data, its inputs and outputs, and what was measured of it."""
    signature = Signature.from_dict(manifest.signature)
    measured = [
        {"type": name, "value": str(value), "slice": f"labelled rows, {target}"}
        for target, record in sorted(manifest.targets.items())
        for name, value in sorted(record.metrics.items())
    ] + [
        {
            "type": f"largest deviation of {output} from the eager model",
            "value": str(worst.max_abs),
            "slice": f"{target}, {engine}",
        }
        for target, record in sorted(manifest.targets.items())
        for engine in record.engines()
        for output, worst in sorted(record.candidates[engine].worst.items())
    ]
    return {
        "modelParameters": {
            "datasets": [{"ref": each["bom-ref"]} for each in files if each["type"] == "data"],
            "inputs": [{"format": _format(each)} for each in signature.inputs],
            "outputs": [{"format": _format(each)} for each in signature.outputs],
        },
        "quantitativeAnalysis": {"performanceMetrics": measured},
    }


def _format(bound: BoundBlock) -> str:
    block, plan = bound.block, bound.plan
    shape = ", ".join(map(str, (bound.rows, *plan.feature_shape)))
    return f"{block.name}: {plan.dtype} ({shape}), columns of {block.collection}"


def _purl(name: str, version: str) -> str:
    kind = "generic" if name in ("g++", "python") else "pypi"
    known = name.lower().replace("_", "-") if kind == "pypi" else name
    return f"pkg:{kind}/{quote(known, safe='')}@{quote(version, safe='')}"


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]
