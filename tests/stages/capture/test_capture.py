"""Capture: its files, its route to TorchScript, and the line that a refusal names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from engines.exported import quiet_torch
from soa import Block, Layout, RowRange, Signature, column
from stages.capture import (
    Capture,
    Route,
    capture,
    convention_arguments,
    example_case,
    export_convention,
)
from stages.capture.independence import rows_differ
from stages.errors import CaptureError
from stages.model import SoaProgram
from stages.model.source import ModelSource, build_model
from stages.reference.answers import Reference, random_inputs
from tests.models import mlps, served
from tests.models.building import (
    JETS,
    TAGS,
    Built,
    build,
    mlp_signature,
    reasons,
    require_valid,
    signature_of,
)

SIGNATURE = mlp_signature()


def captured(
    model: nn.Module, folder: Path, route: Route = "none", signature: Signature = SIGNATURE
) -> Capture:
    if type(model).__module__ == mlps.__name__:  # build_model does this for other models
        model = model.eval().requires_grad_(False)
    return capture(model, signature, random_inputs(signature, 1, {}), folder, route)


def refusal(model: nn.Module, folder: Path, signature: Signature = SIGNATURE) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(model, folder, signature=signature)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())
    return str(caught.value)


def test_the_same_model_gives_the_same_files(tmp_path: Path) -> None:
    def files(name: str) -> list[bytes]:
        (tmp_path / name).mkdir()
        made = captured(mlps.build(), tmp_path / name, route="none")
        return [file.read_bytes() for file in (made.program, made.reference)]

    assert files("first") == files("again")


def test_what_it_writes(mlp: Built) -> None:
    made = mlp.capture
    assert {f.name for f in made.folder.iterdir() if f.is_file()} == {
        "program.pt2",
        "model.ts",
        "reference.safetensors",
        "capture.json",
    }
    assert (made.torchscript, made.torchscript_note) == ("scripted", None)
    assert Capture.load(made.folder) == made
    reference = Reference.load(made.reference)
    assert {case["n"] for case in reference.cases} >= {0, 1, 2, 31, 32, 33, 1000, 4099, 5000}
    assert [set(o) for o in reference.outputs] == [{"probabilities"}] * len(reference.cases)


# -- models that are refused -------------------------------------------------------------------


WRITES = ("the model writes into ", "use the out-of-place operation")
ROWS = "does not work at every row count at "
AS_NUMBER = (ROWS, "takes the row count for a plain number", "which fixes it to 37")


@pytest.mark.parametrize(
    ("model", "line", "says"),
    [
        (mlps.CountsCalls, "mutates buffer", ("'calls' at ", *WRITES)),
        (mlps.BakesRows, "bakes rows", (ROWS, "fixes the row count to 37", "(x.shape[0])")),
        pytest.param(mlps.RootOfRows, "root of rows", AS_NUMBER, marks=pytest.mark.long),
        (mlps.CountsRows, "counts rows", AS_NUMBER),
        (
            mlps.BranchesOnRows,
            "branches on rows",
            (ROWS, "takes another path unless ", "the row count of x <= 100"),
        ),
        (
            mlps.BranchesOnData,
            "branches on data",
            ("takes a path that depends on the data at ", "torch.where"),
        ),
        (
            mlps.PacksSteps,
            "packs steps",
            ("does not export", "y[torch.arange(len(y)), length - 1]"),
        ),
        (
            mlps.Raises,
            "raises",
            ("the model fails on its reference inputs (", "no detector, no answer"),
        ),
        (
            mlps.FailsWithoutRows,
            "fails without rows",
            ("the eager model itself fails at n=0 (", "say so in rows: (min, max)"),
        ),
    ],
)
def test_the_refusal_names_the_line_of_the_model(
    model: type[nn.Module], line: str, says: tuple[str, ...], tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The refusal also says what to do. No log of torch is left, open or on the disk."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    text = refusal(model(), tmp_path, mlp_signature(300))
    assert [path for path in temporary.rglob("*") if path.is_file()] == []
    held = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any(file.is_relative_to(temporary) for file in held)
    assert all(part in text for part in says), text
    assert f"{Path(mlps.__file__).parent}/{mlps.line_of(line)}" in text
    assert ("Take sizes from the input" in text) == (ROWS in says and AS_NUMBER[1] not in says)


class Density(mlps.Core):
    """The log-likelihood of the last column; torch.distributions checks its arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.core(x)
        found: torch.Tensor = torch.distributions.Normal(mean, mean.exp()).log_prob(x[:, 5:])
        return found


class Unknown(mlps.Core):
    """The rules of rows do not know `cholesky_solve`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = torch.eye(3).expand(x.shape[0], 3, 3)
        return torch.cholesky_solve(self.core(x)[..., None], root)[..., 0]


def test_checks_of_distributions_are_no_branch_of_the_model(tmp_path: Path) -> None:
    made = captured(Density(), tmp_path)
    assert (made.dependence, made.tried) == ("", "")
    assert any("torch.distributions" in note for note in Reference.load(made.reference).notes)
    assert torch.distributions.Distribution._validate_args is True


def test_rows_are_tried_if_an_operator_is_unknown_to_the_rules(tmp_path: Path) -> None:
    made = captured(Unknown(), tmp_path, signature=mlp_signature(300))
    assert "cholesky_solve" in made.tried and made.dependence == made.tried
    signature = mlp_signature(300)
    unbounded = replace(signature, ranges={"n": RowRange(0, 300, unbounded=True)})
    with pytest.raises(CaptureError, match=r"only tried, not shown: .*cholesky_solve"):
        captured(Unknown(), tmp_path, signature=unbounded)
    inputs = random_inputs(unbounded, 1, {})
    made = capture(Unknown(), unbounded, inputs, tmp_path, "none", tried_is_enough=True)
    assert made.tried and made.dependence == ""


# -- models that torch.export takes only at one row ------------------------------------------------


class Tokens(mlps.Core):
    """Attention among the columns of a row. Python takes the number of rows as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 4))
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.token.expand(len(x), 1, 4)
        given = torch.cat([first, x[..., None] * self.token], 1)
        found, _ = self.attend(given, given, given, need_weights=False)
        chosen = found[torch.arange(len(x)), 0]
        answers: torch.Tensor = self.core(x) + chosen[:, :3]
        return answers


@pytest.fixture(scope="module")
def by_rows(tmp_path_factory: pytest.TempPathFactory) -> Built:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("by-rows")
    return build(Tokens(), mlp_signature(300), folder, ("lanes", "exported"))


def test_a_model_that_takes_its_row_count_as_a_number_is_captured_at_one_row(
    by_rows: Built,
) -> None:
    """Each engine gives eager's answers at all sizes of the reference, 0 and 1 among them."""
    assert reasons(by_rows) == dict.fromkeys(by_rows.files)
    made = by_rows.capture
    assert made.tried == made.dependence and "test_capture.py" in made.tried
    assert (made.torchscript, made.script) == ("scripted", made.folder / "model.ts")


def test_a_loop_over_rows_is_captured_at_one_row(tmp_path: Path) -> None:
    """It cannot be traced: a trace would keep the row count of the example."""
    made = captured(mlps.LoopsOverRows(), tmp_path, signature=mlp_signature(8))
    assert made.tried and made.dependence
    with pytest.raises(CaptureError, match=r"does not trace: .*\(torchscript_route: trace\)"):
        captured(mlps.LoopsOverRows(), tmp_path, "trace", mlp_signature(8))


class AtOneNumber(mlps.Core):
    """Gives other answers at some row counts, which Python reads as a number."""

    def __init__(self, other: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.core(x), len(x))


def _sorted_at(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.sort(0).values if n == 211 else x


AT_ONE_NUMBER: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "times n": lambda x, n: x * n,
    "many": lambda x, n: x * (1 + n // 5001),
    "one large n": lambda x, n: x + (n == 4711),
    "one small n": lambda x, n: x * (2 if n == 29 else 1),
    "odd n": lambda x, n: x + n % 2,
    "above a limit": lambda x, n: -x if n > 3000 else x,
    "the largest": lambda x, n: x + n // 6000,
    "a power of two": lambda x, n: x + (n & (n - 1) == 0),
    "one row alone": lambda x, n: 2 * x if n == 1 else x,
    "sorts some": _sorted_at,
    "the first row": lambda x, n: torch.cat([x[:1] + (n == 777), x[1:]]),
}


def test_a_model_that_acts_otherwise_at_one_row_count_is_refused(tmp_path: Path) -> None:
    signature = mlp_signature(6000)
    inputs = random_inputs(signature, 1, {})
    for name, other in AT_ONE_NUMBER.items():
        assert rows_differ(AtOneNumber(other).eval(), signature, inputs), name
    text = refusal(AtOneNumber(AT_ONE_NUMBER["one large n"]), tmp_path, signature)
    assert "Captured one by one, its rows are wrong: " in text and "test_capture.py" in text


@pytest.mark.parametrize(
    ("kind", "engines"),
    [
        (mlps.MutatesInput, ("exported",)),
        (mlps.MutatesInputByView, ("exported", "torchscript")),
        pytest.param(mlps.MutatesInput, ("aoti",), marks=pytest.mark.long),
    ],
)
def test_a_model_that_writes_into_its_inputs_gets_copies(
    kind: type[nn.Module], engines: tuple[str, ...], tmp_path: Path
) -> None:
    """In every engine, its answers are right and its input memory is unchanged."""
    require_valid(kind(), SIGNATURE, tmp_path, engines)


def test_a_number_from_the_data_is_no_row_count(tmp_path: Path) -> None:
    signature = signature_of(
        {"features": "a b c d e f", "k": "k:int64"}, {"probabilities": "x y z"}
    )
    text = refusal(mlps.NumberFromData(), tmp_path, signature)
    assert "depends on the data" in text
    assert "row count" not in text


def test_dtypes_that_clash_are_named(tmp_path: Path) -> None:
    text = refusal(mlps.PointwiseFirst().double(), tmp_path)
    assert "computes in float64 (last.bias)" in text
    assert "'features' as float32: write dtype: float64" in text
    mixed = mlps.PointwiseFirst()
    mixed.last.double()
    assert "first.bias is float32 and last.bias is float64" in refusal(mixed, tmp_path)
    as_told = Signature.build(
        {"jets": JETS, "tags": TAGS},
        [Block("features", "jets", mlps.FEATURES, "float64")],
        [Block("probabilities", "tags", mlps.CLASSES)],
        {"n": RowRange(0, 100)},
    )
    captured(mlps.PointwiseFirst().double(), tmp_path, signature=as_told)


class TooLarge(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] + x.new_zeros(1 << 50).sum()


def test_a_model_too_large_for_memory(tmp_path: Path) -> None:
    text = refusal(TooLarge(), tmp_path)
    assert text.startswith("the model fails on its reference inputs (")
    assert text.endswith("out of memory: give it more memory, or build for fewer rows (rows: max)")


def test_the_narrowed_row_range_is_taken(tmp_path: Path) -> None:
    """The advice of the refusals helps."""
    captured(mlps.FailsWithoutRows(), tmp_path, signature=mlp_signature(lowest=1))
    above = mlp_signature(highest=300, lowest=101)
    captured(mlps.BranchesOnRows(), tmp_path, signature=above)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            lambda y, n: y[:, :2],
            "output 'probabilities': the model returns shape (37, 2) at n=37, its columns "
            "x, y, z hold (37, 3)",
        ),
        (lambda y, n: y.mean(0, keepdim=True), "the model returns shape (1, 3) at n=37"),
        (
            lambda y, n: y.round().long(),
            "output 'probabilities': the model returns torch.int64, its columns are float32: "
            "convert it in the model",
        ),
    ],
)
def test_outputs_that_are_not_those_declared(
    ends: Callable[[torch.Tensor, int], torch.Tensor], message: str, tmp_path: Path
) -> None:
    assert message in refusal(AtOneNumber(ends), tmp_path)


def test_a_float_output_into_integer_columns(tmp_path: Path) -> None:
    text = refusal(mlps.PointwiseFirst(), tmp_path, mlp_signature(output="int32"))
    assert "returns torch.float32, its columns are int32" in text


def test_inputs_of_the_wrong_width(tmp_path: Path) -> None:
    five = signature_of({"features": "a b c d e"}, {"probabilities": "x y z"})
    text = refusal(mlps.PointwiseFirst(), tmp_path, five)
    assert "the model fails on its reference inputs (" in text and "mlps.py:" in text
    assert "mat1 and mat2 shapes cannot be multiplied (37x5 and 6x48)" in text


# -- row counts to export at ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowest", "highest", "example"),
    [(0, 100, 37), (0, 37, 36), (15, 16, 15), (50, 100, 99), (2, 2, 2)],
)
def test_the_example_lies_in_the_range(lowest: int, highest: int, example: int) -> None:
    assert example_case(mlp_signature(highest, (), lowest)) == {"n": example}


def several_dimensions(dims: str, ranges: dict[str, RowRange]) -> Signature:
    """Two inputs and two outputs of one column, each with the rows of a dimension."""
    layout = Layout([column("a", "float32")])
    return Signature.build(
        {name: layout for name in "abcd"},
        [Block("x", "a", ("a",)), Block("y", "b", ("a",))],
        [Block("z", "c", ("a",)), Block("w", "d", ("a",))],
        ranges,
        dict(zip("abcd", dims, strict=True)),
    )


def test_examples_of_several_dimensions_differ() -> None:
    case = example_case(several_dimensions("nmkl", dict.fromkeys("nmkl", RowRange(0, 30))))
    assert len(set(case.values())) == 4
    assert all(0 <= n <= 30 for n in case.values())


class Sums(nn.Module):
    """Two row dimensions; each answer needs both."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y.sum(), y * 2 + x.sum()


@pytest.mark.parametrize("highest", [(2, 2), (100, 2), (2, 100), (3, 3)])
def test_a_second_dimension_of_few_rows(highest: tuple[int, int], tmp_path: Path) -> None:
    """torch.export takes the size of a one-row example as a constant, whatever the range."""
    ranges = {"n": RowRange(0, highest[0]), "m": RowRange(0, highest[1])}
    captured(Sums(), tmp_path, signature=several_dimensions("nmnm", ranges))


def test_a_range_of_one_row_count_exports(tmp_path: Path) -> None:
    made = captured(mlps.PointwiseFirst(), tmp_path, "none", mlp_signature(8, (), 8))
    assert (made.torchscript, made.torchscript_note, made.script) == (None, "not wanted", None)
    assert not (tmp_path / "model.ts").exists()


def test_a_program_with_scalars_gives_the_answers_of_the_model() -> None:
    signature, model = served.EVENT, served.Event().eval().requires_grad_(False)
    example = example_case(signature)
    given = convention_arguments(signature, random_inputs(signature, 1, {}), example)
    expected = [each.clone() for each in given]
    program = export_convention(model, signature, given)
    SoaProgram(model, signature)(*expected)
    program.module(check_guards=False)(*given)
    assert any(argument.kind == "scalar" for argument in signature.arguments)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)


# -- TorchScript -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "route", "made", "note"),
    [
        (mlps.PointwiseFirst, "script", "scripted", ""),
        (mlps.PointwiseFirst, "trace", "traced", ""),
        (mlps.OnlyTraces, "auto", "traced", "does not script: "),
    ],
)
def test_routes(model: type[nn.Module], route: Route, made: str, note: str, tmp_path: Path) -> None:
    result = captured(model(), tmp_path, route)
    assert result.torchscript == made
    assert result.script == tmp_path / "model.ts" and result.script.is_file()
    assert (result.torchscript_note or "").startswith(note)


def test_a_route_asked_for_must_work(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"does not script: .*\(torchscript_route: script\)"):
        captured(mlps.OnlyTraces(), tmp_path, "script")
    signature = signature_of({"features": "a b c d e f"}, {"first": "x", "last": "z"})
    with pytest.raises(CaptureError, match=r"does not trace: .*\(torchscript_route: trace\)"):
        captured(mlps.NamedOutputs(), tmp_path, "trace", signature)
    made = captured(mlps.NamedOutputs(), tmp_path, "auto", signature)
    assert made.torchscript is None and made.program.exists()
    assert re.match("does not script: .*; does not trace: ", made.torchscript_note or "")


# -- models that come as files -----------------------------------------------------------------


def test_a_program_of_one_row_count_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    with quiet_torch():
        program = torch.export.export(mlps.PointwiseFirst().eval(), (torch.randn(7, 6),))
        torch.export.save(program, file)
    folder = tmp_path / "capture"
    folder.mkdir()
    text = refusal(build_model(ModelSource(program=file)), folder)
    assert "the model fails on its reference inputs" in text
    assert "7" in text
