"""Files that are no models here: what they are, and how to make models of them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError

from stages.errors import SourceError
from stages.model.weights import read_state

_TO_ONNX = (
    'python -c "import numpy, skl2onnx, {library}; m = {load}; '
    "x = numpy.zeros((1, m.n_features_in_), 'float32'); "
    "open('{stem}.onnx', 'wb').write(skl2onnx.to_onnx(m, x).SerializeToString())\" "
    "(pip install skl2onnx), then give {stem}.onnx"
)
# By the suffixes of other programs' files: how a sentence about such a file goes on after its name.
_OTHERS = {
    ".pkl .pickle .joblib": "is a pickle, which runs code as it loads. If you trust it, and it is "
    "scikit-learn's: "
    + _TO_ONNX.replace("{library}", "joblib").replace("{load}", "joblib.load('{path}')"),
    ".skops": "is scikit-learn's. If you trust what skops.io.get_untrusted_types names: "
    + _TO_ONNX.replace("{library}", "skops.io as s").replace(
        "{load}", "s.load('{path}', trusted=s.get_untrusted_types(file='{path}'))"
    ),
    ".cbm": "is CatBoost's: python -c \"import catboost; catboost.CatBoost().load_model("
    "'{path}').save_model('{stem}.onnx', format='onnx')\", then give {stem}.onnx",
    ".keras .h5 .hdf5": "is Keras's: python -c \"import keras, numpy; "
    "m = keras.saving.load_model('{path}'); m(numpy.zeros((1, *m.input_shape[1:]), 'float32')); "
    "m.export('{stem}.onnx', format='onnx')\", then give {stem}.onnx",
    ".model .bst .xgb .lgb": "is read if it is the text of boosted trees: booster.save_model("
    "'{stem}.json') of XGBoost, '{stem}.txt' of LightGBM",
}


def is_program(path: Path) -> bool:
    """Whether a file is a program that torch.export.save wrote. Its suffix does not matter."""
    return any(name.endswith("/archive_format") for name in _names_in_zip(path))


def advise_on_file(path: Path) -> str:
    """A sentence about a file that is no model here: what it is, and how to make a model of it.

    Empty if its kind is not known. The kind is told by the suffix, or by the files in the archive.
    """
    if path.name.endswith(".weights.h5"):
        return (
            f"{path} has Keras's weights alone: load them into their network (model.load_weights), "
            "and give what model.export('net.onnx', format='onnx') writes"
        )
    for suffixes, text in _OTHERS.items():
        if path.suffix in suffixes.split():
            return f"{path} {text.format(path=path, stem=path.stem)}"
    by_torch_save = any(name.endswith("data.pkl") for name in _names_in_zip(path))
    if not by_torch_save and path.suffix != ".safetensors":
        return ""
    try:
        state = read_state(path)
    except SourceError as error:
        if not isinstance(error.__cause__, UnpicklingError):
            return str(error)
        return (
            f"{error}. Or, if it is the whole network and you trust it, write net.py with "
            f'"import torch" and "def build(): return torch.load({str(path.resolve())!r}, '
            'weights_only=False)", and give net.py:build'
        )
    return (
        f"{path} has weights alone, {len(state)} tensors, as {next(iter(state))}: the model is the "
        f"code of their network, pipeline init FILE.py:CLASS DATA --weights {path} (in a config: "
        "factory and weights)"
    )


def _names_in_zip(path: Path) -> list[str]:
    """The names of the files in a zip archive; empty for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []
