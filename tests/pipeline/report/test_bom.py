"""The bill of materials and the provenance of a version have the forms of their standards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementData

from pipeline.report import bill_of_materials, build_provenance
from registry.bundle import Bundle, Manifest
from soa.records import as_record
from tests.models.bundles import V3, manifest_data, provable, write_annex, write_bundle
from tests.models.project import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle with labelled rows, metrics and an annex."""
    data = provable(manifest_data())
    data["targets"][V3]["metrics"] = {"auc": 0.97, "loss": "NaN"}
    data["labelled"] = {
        "file": "labelled.safetensors",
        "source": "rows.root",
        "sha256": "12" * 32,
        "rows": 10,
    }
    data["provenance"]["tools"] = {"torch": "2.13.0+cpu", "g++": "12.2.0", "soa-pipeline": "1.0.0"}
    write_bundle(tmp_path / "bundle", as_record(Manifest, data))
    bundle = Bundle.open(tmp_path / "bundle")
    write_annex(tmp_path / "bundle/annexes/cpu/x86-64-v4", bundle, "cpu/x86-64-v4")
    return tmp_path / "bundle"


def test_the_bill_of_materials(folder: Path) -> None:
    bundle = Bundle.open(folder)
    bom = bill_of_materials(bundle)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    digests = {
        each["name"]: each["hashes"][0]["content"] for each in bom["components"] if "hashes" in each
    }
    assert digests == {**Bundle.open(folder).files, "SHA256SUMS": bundle.digest}
    model = bom["metadata"]["component"]
    assert (model["name"], model["version"]) == ("jets", bundle.digest)
    assert model["pedigree"] == {"commits": [{"uid": "0123abc"}]}
    data = [each["ref"] for each in model["modelCard"]["modelParameters"]["datasets"]]
    assert data == ["data/labelled.safetensors", "data/reference.safetensors"]
    tools = {each["name"]: each["purl"] for each in bom["components"] if "purl" in each}
    assert tools["torch"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert tools["g++"] == "pkg:generic/g%2B%2B@12.2.0"


def test_the_provenance(folder: Path) -> None:
    said = build_provenance(Bundle.open(folder))
    data: Any = StatementData()
    ParseDict(said, data)
    Statement.copy_from_pb(data).validate()
    subjects = {each.name: each.digest["sha256"] for each in data.subject}
    assert subjects == {**Bundle.open(folder).files, "SHA256SUMS": Bundle.open(folder).digest}
    predicate = Provenance()
    ParseDict(said["predicate"], predicate)  # refuses a field that the standard does not have
    assert predicate.run_details.builder.id == "pkg:pypi/soa-pipeline@1.0.0"
    sources = {
        each.name: dict(each.digest) for each in predicate.build_definition.resolved_dependencies
    }
    assert sources["rows.root"] == {"sha256": "12" * 32}
    assert sources["config"] == {"gitCommit": "0123abc"}


def test_printed_again_it_is_the_same(folder: Path, tmp_path: Path) -> None:
    """So a copy that somebody altered differs; a bundle with one other byte has another bill."""
    printed = cli("show", folder, "--bom").stdout
    assert json.loads(printed) == bill_of_materials(Bundle.open(folder))
    assert cli("show", folder, "--bom", "--json").stdout == printed
    assert printed == cli("show", folder, "--bom").stdout
    write_bundle(tmp_path / "other", Bundle.open(folder).manifest, seed=1)
    other = cli("show", tmp_path / "other", "--bom").stdout
    assert json.loads(other)["serialNumber"] != json.loads(printed)["serialNumber"]
    said = json.loads(cli("show", folder, "--provenance", "--json").stdout)
    assert said == build_provenance(Bundle.open(folder))
    (folder / "program.pt2").write_bytes(b"altered")
    assert "truncated or altered" in cli("show", folder, "--bom", code=1).stderr
    for more in (["--html", tmp_path / "x.html"], [folder]):
        assert "--bom prints one version" in cli("show", folder, "--bom", *more, code=2).stderr
