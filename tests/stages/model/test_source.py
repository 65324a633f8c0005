"""Sources of models: factories, weights, files; and every way in which they do not fit together."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.errors import SourceError
from stages.model import ModelSource, build_model, load_callable, read_state
from tests.models import mlps

FILE = Path(mlps.__file__).resolve()
FACTORY = f"{FILE}:build"


def state_of(seed: int = 1) -> dict[str, torch.Tensor]:
    """The weights of the model that the factory makes with this seed."""
    return {key: value.clone() for key, value in mlps.build(seed).state_dict().items()}


class Bomb:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("/nowhere/at/all"), "the code ran"))


# -- factories -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [FACTORY, "tests.models.mlps:build"])
def test_a_factory_by_file_or_module(factory: str) -> None:
    model = build_model(ModelSource(factory=factory, kwargs={"hidden": 5}))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.state_dict()["first.weight"].shape == (5, 6)


TRAINED = """
import torch
from torch import Tensor, nn


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=self.training)


def layers(*more):
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0), *more)


def plain():
    return layers()


def mixed():
    return layers(nn.BatchNorm1d(2), nn.Dropout(0.1), Own())


def done():
    return mixed().eval()


def partly():
    return layers(mixed().eval(), nn.Dropout(0.1))


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A file with the functions above."""
    (tmp_path / "model.py").write_text(TRAINED)
    return tmp_path / "model.py"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("plain", None),
        ("done", None),
        ("encoder", None),
        ("mixed", "BatchNorm1d '3', Dropout '4', Own '5'"),
        ("partly", "Dropout '4'"),
    ],
)
def test_layers_that_answer_otherwise_in_eval_mode_are_named(
    trained: Path, name: str, layers: str | None
) -> None:
    notes: list[str] = []
    model = build_model(ModelSource(factory=f"{trained}:{name}"), notes.append)
    assert not any(layer.training for layer in model.modules())
    named = [note.rpartition("eval mode: ")[2] for note in notes]
    assert named == ([] if layers is None else [layers])


@pytest.mark.parametrize("name", ["mixed", "done"])
def test_the_layers_of_torchscript_are_named_as_those_of_its_module(
    trained: Path, name: str
) -> None:
    torch.jit.script(load_callable(f"{trained}:{name}")()).save(trained.with_suffix(".ts"))
    of_module: list[str] = []
    of_script: list[str] = []
    build_model(ModelSource(factory=f"{trained}:{name}"), of_module.append)
    build_model(ModelSource(torchscript=trained.with_suffix(".ts")), of_script.append)
    assert of_script == of_module


def test_a_model_may_import_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my_layers_of_this_test.py").write_text("from torch import nn\nWIDTH = 7\n")
    file = tmp_path / "my_model.py"
    file.write_text(
        "from torch import nn\nfrom my_layers_of_this_test import WIDTH\n"
        "def build():\n    return nn.Linear(WIDTH, 1)\n"
    )
    model = build_model(ModelSource(factory=f"{file}:build"))
    assert model.state_dict()["weight"].shape == (1, 7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "no model: give factory, program, torchscript, onnx or trees"),
        ({"factory": "build"}, "'build' is not 'module:callable' or 'file.py:callable'"),
        ({"factory": "/no/such/file.py:build"}, "no such file: /no/such/file.py"),
        ({"factory": "no_such_module:build"}, "no_such_module cannot be imported: No module named"),
        ({"factory": "tests.models.mlps:FEATURES"}, "mlps has no callable 'FEATURES'"),
        ({"factory": "tests.models.mlps:broken"}, "mlps:broken failed: RuntimeError: no such year"),
        ({"factory": "tests.models.mlps:line_of", "kwargs": {"word": "raises"}},
         "line_of returned a str, not a module"),
        ({"factory": FACTORY, "kwargs": {"layers": 3}},
         "kwargs do not fit: got an unexpected keyword argument"),
    ],
)  # fmt: skip
def test_a_factory_that_does_not_work_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        build_model(ModelSource(**source))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\n\ndef build(:\n", "model.py, line 3: "),
        ("import no_such_module_here\n", "cannot be imported: No module named 'no_such_modul"),
        (
            "raise RuntimeError('the detector is off')\n",
            "model.py fails as it loads: RuntimeError: the detector is off",
        ),
        ("open('/no/such/calibration')\n", "model.py fails as it loads: FileNotFoundError: "),
    ],
)
def test_a_file_that_fails_names_the_place_and_is_read_again(
    text: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    with pytest.raises(SourceError) as caught:
        load_callable(f"{file}:build")
    assert says in str(caught.value)
    file.write_text("def build():\n    return 1\n")
    assert load_callable(f"{file}:build")() == 1


# -- weights ---------------------------------------------------------------------------------------


def with_weights(path: Path, prefix: str = "") -> torch.nn.Module:
    """The factory's model with the weights of a file."""
    return build_model(ModelSource(factory=FACTORY, weights=path, weights_prefix=prefix))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("prefix", ["", "mod."])
def test_weights_are_loaded(tmp_path: Path, suffix: str, prefix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    state = {prefix + key: value for key, value in state_of().items()}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    loaded = with_weights(path, prefix).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state_of().items())
    assert not torch.equal(loaded["first.weight"], state_of(0)["first.weight"])


def test_weights_that_do_not_fit_are_refused_with_each_difference(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    state = state_of()
    del state["first.bias"], state["last.bias"]
    state["third.weight"] = torch.zeros(2)
    state["first.weight"] = torch.zeros(48, 5)
    save_file(state, path)
    with pytest.raises(SourceError) as caught:
        with_weights(path)
    assert str(caught.value) == (
        f"{path} does not fit the model: missing first.bias, last.bias; not in the model: "
        "third.weight; first.weight is [48, 5], the model has [48, 6]"
    )


def test_weights_that_differ_by_a_prefix_are_refused_with_the_prefix(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({f"mod.{key}": value for key, value in state_of().items()}, path)
    with pytest.raises(
        SourceError, match=r"missing .* and 1 more; not in the model: mod\.first"
    ) as caught:
        with_weights(path)
    assert str(caught.value).endswith("write weights_prefix: mod.")


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"first.weight": torch.zeros(1), "bomb": Bomb()}, path)
    with pytest.raises(SourceError, match=r"holds no readable weights: .*pickled .* in it.* save"):
        read_state(path)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SourceError, match="holds no readable weights"):
        read_state(plain)


def test_weights_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no weights at .*absent\.safetensors"):
        read_state(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_an_empty_file_of_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=f"{name} holds no readable weights"):
        read_state(tmp_path / name)


def test_a_list_is_no_state_dict(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(SourceError, match="is not a state dict"):
        read_state(tmp_path / "list.pt")


OPTIMIZER = {"state": {}, "param_groups": [{"lr": 0.1}]}


def test_the_only_state_dict_of_a_checkpoint_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"state_dict": state_of(), "epoch": 3, "optimizer": OPTIMIZER}, path)
    loaded = with_weights(path).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state_of().items())


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        (
            {"model": state_of(), "ema": state_of(2), "epoch": 3},
            r"2 state dicts \(model, ema\).*\['model'\]",
        ),
        (
            {"epoch": 3, "optimizer": OPTIMIZER},
            r"found epoch, optimizer; save .*model\.state_dict\(\)",
        ),
    ],
    ids=["several", "none"],
)
def test_a_checkpoint_without_one_state_dict_is_refused(
    tmp_path: Path, checkpoint: dict[str, Any], problem: str
) -> None:
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    with pytest.raises(SourceError, match=problem):
        read_state(tmp_path / "checkpoint.pt")


# -- model files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["program", "torchscript"])
@pytest.mark.parametrize("content", [b"", b"no model", None], ids=["empty", "text", "absent"])
def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, kind: str, content: bytes | None
) -> None:
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=str(path)):
        build_model(ModelSource(**{kind: path}))  # type: ignore[arg-type]


# -- fingerprints ----------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    """The function `build` of model.py and weights.safetensors; both files exist."""
    (tmp_path / "model.py").write_text("def build(): ...\n")
    save_file(state_of(), tmp_path / "weights.safetensors")
    factory, weights = f"{tmp_path / 'model.py'}:build", tmp_path / "weights.safetensors"
    return ModelSource(factory=factory, weights=weights)


def test_a_fingerprint_changes_with_each_setting(source: ModelSource) -> None:
    sources = [
        source,
        replace(source, factory=str(source.factory).replace(":build", ":other")),
        replace(source, kwargs={"a": 1}),
        replace(source, weights_prefix="mod."),
        replace(source, weights=None),
    ]
    assert len({repr(changed.fingerprint()) for changed in sources}) == len(sources)


def test_a_fingerprint_changes_with_the_content_of_each_file(
    source: ModelSource, tmp_path: Path
) -> None:
    first = source.fingerprint()
    (tmp_path / "model.py").write_text("def build(): return 1\n")
    second = source.fingerprint()
    save_file(state_of(2), tmp_path / "weights.safetensors")
    assert len({repr(fingerprint) for fingerprint in (first, second, source.fingerprint())}) == 3


def test_a_fingerprint_is_not_of_files_that_the_model_does_not_import(
    source: ModelSource, tmp_path: Path
) -> None:
    before = source.fingerprint()
    (tmp_path / "plot.py").write_text("A = 1\n")
    assert source.fingerprint() == before


@pytest.mark.parametrize(
    ("absent", "problem"),
    [
        (ModelSource(program=Path("gone.pt2")), r"cannot read .*gone\.pt2"),
        (ModelSource(factory="no_such_module:build"), "no_such_module cannot be imported"),
    ],
    ids=["file", "module"],
)
def test_what_does_not_exist_has_no_fingerprint(absent: ModelSource, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        absent.fingerprint()
