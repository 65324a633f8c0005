"""Sources of models: factories, weights, files; and every way in which they do not fit together."""

from __future__ import annotations

import pickle
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", None),
        ("done", None),
        ("encoder", None),
        ("mixed", "BatchNorm1d '3', Dropout '4', Own '5'"),
        ("partly", "Dropout '4'"),
    ],
)
def test_layers_that_answer_otherwise_in_eval_mode_are_named(
    tmp_path: Path, name: str, said: str | None
) -> None:
    (tmp_path / "model.py").write_text(TRAINED)
    notes: list[str] = []
    model = build_model(ModelSource(factory=f"{tmp_path / 'model.py'}:{name}"), notes.append)
    assert not any(layer.training for layer in model.modules())
    assert [note.rpartition("eval mode: ")[2] for note in notes] == ([said] if said else [])
    if name in ("mixed", "done"):
        made = load_callable(f"{tmp_path / 'model.py'}:{name}")()
        torch.jit.script(made).save(tmp_path / "model.ts")
        again: list[str] = []
        build_model(ModelSource(torchscript=tmp_path / "model.ts"), again.append)
        assert again == notes


def test_a_file_sees_its_neighbours(tmp_path: Path) -> None:
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
def test_factories_that_do_not_work(source: dict[str, Any], message: str) -> None:
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
    found = with_weights(path, prefix).state_dict()
    assert all(torch.equal(found[key], value) for key, value in state_of().items())
    assert not torch.equal(found["first.weight"], state_of(0)["first.weight"])


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
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


def test_a_prefix_left_on_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({f"mod.{key}": value for key, value in state_of().items()}, path)
    with pytest.raises(
        SourceError, match=r"missing .* and 1 more; not in the model: mod\.first"
    ) as e:
        with_weights(path)
    assert str(e.value).endswith("write weights_prefix: mod.")


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"first.weight": torch.zeros(1), "bomb": Bomb()}, path)
    with pytest.raises(SourceError, match=r"holds no readable weights: .*pickled .* in it.* save"):
        read_state(path)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SourceError, match="holds no readable weights"):
        read_state(plain)


def test_files_without_weights(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no weights at .*absent\.safetensors"):
        read_state(tmp_path / "absent.safetensors")
    for name in ("weights.safetensors", "weights.pt"):
        path = tmp_path / name
        path.write_bytes(b"")
        with pytest.raises(SourceError, match=f"{name} holds no readable weights"):
            read_state(path)
    not_a_state = tmp_path / "list.pt"
    torch.save([torch.zeros(2)], not_a_state)
    with pytest.raises(SourceError, match="is not a state dict"):
        read_state(not_a_state)


def test_a_checkpoint(tmp_path: Path) -> None:
    """A single state dict in it is taken; if there are several, the user has to choose."""
    path = tmp_path / "checkpoint.pt"
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    torch.save({"state_dict": state_of(), "epoch": 3, "optimizer": optimizer}, path)
    found = with_weights(path).state_dict()
    assert all(torch.equal(found[key], value) for key, value in state_of().items())
    torch.save({"model": state_of(), "ema": state_of(2), "epoch": 3}, path)
    with pytest.raises(SourceError, match=r"2 state dicts \(model, ema\).*\['model'\]"):
        read_state(path)
    torch.save({"epoch": 3, "optimizer": optimizer}, path)
    with pytest.raises(SourceError, match=r"found epoch, optimizer; save .*model\.state_dict\(\)"):
        read_state(path)


# -- model files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["program", "torchscript"])
def test_model_files_that_are_none(tmp_path: Path, kind: str) -> None:
    for content in (b"", b"no model", None):
        path = tmp_path / "model"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SourceError, match=str(path)):
            build_model(ModelSource(**{kind: path}))  # type: ignore[arg-type]


# -- fingerprints ----------------------------------------------------------------------------------


def test_a_fingerprint_changes_with_everything_the_model_is_made_of(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    weights = tmp_path / "weights.safetensors"
    file.write_text("def build(): ...\n")
    save_file(state_of(), weights)
    made = [
        ModelSource(factory=f"{file}:build", weights=weights),
        ModelSource(factory=f"{file}:other", weights=weights),
        ModelSource(factory=f"{file}:build", weights=weights, kwargs={"a": 1}),
        ModelSource(factory=f"{file}:build", weights=weights, weights_prefix="mod."),
        ModelSource(factory=f"{file}:build"),
    ]
    prints = [source.fingerprint() for source in made]
    file.write_text("def build(): return 1\n")
    prints.append(made[0].fingerprint())
    save_file(state_of(2), weights)
    prints.append(made[0].fingerprint())
    assert len({repr(p) for p in prints}) == len(prints)
    (tmp_path / "plot.py").write_text("A = 1\n")  # not imported by the model
    assert made[0].fingerprint() == prints[-1]


def test_a_fingerprint_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read .*gone\.pt2"):
        ModelSource(program=tmp_path / "gone.pt2").fingerprint()
    with pytest.raises(SourceError, match="no_such_module cannot be imported"):
        ModelSource(factory="no_such_module:build").fingerprint()
