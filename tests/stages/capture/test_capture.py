"""Capture: its files, its route to TorchScript, and the line that a refusal names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engines.exported import load_program, quiet_torch
from soa import Block, Layout, RowRange, Signature, column
from stages.capture import (
    Capture,
    Route,
    capture,
    convention_arguments,
    example_case,
    export_convention,
    why_rows_may_mix,
)
from stages.capture.independence import how_rows_depend
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
    """The capture of a model on random inputs."""
    if type(model).__module__ == mlps.__name__:  # build_model does this for other models
        model = model.eval().requires_grad_(False)
    return capture(model, signature, random_inputs(signature, 1, {}), folder, route)


def refusal(model: nn.Module, folder: Path, signature: Signature = SIGNATURE) -> str:
    """The line with which a capture is refused; the folder stays empty."""
    with pytest.raises(CaptureError) as caught:
        captured(model, folder, signature=signature)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())
    return str(caught.value)


def test_the_same_model_gives_the_same_files(tmp_path: Path) -> None:
    def files(name: str) -> list[bytes]:
        (tmp_path / name).mkdir()
        result = captured(mlps.build(), tmp_path / name, route="none")
        return [file.read_bytes() for file in (result.program, result.reference)]

    assert files("first") == files("again")


def test_a_capture_has_a_program_a_script_and_a_reference(mlp: Built) -> None:
    result = mlp.capture
    assert {file.name for file in result.folder.iterdir() if file.is_file()} == {
        "program.pt2",
        "model.ts",
        "reference.safetensors",
        "capture.json",
    }
    assert (result.torchscript, result.torchscript_note) == ("scripted", None)


def test_a_capture_loads_as_it_was(mlp: Built) -> None:
    assert Capture.load(mlp.capture.folder) == mlp.capture


def test_the_reference_of_a_capture_has_answers_of_every_size(mlp: Built) -> None:
    reference = Reference.load(mlp.capture.reference)
    assert {case["n"] for case in reference.cases} >= {0, 1, 2, 31, 32, 33, 1000, 4099, 5000}
    assert len(reference.outputs) == len(reference.cases)
    assert all(set(outputs) == {"probabilities"} for outputs in reference.outputs)


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
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not any(file.is_relative_to(temporary) for file in links)
    assert all(phrase in text for phrase in says), text
    assert f"{Path(mlps.__file__).parent}/{mlps.line_of(line)}" in text
    assert ("Take sizes from the input" in text) == (ROWS in says and AS_NUMBER[1] not in says)


class Density(mlps.Core):
    """The log-likelihood of the last column; torch.distributions checks its arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.core(x)
        density: torch.Tensor = torch.distributions.Normal(mean, mean.exp()).log_prob(x[:, 5:])
        return density


class Unknown(mlps.Core):
    """The rules of rows do not know `cholesky_solve`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = torch.eye(3).expand(x.shape[0], 3, 3)
        return torch.cholesky_solve(self.core(x)[..., None], root)[..., 0]


def test_checks_of_distributions_are_no_branch_of_the_model(tmp_path: Path) -> None:
    result = captured(Density(), tmp_path)
    assert (result.dependence, result.tried) == ("", "")
    assert any("torch.distributions" in note for note in Reference.load(result.reference).notes)
    assert torch.distributions.Distribution._validate_args is True


BOUNDED = mlp_signature(300)
UNBOUNDED = replace(BOUNDED, ranges={"n": RowRange(0, 300, unbounded=True)})


def test_rows_are_tried_if_an_operator_is_unknown_to_the_rules(tmp_path: Path) -> None:
    result = captured(Unknown(), tmp_path, signature=BOUNDED)
    assert "cholesky_solve" in result.tried and result.dependence == result.tried


def test_a_trial_is_not_enough_for_unbounded_rows(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"only tried, not shown: .*cholesky_solve"):
        captured(Unknown(), tmp_path, signature=UNBOUNDED)


def test_a_trial_may_be_said_to_be_enough_for_unbounded_rows(tmp_path: Path) -> None:
    inputs = random_inputs(UNBOUNDED, 1, {})
    result = capture(Unknown(), UNBOUNDED, inputs, tmp_path, "none", tried_is_enough=True)
    assert result.tried and result.dependence == ""


class WithFreeRowCount(mlps.Core):
    """Applies a function to the answers and to the row count, which stays a symbol in a graph."""

    def __init__(self, function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.core(x), x.shape[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda y, n: y * 2 if n > 5000 else y,
        lambda y, n: y if n < 5000 else y * 2,
        lambda y, n: y * 2 if min(n, 1500) == 1500 else y,
        lambda y, n: y * 2 if y.numel() > 4_000_000 else y,
    ],
)
def test_a_branch_above_a_tile_is_refused_for_unbounded_rows(
    function: Callable[[torch.Tensor, int], torch.Tensor], tmp_path: Path
) -> None:
    model = WithFreeRowCount(function).eval()
    inputs = random_inputs(UNBOUNDED, 1, {})
    says = "another path unless|rows_n <= "  # torch's own words, for a fraction as the limit
    assert re.search(says, why_rows_may_mix(model, BOUNDED, inputs))
    assert re.search(says, refusal(model, tmp_path, UNBOUNDED))
    assert captured(model, tmp_path, signature=BOUNDED).dependence == ""


def test_a_program_of_unbounded_rows_is_made_for_the_rows_of_a_tile(tmp_path: Path) -> None:
    """Also if the graph has the number of rows."""
    model = WithFreeRowCount(lambda y, n: y[torch.arange(n)] + torch.ones(3).expand(n, 3)).eval()
    result = captured(model, tmp_path, signature=UNBOUNDED)
    ranges = load_program(result.program).range_constraints.values()
    assert [int(rows.upper) for rows in ranges if rows.lower == 0] == [300]
    assert why_rows_may_mix(model, BOUNDED, random_inputs(UNBOUNDED, 1, {})) == ""


# -- state in Python -----------------------------------------------------------------------------


class Keeps(mlps.Core):
    """Applies a function to itself, the input and the answers, which keeps what it likes."""

    def __init__(self, function: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.kept: Any = None
        self.cache: dict[str, Any] = {}
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, self.core(x))


def _first_number(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = float(x.shape[0])
    return torch.mul(y, self.kept)


def _first_mean(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(y, self.cache.setdefault("mean", x.mean()))


def _first_row(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.late = x[0, :3].clone() if self.late is None else self.late
    return torch.add(y, self.late)


def _new_attribute(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.most = max(getattr(self, "most", 0), x.shape[0])
    return torch.mul(y, self.most)


def _cache_of_weights(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if self.kept is None:
        self.kept = torch.linspace(0, 1, x.shape[1] // 2)
    self.cache["columns"] = x.shape[1]
    return torch.add(y, self.kept)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_first_number, "kept"),
        (_first_mean, "cache"),
        (_first_row, "late"),
        (_new_attribute, "most"),
    ],
)
def test_a_model_that_keeps_state_of_its_first_call_is_refused(
    function: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], name: str, tmp_path: Path
) -> None:
    text = refusal(Keeps(function).eval(), tmp_path)
    assert text.startswith(f"the model writes into '{name}', and its answers depend on its first")


def test_a_cache_that_changes_no_answer_is_captured(tmp_path: Path) -> None:
    assert captured(Keeps(_cache_of_weights).eval(), tmp_path).dependence == ""


# -- models that torch.export takes only at one row ------------------------------------------------


class Tokens(mlps.Core):
    """Attention among the columns of a row. Python takes the number of rows as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 4))
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.token.expand(len(x), 1, 4)
        tokens = torch.cat([first, x[..., None] * self.token], 1)
        attended, _ = self.attend(tokens, tokens, tokens, need_weights=False)
        of_first = attended[torch.arange(len(x)), 0]
        answers: torch.Tensor = self.core(x) + of_first[:, :3]
        return answers


@pytest.fixture(scope="module")
def by_rows(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model that torch.export takes only at one row, and its artifacts."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("by-rows")
    return build(Tokens(), mlp_signature(300), folder, ("lanes", "exported"))


def test_a_model_that_takes_its_row_count_as_a_number_is_captured_at_one_row(
    by_rows: Built,
) -> None:
    """Each engine gives eager's answers at all sizes of the reference, 0 and 1 among them."""
    assert reasons(by_rows) == dict.fromkeys(by_rows.files)
    result = by_rows.capture
    assert result.tried == result.dependence and "test_capture.py" in result.tried
    assert (result.torchscript, result.script) == ("scripted", result.folder / "model.ts")


def test_a_loop_over_rows_is_captured_at_one_row(tmp_path: Path) -> None:
    result = captured(mlps.LoopsOverRows(), tmp_path, signature=mlp_signature(8))
    assert result.tried and result.dependence


def test_a_loop_over_rows_cannot_be_traced(tmp_path: Path) -> None:
    """A trace would keep the row count of the example."""
    with pytest.raises(CaptureError, match=r"does not trace: .*\(torchscript_route: trace\)"):
        captured(mlps.LoopsOverRows(), tmp_path, "trace", mlp_signature(8))


class WithRowCount(mlps.Core):
    """Applies a function to the answers and to the row count, which Python reads as a number."""

    def __init__(self, function: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.core(x), len(x))


def _sorted_at(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.sort(0).values if n == 211 else x


OTHERWISE_AT_SOME: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
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


MANY = mlp_signature(6000)


@pytest.mark.parametrize("name", OTHERWISE_AT_SOME)
def test_a_trial_finds_a_model_that_acts_otherwise_at_some_row_counts(name: str) -> None:
    model = WithRowCount(OTHERWISE_AT_SOME[name]).eval()
    assert how_rows_depend(model, MANY, random_inputs(MANY, 1, {}))


def test_a_model_that_acts_otherwise_at_one_row_count_is_refused(tmp_path: Path) -> None:
    text = refusal(WithRowCount(OTHERWISE_AT_SOME["one large n"]), tmp_path, MANY)
    assert "Captured one by one, its rows are wrong: " in text and "test_capture.py" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda y, n: torch.where(y > 1e5, y * float(n), y),
        lambda y, n: torch.where(y > 1e5, y * n, y),
        lambda y, n: torch.where(y > 1e5, torch.full_like(y, n), y),
        lambda y, n: torch.where(y > 1e5, torch.tensor(float(n)), y),
    ],
)
def test_a_row_count_among_the_numbers_is_seen_where_no_trial_sees_it(
    function: Callable[[torch.Tensor, int], torch.Tensor], tmp_path: Path
) -> None:
    model = WithRowCount(lambda y, n: function(y, n) + 0 * y[torch.arange(int(n))])
    assert "its graph has other numbers at another row count (" in refusal(model.eval(), tmp_path)


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


def test_a_number_from_the_data_is_not_called_a_row_count(tmp_path: Path) -> None:
    signature = signature_of(
        {"features": "a b c d e f", "k": "k:int64"}, {"probabilities": "x y z"}
    )
    text = refusal(mlps.NumberFromData(), tmp_path, signature)
    assert "depends on the data" in text
    assert "row count" not in text


def test_another_dtype_than_that_of_the_block_is_named(tmp_path: Path) -> None:
    text = refusal(mlps.PointwiseFirst().double(), tmp_path)
    assert "computes in float64 (last.bias)" in text
    assert "'features' as float32: write dtype: float64" in text


def test_two_dtypes_in_one_model_are_named(tmp_path: Path) -> None:
    mixed = mlps.PointwiseFirst()
    mixed.last.double()
    assert "first.bias is float32 and last.bias is float64" in refusal(mixed, tmp_path)


def test_a_block_in_the_dtype_of_the_model_is_captured(tmp_path: Path) -> None:
    """As the refusal says."""
    as_told = Signature.build(
        {"jets": JETS, "tags": TAGS},
        [Block("features", "jets", mlps.FEATURES, "float64")],
        [Block("probabilities", "tags", mlps.CLASSES)],
        {"n": RowRange(0, 100)},
    )
    result = captured(mlps.PointwiseFirst().double(), tmp_path, signature=as_told)
    assert result.program.is_file()


class TooLarge(nn.Module):
    """It needs four pebibytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] + x.new_zeros(1 << 50).sum()


def test_a_model_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    text = refusal(TooLarge(), tmp_path)
    assert text.startswith("the model fails on its reference inputs (")
    assert text.endswith("out of memory: give it more memory, or build for fewer rows (rows: max)")


@pytest.mark.parametrize(
    ("model", "signature"),
    [
        (mlps.FailsWithoutRows, mlp_signature(lowest=1)),
        (mlps.BranchesOnRows, mlp_signature(highest=300, lowest=101)),
    ],
)
def test_a_range_without_the_refused_row_counts_is_captured(
    model: type[nn.Module], signature: Signature, tmp_path: Path
) -> None:
    """The advice of the refusals helps."""
    assert captured(model(), tmp_path, signature=signature).program.is_file()


@pytest.mark.parametrize(
    ("function", "message"),
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
def test_an_output_that_is_not_as_declared_is_refused(
    function: Callable[[torch.Tensor, int], torch.Tensor], message: str, tmp_path: Path
) -> None:
    assert message in refusal(WithRowCount(function), tmp_path)


def test_a_float_output_into_integer_columns_is_refused(tmp_path: Path) -> None:
    text = refusal(mlps.PointwiseFirst(), tmp_path, mlp_signature(output="int32"))
    assert "returns torch.float32, its columns are int32" in text


def test_inputs_of_the_wrong_width_are_refused_with_torchs_reason(tmp_path: Path) -> None:
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
def test_two_dimensions_of_few_rows_are_captured(highest: tuple[int, int], tmp_path: Path) -> None:
    """torch.export takes the size of a one-row example as a constant, whatever the range."""
    ranges = {"n": RowRange(0, highest[0]), "m": RowRange(0, highest[1])}
    result = captured(Sums(), tmp_path, signature=several_dimensions("nmnm", ranges))
    assert result.program.is_file()


def test_a_range_of_one_row_count_is_captured(tmp_path: Path) -> None:
    result = captured(mlps.PointwiseFirst(), tmp_path, "none", mlp_signature(8, (), 8))
    assert result.program.is_file()


def test_torchscript_that_is_not_wanted_is_not_made(tmp_path: Path) -> None:
    result = captured(mlps.PointwiseFirst(), tmp_path, "none", mlp_signature(8, (), 8))
    assert (result.torchscript, result.script) == (None, None)
    assert result.torchscript_note == "not wanted"
    assert not (tmp_path / "model.ts").exists()


def test_a_program_with_scalars_gives_the_answers_of_the_model() -> None:
    signature, model = served.EVENT, served.Event().eval().requires_grad_(False)
    assert any(argument.kind == "scalar" for argument in signature.arguments)
    example = example_case(signature)
    arguments = convention_arguments(signature, random_inputs(signature, 1, {}), example)
    expected = [argument.clone() for argument in arguments]
    program = export_convention(model, signature, arguments)
    SoaProgram(model, signature)(*expected)  # it writes the answers into its arguments
    program.module(check_guards=False)(*arguments)
    for argument, answer in zip(arguments, expected, strict=True):
        torch.testing.assert_close(argument, answer)


# -- TorchScript -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "route", "torchscript", "note"),
    [
        (mlps.PointwiseFirst, "script", "scripted", ""),
        (mlps.PointwiseFirst, "trace", "traced", ""),
        (mlps.OnlyTraces, "auto", "traced", "does not script: "),
    ],
)
def test_a_route_gives_torchscript(
    model: type[nn.Module], route: Route, torchscript: str, note: str, tmp_path: Path
) -> None:
    result = captured(model(), tmp_path, route)
    assert result.torchscript == torchscript
    assert result.script == tmp_path / "model.ts" and result.script.is_file()
    assert (result.torchscript_note or "").startswith(note)


TWO_OUTPUTS = signature_of({"features": "a b c d e f"}, {"first": "x", "last": "z"})


@pytest.mark.parametrize(
    ("model", "route", "signature"),
    [(mlps.OnlyTraces, "script", SIGNATURE), (mlps.NamedOutputs, "trace", TWO_OUTPUTS)],
)
def test_a_route_that_was_asked_for_must_work(
    model: type[nn.Module], route: Route, signature: Signature, tmp_path: Path
) -> None:
    message = rf"does not {route}: .*\(torchscript_route: {route}\)"
    with pytest.raises(CaptureError, match=message):
        captured(model(), tmp_path, route, signature)


def test_a_model_that_no_route_takes_is_captured_without_torchscript(tmp_path: Path) -> None:
    result = captured(mlps.NamedOutputs(), tmp_path, "auto", TWO_OUTPUTS)
    assert result.torchscript is None and result.program.exists()
    assert re.match("does not script: .*; does not trace: ", result.torchscript_note or "")


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
