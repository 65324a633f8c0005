"""`MLmodel`: the files with which `mlflow.pyfunc` and `mlflow models serve` open a bundle.

The files are sealed with the bundle, so digest and signature cover them, and a pulled folder is a
complete MLflow model. They are written in MLflow's format but without MLflow, since a builder may
have only a part of it installed. `pipeline.mlflow_flavour` reads them.

A DataFrame has one length, and one value in each cell. If all inputs (or all outputs) are plain
columns of one collection, with dtypes that MLflow knows, MLflow's signature has columns. Otherwise
it has named arrays: `(n,)`, `(n, r)` or `(n, r, c)` for an Eigen column, `(1,)` for a scalar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from registry.bundle import Manifest
from soa.layout import Column
from soa.signature import Signature

MLMODEL = "MLmodel"
LOADER = "pipeline.mlflow_flavour"
FLAVOUR = "soa_pipeline"
_REQUIREMENTS = "requirements.txt"
_PYTHON_ENV = "python_env.yaml"
_EXAMPLE = "input_example.json"
_SERVING_EXAMPLE = "serving_input_example.json"

_COLUMN_TYPES = {
    "bool": "boolean",
    "int32": "integer",
    "int64": "long",
    "float32": "float",
    "float64": "double",
}


@dataclass(frozen=True)
class Field:
    """A column as MLflow's users see it.

    `name` is `pt`, or `nodes.pt` if there are several collections. `rows`: the row dimension of the
    column, None for a scalar.
    """

    name: str
    collection: str
    column: Column
    rows: str | None

    def shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the column's array for `n` rows; MLflow's signatures use n = -1."""
        return (1,) if self.rows is None else (n, *self.column.shape)


def fields(signature: Signature, role: Literal["input", "output"]) -> tuple[Field, ...]:
    """Return every column that the model reads ("input") or writes ("output"), once."""
    bound_blocks = signature.inputs if role == "input" else signature.outputs
    blocks = [bound.block for bound in bound_blocks]
    pairs = dict.fromkeys((block.collection, name) for block in blocks for name in block.columns)
    several = len({collection for collection, _ in pairs}) > 1
    columns = []
    for collection, name in pairs:
        column = signature.layouts[collection][name]
        rows = None if column.kind == "scalar" else signature.rows_of[collection]
        shown = f"{collection}.{name}" if several else name
        columns.append(Field(shown, collection, column, rows))
    return tuple(columns)


def is_frame(columns: Sequence[Field]) -> bool:
    """Return whether a DataFrame can hold these fields: then MLflow's signature has columns."""
    return len({field.collection for field in columns}) == 1 and all(
        field.column.kind == "column" and field.column.dtype in _COLUMN_TYPES for field in columns
    )


def write_mlmodel(folder: Path, manifest: Manifest, example: Mapping[str, Any]) -> None:
    """Write `MLmodel`, its requirements and its input example into an unsealed bundle.

    `example`: by field name, arrays of the fields' shapes. NumPy has no bfloat16: for a model with
    such a column no `MLmodel` is written, and MLflow sees only files.
    """
    import yaml  # here, because a process that only reads a registry does not need it

    signature, provenance = Signature.from_dict(manifest.signature), manifest.provenance
    inputs, outputs = fields(signature, "input"), fields(signature, "output")
    if any(field.column.dtype == "bfloat16" for field in (*inputs, *outputs)):
        return
    frame = is_frame(inputs)
    _write_examples(folder, example, frame)
    mlflow = provenance.tools.get("mlflow-skinny")  # always of the same version as mlflow
    requirements = [f"mlflow=={mlflow}" if mlflow else "mlflow", *_pip_requirements(manifest)]
    (folder / _REQUIREMENTS).write_text("\n".join(requirements) + "\n")
    environment = {
        "python": provenance.python,
        "build_dependencies": ["pip", "setuptools", "wheel"],
        "dependencies": [f"-r {_REQUIREMENTS}"],
    }
    (folder / _PYTHON_ENV).write_text(yaml.safe_dump(environment, sort_keys=False))
    model = {
        "artifact_path": "bundle",
        **summarize_model(manifest),
        "saved_input_example_info": {
            "artifact_path": _EXAMPLE,
            "serving_input_path": _SERVING_EXAMPLE,
            "type": "dataframe" if frame else "ndarray",
        }
        | ({"pandas_orient": "split"} if frame else {}),
        "signature": {
            "inputs": json.dumps(_mlflow_schema(inputs)),
            "outputs": json.dumps(_mlflow_schema(outputs)),
            "params": None,
        },
    } | ({"mlflow_version": mlflow} if mlflow else {})
    (folder / MLMODEL).write_text(yaml.safe_dump(model))


def _write_examples(folder: Path, example: Mapping[str, Any], frame: bool) -> None:
    """Write the input example, and the same as a request to MLflow's server.

    `frame`: True to write the rows of a DataFrame, False to write an array for each field.
    """
    lists = {name: values.tolist() for name, values in example.items()}
    data: dict[str, Any] = lists
    if frame:
        rows = [list(row) for row in zip(*lists.values(), strict=True)]
        data = {"columns": list(lists), "data": rows}
    (folder / _EXAMPLE).write_text(json.dumps(data) + "\n")
    request = {"dataframe_split" if frame else "inputs": data}
    (folder / _SERVING_EXAMPLE).write_text(json.dumps(request) + "\n")


def summarize_model(manifest: Manifest) -> dict[str, Any]:
    """Return the part of `MLmodel` that MLflow's page of a run needs, too."""
    provenance = manifest.provenance
    return {
        "flavors": {
            "python_function": {
                "loader_module": LOADER,
                "python_version": provenance.python,
                "env": {"virtualenv": _PYTHON_ENV},
                # The options that `load_model(..., model_config=)` may change.
                "config": {"mode": "production"},
            },
            FLAVOUR: {"name": manifest.name, "schema_version": manifest.schema_version},
        },
        "utc_time_created": provenance.created,
    }


def _mlflow_schema(columns: Sequence[Field]) -> list[dict[str, Any]]:
    """Return the fields as an MLflow Schema in JSON data. A shape has -1 for the number of rows."""
    if is_frame(columns):
        return [
            {"type": _COLUMN_TYPES[field.column.dtype], "name": field.name, "required": True}
            for field in columns
        ]
    return [
        {
            "type": "tensor",
            "name": field.name,
            "tensor-spec": {"dtype": field.column.dtype, "shape": list(field.shape(-1))},
        }
        for field in columns
    ]


def _pip_requirements(manifest: Manifest) -> list[str]:
    """Return requirements for pip: the tools that built and validated the artifacts."""
    versions, names = manifest.provenance.tools, ["soa-pipeline", "torch", "numpy"]
    if any("onnxruntime" in record.engines() for record in manifest.targets.values()):
        names.append("onnxruntime")
    # A local version part such as +cpu exists in one package index only, and none is named here.
    return [
        f"{name}=={versions[name].partition('+')[0]}" if name in versions else name
        for name in names
    ]
