"""The onnxruntime engine: it binds the caller's memory, and refuses models."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from engines import EngineError, Portable, Target, engine
from engines.errors import RunError
from engines.exported import quiet_torch
from engines.onnx.engine import OnnxCall
from runtime.checked import Tolerance
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column
from soa.memory import argument_spans
from stages.compile import compile_candidate
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs
from tests.models.building import (
    Built,
    bound,
    build,
    exported,
    mlp_signature,
    reference_collections,
    values,
)
from tests.models.mlps import Core

CPU = torch.device("cpu")
TIGHT = Tolerance(1e-6, 1e-6)


def facts_of(built: Built) -> dict[str, Any]:
    """What the artifact's facts.json says."""
    text = (built.files["onnxruntime"].parent / "facts.json").read_text()
    facts: dict[str, Any] = json.loads(text)
    return facts


def program_of(model: nn.Module, folder: Path) -> Path:
    """The exported program of a model with the signature of PointwiseFirst."""
    signature = mlp_signature()
    return exported(model, signature, random_inputs(signature, 1, {}), folder / "program.pt2")


def compiled(program: Path, out: Path, **options: Any) -> list[str]:
    """The names of the artifact's files, which it compiles into `out`."""
    out.mkdir(exist_ok=True)
    return engine("onnxruntime").compile(Portable(program, None), Target.parse("cpu"), options, out)


# -- what is bound --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(mlp: Built) -> onnx.ModelProto:
    return onnx.load(mlp.files["onnxruntime"])


def test_the_graph_takes_the_arguments_and_gives_one_output_a_column(
    model: onnx.ModelProto,
) -> None:
    assert [value.name for value in model.graph.input] == ["argument_0", "argument_1"]
    assert [value.name for value in model.graph.output] == [f"argument_2.{k}" for k in range(3)]


def test_the_facts_have_the_versions_of_the_graph(mlp: Built, model: onnx.ModelProto) -> None:
    facts = facts_of(mlp)
    (opset,) = [used.version for used in model.opset_import if used.domain == ""]
    assert (facts["opset"], facts["ir_version"]) == (opset, model.ir_version)


def features_of(jets: Collection) -> Tensor:
    """The columns of the input as (n, columns)."""
    return torch.stack([jets.tensor(member.name) for member in jets.layout.columns], dim=1)


def test_a_binding_reads_and_writes_the_callers_memory(mlp: Built) -> None:
    inputs, written = mlp.collections({"n": 10}, spare=50)
    binding = mlp.session("onnxruntime").bind(inputs, written)
    binding()
    before = values(written["tags"])[:, :10].clone()
    inputs["jets"].fill("a", torch.full((10,), 7.0))
    binding()  # without binding again
    after = values(written["tags"])[:, :10]
    assert not torch.equal(before, after)
    wanted = mlp.model(features_of(inputs["jets"])[:10])
    torch.testing.assert_close(after.T, wanted, atol=1e-6, rtol=0)


class Endings(nn.Module):
    """Every kind of output: computed in place, used twice, an input itself, constant."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.exp(-x.abs())
        whole = x.unflatten(1, (2, 3)).mean(-1)  # over a negative axis, also at n = 0
        return (
            torch.sigmoid(x.sum(dim=1, keepdim=True)),
            y[:, -1],
            y[:, -1],
            x[:, 1],
            torch.ones_like(x[:, 0]),
            whole + x[:, :2],
            y[:, 0].double(),
        )


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Built:
    names = ("computed", "first", "second", "passed", "constant", "both", "double")
    out = Layout(
        [column(name, "float64" if name == "double" else "float32") for name in names]
        + [column("other", "float32")],
        64,
        "columns",
    )
    jets = Layout([column(name, "float32") for name in "abcdef"])
    signature = Signature.build(
        {"jets": jets, "out": out},
        [Block("x", "jets", tuple("abcdef"))],
        [Block(name, "out", ("both", "other") if name == "both" else (name,)) for name in names],
        {"n": RowRange(0, 50)},
    )
    folder = tmp_path_factory.mktemp("endings")
    return build(Endings(), signature, folder, ("onnxruntime",), route="none")


def test_every_ending_is_right(endings: Built) -> None:
    reference = Reference.load(endings.capture.reference)
    tolerances = {b.name: TIGHT for b in endings.signature.outputs}
    session = endings.session("onnxruntime")
    report = validate_session(session, "onnxruntime", reference, tolerances)
    assert report.reason is None
    assert {case.rows["n"] for case in report.cases} >= {0, 1, 2, 31, 32, 33, 50}


def test_a_model_for_one_number_of_rows_is_right(tmp_path: Path) -> None:
    signature = mlp_signature(37, lowest=37)
    built = build(Softmax(), signature, tmp_path, ("onnxruntime",), route="none")
    reference = Reference.load(built.capture.reference)
    session = built.session("onnxruntime")
    report = validate_session(session, "onnxruntime", reference, {"probabilities": TIGHT})
    assert report.reason is None


def test_more_columns_than_the_graph_has_room_for_beside_its_weights(tmp_path: Path) -> None:
    """The sizes of a Split take 8 bytes per column, and the ONNX checker must read them."""
    names = tuple(f"value_{k}" for k in range(140))
    signature = Signature.build(
        {
            "jets": Layout([column(name, "float32") for name in "abcdef"]),
            "out": Layout([column(name, "float32") for name in names]),
        },
        [Block("x", "jets", tuple("abcdef"))],
        [Block("y", "out", names)],
        {"n": RowRange(0, 40)},
    )
    model, inputs = nn.Linear(6, 140), random_inputs(signature, 1, {})
    program = exported(model, signature, inputs, tmp_path / "program.pt2")
    file, *_ = compiled(program, tmp_path / "out")
    session = Session(signature, engine("onnxruntime").open(tmp_path / "out" / file, CPU))
    rows, written = reference_collections(signature, inputs, {"n": 33})
    session.run(rows, written)
    answers = torch.stack([written["out"].tensor(name) for name in names], dim=1)
    wanted = model(features_of(rows["jets"]))
    torch.testing.assert_close(answers, wanted, atol=1e-6, rtol=1e-6)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x[:, :3], dim=-1)


# -- many calls, many threads ----------------------------------------------------------------------


def test_a_binding_that_is_running_refuses_a_call(mlp: Built) -> None:
    """Holding its lock stands in for a call of another thread."""
    binding, _ = bound(mlp, mlp.session("onnxruntime"), 3)
    assert isinstance(binding.prepared, OnnxCall)
    with binding.prepared.lock, pytest.raises(RunError, match="another thread is running this"):
        binding()
    binding()


@pytest.mark.usefixtures("restless")
def test_it_is_closed_while_other_threads_bind(mlp: Built) -> None:
    inputs, written = mlp.collections({"n": 3})
    arguments = argument_spans(mlp.signature, {**inputs, **written}, {"n": 3})
    executable = mlp.executable("onnxruntime")
    ended = threading.Event()

    def bind_until_closed() -> str:
        calls = []  # they stay open
        try:
            while not ended.is_set():
                calls.append(executable.prepare(arguments))
        except RunError as error:
            return str(error)
        return "never closed"

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(bind_until_closed) for _ in range(3)]
        time.sleep(0.3)  # for some thousand bindings
        executable.close()
        wait(threads, 5)
        ended.set()
    assert {thread.result() for thread in threads} == {"the session is closed"}


def test_the_error_of_a_failing_run_is_one_line(mlp: Built) -> None:
    executable = mlp.executable("onnxruntime")
    wrong = [torch.empty(4, 0), torch.zeros(5, 32), torch.zeros(3, 32)]  # five columns of six
    with pytest.raises(RunError, match=r"^ONNX Runtime failed: .*argument_1[^\n]*$"):
        executable(wrong)


# -- what is refused -------------------------------------------------------------------------------


class CumulativeMax(Core):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cummax(self.core(x), dim=1).values


class Gelu(Core):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.core(x))


def test_an_operation_that_onnx_does_not_have_is_named(tmp_path: Path) -> None:
    program = program_of(CumulativeMax(), tmp_path)
    with pytest.raises(EngineError, match=r"^ONNX has no operation for aten\.cummax$"):
        compiled(program, tmp_path / "out")


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_of(Gelu(), tmp_path_factory.mktemp("gelu"))


def test_an_artifact_has_the_opset_that_was_asked_for(gelu: Path, tmp_path: Path) -> None:
    assert compiled(gelu, tmp_path, opset=18) == ["model.onnx", "model.onnx.data", "facts.json"]
    assert json.loads((tmp_path / "facts.json").read_text())["opset"] == 18


@pytest.mark.parametrize(
    ("opset", "message"),
    [
        (7, r"^opset 7 has no Erf[\w, ]*; this program was made in opset \d+$"),
        (10_000, r"^this program was made in opset \d+ and does not convert to opset 10000$"),
        ("18", r"^opset is a whole number; found '18'$"),
    ],
    ids=["too old", "too new", "a text"],
)
def test_an_opset_that_does_not_fit_is_refused(
    gelu: Path, tmp_path: Path, opset: object, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        compiled(gelu, tmp_path, opset=opset)


def test_an_unknown_option_is_refused(gelu: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="onnxruntime has no option 'opsets': it has opset"):
        compiled(gelu, tmp_path, opsets=18)


def test_an_onnx_file_that_names_no_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "theirs.onnx"
    with quiet_torch():
        torch.onnx.export(Softmax(), (torch.rand(2, 3),), file, dynamo=True, verbose=False)
    with pytest.raises(EngineError, match=r"^theirs\.onnx does not say which columns it writes"):
        engine("onnxruntime").open(file, CPU)


def test_the_extra_that_opens_artifacts_is_named(
    mlp: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it were not installed
    with pytest.raises(EngineError, match=r"onnxruntime cannot be imported .*soa-pipeline\[cpu\]"):
        mlp.executable("onnxruntime")


def test_the_extra_that_compiles_artifacts_is_named(
    mlp: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(EngineError, match=r"onnxscript cannot be imported .*soa-pipeline\[onnx\]"):
        compiled(mlp.capture.program, tmp_path)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="a GPU build"
)
def test_a_build_without_the_devices_provider_is_refused(mlp: Built) -> None:
    with pytest.raises(EngineError, match=r"has no CUDAExecutionProvider; it has .*CPUExecution"):
        engine("onnxruntime").open(mlp.files["onnxruntime"], torch.device("cuda"))


# -- on a GPU; these tests have not run yet --------------------------------------------------------


@pytest.mark.cuda
def test_on_a_gpu_it_gives_the_cpus_answers(mlp: Built) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime has no CUDAExecutionProvider: onnxruntime-gpu has")
    device = torch.device("cuda:0")
    executable = engine("onnxruntime").open(mlp.files["onnxruntime"], device)
    session = Session(mlp.signature, executable, device)
    for n in (1, 33, 1000):
        binding, expected = bound(mlp, mlp.session("onnxruntime"), n)
        binding()
        inputs, written = mlp.collections({"n": n})
        jets, tags = inputs["jets"].to(device), written["tags"].to(device)
        session.run({"jets": jets}, {"tags": tags})
        torch.testing.assert_close(values(tags).cpu(), values(expected), atol=1e-5, rtol=0)


# -- the record ------------------------------------------------------------------------------------


def test_the_facts_come_with_the_candidate(mlp: Built, tmp_path: Path) -> None:
    candidate = compile_candidate(
        "onnxruntime", mlp.capture, Target.parse("cpu"), {}, tmp_path, timeout_s=300
    )
    assert candidate.outcome.error is None
    assert candidate.facts == facts_of(mlp)
