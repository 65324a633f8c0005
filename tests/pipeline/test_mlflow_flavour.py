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
from collections.abc import Callable, Iterator
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

TEST_MODE = {"mode": "test"}
"""The `model_config` that runs a version which no promotion let into production."""


@pytest.fixture(autouse=True)
def own_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow is imported without its warnings, and each test has its own cache of files."""
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
    """Adds the sum of a matrix to a number, in each row."""

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


def pyfunc_model(bundle: Bundle) -> Any:
    """The bundle as MLflow loads it, in test mode; loaded once per process."""
    return _pyfunc_model(bundle.path)


@functools.cache
def _pyfunc_model(path: Path) -> Any:
    import mlflow

    return mlflow.pyfunc.load_model(str(path), model_config=TEST_MODE)


@functools.cache
def session_of(path: Path) -> Session:
    """A session of our own on the bundle in this folder; loaded once per process."""
    return load(path, mode="test")


def arrays(bundle: Bundle, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The reference's inputs as arrays by MLflow's field names."""
    inputs = Reference.load(bundle.file("reference.safetensors")).inputs
    signature = Signature.from_dict(bundle.manifest.signature)
    by_field = {}
    for field in fields(signature, "input"):
        values = inputs[field.collection][field.column.name]
        cut = values.reshape(1) if field.rows is None else values[: case[field.rows]]
        by_field[field.name] = cut.numpy().copy()
    return by_field


def expected(bundle: Bundle, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The answers of the same artifact, computed with collections."""
    session = session_of(bundle.path)
    inputs = Reference.load(bundle.file("reference.safetensors")).inputs
    inputs_of_case, outputs = reference_collections(session.signature, inputs, case)
    session.run(inputs_of_case, outputs)
    by_field = {}
    for field in fields(session.signature, "output"):
        collection, column = outputs[field.collection], field.column
        components = [
            collection.span(column.name, column.component_of(i)).tensor().numpy().copy()
            for i in range(column.components)
        ]
        rows = 1 if field.rows is None else case[field.rows]
        by_field[field.name] = np.stack(components, 1).reshape(field.shape(rows))
    return by_field


def assert_equal(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Requires the same names in the same order, with equal dtypes and values."""
    assert list(actual) == list(wanted)
    for name, values in actual.items():
        assert values.dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


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
    model = pyfunc_model(bundle)
    for case in cases:
        assert_equal(model.predict(arrays(bundle, case)), expected(bundle, case))


def signature_in_mlflow(bundle: Bundle) -> Any:
    """The signature that MLflow reads of the bundle."""
    from mlflow.models import Model

    return Model.load(str(bundle.path)).signature


def test_columns_of_one_collection_are_columns_of_a_frame_to_mlflow(jets: Built) -> None:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, DataType, Schema

    ins, outs = (Schema([ColSpec(DataType.float, c) for c in names]) for names in ("abcdef", "xyz"))
    assert signature_in_mlflow(jets.bundle) == ModelSignature(ins, outs)


def test_several_collections_are_tensors_to_mlflow(event: Bundle) -> None:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Schema, TensorSpec

    float32, any_rows, scalar = np.dtype("float32"), (-1,), (1,)
    inputs = [
        TensorSpec(float32, any_rows, "nodes.x"),
        TensorSpec(float32, any_rows, "nodes.y"),
        TensorSpec(float32, scalar, "nodes.z"),
        TensorSpec(float32, any_rows, "edges.weight"),
    ]
    outputs = [TensorSpec(float32, any_rows, "score"), TensorSpec(float32, scalar, "total")]
    assert signature_in_mlflow(event) == ModelSignature(Schema([*inputs]), Schema([*outputs]))


def test_an_eigen_column_is_a_tensor_of_its_shape_to_mlflow(separate: Bundle) -> None:
    from mlflow.types.schema import TensorSpec

    inputs = signature_in_mlflow(separate).inputs.input_dict()
    assert inputs["w"] == TensorSpec(np.dtype("float32"), (-1, 2, 3), "w")


@pytest.mark.parametrize("name", ["coupled", "event", "separate"])
def test_a_bundle_has_the_files_of_an_mlflow_model(
    name: str, request: pytest.FixtureRequest
) -> None:
    files = set(request.getfixturevalue(name).files)
    assert {"MLmodel", "requirements.txt", "input_example.json"} <= files


@pytest.mark.parametrize(
    ("name", "case"), [("event", {"nodes": 2, "edges": 2}), ("coupled", {"n": 2})]
)
def test_the_example_is_two_rows_of_the_reference_and_runs(
    name: str, case: Case, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(name)
    model = pyfunc_model(bundle)
    example = model.input_example
    rows = arrays(bundle, case)
    assert len(next(iter(rows.values()))) == 2
    assert_equal(dict(example.items()), rows)
    assert_equal(dict(model.predict(example).items()), expected(bundle, case))


def test_a_bundle_that_was_run_has_what_mlflow_reads(jets: Built) -> None:
    assert {"MLmodel", "requirements.txt", "input_example.json"} <= set(jets.bundle.files)


def test_requirements_name_what_built_it(jets: Built) -> None:
    lines = jets.bundle.file("requirements.txt").read_text().splitlines()
    requirements = dict(line.partition("==")[::2] for line in lines)
    assert list(requirements) == ["mlflow", "soa-pipeline", "torch", "numpy"]
    assert requirements["numpy"] == np.__version__
    assert requirements["torch"] == torch.__version__.partition("+")[0]


@pytest.fixture
def production(promoted: Registry) -> Any:
    """coupled/1 as MLflow loads it by its alias, without a mode: as in production."""
    import mlflow

    return mlflow.pyfunc.load_model("models:/coupled@production")


def test_a_promoted_version_keeps_the_index_of_a_frame(production: Any, coupled: Bundle) -> None:
    frame = pandas.DataFrame(arrays(coupled, {"n": 40}), index=range(1000, 1040))
    answer = production.predict(frame[frame.x > -10])
    assert list(answer.index) == list(frame.index)
    assert_equal(dict(answer.items()), expected(coupled, {"n": 40}))


def test_a_promoted_version_on_arrays(production: Any, coupled: Bundle) -> None:
    """MLflow makes a DataFrame of them."""
    answer = production.predict(arrays(coupled, {"n": 40}))
    assert_equal(dict(answer.items()), expected(coupled, {"n": 40}))


def test_a_promoted_version_on_an_empty_frame(production: Any, coupled: Bundle) -> None:
    assert len(production.predict(pandas.DataFrame(arrays(coupled, {"n": 40})).iloc[:0])) == 0


def test_the_origin_of_a_promoted_version(production: Any, promoted: Registry) -> None:
    origin = production.get_raw_model().origin
    assert (origin.name, origin.version) == ("coupled", "1")
    assert origin.digest == promoted.find("coupled/1").digest


def test_mlflow_leaves_the_registrys_bundle_valid(promoted: Registry, coupled: Bundle) -> None:
    """MLflow writes a note into the folder that it loads from, here the store's own."""
    import mlflow

    mlflow.pyfunc.load_model("models:/coupled@production")
    version = promoted.find("coupled/1")
    place = promoted.local_path(version)
    assert place is not None
    assert (place / "registered_model_meta").is_file()
    assert promoted.open(version).digest == coupled.digest
    load("coupled@production", registry=promoted)


@pytest.fixture
def unpromoted(promoted: Registry, coupled: Bundle, tmp_path: Path) -> Registry:
    """coupled/2 is a candidate beside coupled/1 in production."""
    second = promoted.register(described(coupled, tmp_path / "other", "other"))
    promoted.set_alias(second, "candidate")
    return promoted


@pytest.mark.parametrize("uri", ["models:/coupled@candidate", "models:/coupled/2"])
def test_a_version_that_was_never_promoted_is_refused(unpromoted: Registry, uri: str) -> None:
    import mlflow

    with pytest.raises(LoadError, match=r"coupled/2 was never promoted .*config="):
        mlflow.pyfunc.load_model(uri)


def test_a_version_that_was_never_promoted_runs_in_test_mode(
    unpromoted: Registry, coupled: Bundle
) -> None:
    import mlflow

    model = mlflow.pyfunc.load_model("models:/coupled/2", model_config=TEST_MODE)
    answer = model.predict(arrays(coupled, {"n": 3}))
    assert_equal(dict(answer.items()), expected(coupled, {"n": 3}))


def test_a_folder_that_no_promotion_vouches_for_is_refused(coupled: Bundle) -> None:
    import mlflow

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


def test_a_pulled_folder_runs_without_its_registry(
    promoted: Registry, coupled: Bundle, tmp_path: Path
) -> None:
    import mlflow

    pull(promoted, "coupled@production", tmp_path / "pulled")
    shutil.rmtree(Path(promoted.uri.removeprefix("sqlite:///")).parent)
    model = mlflow.pyfunc.load_model(str(tmp_path / "pulled"))
    frame = pandas.DataFrame(arrays(coupled, {"n": 5}))
    assert_equal(dict(model.predict(frame).items()), expected(coupled, {"n": 5}))


def test_a_note_that_names_another_bundles_version_is_refused(
    promoted: Registry, coupled: Bundle, tmp_path: Path
) -> None:
    """Happens if a folder was fetched from another registry, and registered in this one."""
    import mlflow

    other = described(coupled, tmp_path / "other", "other")
    (other.path / "registered_model_meta").write_text("model_name: coupled\nmodel_version: 1\n")
    with pytest.raises(LoadError, match=f"another bundle .{other.digest[:12]}…. than coupled/1"):
        mlflow.pyfunc.load_model(str(other.path))


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "model_name: coupled", "model_name: ../x\nmodel_version: 1", "a: ["],
    ids=["a list", "no version", "no model's name", "no YAML"],
)
def test_a_note_that_is_not_mlflows_is_refused(coupled: Bundle, tmp_path: Path, text: str) -> None:
    import mlflow

    shutil.copytree(coupled.path, tmp_path / "copy")
    (tmp_path / "copy" / "registered_model_meta").write_text(text)
    with pytest.raises(LoadError, match="registered_model_meta: not MLflow's note"):
        mlflow.pyfunc.load_model(str(tmp_path / "copy"))


NODE_ROWS = 4


def event_model(event: Bundle) -> Any:
    """Our model without MLflow's own checks of its arguments, which would refuse first."""
    return pyfunc_model(event)._model_impl


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("nodes.y", None, "no column 'nodes.y'"),
        ("nodes.y", lambda values: values.astype("f8"), "'nodes.y' is float64"),
        ("nodes.y", lambda values: values.astype(">f4"), "'nodes.y' is >f4"),
        ("nodes.y", lambda values: values.reshape(4, 1), r"'nodes.y' has shape \(4, 1\)"),
        ("nodes.y", lambda values: values[:3], "'nodes.y' has 3 rows, another of 'nodes' has 4"),
        ("nodes.z", lambda _: np.ones(2, "f4"), r"'nodes.z' has shape \(2,\), needed \(1,\)"),
        (
            "edges.weight",
            lambda _: np.ones(91, "f4"),
            "edges = 91 is outside the compiled range 0 … 90",
        ),
    ],
    ids=["missing", "dtype", "byte order", "shape", "rows", "scalar", "range"],
)
def test_a_column_that_does_not_fit_is_an_invalid_parameter(
    event: Bundle, name: str, change: Callable[[Any], Any] | None, problem: str
) -> None:
    from mlflow.exceptions import MlflowException

    columns = arrays(event, {"nodes": NODE_ROWS, "edges": 9})
    if change is None:
        del columns[name]
    else:
        columns[name] = change(columns[name])
    with pytest.raises(MlflowException, match=problem) as caught:
        event_model(event).predict(columns)
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


def test_a_scalar_may_be_a_number(event: Bundle) -> None:
    case = {"nodes": NODE_ROWS, "edges": 9}
    columns: dict[str, Any] = dict(arrays(event, case))
    columns["nodes.z"] = np.float32(columns["nodes.z"][0])
    assert_equal(event_model(event).predict(columns), expected(event, case))


@pytest.fixture
def addresses(separate: Bundle, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the input columns of each run of `separate`, as the session gets them."""
    session = pyfunc_model(separate)._model_impl._session
    run, bound = session.run, list[int]()

    def recording_run(inputs: Any, outputs: Any) -> None:
        bound.extend(piece.data_ptr() for piece in inputs["arrow"].memory())
        run(inputs, outputs)

    monkeypatch.setattr(session, "run", recording_run)
    return bound


def aligned(floats: int, alignment: int) -> np.ndarray[Any, Any]:
    """Memory for as many float32, which begins at a multiple of so many bytes."""
    spare = np.zeros(floats + alignment // 4, "f4")
    start = -spare.ctypes.data % alignment // 4
    return spare[start : start + floats]


@pytest.mark.parametrize(("offset", "in_place"), [(0, True), (1, False)])
def test_a_separate_column_is_bound_in_place_where_it_is_aligned(
    separate: Bundle, addresses: list[int], offset: int, in_place: bool
) -> None:
    """Elsewhere a copy gives the same answer. The layout asks for 64 bytes."""
    columns = arrays(separate, {"n": 64})
    values = aligned(64 + offset, 64)[offset:]
    values[:] = columns["u"]
    answer = pyfunc_model(separate).predict(columns | {"u": values})
    assert_equal(answer, expected(separate, {"n": 64}))
    assert (values.ctypes.data in addresses) == in_place


def test_a_strided_column_is_copied(separate: Bundle, addresses: list[int]) -> None:
    columns = arrays(separate, {"n": 64})
    strided = np.repeat(columns["u"], 2)[::2]
    answer = pyfunc_model(separate).predict(columns | {"u": strided})
    assert_equal(answer, expected(separate, {"n": 64}))
    assert addresses and strided.ctypes.data not in addresses


def test_threads_that_share_a_model_get_their_own_answers(event: Bundle) -> None:
    model = pyfunc_model(event)
    cases = [{"nodes": n, "edges": 3 * n} for n in range(1, 9)]
    inputs = [arrays(event, case) for case in cases]
    wanted = [expected(event, case) for case in cases]

    def predict_all(first: int) -> None:
        """Predicts every case, beginning with this one."""
        for i in [*range(first, len(cases)), *range(first)]:
            assert_equal(model.predict(inputs[i]), wanted[i])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(predict_all, (0, 2, 4, 6)))


SERVER_STARTS_S = 120  # each worker imports torch and MLflow


@pytest.fixture
def serving(promoted: Registry, tmp_path: Path) -> Iterator[str]:
    """The address of `mlflow models serve` for the production version, with two workers."""
    pytest.importorskip("uvicorn", reason="the server comes with the mlflow extra")
    port, root = free_port(), Path(__file__).parents[2]
    command = [
        *(sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/coupled@production"),
        *("--env-manager", "local", "--port", str(port), "--workers", "2"),
    ]
    folder = Path(sys.executable).parent  # MLflow finds uvicorn on PATH
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root), "PATH": path},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + SERVER_STARTS_S
        while not answers_pings(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def answers_pings(port: int) -> bool:
    """Whether a server of MLflow is ready on this port."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
    except OSError:
        return False
    return True


def predictions_of(url: str, body: dict[str, Any]) -> Any:
    """The predictions that a server gives for the body of a request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["predictions"]


@pytest.mark.long  # it starts three processes that import torch and MLflow
def test_mlflow_models_serve(serving: str, coupled: Bundle) -> None:
    """One test, as the server takes long to start."""
    wanted = expected(coupled, {"n": 6})
    rows = [dict(zip(wanted, row, strict=True)) for row in zip(*wanted.values(), strict=True)]
    columns = {name: values.tolist() for name, values in arrays(coupled, {"n": 6}).items()}
    split = {
        "columns": list(columns),
        "data": [list(row) for row in zip(*columns.values(), strict=True)],
    }
    bodies: list[dict[str, Any]] = [{"dataframe_split": split}, {"inputs": columns}]

    def require_rows(body: dict[str, Any]) -> None:
        for answer, row in zip(predictions_of(serving, body), rows, strict=True):
            assert {name: np.float32(value) for name, value in answer.items()} == row

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(require_rows, 12 * bodies))
    example = json.loads(coupled.file("serving_input_example.json").read_text())
    assert len(predictions_of(serving, example)) == 2
    with pytest.raises(urllib.error.HTTPError) as caught:
        predictions_of(serving, {"inputs": {name: 101 * [0.0] for name in columns}})
    refusal = json.load(caught.value)
    assert caught.value.code == 400
    assert "n = 101 is outside the compiled range 0 … 100" in refusal["message"]
    assert "Traceback" not in json.dumps(refusal)
