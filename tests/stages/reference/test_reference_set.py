"""A larger reference set: read in windows, and compared with the portable program."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runtime.checked import recorded_tolerances
from soa.signature import RowRange, Signature
from stages.errors import ReferenceDataError
from stages.judging.validate import Trial, validate_here
from stages.reference import read_more_rows, read_rows, read_set, windows
from stages.reports import ValidationReport
from tests.models.building import signature_of
from tests.models.project import TARGET, Built


def signature(minimum: int = 0, rows: RowRange | None = None) -> Signature:
    """One column of floats, of at most ten rows unless `rows` says otherwise."""
    return signature_of({"f": "a"}, {"y": "x"}, rows or RowRange(minimum, 10, (10,)))


def write(folder: Path, **columns: torch.Tensor) -> Path:
    """Writes a reference set with these columns."""
    path = folder / "set.safetensors"
    save_file({f"input/rows/{name}": values for name, values in columns.items()}, path)
    return path


@pytest.mark.parametrize(
    ("rows", "minimum", "sizes"),
    [(1, 0, [1]), (10, 0, [10]), (23, 0, [10, 10, 3]), (23, 5, [10, 10, 5]), (12, 10, [10, 10])],
)
def test_windows_cover_every_row(tmp_path: Path, rows: int, minimum: int, sizes: list[int]) -> None:
    path = write(tmp_path, a=torch.arange(float(rows)))
    pieces = list(windows(signature(minimum), read_set(signature(minimum), path)))
    assert [case["n"] for _, case in pieces] == sizes
    assert all(len(arrays["rows"]["a"]) == case["n"] for arrays, case in pieces)
    seen = {int(value) for arrays, _ in pieces for value in arrays["rows"]["a"]}
    assert seen == set(range(rows))


@given(
    count=st.integers(1, 400), most=st.integers(2, 12), minimum=st.integers(0, 12),
    unbounded=st.booleans(),
)  # fmt: skip
def test_every_row_of_a_file_is_run(count: int, most: int, minimum: int, unbounded: bool) -> None:
    """Among the first rows or the further ones; of a very long file, a sample is run."""
    least = 0 if unbounded else min(minimum, most)
    rows = RowRange(least, most, (most,), unbounded=unbounded)
    taken = signature(rows=rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.npz")
        columns: Any = {"rows/a": np.arange(count, dtype=np.float32)}
        np.savez(path, **columns)
        first, more = read_rows(taken, path), read_more_rows(taken, path)
    seen = {int(value) for value in first["rows"]["a"]}
    if count <= rows.proven:
        assert more is None and seen == set(range(count))
        return
    assert more is not None
    pieces = [arrays["rows"]["a"] for arrays, _ in windows(taken, more)]
    assert all(rows.min <= len(piece) <= rows.max for piece in pieces)
    seen |= {int(value) for piece in pieces for value in piece}
    assert count - 1 in seen
    assert seen == set(range(count)) or len(pieces) == 64


@pytest.mark.parametrize(
    ("columns", "minimum", "says"),
    [
        ({"b": torch.ones(3)}, 0, "0 rows of n, at least 1 are needed"),
        ({"a": torch.ones(3)}, 5, "3 rows of n, at least 5 are needed"),
        (
            {"a": torch.ones(3, dtype=torch.float64)},
            0,
            "the layout says float32: convert it first",
        ),
    ],
    ids=["another column", "few rows", "dtype"],
)
def test_a_set_that_does_not_fit_is_refused(
    tmp_path: Path, columns: dict[str, torch.Tensor], minimum: int, says: str
) -> None:
    path = write(tmp_path, **columns)
    with pytest.raises(ReferenceDataError) as caught:
        read_set(signature(minimum), path)
    assert str(caught.value).startswith(str(path)) and says in str(caught.value)


def test_a_file_that_is_no_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ReferenceDataError, match="is not a reference set") as caught:
        read_set(signature(), tmp_path / "text")
    assert str(caught.value).startswith(str(tmp_path / "text"))


def judged(jets: Built, inputs: Path, program: Path) -> ValidationReport:
    """The chosen artifact compared with a program, in this process."""
    manifest = jets.bundle.manifest
    candidate = manifest.targets[TARGET].candidates["torchscript"]
    trial = Trial(
        "torchscript",
        jets.bundle.file(candidate.files[0]),
        Signature.from_dict(manifest.signature),
        inputs,
        recorded_tolerances(manifest),
        program=program,
        set_nonfinite=0.0,
    )
    answer = validate_here(trial.to_dict(), keep_memory=False)
    return ValidationReport.from_dict(answer)


def long_set(jets: Built, folder: Path, draw: Callable[[int], torch.Tensor]) -> Path:
    """A set of 2,500 rows; the version takes at most 1,000 in a run."""
    stored = load_file(jets.bundle.file("reference.safetensors"))
    columns = {name: draw(2500) for name in stored if name.startswith("input/")}
    save_file(columns, folder / "set.safetensors")
    return folder / "set.safetensors"


def test_all_rows_of_a_set_are_compared(
    jets: Built, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    inputs = long_set(jets, tmp_path, torch.randn)
    report = judged(jets, inputs, jets.bundle.file("program.pt2"))
    assert report.valid, report.reason
    assert [case.rows["n"] for case in report.cases] == [1000, 1000, 500]
    assert report.worst["probabilities"].elements == 2500 * 3
    # The log says where an artifact was, if it crashes.
    assert [line[:3] for line in capfd.readouterr().out.splitlines()] == ["at "] * 3


def test_a_set_whose_answers_are_all_nan_proves_nothing(jets: Built, tmp_path: Path) -> None:
    inputs = long_set(jets, tmp_path, lambda rows: torch.full((rows,), torch.nan))
    report = judged(jets, inputs, jets.bundle.file("program.pt2"))
    assert not report.valid
    assert "100.00% of the portable program's answers are NaN" in (report.reason or "")


def test_an_artifact_of_another_model_than_the_program_is_refused(
    jets: Built, heavy: Built, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    inputs = long_set(jets, tmp_path, torch.randn)
    report = judged(jets, inputs, heavy.bundle.file("program.pt2"))
    assert not report.valid and report.worst["probabilities"].outside > 0.5
