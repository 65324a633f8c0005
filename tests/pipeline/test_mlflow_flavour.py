"""A version as MLflow's users use it: `mlflow.pyfunc`, its signature, example and server."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle
from registry.errors import BundleError
from registry.mlflow.mlmodel import fields
from registry.store.registry import Registry
from runtime.errors import LoadError
from runtime.loader import load
from runtime.session.session import Session
from soa import Block, Layout, RowRange, Signature, column, eigen
from stages.reference.answers import Reference
from stages.reference.nonfinite import Case
from tests.models import served
from tests.models.building import reference_collections
from tests.models.mlflow_server import free_port
from tests.models.project import PASSED, Built, described

pandas = pytest.importorskip("pandas", reason="mlflow.pyfunc comes with the mlflow extra")

ANY = {"mode": "test"}


@pytest.fixture(autouse=True)
def own_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow 3.17 warns about its own type hints
        import mlflow.pyfunc  # noqa: F401


@pytest.fixture(scope="session")
def coupled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Plain columns of one input and one output collection: DataFrames."""
    return served.shared(tmp_path_factory, "coupled", served.Coupled(), served.COUPLED)


@pytest.fixture(scope="session")
def event(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two collections of different lengths, with scalar inputs and outputs."""
    return served.shared(tmp_path_factory, "event", served.Event(), served.EVENT)


SEPARATE = Signature.build(
    {
        "arrow": Layout([column("u", "float32"), eigen("w", "float32", 2, 3)], 64, "columns"),
        "out": Layout([column("sum", "float32")]),
    },
    [Block("u", "arrow", ("u",)), Block("w", "arrow", ("w",))],
    [Block("sum", "out", ("sum",))],
    {"n": RowRange(0, 100)},
)


class Separate(nn.Module):
    def forward(self, u: Tensor, w: Tensor) -> Tensor:
        return u + w.sum((1, 2)).unsqueeze(1)


@pytest.fixture(scope="session")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Separate columns as inputs."""
    return served.shared(tmp_path_factory, "separate", Separate(), SEPARATE)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Every dtype, and a collection that is read and written."""
    return served.shared(tmp_path_factory, "mixed", served.Mixed(), served.MIXED)


@pytest.fixture
def promoted(empty: Registry, coupled: Bundle, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """coupled/1 is in production, and MLflow uses this registry too."""
    empty.promote(empty.register(coupled), "production", PASSED)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty.uri)
    return empty


def open_any(bundle: Bundle) -> Any:
    return _opened(bundle.path)


@functools.cache
def _opened(path: Path) -> Any:
    import mlflow

    return mlflow.pyfunc.load_model(str(path), model_config=ANY)


@functools.cache
def session_of(path: Path) -> Session:
    return load(path, mode="test")


def arrays(bundle: Bundle, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The reference's inputs as arrays by MLflow's field names."""
    inputs = Reference.load(bundle.file("reference.safetensors")).inputs
    signature = Signature.from_dict(bundle.manifest.signature)
    found = {}
    for field in fields(signature, "input"):
        values = inputs[field.collection][field.column.name]
        cut = values.reshape(1) if field.rows is None else values[: case[field.rows]]
        found[field.name] = cut.numpy().copy()
    return found


def expected(bundle: Bundle, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The answers of the same artifact, computed with collections."""
    session = session_of(bundle.path)
    inputs = Reference.load(bundle.file("reference.safetensors")).inputs
    given, written = reference_collections(session.signature, inputs, case)
    session.run(given, written)
    found = {}
    for field in fields(session.signature, "output"):
        collection, column = written[field.collection], field.column
        parts = [
            collection.span(column.name, column.component_of(i)).tensor().numpy().copy()
            for i in range(column.components)
        ]
        n = 1 if field.rows is None else case[field.rows]
        found[field.name] = np.stack(parts, 1).reshape(field.shape(n))
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, values in one.items():
        assert values.dtype == other[name].dtype, name
        np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("event", [{"nodes": 7, "edges": 31}, {"nodes": 0, "edges": 3}]),
        ("separate", [{"n": 33}]),
        ("mixed", [{"n": 37}, {"n": 0}]),
    ],
)
def test_answers_are_those_of_the_session(
    name: str, cases: list[Case], request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(name)
    model = open_any(bundle)
    for case in cases:
        equal(model.predict(arrays(bundle, case)), expected(bundle, case))


def test_mlflow_reads_what_we_wrote(event: Bundle, separate: Bundle, jets: Built) -> None:
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, DataType, Schema, TensorSpec

    float32 = np.dtype("float32")
    ins, outs = (Schema([ColSpec(DataType.float, c) for c in names]) for names in ("abcdef", "xyz"))
    assert Model.load(str(jets.bundle.path)).signature == ModelSignature(ins, outs)
    rows = ("nodes.x", "nodes.y")
    tensors: list[ColSpec | TensorSpec] = [TensorSpec(float32, (-1,), name) for name in rows]
    tensors += [TensorSpec(float32, (1,), "nodes.z"), TensorSpec(float32, (-1,), "edges.weight")]
    answers: list[ColSpec | TensorSpec] = [
        TensorSpec(float32, (-1,), "score"),
        TensorSpec(float32, (1,), "total"),
    ]
    assert Model.load(str(event.path)).signature == ModelSignature(Schema(tensors), Schema(answers))
    found = Model.load(str(separate.path)).signature
    assert found is not None
    assert found.inputs.input_dict()["w"] == TensorSpec(float32, (-1, 2, 3), "w")
    for bundle in (jets.bundle, event, separate):
        assert {"MLmodel", "requirements.txt", "input_example.json"} <= set(bundle.files)


def test_the_example_runs_and_is_the_reference_s(event: Bundle, coupled: Bundle) -> None:
    for bundle, case in ((event, {"nodes": 2, "edges": 2}), (coupled, {"n": 2})):
        model = open_any(bundle)
        example = model.input_example
        assert len(next(iter(arrays(bundle, case).values()))) == 2
        equal(dict(example.items()), arrays(bundle, case))
        equal(dict(model.predict(example).items()), expected(bundle, case))


def test_requirements_name_what_built_it(jets: Built) -> None:
    lines = jets.bundle.file("requirements.txt").read_text().splitlines()
    found = dict(line.partition("==")[::2] for line in lines)
    assert list(found) == ["mlflow", "soa-pipeline", "torch", "numpy"]
    assert found["numpy"] == np.__version__
    assert found["torch"] == torch.__version__.partition("+")[0]


def test_a_promoted_version_on_a_frame_and_on_arrays(promoted: Registry, coupled: Bundle) -> None:
    import mlflow

    model = mlflow.pyfunc.load_model("models:/coupled@production")
    given, wanted = arrays(coupled, {"n": 40}), expected(coupled, {"n": 40})
    frame = pandas.DataFrame(given, index=range(1000, 1040))
    answer = model.predict(frame[frame.x > -10])
    assert list(answer.index) == list(frame.index)
    equal(dict(answer.items()), wanted)
    equal(dict(model.predict(given).items()), wanted)  # MLflow makes a DataFrame of it
    assert len(model.predict(frame.iloc[:0])) == 0
    raw = model.get_raw_model()
    assert (raw.origin.name, raw.origin.version) == ("coupled", "1")
    assert raw.origin.digest == promoted.find("coupled/1").digest


def test_the_registry_is_as_it_was(promoted: Registry, coupled: Bundle) -> None:
    """MLflow writes a note into the folder that it loads from, here the store's own."""
    import mlflow

    mlflow.pyfunc.load_model("models:/coupled@production")
    version = promoted.find("coupled/1")
    place = promoted.local_path(version)
    assert place is not None
    assert (place / "registered_model_meta").is_file()
    assert promoted.open(version).digest == coupled.digest
    load("coupled@production", registry=promoted)


def test_no_way_around_the_gates(promoted: Registry, coupled: Bundle, tmp_path: Path) -> None:
    import mlflow

    promoted.set_alias(
        promoted.register(described(coupled, tmp_path / "other", "other")), "candidate"
    )
    for uri in ("models:/coupled@candidate", "models:/coupled/2"):
        with pytest.raises(LoadError, match=r"coupled/2 was never promoted .*config="):
            mlflow.pyfunc.load_model(uri)
    tested = mlflow.pyfunc.load_model("models:/coupled/2", model_config=ANY)
    equal(
        dict(tested.predict(arrays(coupled, {"n": 3})).items()),
        expected(coupled, {"n": 3}),
    )
    with pytest.raises(LoadError, match="a folder that no promotion vouches for"):
        mlflow.pyfunc.load_model(str(coupled.path))


@pytest.mark.parametrize("name", ["program.pt2", "MLmodel", "requirements.txt"])
def test_an_altered_file_is_refused(promoted: Registry, name: str) -> None:
    import mlflow

    place = promoted.local_path(promoted.find("coupled/1"))
    assert place is not None
    with (place / name).open("ab") as file:
        file.write(b"\n# more\n")
    with pytest.raises(BundleError, match=f"{name} is truncated or altered"):
        mlflow.pyfunc.load_model("models:/coupled@production")


def test_a_pulled_folder_is_a_model(promoted: Registry, coupled: Bundle, tmp_path: Path) -> None:
    import mlflow

    pull(promoted, "coupled@production", tmp_path / "pulled")
    shutil.rmtree(Path(promoted.uri.removeprefix("sqlite:///")).parent)
    model = mlflow.pyfunc.load_model(str(tmp_path / "pulled"))
    given = pandas.DataFrame(arrays(coupled, {"n": 5}))
    equal(dict(model.predict(given).items()), expected(coupled, {"n": 5}))


def test_a_note_of_another_version(promoted: Registry, coupled: Bundle, tmp_path: Path) -> None:
    """Happens if a folder was fetched from another registry, and registered in this one."""
    import mlflow

    other = described(coupled, tmp_path / "other", "other")
    (other.path / "registered_model_meta").write_text("model_name: coupled\nmodel_version: 1\n")
    with pytest.raises(LoadError, match=f"another bundle .{other.digest[:12]}…. than coupled/1"):
        mlflow.pyfunc.load_model(str(other.path))


def test_a_note_of_another_kind(coupled: Bundle, tmp_path: Path) -> None:
    import mlflow

    shutil.copytree(coupled.path, tmp_path / "copy")
    for text in ("[1, 2]", "model_name: coupled", "model_name: ../x\nmodel_version: 1", "a: ["):
        (tmp_path / "copy" / "registered_model_meta").write_text(text)
        with pytest.raises(LoadError, match="registered_model_meta: not MLflow's note"):
            mlflow.pyfunc.load_model(str(tmp_path / "copy"))


def test_what_cannot_be_run_is_said(event: Bundle) -> None:
    from mlflow.exceptions import MlflowException

    given = arrays(event, {"nodes": 4, "edges": 9})
    raw = open_any(event)._model_impl
    wrong = {
        "no column 'nodes.y'": {k: v for k, v in given.items() if k != "nodes.y"},
        "'nodes.y' is float64": given | {"nodes.y": given["nodes.y"].astype("f8")},
        "'nodes.y' is >f4": given | {"nodes.y": given["nodes.y"].astype(">f4")},
        r"'nodes.y' has shape \(4, 1\)": given | {"nodes.y": given["nodes.y"].reshape(4, 1)},
        "'nodes.y' has 3 rows, another of 'nodes' has 4": given | {"nodes.y": given["nodes.y"][:3]},
        r"'nodes.z' has shape \(2,\), needed \(1,\)": given | {"nodes.z": np.ones(2, "f4")},
        "edges = 91 is outside the compiled range 0 … 90": given
        | {"edges.weight": np.ones(91, "f4")},
    }
    for text, data in wrong.items():
        with pytest.raises(MlflowException, match=text) as caught:
            raw.predict(data)
        assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    number = raw.predict(given | {"nodes.z": np.float32(given["nodes.z"][0])})
    equal(number, expected(event, {"nodes": 4, "edges": 9}))


def test_separate_columns_are_bound_in_place(
    separate: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where dtype, stride and address allow it; elsewhere a copy gives the same answer."""
    model = open_any(separate)
    impl = model._model_impl
    case = {"n": 64}
    given, wanted = arrays(separate, case), expected(separate, case)
    bound: list[int] = []
    run = impl._session.run

    def spy(inputs: Any, outputs: Any) -> None:
        bound.extend(piece.data_ptr() for piece in inputs["arrow"].memory())
        run(inputs, outputs)

    monkeypatch.setattr(impl._session, "run", spy)
    memory = np.zeros(64 + 64, "f4")
    start = (-memory.ctypes.data % 64) // 4
    for place, in_place in (
        (slice(start, start + 64), True),
        (slice(start + 1, start + 65), False),
    ):
        memory[place] = given["u"]
        equal(model.predict(given | {"u": memory[place]}), wanted)
        assert (memory[place].ctypes.data in bound) == in_place
    strided = np.repeat(given["u"], 2)[::2]
    equal(model.predict(given | {"u": strided}), wanted)
    assert strided.ctypes.data not in bound


def test_many_threads(event: Bundle) -> None:
    model = open_any(event)
    cases = [{"nodes": n, "edges": 3 * n} for n in range(1, 9)]
    given = [arrays(event, case) for case in cases]
    wanted = [expected(event, case) for case in cases]

    def work(first: int) -> None:
        for i in [*range(first, len(cases)), *range(first)]:
            equal(model.predict(given[i]), wanted[i])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (0, 2, 4, 6)))


@pytest.fixture
def serving(promoted: Registry, tmp_path: Path) -> Iterator[str]:
    """The address of `mlflow models serve` for the production version, with two workers."""
    pytest.importorskip("uvicorn", reason="the server comes with the mlflow extra")
    port, root = free_port(), Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        "models:/coupled@production",
    ]
    command += ["--env-manager", "local", "--port", str(port), "--workers", "2"]
    folder = Path(sys.executable).parent  # MLflow finds uvicorn on PATH
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root), "PATH": path},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


@pytest.mark.long  # it starts three processes that import torch and MLflow
def test_mlflow_models_serve(serving: str, coupled: Bundle) -> None:
    wanted = expected(coupled, {"n": 6})
    rows = [dict(zip(wanted, row, strict=True)) for row in zip(*wanted.values(), strict=True)]
    given = {name: values.tolist() for name, values in arrays(coupled, {"n": 6}).items()}
    split = {
        "columns": list(given),
        "data": [list(row) for row in zip(*given.values(), strict=True)],
    }
    bodies: list[dict[str, Any]] = [{"dataframe_split": split}, {"inputs": given}]

    def work(body: dict[str, Any]) -> None:
        for found, row in zip(ask(serving, body), rows, strict=True):
            assert {name: np.float32(value) for name, value in found.items()} == row

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, 12 * bodies))
    example = json.loads(coupled.file("serving_input_example.json").read_text())
    assert len(ask(serving, example)) == 2
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(serving, {"inputs": {name: 101 * [0.0] for name in given}})
    said = json.load(caught.value)
    assert caught.value.code == 400
    assert "n = 101 is outside the compiled range 0 … 100" in said["message"]
    assert "Traceback" not in json.dumps(said)
