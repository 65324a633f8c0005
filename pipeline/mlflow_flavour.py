"""The module that `mlflow.pyfunc.load_model` and `mlflow models serve` use to open a bundle.

MLflow reads a bundle's `MLmodel` and calls `_load_pyfunc`, which opens the bundle with
`pipeline.load`. So the checks of digests, signatures and promotion are the same. If MLflow took the
folder from a registered version, it names that version in a file in the folder. That version is
then opened from MLflow's registry, as by `pipeline.load("name/3")`. A folder without such a file
must hold a record of its promotion, like a folder that `pipeline pull` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import read_yaml
from pipeline.errors import ConfigError
from pipeline.loading import load
from registry.bundle import MLFLOW_NOTE, Bundle
from registry.errors import RegistryError
from registry.mlflow import Field, fields, is_frame
from registry.ref import Ref
from runtime.errors import LoadError
from runtime.session import Session
from soa.dtypes import numpy_dtype
from soa.errors import CollectionError, SoaPipelineError
from soa.layout import Layout
from soa.memory import Collection, as_collection, to_numpy

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> ColumnModel:
    """MLflow calls this. `model_config={"mode": "test"}` also opens versions without promotion."""
    folder = Path(path)
    ref, registry = _find_version(folder)
    config = dict(model_config or {})
    mode = config.pop("mode", "production")
    if config:
        raise LoadError(f"model_config has no {min(config)!r}: it has: mode")
    try:
        session = load(ref, mode=mode, registry=registry)
    except LoadError as error:
        hint = '; of MLflow: model_config={"mode": "test"}' if mode == "production" else ""
        raise LoadError(f"{error}{hint}", code=error.code) from None
    digest = Bundle.open(folder, verify=False).digest
    if session.origin is None or session.origin.digest != digest:
        raise LoadError(
            f"{folder}: holds another bundle ({digest[:12]}…) than {ref}, which {MLFLOW_NOTE} in "
            "it names: load it as models:/NAME/VERSION"
        )
    return ColumnModel(session)


def _find_version(path: Path) -> tuple[str | Path, str | None]:
    """The registered version that a folder came from and its registry, else the folder itself."""
    note = path / MLFLOW_NOTE
    if not note.is_file():
        return path, None
    import mlflow

    try:
        noted = read_yaml(note).data
        ref = Ref(str(noted["model_name"]), int(noted["model_version"]))
    except (ValueError, TypeError, KeyError, ConfigError, RegistryError) as error:
        raise LoadError(f"{note}: not MLflow's note of a version: {error}") from None
    return str(ref), mlflow.get_registry_uri()


class ColumnModel:
    """A session that takes DataFrames or dicts of arrays. Several threads may call it at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inputs = fields(session.signature, "input")
        self._outputs = fields(session.signature, "output")
        counted = {field.rows for field in self._inputs}
        for field in self._outputs:
            if field.rows is not None and field.rows not in counted:
                raise LoadError(
                    f"nothing that the model reads says how many rows {field.name!r} has: MLflow "
                    "cannot run it, pipeline.load can"
                )

    def get_raw_model(self) -> Session:
        """The session, to run on collections in place. `PyFuncModel.get_raw_model` calls this."""
        return self._session

    def predict(self, data: pd.DataFrame | Mapping[str, Array]) -> Any:
        """The model's output columns: a DataFrame if `data` is one and all outputs are columns of
        one collection; else a dict of arrays.

        The DataFrame has the index of `data` if their rows correspond. Shapes as in
        `registry.mlflow.mlmodel`. Raises MlflowException, which MLflow's server turns into an error
        response, if `data` cannot be run.
        """
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

        columns = (
            data if isinstance(data, Mapping) else {name: data[name].to_numpy() for name in data}
        )
        try:
            answer = self._run(columns)
        except SoaPipelineError as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error
        if isinstance(data, Mapping) or not is_frame(self._outputs):
            return answer
        import pandas as pd

        if self._outputs[0].rows != self._inputs[0].rows:
            return pd.DataFrame(answer, copy=False)
        return pd.DataFrame(answer, index=data.index, copy=False)

    def _run(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Run the session on arrays. Inputs and answers are named as MLflow's fields."""
        arrays = {field: _get_input_array(field, columns) for field in self._inputs}
        collections = self._make_collections(arrays)
        signature = self._session.signature
        self._session.run(
            {name: collections[name] for name in signature.input_collections},
            {name: collections[name] for name in signature.output_collections},
        )
        answers: dict[str, Array] = {}
        for field in self._outputs:
            name = field.column.name
            answer = to_numpy(collections[field.collection], [name])[name]
            answers[field.name] = np.atleast_1d(answer)
        return answers

    def _make_collections(self, arrays: Mapping[Field, Array]) -> dict[str, Collection]:
        """Every collection that the model reads or writes, by name."""
        rows = _count_rows(arrays)
        signature = self._session.signature
        collections = {}
        for name in signature.layouts:
            own = {f.column.name: array for f, array in arrays.items() if f.collection == name}
            written = name in signature.output_collections
            n = rows[signature.rows_of[name]]
            collections[name] = _make_collection(signature.layouts[name], n, own, written)
        return collections


def _get_input_array(field: Field, columns: Mapping[str, Array]) -> Array:
    """The array of one input, with its dtype and shape checked. A scalar may be a plain number."""
    if field.name not in columns:
        have = ", ".join(map(str, columns))
        raise CollectionError(f"no column {field.name!r}, there are: {have}")
    array = np.asarray(columns[field.name])
    if field.rows is None and array.ndim == 0:
        array = array.reshape(1)
    if array.dtype != numpy_dtype(field.column.dtype):
        raise CollectionError(
            f"column {field.name!r} is {array.dtype}, the model was compiled for "
            f"{field.column.dtype}"
        )
    needed = field.shape(len(array) if array.ndim else 0)
    if array.shape != needed:
        raise CollectionError(f"column {field.name!r} has shape {array.shape}, needed {needed}")
    return array


def _count_rows(arrays: Mapping[Field, Array]) -> dict[str, int]:
    """How many rows each dimension has; CollectionError if its columns differ in length."""
    rows: dict[str, int] = {}
    for field, array in arrays.items():
        if field.rows is not None and rows.setdefault(field.rows, len(array)) != len(array):
            raise CollectionError(
                f"column {field.name!r} has {len(array)} rows, another of {field.rows!r} has "
                f"{rows[field.rows]}"
            )
    return rows


def _make_collection(
    layout: Layout, n: int, arrays: Mapping[str, Array], written: bool
) -> Collection:
    """A collection with these columns; all other columns are zero. If the model only reads it, the
    arrays are used in place where possible; if the model writes it, they are copied."""
    collection = Collection(layout, n)
    if not written:
        return as_collection({**to_numpy(collection), **arrays}, layout)
    for name, values in arrays.items():
        collection.fill(name, values)
    return collection
