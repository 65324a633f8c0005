"""Altered records of every kind that comes from outside: each is read, or refused in one line."""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.onnx.program import read_outputs
from pipeline.building.add_target import read_recipe
from pipeline.config import load_policy
from pipeline.mlflow_flavour import _find_version
from pipeline.promotion.promoting import join_requirements
from pipeline.report.difference import compare, describe_difference
from pipeline.report.tables import show
from pipeline.report.versions import (
    describe_build,
    describe_bundle,
    describe_history,
    describe_versions,
)
from registry.bundle.annex import ANNEX_SCHEMA, AnnexRecord
from registry.bundle.bundle import Bundle
from registry.bundle.digests import MLFLOW_NOTE
from registry.bundle.manifest import Manifest, record_from_json
from registry.bundle.pulled import PROMOTED, PulledNote, read_note
from registry.history.event_log import (
    _RECORD,
    Event,
    _read_event,
    aliases_at,
    approvers,
    missing_numbers,
    promoted_since,
)
from registry.history.event_log import markdown as event_markdown
from registry.history.policies import _read_policy
from registry.housekeeping.export_import import EXPORT, import_from
from registry.housekeeping.pushing import _describe_origin
from registry.mlflow import description
from registry.mlflow.store_protocol import StoredRun, StoredVersion
from registry.promotion import Decision
from registry.store.recorded_lookups import Lookup, LookupCache, _digest
from registry.store.registry import Registry
from registry.trust import parse_trusted, require_signature
from registry.version import Promotion, Version
from runtime.checked import recorded_tolerances
from runtime.opening import Opened, Opening
from runtime.opening.production_trust import require_promoted, require_vouched, usable_annexes
from runtime.opening.target_choice import choose
from serving.triton.batch_sizes import preferred_sizes, why_merging_does_not_pay
from soa.records import as_record
from soa.signature import Signature
from stages.reports import BenchmarkReport, CaseReport, Timing, ValidationReport
from tests.fuzz.hostile import (
    altered,
    altered_json,
    damaged,
    only_ours,
    printed,
    put,
    require_plain,
)
from tests.models import bundles
from tests.models.building import mlp_signature
from tests.models.keys import make_keys

V3 = bundles.V3
MANIFEST = bundles.manifest_data() | {
    "signature": mlp_signature(5000, (10, 1000)).to_dict(),
    "session": {"threads": 2, "instances": None},
    "classifiers": ["probabilities"],
}
MANIFEST["targets"][V3] |= {"below": [{"rows": 10, "engine": "aoti"}]}
MANIFEST["provenance"]["config"] = {
    "name": "jets",
    "engines": ["aoti", "exported"],
    "gates": {"max_slowdown": 1.2, "max_outside": 0.0, "required_targets": [V3]},
    "compile": {"timeout_s": 60.0, "options": {"aoti": {"max_autotune": True}}},
}
WHEN = "2026-01-02T03:04:05+00:00"
DIGEST = "ab" * 32
DECISION = {
    "gate": "speed", "passed": False, "found": "2", "limit": "1.1", "detail": "slow",
    "override": "because",
}  # fmt: skip


def opened(manifest: Manifest) -> Bundle:
    """A bundle whose folder holds only the reference."""
    return Bundle(
        path=Path(HOME.name),
        manifest=manifest,
        digest=DIGEST,
        files=dict.fromkeys(manifest.files(), DIGEST),
    )


# -- the bundle ------------------------------------------------------------------------------------

HOME = tempfile.TemporaryDirectory(prefix="soa-fuzz-")
atexit.register(HOME.cleanup)
bundles.write_reference(Path(HOME.name) / "reference.safetensors")
SOUND = opened(Manifest.from_json(json.dumps(MANIFEST)))


def derived(bundle: Bundle) -> Iterator[Callable[[], object]]:
    """Functions for everything that is derived from a manifest without the other files."""
    manifest = bundle.manifest
    yield lambda: show(describe_bundle(bundle, None))
    yield lambda: show(describe_difference(compared(SOUND, bundle)))
    yield lambda: require_plain(description.markdown(bundle))
    for derive in (description.parameters, read_recipe, recorded_tolerances):
        yield partial(derive, manifest)
    yield lambda: (description.tags(bundle), list(description.metrics(manifest.targets)))
    yield lambda: join_requirements(bundle, "production", None, [])
    opened = Opened(bundle, manifest.name, None, None, Opening("x"), {})
    yield lambda: choose(opened, torch.device("cpu"), None)
    for function in (preferred_sizes, why_merging_does_not_pay):
        yield from (partial(function, manifest, target) for target in manifest.targets)


def compared(first: Bundle, second: Bundle) -> dict[str, Any]:
    """The differences, which JSON must be able to hold."""
    differences = compare(first, second, "A", "B")
    json.dumps(differences, allow_nan=False)
    return differences


@given(altered_json(MANIFEST))
def test_any_manifest_is_read_and_shown_or_refused(content: bytes) -> None:
    with only_ours():
        bundle = opened(Manifest.from_json(content))
        assert Manifest.from_json(bundle.manifest.to_json()) == bundle.manifest
        for derive in derived(bundle):
            with only_ours(), printed():
                derive()


def test_the_manifest_that_is_altered_is_sound() -> None:
    for derive in derived(SOUND):
        with printed():
            derive()


@given(altered(MANIFEST["signature"]))
def test_any_stored_signature_is_read_as_it_is_or_refused(data: Any) -> None:
    with only_ours():
        assert Signature.from_dict(data).to_dict() == data


RECORD = MANIFEST["targets"][V3] | {"status": "verified"}
ANNEX = {
    "schema_version": 1, "name": "jets", "base": DIGEST, "target": V3, "record": RECORD,
    "created": WHEN, "by": "ada", "tools": {}, "host": {"cpu": "x"}, "python": "3", "notes": ["n"],
}  # fmt: skip


@given(altered_json(ANNEX))
def test_any_annex_is_read_or_refused(content: bytes) -> None:
    with only_ours():
        record_from_json(AnnexRecord, content, "annex.json", ANNEX_SCHEMA)


NOTE = {"ref": "jets/1", "digest": DIGEST, "by": "ada", "at": WHEN, "annexes": {V3: DIGEST}}


@given(content=altered_json(NOTE))
def test_any_note_of_a_promotion_is_read_or_refused(place: Path, content: bytes) -> None:
    put(place / PROMOTED, content)
    with only_ours():
        bundle = Bundle(path=place, manifest=SOUND.manifest, digest=DIGEST, files={})
        note = read_note(place)
        assert isinstance(note, PulledNote)
        _describe_origin(bundle, None)
        require_vouched(place, note, bundle)


def deviation() -> dict[str, Any]:
    """The record of a comparison."""
    return {
        "elements": 3, "max_abs": 0.1, "max_rel": 0.1, "outside": 0.0, "nonfinite_mismatches": 0,
        "ulp_p50": 1.0, "ulp_p99": 1.0, "ulp_max": None, "argmax": 1.0, "worst_row": None,
    }  # fmt: skip


VALIDATION = {
    V3: {
        "aoti": {
            "engine": "aoti",
            "valid": False,
            "reason": "so",
            "seconds": 1.0,
            "unverified": False,
            "worst": {"probabilities": deviation()},
            "cases": [{"rows": {"n": 5}, "faults": ["f"], "outputs": {"x": deviation()}}],
        }
    }
}  # fmt: skip
TIMING = {"median_us": 1.0, "p05_us": 1.0, "p95_us": 1.0, "rounds": 7}
BENCHMARK = {
    V3: {
        "timings": {"n=5": {"aoti": TIMING}},
        "fastest": "aoti",
        "threads": 1,
        "below": [[5, "aoti"]],
    }
}


@given(validation=altered_json(VALIDATION), benchmark=altered_json(BENCHMARK))
def test_any_reports_are_read_or_refused(place: Path, validation: bytes, benchmark: bytes) -> None:
    put(place / "reports/validation.json", validation)
    put(place / "reports/benchmark.json", benchmark)
    files = {"reports/validation.json": "", "reports/benchmark.json": ""}
    with only_ours(), printed():
        bundle = Bundle(path=place, manifest=SOUND.manifest, digest=DIGEST, files=files)
        show(describe_build(bundle))


def test_the_reports_that_are_altered_are_sound() -> None:
    validation = ValidationReport.from_dict(VALIDATION[V3]["aoti"])
    assert isinstance(validation.cases[0], CaseReport)
    benchmark = as_record(BenchmarkReport, BENCHMARK[V3])
    assert isinstance(benchmark.timings["n=5"]["aoti"], Timing)


# -- signatures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, bytes, str]:
    """A bundle, its signature, and the key that it was made with."""
    from registry.trust import sign

    folder = tmp_path_factory.mktemp("signed")
    bundles.write_bundle(folder / "bundle", Manifest.from_json(json.dumps(MANIFEST)))
    keys = make_keys(folder, "release")
    bundle = Bundle.open(folder / "bundle")
    sign(bundle, keys.private)
    return bundle, (bundle.path / "bundle.sig").read_bytes(), keys.public.read_text()


@given(data=st.data())
def test_any_signature_is_read_or_refused(
    signed: tuple[Bundle, bytes, str], data: st.DataObject
) -> None:
    bundle, signature, pem = signed
    content = data.draw(st.one_of(altered_json(json.loads(signature)), damaged(signature)))
    put(bundle.path / "bundle.sig", content)
    with only_ours():
        require_signature(bundle, [parse_trusted(pem, "a key")])


@given(data=st.data())
def test_any_key_is_read_or_refused(signed: tuple[Bundle, bytes, str], data: st.DataObject) -> None:
    _, _, pem = signed
    with only_ours():
        parse_trusted(data.draw(damaged(pem.encode())), "a key")
    with only_ours():
        parse_trusted(b"-----BEGIN CERTIFICATE-----\n" + data.draw(st.binary(max_size=80)), "a key")


# -- the registry ----------------------------------------------------------------------------------

EVENT = {
    "number": 3, "time": WHEN, "kind": "promotion", "state": "done", "by": "ada",
    "alias": "staging", "version": 2, "replaced": 1, "approver": "", "annexes": {V3: DIGEST},
    "engine": "aoti", "reason": "so", "digests": {"jets/2": DIGEST}, "policies": ["p"],
    "decisions": [DECISION],
    "before": {"staging": 1}, "after": {"staging": 2}, "imported": {"registry": "r"},
}  # fmt: skip


def run_with(tags: Mapping[str, str], milliseconds: int, status: str = "FINISHED") -> StoredRun:
    """A run of MLflow, which began and ended at this time, with these tags."""
    return StoredRun("run", status, milliseconds, milliseconds, tags)


def cut(content: bytes) -> dict[str, str]:
    """The tags in which an event is kept: its text in pieces."""
    text = content.decode(errors="replace")
    return {f"{_RECORD}{i:03}": text[at : at + 50] for i, at in enumerate(range(0, len(text), 50))}


@given(altered_json(EVENT), st.one_of(st.just(1), st.integers(-(2**63), 2**63)))
def test_any_event_of_the_history_is_read_and_shown_or_refused(
    content: bytes, milliseconds: int
) -> None:
    with only_ours():
        event = _read_event(run_with(cut(content), milliseconds), "jets")
        with printed():
            show([describe_history("jets", [event])])
        require_plain(event_markdown(event))
        json.dumps(event.to_json())
        aliases_at([event], event.time)
        missing_numbers([event])
        promoted_since([event], "staging", 2)
        approvers([event], 2, DIGEST)


PROMOTION = {"alias": "production", "by": "ada", "at": WHEN, "decisions": [DECISION], "annexes": {}}


@given(altered_json(PROMOTION), altered_json({"pushed_by": "ada"}))
def test_any_tags_of_a_version_are_read_and_shown_or_refused(
    promotion: bytes, origin: bytes
) -> None:
    tags = {"promotion.production": promotion, "origin": origin, f"annex.{V3}": DIGEST.encode()}
    version = version_with({key: text.decode(errors="replace") for key, text in tags.items()})
    with only_ours():
        read = version.promotion("production")
        assert isinstance(read, Promotion)
        usable_annexes(version, read, signed=False)
        require_promoted(version, [read])
    with only_ours(), printed():
        show(describe_bundle(SOUND, version))
    with printed():
        show([describe_versions([version])])


def version_with(tags: Mapping[str, str]) -> Version:
    """jets/1 with these tags."""
    stored = StoredVersion("jets", 1, 1, "run", "/nowhere", {"digest": DIGEST} | dict(tags))
    return Version.of(stored, {"staging": 1})


RESOLVED = {
    "version": {
        "name": "jets", "number": 1, "digest": DIGEST, "aliases": ["production"],
        "targets": {V3: "verified"}, "chosen": {V3: "aoti"}, "annexes": {V3: DIGEST},
        "created": WHEN, "run_id": None, "source": "/nowhere",
        "tags": {"promotion.production": json.dumps(PROMOTION)},
    },
    "signers": [{"origin": "policy", "keys": ["pem"]}],
    "at": WHEN,
}  # fmt: skip


@given(content=altered_json(RESOLVED), wrong=altered_json({"content": {}, "sha256": ""}))
def test_any_record_of_a_lookup_is_read_or_refused(
    place: Path, content: bytes, wrong: bytes
) -> None:
    kept = LookupCache(place, "registry", "production")
    with only_ours():
        put(kept._path("jets"), wrong)
        kept.read("jets")
    try:
        record = {"schema": 1, "ref": "jets", **json.loads(content)}
    except (ValueError, TypeError):
        return
    put(kept._path("jets"), json.dumps({"content": record, "sha256": _digest(record)}).encode())
    with only_ours():
        lookup = kept.read("jets")
        assert isinstance(lookup, Lookup)
        require_promoted(lookup.version, lookup.history)
        kept.write("jets", lookup)


POLICY = {
    "targets": [V3], "max_outside": 0.1, "max_outside_by_output": {"x": 0.1}, "max_slowdown": 1.5,
    "min_time_in_staging": "24h", "approvals": ["ada"], "signed_by": ["pem"],
}  # fmt: skip


@given(altered_json(POLICY), st.one_of(st.just(1), st.integers(-(2**63), 2**63)))
def test_any_policy_of_the_registry_is_read_or_refused(content: bytes, milliseconds: int) -> None:
    tags = {"soa.policy": content.decode(errors="replace"), "soa.policy.scope": "*"}
    with only_ours():
        asked = _read_policy(None, run_with(tags, milliseconds), None)  # type: ignore[arg-type]
        assert asked.policy


@given(content=altered_json({k: v for k, v in POLICY.items() if k != "signed_by"}))
def test_any_policy_in_a_file_is_read_or_refused(place: Path, content: bytes) -> None:
    """JSON content is valid YAML."""
    with only_ours():
        load_policy(put(place / "policy.yaml", content))


EXPORTED = {
    "schema_version": 1, "name": "jets", "registry": "r", "by": "ada", "at": WHEN,
    "versions": {"1": {"digest": DIGEST, "created": WHEN, "aliases": ["a"], "origin": {"a": "b"}}},
    "history": [{"registry": "r", "model": "jets", "event": EVENT}],
}  # fmt: skip


@given(content=altered_json(EXPORTED))
def test_any_export_is_read_or_refused(place: Path, content: bytes) -> None:
    put(place / "export" / EXPORT, content)
    with only_ours():
        import_from(Registry(f"sqlite:///{place}/none.db"), place / "export")


# -- other records ---------------------------------------------------------------------------------


@given(content=altered_json({"model_name": "jets", "model_version": "3"}))
def test_any_note_of_mlflow_is_read_or_refused(place: Path, content: bytes) -> None:
    put(place / MLFLOW_NOTE, content)
    with only_ours():
        _find_version(place)


OUTPUT = {"argument": 0, "component": 0, "rows": None, "shape": [-1, 3]}


@given(altered_json([OUTPUT]))
def test_any_outputs_of_an_onnx_artifact_are_read_or_refused(content: bytes) -> None:
    with only_ours():
        read_outputs(content.decode(errors="replace"))


# Unchanged, the records are read, so the altered ones above are close to valid ones.


def test_the_annex_that_is_altered_is_sound() -> None:
    assert record_from_json(AnnexRecord, json.dumps(ANNEX), "", 1).target == V3


def test_the_note_of_a_promotion_that_is_altered_is_sound(tmp_path: Path) -> None:
    put(tmp_path / PROMOTED, json.dumps(NOTE).encode())
    assert read_note(tmp_path) == PulledNote(**NOTE)  # type: ignore[arg-type]


def test_the_event_that_is_altered_is_sound() -> None:
    event = _read_event(run_with(cut(json.dumps(EVENT).encode()), 1), "jets")
    assert (event.number, event.decisions) == (3, (Decision(**DECISION),))  # type: ignore[arg-type]
    assert isinstance(event, Event)


def test_the_promotion_that_is_altered_is_sound() -> None:
    version = version_with({"promotion.production": json.dumps(PROMOTION)})
    assert version.promotion("production") is not None


def test_the_outputs_that_are_altered_are_sound() -> None:
    assert read_outputs(json.dumps([OUTPUT]))[0].shape == (-1, 3)


def test_a_note_of_mlflow_is_read(tmp_path: Path) -> None:
    (tmp_path / MLFLOW_NOTE).write_text("model_name: jets\nmodel_version: '3'\n")
    assert _find_version(tmp_path)[0] == "jets/3"
