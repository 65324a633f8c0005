"""An ONNX file is run by ONNX Runtime, and read as torch operations that give the same answers."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as examples
from torch import Tensor, nn

from engines.exported import quiet_torch
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.capture import capture
from stages.errors import CaptureError, SourceError
from stages.model import ModelSource, as_torch, build_model
from stages.model.onnx.graph import OnnxGraph
from stages.reference.answers import random_inputs
from tests.models.building import build, reasons, require_valid, signature_of
from tests.models.forked import in_a_child

TYPES = {
    np.dtype(t) for t in ("bool", "uint8", "int8", "int16", "int32", "int64", "f2", "f4", "f8")
}
# Operators of which every example in ONNX's own tests is read.
COMPLETE = (
    "Abs Add And Ceil Clip Concat Cos Div Equal Erf Exp Expand Flatten Floor Gather Gemm "
    "Greater LeakyRelu Less Log LogSoftmax MatMul Max Mean Min Mul Neg Not Or PRelu "
    "Pow Reciprocal ReduceMean ReduceSum Relu Reshape Round Shape Sigmoid Sign Sin Softmax "
    "Celu HardSigmoid HardSwish Mish ReduceL1 ReduceL2 ReduceLogSum ReduceProd ReduceSumSquare "
    "Selu Softsign ThresholdedRelu Split Sqrt Squeeze Sub Sum Tanh Tile Transpose Unsqueeze "
    "Where Xor"
)


POOLS = ("averagepool", "lppool", "maxpool")
"""ONNX computes their examples in Python, which takes ten seconds."""


@dataclass(frozen=True)
class Example:
    """One of ONNX's own tests, of one operator: a file, its inputs and outputs as arrays."""

    name: str
    operator: str
    file: Path
    inputs: list[Any]
    outputs: list[Any]

    def answers(self) -> list[Tensor]:
        return list(OnnxGraph(self.file)(*(torch.from_numpy(np.array(x)) for x in self.inputs)))

    def is_right(self, answers: Sequence[Tensor]) -> bool:
        """Whether answers have the shapes and dtypes of the outputs, and nearly their values."""
        return all(
            answer.shape == output.shape
            and answer.numpy().dtype == output.dtype
            and np.allclose(answer.numpy(), output, rtol=1e-3, atol=1e-6, equal_nan=True)
            for answer, output in zip(answers, self.outputs, strict=True)
        )


def onnx_examples(folder: Path) -> Iterator[Example]:
    """The examples of one operator whose types torch has, each with a file in the folder.

    They take sizes as inputs. Networks have them as constants, and so have the files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = examples.collect_testcases()
    for case in cases:
        assert case.model is not None and case.data_sets is not None
        graph, (inputs, outputs) = case.model.graph, case.data_sets[0]
        types = {getattr(x, "dtype", object) for x in (*inputs, *outputs)}
        if len(graph.node) > 1 or not types <= TYPES or case.name.endswith("_expanded"):
            continue
        sizes = [x.dtype == np.int64 and x.ndim < 2 and i > 0 for i, x in enumerate(inputs)]
        for value, x, is_size in zip(graph.input, inputs, sizes, strict=True):
            if is_size:
                graph.initializer.append(numpy_helper.from_array(x, value.name))
        onnx.save(case.model, folder / "case.onnx")
        rest = [x for x, is_size in zip(inputs, sizes, strict=True) if not is_size]
        operator = graph.node[0].op_type
        yield Example(case.name, operator, folder / "case.onnx", rest, list(outputs))


@pytest.mark.parametrize("leave_out", [POOLS, pytest.param((), marks=pytest.mark.long)])
def test_operators_give_what_onnx_says(
    leave_out: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of ONNX's own examples gives the right answer or is refused.

    Those of COMPLETE are all read.
    """
    for name in leave_out:
        monkeypatch.setitem(sys.modules, f"{examples.__name__}.{name}", ModuleType(name))
    read, refused, wrong = set[str](), set[str](), list[str]()
    for example in onnx_examples(tmp_path):
        try:
            answers = example.answers()
        except Exception:  # our error, or torch's, which lacks uint16 operators
            refused.add(example.operator)
            continue
        read.add(example.operator)
        if not example.is_right(answers):
            wrong.append(example.name)
    assert not wrong
    assert set(COMPLETE.split()) <= read - refused


class Network(nn.Module):
    """Convolution, attention with a class token, norms, sizes from the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.convolution, self.batch = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)
        self.batch.running_mean.normal_()  # type: ignore[union-attr]
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        n = features.shape[0]
        x = torch.relu(self.batch(self.convolution(features))).transpose(1, 2) * mask.unsqueeze(2)
        x = torch.cat([self.token.expand(n, 1, 8), x], dim=1)
        y, _ = self.attention(x, x, x, need_weights=False)
        y = nn.functional.gelu(self.norm(y + x)).reshape(n, -1)[:, :8]
        return torch.softmax(self.last(y), dim=1)


PARTICLES = Signature.build(
    {
        "jets": Layout(
            [*(eigen(name, "float32", 4) for name in "abc"), eigen("mask", "float32", 4)]
        ),
        "tags": Layout([column("x", "float32"), column("y", "float32")]),
    },
    [Block("features", "jets", ("a", "b", "c"), shape=(3, 4)), Block("mask", "jets", ("mask",))],
    [Block("probabilities", "tags", ("x", "y"))],
    {"n": RowRange(0, 100)},
)


def exported(model: nn.Module, file: Path, *inputs: Tensor, **options: Any) -> Path:
    """Writes a model as ONNX, for any number of rows."""
    shapes = tuple({0: "n"} for _ in inputs)
    with quiet_torch():
        torch.onnx.export(
            model.eval(), inputs, file, dynamo=True, dynamic_shapes=shapes, verbose=False, **options
        )
    return file


INPUTS = torch.randn(5, 3, 4), torch.rand(5, 4)


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network above as ONNX, with its weights in a file of their own."""
    file = tmp_path_factory.mktemp("network") / "net.onnx"
    return exported(Network(), file, *INPUTS, external_data=True)


def test_a_network_has_the_answers_of_its_module(network_file: Path) -> None:
    """Run by ONNX Runtime, and as torch operations."""
    model = build_model(ModelSource(onnx=network_file))
    with torch.no_grad():
        expected = Network().eval()(*INPUTS)
        torch.testing.assert_close(model(*INPUTS)[0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(as_torch(model)(*INPUTS)[0], expected, atol=1e-5, rtol=1e-5)


def test_a_network_is_valid_in_engines(network_file: Path, tmp_path: Path) -> None:
    model = build_model(ModelSource(onnx=network_file))
    require_valid(model, PARTICLES, tmp_path, ("exported", "onnxruntime"), route="none")


def test_the_fingerprint_is_of_weights_in_a_file_of_their_own_too(
    network_file: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(network_file.parent, tmp_path / "copy"))
    before = ModelSource(onnx=folder / "net.onnx").fingerprint()
    weights = folder / "net.onnx.data"
    weights.write_bytes(b"\0" + weights.read_bytes()[1:])
    assert ModelSource(onnx=folder / "net.onnx").fingerprint() != before


def write_network(folder: Path, *nodes: Any, rows: int | str = "n", **constants: Any) -> Path:
    """Writes a network from x: (rows, 3) float32 to y."""
    file = folder / "net.onnx"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, None])],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file
    )
    return file


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """A node with the names of inputs and outputs, divided by spaces."""
    name = f"{kind} to {outputs}"
    return helper.make_node(kind, inputs.split(), outputs.split(), name=name, **attributes)


def from_rows(lowest: int) -> Signature:
    """Three columns in and three out, of at least so many rows."""
    return signature_of({"features": "a b c"}, {"found": "u v w"}, RowRange(lowest, 100))


def test_sizes_that_the_graph_computes(tmp_path: Path) -> None:
    """Exporters write `expand` and `view` like this if rows are counted at run time.

    ONNX Runtime itself fails there at n = 0.
    """
    file = write_network(
        tmp_path,
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "rows", axis=0),
        node("Unsqueeze", "rows first", "size"),
        node("Concat", "size minus three", "wanted", axis=0),
        node("Reshape", "x wanted", "cube"),
        node("ConstantOfShape", "two_", "ones", value=numpy_helper.from_array(np.array([1]))),
        node("Mul", "ones minus", "marks"),
        node("Concat", "size three", "target", axis=0),
        node("Equal", "target marks", "same"),
        node("Where", "same ones target", "spread"),
        node("Expand", "row spread", "rest"),
        node("Squeeze", "cube one", "flat"),
        node("Add", "flat rest", "y"),
        zero=0, first=[0], one=[1], minus=[-1], three=[3], two_=[2],
        row=np.array([[1.0, 2.0, 4.0]], np.float32),
    )  # fmt: skip
    model = build_model(ModelSource(onnx=file))
    require_valid(model, from_rows(1), tmp_path, ("exported",), route="none")


PAIRS = [
    node("Unsqueeze", "x last", "c"),
    node("Concat", "c c", "cc", axis=2),
    node("Einsum", "cc cc", "pairs", equation="nij,nkj->nik"),
    node("ReduceSum", "pairs last", "y", keepdims=0),
]


def test_no_rows_are_not_asked_where_onnx_runtime_ends_the_process(tmp_path: Path) -> None:
    """ONNX Runtime 1.32 crashes at such an Einsum without rows; the engines do not."""
    model = build_model(ModelSource(onnx=write_network(tmp_path, *PAIRS, last=[2])))

    def raise_answer() -> None:
        (answer,) = model(torch.zeros(0, 3))
        raise ValueError(f"{answer.dtype} {list(answer.shape)}")

    assert in_a_child(raise_answer) == "ValueError: torch.float32 [0, 3]"
    require_valid(model, from_rows(0), tmp_path, ("exported",), route="none")


def test_some_inputs_without_rows_are_asked_of_a_process_of_its_own(tmp_path: Path) -> None:
    """One of two row dimensions may be empty; if that crashes the process, the model is refused."""
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n", 3]), value("w", TensorProto.FLOAT, ["m", 3])]
    outputs = [value("y", TensorProto.FLOAT, ["n", 3]), value("z", TensorProto.FLOAT, ["m", 3])]
    last = numpy_helper.from_array(np.array([2]), "last")
    graph = helper.make_graph([*PAIRS, node("Relu", "w", "z")], "net", inputs, outputs, [last])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "two.onnx")
    model = build_model(ModelSource(onnx=tmp_path / "two.onnx"))
    y, z = model(torch.ones(2, 3), torch.ones(0, 3))
    assert (y.tolist(), z.shape) == ([[6.0] * 3] * 2, (0, 3))
    with pytest.raises(CaptureError, match=r"x \[0, 3\].* rows min:") as caught:
        model(torch.ones(0, 3), torch.ones(2, 3))
    assert "killed by SIGFPE" in str(caught.value)


def test_a_file_for_one_row_is_run_row_by_row(tmp_path: Path) -> None:
    """Also if the row is part of the graph."""
    view = [node("Reshape", "x one", "r"), node("Softmax", "r", "y", axis=-1)]
    file = write_network(tmp_path, *view, rows=1, one=np.array([1, 3]))
    model, rows = build_model(ModelSource(onnx=file)), torch.randn(5, 3)
    torch.testing.assert_close(model(rows)[0], rows.softmax(1))
    require_valid(model, from_rows(0), tmp_path, ("exported",), route="none")


def test_a_file_for_one_row_with_an_operator_across_rows_has_no_artifact(tmp_path: Path) -> None:
    """Row by row the operator does nothing; in an artifact it would mix them."""
    mixing = [node("ReduceMax", "x", "most", axes=[0]), node("Add", "x most", "y")]
    model = build_model(ModelSource(onnx=write_network(tmp_path, *mixing, rows=1)))
    rows = torch.randn(5, 3)
    torch.testing.assert_close(model(rows)[0], 2 * rows)
    built = build(model, from_rows(0), tmp_path, ("exported",), route="none")
    assert reasons(built)["exported"]


@pytest.mark.parametrize(
    ("nodes", "rows", "says"),
    [
        ([node("Relu", "x", "y")], 5, "Got: 37 Expected: 5"),
        ([node("NonZero", "x", "z"), node("Cast", "z", "y", to=1)], "n",
         "NonZero (node 'NonZero to z')"),
        ([node("ReduceSum", "x first", "s", keepdims=0), node("Cast", "s", "i", to=7),
          node("Tile", "x i", "y")], "n", "node 'Tile to y' (Tile) takes a size out of the data"),
        ([node("CumSum", "x axis", "y", reverse=1)], "n", "reverse = 1 is not known here"),
    ],
)  # fmt: skip
def test_a_graph_that_torch_cannot_follow_is_refused(
    nodes: list[Any], rows: Any, says: str, tmp_path: Path
) -> None:
    file = write_network(tmp_path, *nodes, rows=rows, first=[0], axis=1)
    signature = from_rows(0)
    model = build_model(ModelSource(onnx=file))
    with pytest.raises((CaptureError, SourceError), match=re.escape(says)) as caught:
        if "Tile" in says or "node 'NonZero to z'" in says:
            as_torch(model)(torch.ones(2, 3))  # its eager shapes differ already
        capture(model, signature, random_inputs(signature, 1, {}), tmp_path, "none")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"none")
    with pytest.raises(SourceError, match=r"net\.onnx"):
        build_model(ModelSource(onnx=tmp_path / "net.onnx"))
    with pytest.raises(SourceError, match=r"net\.onnx"):
        ModelSource(onnx=tmp_path / "net.onnx").fingerprint()
