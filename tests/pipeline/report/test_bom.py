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


@pytest.fixture
def bom(folder: Path) -> dict[str, Any]:
    """The bill of materials of the bundle."""
    return bill_of_materials(Bundle.open(folder))


def test_the_bill_of_materials_is_cyclonedx(bom: dict[str, Any]) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None


def test_the_bill_of_materials_has_each_file_with_its_digest(
    folder: Path, bom: dict[str, Any]
) -> None:
    digests = {
        component["name"]: component["hashes"][0]["content"]
        for component in bom["components"]
        if "hashes" in component
    }
    bundle = Bundle.open(folder)
    assert digests == {**bundle.files, "SHA256SUMS": bundle.digest}


def test_the_bill_of_materials_names_the_model_and_its_data(
    folder: Path, bom: dict[str, Any]
) -> None:
    model = bom["metadata"]["component"]
    assert (model["name"], model["version"]) == ("jets", Bundle.open(folder).digest)
    assert model["pedigree"] == {"commits": [{"uid": "0123abc"}]}
    data = [dataset["ref"] for dataset in model["modelCard"]["modelParameters"]["datasets"]]
    assert data == ["data/labelled.safetensors", "data/reference.safetensors"]


def test_the_bill_of_materials_names_tools_as_package_urls(bom: dict[str, Any]) -> None:
    tools = {
        component["name"]: component["purl"]
        for component in bom["components"]
        if "purl" in component
    }
    assert tools["torch"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert tools["g++"] == "pkg:generic/g%2B%2B@12.2.0"


def test_the_provenance_is_a_statement_on_each_file(folder: Path) -> None:
    data: Any = StatementData()
    ParseDict(build_provenance(Bundle.open(folder)), data)
    Statement.copy_from_pb(data).validate()
    subjects = {subject.name: subject.digest["sha256"] for subject in data.subject}
    assert subjects == {**Bundle.open(folder).files, "SHA256SUMS": Bundle.open(folder).digest}


def test_the_provenance_names_the_builder_and_its_sources(folder: Path) -> None:
    predicate = Provenance()
    # ParseDict refuses a field that the standard does not have.
    ParseDict(build_provenance(Bundle.open(folder))["predicate"], predicate)
    assert predicate.run_details.builder.id == "pkg:pypi/soa-pipeline@1.0.0"
    dependencies = predicate.build_definition.resolved_dependencies
    sources = {source.name: dict(source.digest) for source in dependencies}
    assert sources["rows.root"] == {"sha256": "12" * 32}
    assert sources["config"] == {"gitCommit": "0123abc"}


def test_the_bill_printed_again_is_the_same(folder: Path) -> None:
    """So a copy that somebody altered differs."""
    printed = cli("show", folder, "--bom").stdout
    assert json.loads(printed) == bill_of_materials(Bundle.open(folder))
    assert cli("show", folder, "--bom", "--json").stdout == printed
    assert cli("show", folder, "--bom").stdout == printed


def test_a_bundle_with_one_other_file_has_another_bill(folder: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "other", Bundle.open(folder).manifest, seed=1)
    bills = [json.loads(cli("show", path, "--bom").stdout) for path in (folder, tmp_path / "other")]
    assert bills[0]["serialNumber"] != bills[1]["serialNumber"]


def test_the_provenance_is_printed(folder: Path) -> None:
    printed = json.loads(cli("show", folder, "--provenance", "--json").stdout)
    assert printed == build_provenance(Bundle.open(folder))


def test_an_altered_bundle_has_no_bill(folder: Path) -> None:
    (folder / "program.pt2").write_bytes(b"altered")
    assert "truncated or altered" in cli("show", folder, "--bom", code=1).stderr


@pytest.mark.parametrize("options", ["--html {}.html", "{}"], ids=["a page", "two versions"])
def test_a_bill_is_of_one_version_and_no_page(folder: Path, options: str) -> None:
    result = cli("show", folder, "--bom", *options.format(folder).split(), code=2)
    assert "--bom prints one version" in result.stderr
