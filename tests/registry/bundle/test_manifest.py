from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from registry import BundleError, Manifest
from registry.bundle import Below, Candidate, TargetRecord
from soa.records import as_record

V3 = "cpu/x86-64-v3"


def test_json_round_trip_is_stable(manifest: Manifest) -> None:
    text = manifest.to_json()
    restored = Manifest.from_json(text)
    assert restored == manifest
    assert restored.to_json() == text
    keys = list(json.loads(text))
    assert keys == sorted(keys)


def test_order_of_fields_does_not_matter(manifest_data: dict[str, Any]) -> None:
    shuffled = dict(reversed(manifest_data.items()))
    assert as_record(Manifest, shuffled).to_json() == as_record(Manifest, manifest_data).to_json()


def test_infinite_and_undefined_deviations_survive(manifest_data: dict[str, Any]) -> None:
    candidate = manifest_data["targets"][V3]["candidates"]["aoti"]
    candidate["worst"]["probabilities"] = {"max_abs": math.nan, "max_rel": math.inf, "outside": 1}
    text = as_record(Manifest, manifest_data).to_json()
    worst = Manifest.from_json(text).targets[V3].candidates["aoti"].worst["probabilities"]
    assert math.isnan(worst.max_abs)
    assert worst.max_rel == math.inf


def test_files_are_named_with_their_place(manifest: Manifest) -> None:
    assert manifest.files() == {
        "program.pt2": "program",
        "model.ts": "torchscript",
        "reference.safetensors": "reference",
        f"targets/{V3}/aoti/model.pt2": f"targets[{V3}].candidates[aoti]",
        f"targets/{V3}/aoti/data/weights.bin": f"targets[{V3}].candidates[aoti]",
    }


def test_a_newer_schema_is_refused_whatever_else_it_has(manifest_data: dict[str, Any]) -> None:
    text = json.dumps(manifest_data | {"schema_version": 2, "new": []})
    with pytest.raises(BundleError, match=r"^here: schema version 2 is newer than 1, .* update"):
        Manifest.from_json(text, where="here")


@pytest.mark.parametrize(
    ("limits", "spans"),
    [
        ([], {"aoti": ""}),
        ([(32, "ort"), (2024, "lanes")],
         {"ort": "below 32 rows", "lanes": "from 32 to 2023 rows", "aoti": "from 2024 rows on"}),
        ([(5, "aoti"), (50, "ort")],
         {"aoti": "below 5 rows and from 50 rows on", "ort": "from 5 to 49 rows"}),
    ],
)  # fmt: skip
def test_the_spans_of_rows_name_the_engine_that_runs(
    limits: list[tuple[int, str]], spans: dict[str, str]
) -> None:
    """The text names exactly one engine for every row count, and it is the one that runs there."""
    candidates = {name: Candidate(status="valid", files=["f"]) for name in spans}
    below = [Below(rows=rows, engine=engine) for rows, engine in limits]
    record = TargetRecord(status="verified", chosen="aoti", below=below, candidates=candidates)
    assert record.spans() == spans
    for rows in range(3000):  # beyond every limit above
        named = [engine for engine, text in spans.items() if _covers(text, rows)]
        assert named == [record.engine_at(str(rows))]


def _covers(text: str, rows: int) -> bool:
    """Whether a text such as "from 5 to 49 rows and from 90 rows on" includes `rows`."""
    for span in text.split(" and "):
        first, last = re.search(r"from (\d+)", span), re.search(r"to (\d+)", span)
        limit = re.search(r"below (\d+)", span)
        not_too_few = first is None or rows >= int(first[1])
        not_too_many = last is None or rows <= int(last[1])
        if not_too_few and not_too_many and (limit is None or rows < int(limit[1])):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "a JSON object is needed, found list"), ("{}", "name: is missing")],
)
def test_text_that_is_no_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        Manifest.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("surprise", 1, "surprise: there is no such field"),
        ("name", "a/b", "not a model name"),
        ("name", "..", "not a model name"),
        ("name", "-x", "not a model name"),
        ("program", "../program.pt2", "leaves its folder"),
        ("program", "/etc/passwd", "not a relative path"),
        ("reference", "a//b", "leaves its folder or is not in normal form"),
        ("torchscript", "a\\b", "not a relative path"),
        ("torchscript", "a\nb", "not a relative path"),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused(
    manifest_data: dict[str, Any], field: str, value: object, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(json.dumps(manifest_data | {field: value}))


VALID = {"a": {"status": "valid", "files": ["f"]}}
CHOSEN = {"status": "verified", "chosen": "a", "candidates": VALID}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"status": "verified"}, "names the chosen engine"),
        ({"status": "unverified", "chosen": "aoti"}, "is not among"),
        (CHOSEN | {"candidates": {"a": {"status": "valid"}}}, "no files"),
        (
            CHOSEN | {"candidates": {"a": {"status": "refused", "files": ["f"]}}},
            "is refused, not valid",
        ),
        (CHOSEN | {"below": [{"rows": 9, "engine": "b"}]}, "'b' is not among"),
        (CHOSEN | {"below": [{"rows": 9, "engine": "a"}] * 2}, "do not ascend"),
        (
            CHOSEN | {"candidates": {"a": {"status": "valid", "files": ["../f"]}}},
            "leaves its folder",
        ),
    ],
)
def test_a_target_that_contradicts_itself_is_refused(
    manifest_data: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(json.dumps(manifest_data | {"targets": {V3: record}}))


AOTI = ("targets", V3, "candidates", "aoti")
TIMES = {"median_us": 1, "p05_us": 0, "p95_us": 2}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("capture", "precision"), "fp8"),
        (("session",), {"threads": 0, "instances": None}),
        (("session",), {"threads": 4097, "instances": None}),
        (("classifiers",), "probabilities"),
        (("targets", "CPU/x"), {"status": "unverified"}),
        (("targets", V3, "candidates", "a/b"), {"status": "failed"}),
        ((*AOTI, "tile"), 0),
        ((*AOTI, "windows"), 1),
        ((*AOTI, "bits"), "ab"),
        ((*AOTI, "compile_seconds"), "1.5"),
        ((*AOTI, "benchmark", "n"), TIMES),
        ((*AOTI, "benchmark", "10"), TIMES | {"median_us": -1}),
        ((*AOTI, "benchmark", "10"), TIMES | {"median_us": math.nan}),
        (("tolerances", "probabilities", "atol"), -1e-5),
        (("tolerances", "probabilities", "max_outside"), 1.5),
        (("provenance", "git_dirty"), "yes"),
    ],
)
def test_a_value_out_of_its_range_is_refused(
    manifest_data: dict[str, Any], path: tuple[str, ...], value: object
) -> None:
    *sections, field = path
    section: Any = manifest_data
    for key in sections:
        section = section.setdefault(key, {})
    section[field] = value
    with pytest.raises(BundleError):
        Manifest.from_json(json.dumps(manifest_data))
