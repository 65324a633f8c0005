"""Preprocessing of a config: as torch operations, compared with NumPy, and in an artifact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.config.expressions import features_of
from pipeline.config.schema import ColumnConfig, PreprocessConfig
from runtime.checked import Tolerance
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.capture import capture
from stages.model.fronts.expressions import BINARY, UNARY, Expression, Features, Operation
from stages.model.fronts.preprocess import Preprocessed, compute_features
from stages.model.source import ModelSource, build_model
from stages.reference.answers import Reference, random_inputs
from tests.models.building import build, reasons

PLAIN = ("a", "b")
VECTORS = ("u", "v")
MEMBERS = [
    *(ColumnConfig(name=name, dtype="float64") for name in PLAIN),
    *(ColumnConfig(name=name, dtype="float64", eigen=(3,)) for name in VECTORS),
]

constants = st.integers(-64, 64).map(lambda k: k / 8)
unary = st.one_of(
    st.sampled_from([name for name, (_, wanted) in UNARY.items() if not wanted]),
    st.tuples(constants, constants).map(lambda pair: {"clip": sorted(pair)}),
    st.tuples(constants, constants.filter(bool)).map(lambda pair: {"standardise": list(pair)}),
    constants.map(lambda value: {"above": value}),
)


def chains(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Expressions as in a config: a column, or a list of a column and operations on it."""
    columns = st.sampled_from(names)

    def longer(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        operands = st.one_of(constants, inner)
        names_of_two = st.sampled_from(list(BINARY))
        binary = st.builds(lambda name, operand: {name: operand}, names_of_two, operands)
        steps = st.lists(st.one_of(unary, binary), max_size=4)
        return st.builds(lambda column, operations: [column, *operations], columns, steps)

    return st.recursive(columns, longer, max_leaves=6)


NUMPY = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply}


def by_numpy(expression: Any, columns: dict[str, Any]) -> Any:
    """The value of an expression of a config, computed with NumPy in the columns' dtype."""
    if isinstance(expression, int | float):
        return columns["a"].dtype.type(expression)
    if isinstance(expression, str):
        return columns[expression]
    value = columns[expression[0]]
    for step in expression[1:]:
        argument: Any = None
        name = step
        if isinstance(step, dict):
            [(name, argument)] = step.items()
        match name:
            case "log" | "log1p" | "abs" | "sqrt" | "square":
                value = getattr(np, name)(value)
            case "clip":
                value = np.minimum(np.maximum(value, argument[0]), argument[1])
            case "standardise":
                value = (value - argument[0]) * argument[1]
            case "above":
                value = np.where(value > argument, 1.0, 0.0).astype(value.dtype)
            case _:
                value = NUMPY.get(name, np.divide)(value, by_numpy(argument, columns))
    return value


def features_by_numpy(expressions: list[Any], columns: dict[str, Any], dtype: type[Any]) -> Any:
    """(rows, expressions, 3): one feature for each expression."""
    in_dtype = {name: values.astype(dtype) for name, values in columns.items()}
    shape = (len(columns["a"]), 3)
    values = [np.broadcast_to(by_numpy(each, in_dtype), shape) for each in expressions]
    return np.stack(values, axis=1)


@given(
    expressions=st.lists(chains(PLAIN + VECTORS), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    n=st.sampled_from([0, 1, 5]),
)
def test_random_expressions_are_numpys(expressions: list[Any], seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    plain = {name: np.round(rng.normal(0, 4, (n, 1)), 3) for name in PLAIN}
    columns = plain | {name: np.round(rng.normal(0, 4, (n, 3)), 3) for name in VECTORS}
    with np.errstate(all="ignore"):
        expected = features_by_numpy(expressions, columns, np.float64)
        exact = features_by_numpy(expressions, columns, np.longdouble)
        # Two libraries need not agree where rounding is magnified, or decides on which side of a
        # threshold a value lies.
        assume(np.allclose(expected, exact.astype(np.float64), rtol=1e-11, atol=0, equal_nan=True))
    block = features_of(PreprocessConfig(features=tuple(expressions)), MEMBERS)
    values = compute_features(block, torch.tensor(np.concatenate(list(columns.values()), axis=1)))
    assert values.shape == (n, len(expressions), 3)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-9, atol=0)


VALUES = torch.tensor([[1.0, -1.0, math.e], [math.nan, math.inf, 1.0]])
LOG = Expression("v", (Operation("log"),))


def test_absent_elements_are_padded_whatever_they_hold() -> None:
    """An element exists where the same one of column p is above zero."""
    block = Features((("v", (3,)), ("p", (3,))), (LOG, LOG), "p", -9.0)
    p = torch.tensor([[1.0, 0.0, 2.0], [-1.0, math.nan, 1e-30]])
    expected = torch.tensor([[0.0, -9.0, 1.0], [-9.0, -9.0, 0.0]])
    torch.testing.assert_close(
        compute_features(block, torch.cat([VALUES, p], dim=1)),
        expected.unsqueeze(1).expand(-1, 2, -1),
    )


def test_absent_rows_are_padded_whatever_they_hold() -> None:
    """A row exists where its number q is above zero."""
    block = Features((("q", ()), ("v", (3,))), (LOG,), "q", 0.5)
    q = torch.tensor([[1.0], [0.0]])
    values = compute_features(block, torch.cat([q, VALUES.abs()], dim=1))
    assert values[1].tolist() == [[0.5, 0.5, 0.5]]
    assert not (values[0] == 0.5).any()


@pytest.mark.parametrize(
    "shape, features_shape", [((), (4, 2)), ((3,), (4, 2, 3)), ((2, 3), (4, 2, 2, 3))]
)
def test_features_keep_the_shape_of_eigen_columns(
    shape: tuple[int, ...], features_shape: tuple[int, ...]
) -> None:
    block = Features((("x", shape),), (Expression("x"), Expression("x", (Operation("square"),))))
    rows = torch.randn(4, *shape) if len(shape) == 2 else torch.randn(4, math.prod(shape))
    values = compute_features(block, rows)
    assert tuple(values.shape) == features_shape
    assert torch.equal(values[:, 0].flatten(), rows.flatten())
    assert torch.equal(values[:, 1], values[:, 0].square())


# -- inside an artifact ----------------------------------------------------------------------------


class Linear(nn.Module):
    """(n, 2, 3), (n, 1) -> (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        answer: Tensor = self.linear(x.flatten(1)) + y
        return answer


HITS = Layout(
    [
        column("pt", "float32"),
        eigen("u", "float32", 3),
        column("count", "int32"),
        column("raw", "float32"),
    ]
)
SIGNATURE = Signature.build(
    {"hits": HITS, "out": Layout([column("z", "float32")])},
    [Block("x", "hits", ("u", "pt", "count"), "float32"), Block("y", "hits", ("raw",))],
    [Block("answer", "out", ("z",))],
    {"n": RowRange(0, 70)},
)
BLOCK = Features(
    (("u", (3,)), ("pt", ()), ("count", ())),
    (
        Expression("u", (Operation("abs"), Operation("add", operand=1.0), Operation("log"))),
        Expression(
            "u", (Operation("multiply", operand=Expression("count", (Operation("log1p"),))),)
        ),
    ),
    "pt",
    0.25,
)


def by_hand(inputs: dict[str, Tensor]) -> Tensor:
    """The answers of `Linear` on the features of BLOCK, written out."""
    u, pt = inputs["u"], inputs["pt"].unsqueeze(1)
    first = torch.log(u.abs() + 1.0)
    second = u * torch.log1p(inputs["count"].float()).unsqueeze(1)
    both = torch.stack([torch.where(pt > 0, feature, 0.25) for feature in (first, second)], dim=1)
    with torch.no_grad():
        answers: Tensor = Linear()(both, inputs["raw"].unsqueeze(1))
    return answers


@pytest.mark.parametrize("route", ["auto", "trace"])
def test_artifacts_take_the_raw_columns(tmp_path: Path, route: Any) -> None:
    model = Preprocessed(Linear().eval(), (BLOCK, None))
    engines = ("torchscript", "exported") if route == "auto" else ("torchscript",)
    built = build(model, SIGNATURE, tmp_path, engines, route=route)
    assert built.capture.torchscript == ("scripted" if route == "auto" else "traced")
    reference = Reference.load(built.capture.reference)
    for case, outputs in zip(reference.cases, reference.outputs, strict=True):
        rows = {name: values[: case["n"]] for name, values in reference.inputs["hits"].items()}
        torch.testing.assert_close(outputs["answer"], by_hand(rows))
    assert reasons(built, {"answer": Tolerance(1e-6, 1e-5)}) == dict.fromkeys(engines)


@pytest.mark.parametrize("kind", ["torchscript", "program"])
def test_a_model_from_a_file_is_preprocessed_too(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model"
    example = (torch.randn(7, 2, 3), torch.randn(7, 1))
    if kind == "torchscript":
        with pytest.warns(DeprecationWarning):
            torch.jit.save(torch.jit.script(Linear().eval()), file)
        source = ModelSource(torchscript=file, preprocess=(BLOCK, None))
    else:
        rows = {0: torch.export.Dim("n", min=0, max=70)}
        program = torch.export.export(Linear().eval(), example, dynamic_shapes=(rows, rows))
        torch.export.save(program, file.with_suffix(".pt2"))
        source = ModelSource(program=file.with_suffix(".pt2"), preprocess=(BLOCK, None))
    (tmp_path / "capture").mkdir()
    built = build_model(source)
    assert isinstance(built, Preprocessed)
    captured = capture(built, SIGNATURE, random_inputs(SIGNATURE, 1, {}), tmp_path / "capture")
    assert captured.torchscript == "scripted" or kind == "program"
    reference = Reference.load(captured.reference)
    torch.testing.assert_close(reference.outputs[-1]["answer"], by_hand(reference.inputs["hits"]))


def fingerprint(folder: Path, block: Features | None) -> Any:
    """The fingerprint of a model file whose first block is preprocessed so."""
    (folder / "model.ts").write_bytes(b"a model")
    return ModelSource(torchscript=folder / "model.ts", preprocess=(block, None)).fingerprint()


def test_another_expression_is_another_model(tmp_path: Path) -> None:
    other = Features(BLOCK.columns, BLOCK.values, "pt", 0.5)
    assert fingerprint(tmp_path, BLOCK) != fingerprint(tmp_path, other)


def test_a_fingerprint_without_expressions_has_no_key_for_them(tmp_path: Path) -> None:
    assert "preprocess" not in fingerprint(tmp_path, None)
