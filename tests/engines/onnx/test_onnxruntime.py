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
from soa import Block, Layout, RowRange, Signature, column
from soa.memory import argument_spans
from stages.compile import compile_candidate
from stages.judging.validate import validate_session
from stages.reference.answers import Reference, random_inputs
from tests.models.building import (
    TAGS,
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
    found: dict[str, Any] = json.loads(
        (built.files["onnxruntime"].parent / "facts.json").read_text()
    )
    return found


def program_of(model: nn.Module, folder: Path) -> Path:
    signature = mlp_signature()
    return exported(model, signature, random_inputs(signature, 1, {}), folder / "program.pt2")


def compiled(program: Path, out: Path, **options: Any) -> list[str]:
    out.mkdir(exist_ok=True)
    return engine("onnxruntime").compile(Portable(program, None), Target.parse("cpu"), options, out)


# -- what is bound --------------------------------------------------------------------------------


def test_the_graph_takes_the_arguments_and_gives_one_output_a_column(mlp: Built) -> None:
    model = onnx.load(mlp.files["onnxruntime"])
    assert [i.name for i in model.graph.input] == ["argument_0", "argument_1"]
    assert [o.name for o in model.graph.output] == [f"argument_2.{k}" for k in range(3)]
    facts = facts_of(mlp)
    assert facts["opset"] == next(o.version for o in model.opset_import if o.domain == "")
    assert facts["ir_version"] == model.ir_version


def test_a_binding_reads_and_writes_the_callers_memory(mlp: Built) -> None:
    given, written = mlp.collections({"n": 10}, spare=50)
    binding = mlp.session("onnxruntime").bind(given, written)
    binding()
    before = values(written["tags"])[:, :10].clone()
    given["jets"].fill("a", torch.full((10,), 7.0))
    binding()  # without binding again
    jets = torch.stack([given["jets"].tensor(c.name) for c in given["jets"].layout.columns], dim=1)
    after = values(written["tags"])[:, :10]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.T, mlp.model(jets[:10]), atol=1e-6, rtol=0)


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
    given = Layout([column(name, "float32") for name in "abcdef"])
    signature = Signature.build(
        {"jets": given, "out": out},
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


def test_rows_of_one_value_only(tmp_path: Path) -> None:
    signature = mlp_signature(37, lowest=37)
    made = build(Softmax(), signature, tmp_path, ("onnxruntime",), route="none")
    reference = Reference.load(made.capture.reference)
    report = validate_session(
        made.session("onnxruntime"), "onnxruntime", reference, {"probabilities": TIGHT}
    )
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
    first, *_ = compiled(program, tmp_path / "out")
    session = Session(signature, engine("onnxruntime").open(tmp_path / "out" / first, CPU))
    given, written = reference_collections(signature, inputs, {"n": 33})
    session.run(given, written)
    x = torch.stack([given["jets"].tensor(name) for name in "abcdef"], dim=1)
    found = torch.stack([written["out"].tensor(name) for name in names], dim=1)
    torch.testing.assert_close(found, model(x), atol=1e-6, rtol=1e-6)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x[:, :3], dim=-1)


# -- many calls, many threads ----------------------------------------------------------------------


def test_a_binding_that_is_running_is_busy(mlp: Built) -> None:
    binding, _ = bound(mlp, mlp.session("onnxruntime"), 3)
    assert isinstance(binding.prepared, OnnxCall)
    with binding.prepared.lock, pytest.raises(RunError, match="another thread is running this"):
        binding()
    binding()


@pytest.mark.usefixtures("restless")
def test_it_is_closed_while_other_threads_bind(mlp: Built) -> None:
    given, written = mlp.collections({"n": 3})
    arguments = argument_spans(mlp.signature, {**given, **written}, {"n": 3})
    opened = mlp.executable("onnxruntime")
    ended = threading.Event()

    def bind_until_closed() -> str:
        calls = []
        try:
            while not ended.is_set():
                calls.append(opened.prepare(arguments))
        except RunError as error:
            return str(error)
        return "never closed"

    with ThreadPoolExecutor(3) as pool:
        said = [pool.submit(bind_until_closed) for _ in range(3)]
        time.sleep(0.3)
        opened.close()
        wait(said, 5)
        ended.set()
    assert {each.result() for each in said} == {"the session is closed"}


def test_a_failing_run_is_one_line(mlp: Built) -> None:
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


def test_an_operation_that_onnx_does_not_have(tmp_path: Path) -> None:
    program = program_of(CumulativeMax(), tmp_path)
    with pytest.raises(EngineError, match=r"^ONNX has no operation for aten\.cummax$"):
        compiled(program, tmp_path / "out")


def test_opsets(tmp_path: Path) -> None:
    program = program_of(Gelu(), tmp_path)
    out = tmp_path / "out"
    assert compiled(program, out, opset=18) == ["model.onnx", "model.onnx.data", "facts.json"]
    assert json.loads((out / "facts.json").read_text())["opset"] == 18
    for opset, message in [
        (7, r"^opset 7 has no Erf[\w, ]*; this program was made in opset \d+$"),
        (10_000, r"^this program was made in opset \d+ and does not convert to opset 10000$"),
        ("18", r"^opset is a whole number; found '18'$"),
    ]:
        with pytest.raises(EngineError, match=message):
            compiled(program, out, opset=opset)
    with pytest.raises(EngineError, match="onnxruntime has no option 'opsets': it has opset"):
        compiled(program, out, opsets=18)


def test_an_onnx_file_of_somebody_else(tmp_path: Path) -> None:
    file = tmp_path / "theirs.onnx"
    with quiet_torch():
        torch.onnx.export(Softmax(), (torch.rand(2, 3),), file, dynamo=True, verbose=False)
    with pytest.raises(EngineError, match=r"^theirs\.onnx does not say which columns it writes"):
        engine("onnxruntime").open(file, CPU)


def test_what_is_not_installed_is_named_with_its_extra(
    mlp: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match=r"onnxruntime cannot be imported .*soa-pipeline\[cpu\]"):
        mlp.executable("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(EngineError, match=r"onnxscript cannot be imported .*soa-pipeline\[onnx\]"):
        compiled(mlp.capture.program, tmp_path)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="a GPU build"
)
def test_a_build_without_the_devices_provider(mlp: Built) -> None:
    with pytest.raises(EngineError, match=r"has no CUDAExecutionProvider; it has .*CPUExecution"):
        engine("onnxruntime").open(mlp.files["onnxruntime"], torch.device("cuda"))


# -- on a GPU; these tests have not run yet --------------------------------------------------------


@pytest.mark.cuda
def test_on_a_gpu_it_gives_the_cpus_answers(mlp: Built) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime has no CUDAExecutionProvider: onnxruntime-gpu has")
    device = torch.device("cuda:0")
    opened = engine("onnxruntime").open(mlp.files["onnxruntime"], device)
    session = Session(mlp.signature, opened, device)
    for n in (1, 33, 1000):
        binding, expected = bound(mlp, mlp.session("onnxruntime"), n)
        binding()
        given, written = mlp.collections({"n": n})
        there = {name: c.to(device) for name, c in {**given, **written}.items()}
        session.run({"jets": there["jets"]}, {"tags": there["tags"]})
        found = torch.stack([there["tags"].tensor(c.name).cpu() for c in TAGS.columns])
        torch.testing.assert_close(found, values(expected), atol=1e-5, rtol=0)


# -- the record ------------------------------------------------------------------------------------


def test_the_facts_come_with_the_candidate(mlp: Built, tmp_path: Path) -> None:
    made = compile_candidate(
        "onnxruntime", mlp.capture, Target.parse("cpu"), {}, tmp_path, timeout_s=300
    )
    assert made.outcome.error is None
    assert made.facts == facts_of(mlp)
