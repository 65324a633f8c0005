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
    """Open the bundle in the folder `path` as a model for MLflow, which calls this function.

    `model_config={"mode": "test"}` also opens a version that was not promoted. Raises LoadError if
    the version cannot be opened, or if the folder and the version it names are different bundles.
    """
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
    """Find which version MLflow took a folder from. Returns its `name/number` and the address of
    MLflow's registry, or the folder and None if the folder holds no note of a version. Raises
    LoadError for a damaged note."""
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
    """A session behind MLflow's interface: it takes DataFrames or dicts of arrays, and makes new
    arrays for the answers. Several threads may call it at once."""

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
        """Run the model on the columns of `data`, and return its output columns.

        The answer is a DataFrame if `data` is one and all outputs are columns of one collection;
        else it is a dict of arrays, in the shapes that `registry.mlflow.mlmodel` states. The
        DataFrame has the index of `data` if both have the same rows. If `data` cannot be run,
        raises MlflowException, which MLflow's server turns into an error response.
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
        """Run the session on arrays, and return the answers as arrays. Both are named like MLflow's
        fields, as `registry.mlflow.fields` lists them."""
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
        """Make a collection of each layout of the model, with the input arrays in it. Returns them
        by name. An output has as many rows as the inputs of its row dimension."""
        rows = _count_rows(arrays)
        signature = self._session.signature
        collections = {}
        for name in signature.layouts:
            members = {f.column.name: array for f, array in arrays.items() if f.collection == name}
            written = name in signature.output_collections
            n = rows[signature.rows_of[name]]
            collections[name] = _collect(signature.layouts[name], n, members, written)
        return collections


def _get_input_array(field: Field, columns: Mapping[str, Array]) -> Array:
    """Return the array in `columns` for one input of the model. CollectionError if it is missing,
    or has another dtype or shape. A scalar may be a plain number; it becomes an array of one."""
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
    """Count the rows of each row dimension, by its name. CollectionError if columns of the same
    dimension differ in length."""
    rows: dict[str, int] = {}
    for field, array in arrays.items():
        if field.rows is not None and rows.setdefault(field.rows, len(array)) != len(array):
            raise CollectionError(
                f"column {field.name!r} has {len(array)} rows, another of {field.rows!r} has "
                f"{rows[field.rows]}"
            )
    return rows


def _collect(layout: Layout, n: int, arrays: Mapping[str, Array], written: bool) -> Collection:
    """Make a collection of `n` rows from arrays by column. Columns without an array are zero.
    `written`: the model writes into the collection, so the arrays are copied; else they are used in
    place where possible."""
    collection = Collection(layout, n)
    if not written:
        return as_collection({**to_numpy(collection), **arrays}, layout)
    for name, values in arrays.items():
        collection.fill(name, values)
    return collection
