"""What the tests of CMSSW's packages for inference assert, as cases for our interfaces.

The numbers and shapes are theirs; the models are written anew from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from soa import Block, Layout, RowRange, Signature, column, eigen, scalar

Array = npt.NDArray[Any]
Columns = Mapping[str, Mapping[str, Array]]
"""The values of each column, by collection."""


@dataclass(frozen=True)
class Case:
    """`given` and `wanted`: the columns of the inputs and of the outputs. An answer is right if it
    is within `within` of `wanted`, and if `holds` is true of it. `engines`: those that run it.
    `ranges`: of the reference's columns. `constant`: no input changes an answer, so that a pipeline
    refuses the model: no reference could show that an artifact reads the right memory."""

    source: str
    asserts: str
    model: Callable[[], nn.Module]
    signature: Signature
    given: Columns
    wanted: Columns = field(default_factory=dict)
    within: float = 0.0
    holds: Callable[[Columns], bool] = lambda found: True
    engines: tuple[str, ...] = ("lanes", "torchscript")
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    constant: bool = False

    @property
    def rows(self) -> dict[str, int]:
        """The number of elements of each row dimension."""
        rows: dict[str, int] = {}
        for name, columns in self.given.items():
            lengths = {len(values) for values in columns.values() if values.ndim}
            rows[self.signature.rows_of[name]] = max(lengths)
        return rows

    def right(self, found: Columns) -> bool:
        """Whether answers are those that CMSSW asserts."""
        near = [
            np.allclose(found[name][column], values, rtol=0, atol=self.within)
            for name, columns in self.wanted.items()
            for column, values in columns.items()
        ]
        return all(near) and self.holds(found)


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def linear(weight: Any, bias: float) -> nn.Linear:
    """A layer with this matrix, and one bias for all outputs."""
    weight = torch.as_tensor(weight, dtype=torch.float32)
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight.clone(), torch.full((len(weight),), bias)
    return layer


def full(inputs: int, outputs: int, weight: float, bias: float = 0.0) -> nn.Linear:
    """A layer whose weights are all the same."""
    return linear(torch.full((outputs, inputs), weight), bias)


def rows_case(
    source: str, asserts: str, model: Callable[[], nn.Module], x: Any, *wanted: Any,
    outputs: tuple[int, ...] = (), dtype: str = "float32", **more: Any,
) -> Case:  # fmt: skip
    """A case of float32 rows `x`, (n, F). Each output has its own collection: of `wanted`, (n, K),
    or of `outputs` columns, if only `holds` is known."""
    x = np.asarray(x, dtype)
    sizes = tuple(np.asarray(answers).shape[1] for answers in wanted) or outputs
    features = tuple(f"x{k}" for k in range(x.shape[1]))
    columns = {f"found{i}": [f"y{k}" for k in range(size)] for i, size in enumerate(sizes)}
    signature = Signature.build(
        {
            "given": Layout([column(name, dtype) for name in features]),
            **{name: Layout([column(y, dtype) for y in ys]) for name, ys in columns.items()},
        },
        [Block("x", "given", features)],
        [Block(name, name, tuple(ys)) for name, ys in columns.items()],
        {"n": RowRange(0, max(64, len(x)), (len(x),) if len(x) else ())},
    )
    return Case(
        source, asserts, model, signature,
        {"given": {name: x[:, k] for k, name in enumerate(features)}},
        {
            name: {y: np.asarray(answers)[:, k] for k, y in enumerate(columns[name])}
            for name, answers in zip(columns, wanted, strict=False)
        },
        **more,
    )  # fmt: skip


def classifier() -> nn.Module:
    """Two classes of three features; both have the same score, so that both get 0.5."""
    return nn.Sequential(linear([[1, 1, 0], [1, 1, 0]], 0.0), nn.Softmax(1))


class MultiTask(nn.Module):
    """Five features → 128 → 128, then a class and a regression head of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(full(5, 128, 0.1), full(128, 128, 0.1))
        self.classes = nn.Sequential(full(128, 64, 0.05), full(64, 5, 0.02), nn.Softmax(1))
        self.regression = nn.Sequential(full(128, 64, 0.03), full(64, 1, 0.01))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.base(x)
        return self.classes(x), self.regression(x)


class MultiHead(nn.Module):
    """3 → 32 → 64 → 256 → 64 → 32, then a regression head and three classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 256), (256, 64), (64, 32)):
            layers += [full(inputs, outputs, 0.025, 0.1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), full(32, 1, 0.03, 0.1)
        self.classes = linear([[0.06] * 32, [0.07] * 32, [0.08] * 32], 0.0)
        self.classes.bias.data = torch.tensor([0.1, 0.2, 0.3])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.head(x), torch.softmax(self.classes(x), 1)


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + x)


def tiny_resnet() -> nn.Module:
    """Images of 3 x 9 x 9 to ten classes."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Unflatten(1, (3, 9, 9)), nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16), Residual(16), nn.Conv2d(16, 32, 3, stride=2, padding=1),
        Residual(32), Residual(32), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(1),
        nn.Linear(32, 10), nn.Softmax(1),
    )  # fmt: skip


class DeepSet(nn.Module):
    """Tracks and their hits, which begin and end at an offset for each track; a scale for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.track = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.hit = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.last = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, tracks: Tensor, scale: Tensor, hits: Tensor, which: Tensor) -> Tensor:
        pooled = tracks.new_zeros((tracks.shape[0], 16))
        pooled = pooled.index_add(0, which[:, 0].long(), self.hit(hits * scale))
        scores: Tensor = self.last(torch.cat([self.track(tracks), pooled], 1))
        return scores


def sums_to_one(found: Columns) -> bool:
    """Whether all columns of each row sum to one, as probabilities do."""
    columns = [values for collection in found.values() for values in collection.values()]
    return bool(np.all(np.abs(np.sum(columns, 0) - 1) <= 1e-4))


def heads(found: Columns) -> bool:
    """Whether the regression head is between 4 and 5, and the classes sum to one."""
    head = found["found0"]["y0"]
    return bool(((head >= 4) & (head <= 5)).all()) and sums_to_one({"c": found["found1"]})


TYPES = Layout(
    [eigen("a", "float64", 3), eigen("b", "float64", 3), eigen("c", "float32", 2, 2),
     column("x", "float64"), column("y", "float64"), column("z", "float64"),
     scalar("type", "float32"), scalar("some_number", "int32")],
)  # fmt: skip


def types_case(n: int, asserts: str) -> Case:
    """Six inputs in another order than in memory, each copied to an output of its own."""
    i = np.arange(n, dtype=np.float64)
    given: dict[str, Array] = {
        "a": np.stack([1 + i, 2 + i, 3 + i], 1),
        "b": np.stack([4 + i, 5 + i, 6 + i], 1),
        "c": np.stack([4 + i, 6 + i, 8 + i, 10 + i], 1).reshape(n, 2, 2).astype(np.float32),
        "x": 12 + i,
        "y": 1 + 2.5 * i,
        "z": 36 * i,
        "type": np.array(4, np.float32),
        "some_number": np.array(5, np.int32),
    }
    inputs = [
        Block("column", "event", ("x", "y", "z")),
        Block("scalar", "event", ("type",), broadcast=True),
        Block("matrix", "event", ("c",)), Block("vector", "event", ("a", "b"), shape=(2, 3)),
        Block("single_column", "event", ("x",)), Block("single_vector", "event", ("a",)),
    ]  # fmt: skip
    found = Layout(
        [eigen("a", "float64", 3), eigen("b", "float64", 3), eigen("c", "float32", 2, 2),
         column("v", "float64"), column("w", "float64"), column("z", "float64"),
         column("t", "float32"), column("x", "float64"), eigen("d", "float64", 3)],
    )  # fmt: skip
    outputs = [
        Block("columns", "result", ("v", "w", "z")), Block("t", "result", ("t",)),
        Block("c", "result", ("c",)), Block("ab", "result", ("a", "b"), shape=(2, 3)),
        Block("x", "result", ("x",)), Block("d", "result", ("d",)),
    ]  # fmt: skip

    def copies(xyz: Tensor, kind: Tensor, c: Tensor, ab: Tensor, x: Tensor, a: Tensor) -> Any:
        return xyz.clone(), kind.clone(), c.clone(), ab.clone(), x.clone(), a.clone()

    wanted = {
        "a": given["a"], "b": given["b"], "c": given["c"], "v": given["x"], "w": given["y"],
        "z": given["z"], "t": np.full(n, 4, np.float32), "x": given["x"], "d": given["a"],
    }  # fmt: skip
    return Case(
        "PyTorchAlpaka/test/alpaka/testSoADataTypes.dev.cc", asserts, lambda: Call(copies),
        Signature.build({"event": TYPES, "result": found}, inputs, outputs, {"n": RowRange(0, 64)}),
        {"event": given}, {"result": wanted},
    )  # fmt: skip


def deep_set_case() -> Case:
    """Eight tracks with 16 hits, compared with eager torch."""
    counts = np.array([2, 3, 1, 4, 1, 2, 3, 0])
    draw = np.random.default_rng(1234)
    tracks = {name: draw.normal(size=8).astype(np.float32) for name in ("pt", "eta", "phi")}
    hits: dict[str, Array] = {
        name: draw.normal(size=16).astype(np.float32) for name in ("x", "y", "z")
    }
    hits["track"] = np.repeat(np.arange(8), counts)
    with torch.no_grad():
        wanted = DeepSet().eval()(
            torch.from_numpy(np.stack([tracks["pt"], tracks["eta"], tracks["phi"]], 1)),
            torch.tensor(0.5),
            torch.from_numpy(np.stack([hits["x"], hits["y"], hits["z"]], 1)),
            torch.from_numpy(hits["track"])[:, None],
        )
    signature = Signature.build(
        {
            "tracks": Layout([*(column(name, "float32") for name in tracks),
                              scalar("scale", "float32")]),
            "hits": Layout([*(column(name, "float32") for name in ("x", "y", "z")),
                            column("track", "int64")]),
            "scores": Layout([column("score", "float32")]),
        },
        [Block("tracks", "tracks", ("pt", "eta", "phi")), Block("scale", "tracks", ("scale",)),
         Block("hits", "hits", ("x", "y", "z")), Block("which", "hits", ("track",))],
        [Block("score", "scores", ("score",))],
        {"tracks": RowRange(8, 16), "hits": RowRange(0, 64)},
        {"tracks": "tracks", "hits": "hits", "scores": "tracks"},
    )  # fmt: skip
    return Case(
        "PyTorchAlpakaTest/test/TrackHitDeepSet.py", "hits 2, 3, 1, 4, 1, 2, 3, 0 of eight tracks",
        DeepSet, signature,
        {"tracks": {**tracks, "scale": np.array(0.5, np.float32)}, "hits": hits},
        {"scores": {"score": wanted.numpy()[:, 0]}}, 1e-6, engines=("aoti", "torchscript"),
        ranges={"track": (0, 8)},
    )  # fmt: skip


def masked_case() -> Case:
    """Particles whose feature eta is masked."""
    draw = np.random.default_rng(3)
    given: dict[str, Array] = {
        name: draw.normal(size=32).astype(np.float32) for name in ("pt", "eta", "phi")
    }
    masks = {"m_pt": 0, "m_eta": 1, "m_phi": 0}
    signature = Signature.build(
        {
            "particles": Layout([column(name, "float32") for name in given]),
            "mask": Layout([column(name, "uint8") for name in masks]),
            "found": Layout([column("sum", "float32")]),
        },
        [Block("x", "particles", tuple(given)), Block("mask", "mask", tuple(masks))],
        [Block("sum", "found", ("sum",))],
        {"n": RowRange(0, 64)},
    )
    return Case(
        "PyTorchAlpakaTest/test/MaskedNet.py", "pt + phi, exactly",
        lambda: Call(lambda x, mask: (x * (1 - mask)).sum(1, keepdim=True)), signature,
        {"particles": given,
         "mask": {name: np.full(32, mask, np.uint8) for name, mask in masks.items()}},
        {"found": {"sum": given["pt"] + given["phi"]}},
    )  # fmt: skip


def cases() -> dict[str, Case]:
    """Every case that a CPU can run, by a short name."""
    draw = np.random.default_rng(2)
    weight = [[-0.1, 0.2, 2.0], [0.1, -2.3, 4.0]]
    points = [[1, 2, 1], [2, 4, 3], [3, 4, 1], [2, 3, 2]]
    results = [[2.3, -0.5], [6.6, 3.0], [2.5, -4.9], [4.4, 1.3]]
    ones, compiled = np.ones((8, 3)), ("lanes",)
    whole = draw.integers(-(2**20), 2**20, (65536, 2))
    jit, torchlib = "PyTorch/test/testModelJit.cc", "PyTorch/test/testTorchlibModelsCpu.cc"
    portable = "PyTorch/test/alpaka/testPortableInference"
    half = np.full((2048, 2), 0.5)
    return {
        "interface": types_case(64, "six tensors in another order, n = 64"),
        "single element": types_case(1, "n = 1"),
        "no element": types_case(0, "n = 0"),
        "SoA to torch": rows_case(
            "PyTorchAlpaka/test/alpaka/testSoAToTorch.dev.cc", "four rows within 1e-5",
            lambda: linear(weight, 0.0), points, results, within=1e-5),
        "jit": rows_case(jit, "2,048 rows, again and again the same bits",
                         classifier, draw.normal(size=(2048, 3)), half, within=1e-7,
                         constant=True, engines=compiled),
        "aot": rows_case("PyTorch/test/testModelAot.cc", "ones(8, 3) gives 0.5",
                         lambda: full(3, 1, 0.0, 0.5), ones, np.full((8, 1), 0.5), constant=True,
                         engines=("lanes", "aoti")),
        "load": rows_case("PyTorch/test/testJitLoad.cc", "ones(8, 3) gives 2.1 and 1.8",
                          lambda: linear(weight, 0.0), ones, np.tile([2.1, 1.8], (8, 1)),
                          within=1e-6),
        "classifier": rows_case(torchlib, "0.5 and 0.5", classifier, ones, np.full((8, 2), 0.5),
                                constant=True, engines=compiled),
        "regression": rows_case(torchlib, "0.5", lambda: full(3, 1, 0.0, 0.5), ones,
                                np.full((8, 1), 0.5), constant=True, engines=compiled),
        "two heads": rows_case(torchlib, "0.2 and 15.7286", MultiTask, np.ones((8, 5)),
                               np.full((8, 5), 0.2), np.full((8, 1), 15.7286), within=1e-4),
        "buffers": rows_case("PyTorch/test/testTorchFromBufferModelEval.cu",
                             "int, n = 65,536: c == a + b", lambda: Call(lambda x: x.sum(1, True)
                             .to(torch.int32)), whole, whole.sum(1, keepdims=True), dtype="int32"),
        "simple DNN": rows_case(
            "PyTorch/test/testTorchSimpleDnn.cc", "ones(10) gives 110",
            lambda: nn.Sequential(full(10, 10, 1.0, 1.0), nn.ELU(),
                                  Call(lambda x: x.sum(1, keepdim=True))),
            np.ones((1, 10)), [[110.0]]),
        "portable, 32": rows_case(f"{portable}JIT.cc", "32 rows of zeros give exactly 0.5",
                                  classifier, np.zeros((32, 3)), half[:32], constant=True,
                                  engines=compiled),
        "portable, 2,048": rows_case(f"{portable}AOT.dev.cc", "2,048 rows, exactly 0.5",
                                     classifier, np.zeros((2048, 3)), half, constant=True,
                                     engines=compiled),
        "masked": masked_case(),
        "multi-head": rows_case(
            "PyTorchAlpakaTest/test/MultiHeadNet.py", "r in [4, 5]; classes sum to 1 ± 1e-4",
            MultiHead, draw.random((32, 3)), outputs=(1, 3), holds=heads),
        "images": rows_case(
            "PyTorchAlpakaTest/test/TinyResNet.py", "3 x 9 x 9, ten classes sum to 1 ± 1e-4",
            tiny_resnet, draw.normal(size=(10, 243)), outputs=(10,), holds=sums_to_one),
        "tracks and hits": deep_set_case(),
        "batches": rows_case("ONNXRuntime/test/testONNXRuntime.cc", "four rows of ones give 3",
                             lambda: full(3, 1, 1.0), np.ones((4, 3)), np.full((4, 1), 3.0),
                             engines=("lanes", "onnxruntime")),
    }  # fmt: skip
