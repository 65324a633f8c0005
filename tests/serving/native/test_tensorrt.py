"""TensorRT plans: their sizes, the ONNX file they are made from, and a plan itself on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from engines import EngineError, Portable, Target, engine
from engines.target import gpu_target
from pipeline.deployment.repository import deploy
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from runtime.checked import default_tolerance
from runtime.session.session import Session
from serving.errors import ServingError
from serving.native.artifact import ProgramExecutable, artifact_of, make_native
from serving.native.onnx import write_onnx
from serving.native.tensorrt import (
    CARRIED,
    PlanFor,
    PlanTuning,
    check_tensors,
    plan_for,
    profile,
    require_carried,
)
from serving.triton.batch_sizes import preferred_sizes
from serving.triton.config import Service, config_text
from serving.wire import FORMS, Form, Wire
from soa import Signature
from soa.dtypes import numpy_dtype
from stages.judging.validate import validate_session
from stages.reference.answers import Reference
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.project import PASSED, TARGET, resealed

INSTALLED = importlib.util.find_spec("tensorrt") is not None
SM90, SM80 = Target("cuda", "sm_90"), Target("cuda", "sm_80")
GPU = str(SM90)
HOPPER = PlanFor(SM90, 0, "10.14.1.48")


@pytest.mark.parametrize(
    ("lowest", "highest", "preferred", "typical"),
    [
        (0, 1000, (100, 500), 500),
        (0, 1000, (100, 4000), 100),  # 4000 is out of range
        (0, 1000, (), 32),
        (10, 1000, (), 100),
        (10, 1000, (5,), 100),
        (7, 7, (), 7),
    ],
)
def test_what_a_plan_is_tuned_for(
    lowest: int, highest: int, preferred: tuple[int, ...], typical: int
) -> None:
    signature = mlp_signature(highest, lowest=lowest)
    found = profile(Wire.of(signature, "rows"), signature.ranges, preferred)
    assert found == {"features": ((lowest, 6), (typical, 6), (highest, 6))}


@pytest.mark.parametrize("form", FORMS)
def test_the_profile_is_that_of_the_files_inputs(
    event_onnx: Path, form: Form, tmp_path: Path
) -> None:
    wire, file = Wire.of(served.EVENT, form), tmp_path / "model.onnx"
    write_onnx(event_onnx, served.EVENT, wire, file)
    shapes = profile(wire, served.EVENT.ranges)
    found = {}
    for each in onnx.load(file).graph.input:
        dims = each.type.tensor_type.shape.dim
        if any(dim.HasField("dim_param") for dim in dims):
            found[each.name] = [
                None if dim.HasField("dim_param") else dim.dim_value for dim in dims
            ]
    assert set(found) == set(shapes)
    for name, dims in found.items():
        for shape in shapes[name]:
            assert len(shape) == len(dims)
            assert all(dim in (None, extent) for dim, extent in zip(dims, shape, strict=True))


def test_the_onnx_file_does_not_know_its_target(
    event: Bundle, event_onnx: Path, tmp_path: Path
) -> None:
    """So a file that was validated for another device may be used for a plan."""
    source = Portable(event.file(event.manifest.program), None)
    made = engine("onnxruntime").compile(source, SM90, {}, tmp_path)
    assert (tmp_path / made[0]).read_bytes() == event_onnx.read_bytes()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return served.shared(tmp_path_factory, "coupled", served.Coupled(), served.COUPLED)


def forged(bundle: Bundle, folder: Path, graphs: dict[str, tuple[str, bytes]]) -> Bundle:
    """A copy with an onnxruntime candidate for each target, given its status and content."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for target, (status, content) in graphs.items():
            file = f"{target.replace('/', '-')}.onnx"
            (folder / file).write_bytes(content)
            record = manifest["targets"].setdefault(target, {"status": "unverified"})
            candidates = record.setdefault("candidates", {})
            candidates["onnxruntime"] = {"status": status, "files": [file]}

    return resealed(bundle, folder, edit)


def test_the_file_is_a_valid_one_of_any_target(bundle: Bundle, tmp_path: Path) -> None:
    cpu = (TARGET, b"of the CPU")
    one = forged(bundle, tmp_path / "one", {cpu[0]: ("valid", cpu[1]), GPU: ("unverified", b"")})
    assert artifact_of(one, GPU, "tensorrt")[0] == TARGET
    assert artifact_of(one, str(SM80), "tensorrt")[0] == TARGET  # not a target of this bundle
    assert preferred_sizes(one.manifest, str(SM80)) == ()
    both = forged(bundle, tmp_path / "both", {cpu[0]: ("valid", cpu[1]), GPU: ("valid", b"own")})
    assert artifact_of(both, GPU, "tensorrt") == (GPU, "onnxruntime")


def test_what_nobody_validated_is_not_taken(bundle: Bundle, tmp_path: Path) -> None:
    made = forged(bundle, tmp_path / "b", {TARGET: ("invalid", b"1"), GPU: ("unverified", b"2")})
    with pytest.raises(ServingError, match=r"^coupled has no valid artifact of onnxruntime for"):
        artifact_of(made, GPU, "tensorrt")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.14"))


@pytest.mark.parametrize(
    ("wanted", "there", "gpu"),
    [(None, [SM90, SM90], 0), (GPU, [SM80, SM90], 1), (str(SM80), [SM90, SM80, SM80], 1)],
)
def test_the_gpu_that_builds_it(
    wanted: str | None, there: list[Target], gpu: int, library: None
) -> None:
    assert plan_for(("cuda:0",), wanted, there) == PlanFor(there[gpu], gpu, "10.14")


@pytest.mark.parametrize(
    ("wanted", "there", "message"),
    [
        (None, [], "torch sees none here$"),
        (GPU, [], "torch sees none here$"),
        (None, [SM80, SM90], "here are cuda/sm_80, cuda/sm_90: name one with --target$"),
        (GPU, [SM80, SM80], "plan for cuda/sm_90 is .* torch sees cuda/sm_80 here$"),
        (None, [Target("rocm", "gfx90a")], "an NVIDIA GPU .* torch sees rocm/gfx90a here$"),
        ("rocm/gfx90a", [Target("rocm", "gfx90a")], "sees rocm/gfx90a here$"),
    ],
)
def test_no_gpu_to_build_it(
    wanted: str | None, there: list[Target], message: str, library: None
) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        plan_for(("cuda:0",), wanted, there)
    assert "\n" not in str(refused.value)


def test_dtypes_that_a_plan_does_not_carry() -> None:
    require_carried(Wire.of(served.EVENT))
    with pytest.raises(EngineError, match=r"^parts\.kind is int8, which it does not support: it"):
        require_carried(Wire.of(served.MIXED))
    sizes = {dtype: numpy_dtype(dtype).itemsize for dtype in CARRIED}
    assert sizes == {"bool": 1, "int32": 4, "int64": 8, "float16": 2, "float32": 4}


def test_a_plan_with_other_tensors_is_refused() -> None:
    wire = Wire.of(served.COUPLED)
    right = {t.name: (t.dtype, t.shape(-1)) for t in (*wire.inputs, *wire.outputs)}
    check_tensors(wire, right)
    wrong = (np.dtype("float16"), right["out.share"][1])
    with pytest.raises(EngineError, match=r"out\.share is float16 \(-1, 1\) in the plan, where"):
        check_tensors(wire, {**right, "out.share": wrong})
    with pytest.raises(EngineError, match=r"nodes\.x is float32 \(5, 1\) in the plan, where"):
        check_tensors(wire, {**right, "nodes.x": (right["nodes.x"][0], (5, 1))})
    del right["nodes.y"]
    with pytest.raises(EngineError, match=r"nodes\.y is not there in the plan, where"):
        check_tensors(wire, right)


def service(signature: Signature, **fields: Any) -> Service:
    given = {"devices": ("cuda:0",), "target": GPU, "plan": HOPPER, **fields}
    return Service("m", 3, "d" * 64, signature=signature, backend="tensorrt", **given)


def test_its_configuration() -> None:
    served_on = service(
        mlp_signature(100), merge=True, devices=("cuda:0", "cuda:2"), requests="rows"
    )
    config = text_format.Parse(config_text(served_on), model_config_pb2.ModelConfig())
    assert (config.backend, config.platform) == ("tensorrt", "tensorrt_plan")
    assert (config.default_model_filename, config.max_batch_size) == ("model.plan", 100)
    assert {e.name: list(e.dims) for e in (*config.input, *config.output)} == {
        "features": [6],
        "probabilities": [3],
    }
    said = {key: value.string_value for key, value in config.parameters.items()}
    assert said["compute_capability"] == "9.0" and said["tensorrt_version"] == "10.14.1.48"
    assert said["target"] == "cuda/sm_90"


def test_the_compute_capability_of_an_architecture() -> None:
    named = {
        arch: PlanFor(Target("cuda", arch), 0, "11").parameters["compute_capability"]
        for arch in ("sm_75", "sm_90", "sm_120")
    }
    assert named == {"sm_75": "7.5", "sm_90": "9.0", "sm_120": "12.0"}


def test_it_runs_on_gpus_alone() -> None:
    with pytest.raises(ServingError, match=r"NVIDIA GPUs alone: name them, as --device cuda:0$"):
        service(served.EVENT, merge=False, devices=("cpu",), target=TARGET)
    with pytest.raises(ServingError, match="NVIDIA GPUs alone"):
        plan_for(("cuda:0", "cpu"), None)


with_tensorrt = pytest.mark.skipif(
    not INSTALLED, reason="TensorRT's Python library is not installed"
)


@pytest.mark.cuda
@with_tensorrt
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_answers_the_reference(
    event: Bundle, event_onnx: Path, form: Form, tmp_path: Path
) -> None:
    signature, wire = served.EVENT, Wire.of(served.EVENT, form)
    plan = plan_for(("cuda:0",), str(gpu_target(0)))
    tuning = PlanTuning(plan)
    made = make_native(event_onnx, "tensorrt", signature, wire, tmp_path, tuning)
    assert made.file.name == "model.plan"
    report = validate_session(
        Session(signature, ProgramExecutable(signature, wire, made.program)),
        form,
        Reference.load(event.file(event.manifest.reference)),
        {b.name: default_tolerance(b.plan.dtypes[0]) for b in signature.outputs},
    )
    assert report.valid, report.reason


@pytest.mark.cuda
@with_tensorrt
def test_a_version_without_a_gpu_target_is_deployed(bundle: Bundle, tmp_path: Path) -> None:
    source = Portable(bundle.file(bundle.manifest.program), None)
    (tmp_path / "onnx").mkdir()
    engine("onnxruntime").compile(source, Target.parse("cpu"), {}, tmp_path / "onnx")
    graph = (tmp_path / "onnx" / "model.onnx").read_bytes()
    made = forged(bundle, tmp_path / "bundle", {TARGET: ("valid", graph)})
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    ref = registry.promote(registry.register(made), "production", PASSED).ref
    done = deploy(registry, ref, tmp_path / "out", devices=("cuda:0",), backend="tensorrt")
    assert (done.folder / "1" / "model.plan").stat().st_size > 0
    assert done.service.target == str(gpu_target(0))
