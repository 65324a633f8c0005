"""`pipeline init` tries what a person would: orders of axes, masks, batch second, a dict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.model import load_callable
from tests.models.project import cli
from tests.pipeline.init.test_init import init_config, refused

MODEL = '''
import torch
from torch import Tensor, nn


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0][:, -1])


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        found = torch.relu(self.each(x)).masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.all(found.sum(1))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nif,fk->nk", x, self.w).tanh()


class Remainder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x % 1000


class Above(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 3).float()


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=1)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (n, items, features)"""
        return self.heads(x, x, x, key_padding_mask=mask)[0].mean(1)


class Second(nn.Module):
    """Recurrent, the batch second"""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.RNN(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Turned(nn.Module):
    """(F, n)"""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w @ x)


class Dict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.b(batch["tracks"]).mean(1) + self.a(batch["jet"])


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


class Image(nn.Module):
    """(n, 3, rows, columns)"""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.out = nn.Conv2d(3, 2, 3), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.filters(x).mean((2, 3)))


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)
'''


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A folder with the models above."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    return folder


def write_columns(user_folder: Path, features: int, *shape: int, **others: Any) -> Path:
    """Writes rows.npz: sixty rows of columns f0, f1, … with values of `shape`, and `more`."""
    draw = np.random.default_rng(1)
    columns = {f"f{i}": draw.normal(size=(60, *shape)).astype("f4") for i in range(features)}
    np.savez(user_folder / "rows.npz", allow_pickle=False, **columns, **others)
    return user_folder / "rows.npz"


def require_run(user_folder: Path) -> None:
    """Requires that the config runs, here with little time for the benchmark."""
    config = user_folder / "config.yaml"
    config.write_text(config.read_text() + "compile: {benchmark_s: 0.1}\n")
    cli(
        "run", config, "--work", user_folder / "work", "--registry", f"sqlite:///{user_folder}/r.db"
    )


@pytest.mark.parametrize(
    ("model", "features", "items", "permute", "output"),
    [
        ("Einsum", 4, 12, (0, 2, 1), ()),
        ("Second", 3, 4, (2, 0, 1), (1, 0, 2)),
    ],
    ids=["items before features", "batch second"],
)
def test_items_and_features_in_either_order(
    user_folder: Path,
    model: str,
    features: int,
    items: int,
    permute: tuple[int, ...],
    output: tuple[int, ...],
) -> None:
    config = init_config(
        user_folder, f"model.py:{model}", write_columns(user_folder, features, items)
    )
    assert config.inputs[0].permute == permute
    assert config.outputs[0].permute == output
    if output:
        require_run(user_folder)


def test_rows_may_be_the_second_axis(user_folder: Path) -> None:
    config = init_config(user_folder, "model.py:Turned", write_columns(user_folder, 5))
    assert (config.inputs[0].permute, config.outputs[0].permute) == ((1, 0), (1, 0))


def test_a_bool_mask_may_come_before_its_items(user_folder: Path) -> None:
    exists = np.arange(30) < np.random.default_rng(2).integers(1, 30, (60, 1))
    config = init_config(
        user_folder,
        "model.py:DeepSets",
        write_columns(user_folder, 3, 30, mask=exists),
        "--input",
        "x=f*",
    )
    mask, x = config.inputs
    assert (mask.name, mask.columns, x.permute) == ("mask", ("mask",), (0, 2, 1))
    assert config.collections["events"].columns[0].dtype == "bool"


@pytest.mark.parametrize(
    ("shape", "permute"), [((3, 6, 5), ()), ((6, 5, 3), (0, 3, 1, 2))], ids=["first", "last"]
)
def test_images_may_have_their_channels_first_or_last(
    user_folder: Path, shape: tuple[int, ...], permute: tuple[int, ...]
) -> None:
    """A row of three axes is a vector in memory, and has its axes again as an input."""
    config = init_config(user_folder, "model.py:Image", write_columns(user_folder, 1, *shape))
    (block,), (column,) = config.inputs, config.collections["events"].columns
    assert (block.shape, block.permute, column.eigen) == (shape, permute, (90,))


def test_the_keys_of_a_dict_of_tensors_are_inputs_in_their_order(user_folder: Path) -> None:
    draw = np.random.default_rng(1)
    rows = {"jet": draw.normal(size=(60, 3)), "tracks": draw.normal(size=(60, 5, 4))}
    np.savez(
        user_folder / "rows.npz", allow_pickle=False, **{k: v.astype("f4") for k, v in rows.items()}
    )
    config = init_config(user_folder, "model.py:Dict", user_folder / "rows.npz")
    assert config.model.takes == "dict"
    assert [block.name for block in config.inputs] == ["tracks", "jet"]
    require_run(user_folder)


def test_two_orders_that_both_run_are_asked_about(user_folder: Path) -> None:
    """Each option that the message names works, and the config has that order."""
    file = write_columns(user_folder, 4, 6)
    line = refused(user_folder, "model.py:Flat", file)
    for order, permute in (("n, features, items", ()), ("n, items, features", (0, 2, 1))):
        option = f"x=({order}): f0,f1,f2,f3"
        assert f"--input '{option}'" in line
        config = init_config(user_folder, "model.py:Flat", file, "--input", option, "--force")
        assert config.inputs[0].permute == permute


def test_a_number_that_fits_two_orders_is_asked_about(user_folder: Path) -> None:
    file = write_columns(user_folder, 4, 6)
    line = refused(user_folder, "model.py:Flat", file, "--input", "x=(n, 24): f0,f1,f2,f3")
    for order, permute in (("n, features*items", ()), ("n, items*features", (0, 2, 1))):
        option = f"x=({order}): f0,f1,f2,f3"
        assert f"--input '{option}'" in line
        config = init_config(user_folder, "model.py:Flat", file, "--input", option, "--force")
        assert config.inputs[0].permute == permute


@pytest.mark.parametrize(
    "number",
    [np.int32(123_456_789), np.int64(2**40 + 1), np.float64(2**40 + 0.5), np.int8(-3)],
    ids=lambda number: number.dtype.name,
)
def test_a_dtype_that_changes_the_answers_is_asked_about(
    user_folder: Path, number: np.number[Any]
) -> None:
    """A float32 holds no such large number, and an int8 not the 1000 of the model."""
    values = {"x": np.repeat(number, 60) + np.arange(60).astype(number.dtype)}
    np.savez(user_folder / "rows.npz", allow_pickle=False, **values)
    line = refused(user_folder, "model.py:Remainder", user_folder / "rows.npz")
    for dtype in (number.dtype.name, "float32"):
        words = f"x=(n, features) {dtype}: x"
        assert words in line
        config = init_config(
            user_folder, "model.py:Remainder", user_folder / "rows.npz", "--input", words, "--force"
        )
        block, (column,) = config.inputs[0], config.collections["events"].columns
        assert (block.dtype or column.dtype) == dtype
        assert column.dtype == number.dtype.name


def test_a_dtype_that_changes_the_answers_of_later_rows_is_asked_about(user_folder: Path) -> None:
    """All numbers that `init` reads are small; a float32 holds them."""
    np.savez(user_folder / "rows.npz", allow_pickle=False, x=np.arange(60, dtype=np.int64))
    assert "as int64 and as float32" in refused(
        user_folder, "model.py:Remainder", user_folder / "rows.npz"
    )


def test_a_mask_of_numbers_that_may_be_bools_is_asked_about(user_folder: Path) -> None:
    """Attention adds a mask of numbers, and leaves out the items where a mask of bools is true."""
    mask = np.arange(6) >= np.random.default_rng(2).integers(1, 6, (60, 1))
    file = write_columns(user_folder, 4, 6, mask=mask.astype(np.uint8))
    line = refused(user_folder, "model.py:Attention", file, "--input", "x=f*")
    assert "(n, items) bool: mask" in line


def test_a_column_with_the_name_of_the_only_input_may_be_one_of_several(user_folder: Path) -> None:
    values = {name: np.linspace(0, 1, 60, dtype=np.float32) for name in "xyz"}
    np.savez(user_folder / "rows.npz", allow_pickle=False, **values)
    file = user_folder / "rows.npz"
    assert "out of x, y, z" in refused(user_folder, "model.py:Norm", file)
    config = init_config(user_folder, "model.py:Norm", file, "--input", "x=x,y,z")
    assert config.inputs[0].columns == ("x", "y", "z")


def test_a_lone_column_with_and_without_an_axis_of_features_is_asked_about(
    user_folder: Path,
) -> None:
    values = {"x": np.linspace(0, 1, 60, dtype=np.float32)}
    np.savez(user_folder / "rows.npz", allow_pickle=False, **values)
    line = refused(user_folder, "model.py:Total", user_folder / "rows.npz")
    assert "'x=(n, features): x'" in line and "'x=(n): x'" in line
    init_config(user_folder, "model.py:Total", user_folder / "rows.npz", "--input", "x=(n): x")


def test_columns_whose_names_become_equal_are_told_apart(user_folder: Path) -> None:
    values = {name: np.linspace(0, 1, 60, dtype=np.float32) for name in ("a b", "a-b", "a.b")}
    np.savez(user_folder / "rows.npz", allow_pickle=False, **values)
    config = init_config(
        user_folder, "model.py:Norm", user_folder / "rows.npz", "--input", "x=a b,a-b,a.b"
    )
    assert config.inputs[0].columns == ("a_b", "a_b_", "b")


def test_a_dtype_that_changes_nothing_is_not_asked_about(user_folder: Path) -> None:
    np.savez(user_folder / "rows.npz", allow_pickle=False, x=np.arange(60, dtype=np.int32))
    config = init_config(user_folder, "model.py:Above", user_folder / "rows.npz")
    assert config.inputs[0].dtype == "float32"


def test_the_message_shows_each_shape_and_its_line(user_folder: Path) -> None:
    line = refused(user_folder, "model.py:Wrong", write_columns(user_folder, 4, 6))
    for shape in ("(n, 4, 6)", "(n, 6, 4)", "(n, 24)"):
        assert shape in line
    assert "model.py" in line and "--input 'x=(n, items, features)" in line


def test_a_model_that_is_not_reproducible_is_refused(user_folder: Path) -> None:
    assert "two answers" in refused(user_folder, "model.py:Random", write_columns(user_folder, 4))


WORDS = """
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return x.sort(0).values


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)

    def forward(self, x):
        return self.table(x).sum(1)
"""


def test_fractions_stay_floats(user_folder: Path) -> None:
    (user_folder / "words.py").write_text(WORDS)
    assert (
        init_config(user_folder, "words.py:Net", write_columns(user_folder, 3)).inputs[0].dtype
        is None
    )


def test_whole_numbers_in_columns_of_floats_may_be_indices(user_folder: Path) -> None:
    (user_folder / "words.py").write_text(WORDS)
    whole = {f"w{i}": np.arange(60, dtype="f4") % 9 for i in range(2)}
    np.savez(user_folder / "words.npz", allow_pickle=False, **whole)
    config = init_config(user_folder, "words.py:Words", user_folder / "words.npz")
    assert config.inputs[0].dtype == "int64"


def test_fractions_are_no_indices(user_folder: Path) -> None:
    (user_folder / "words.py").write_text(WORDS)
    assert "forward does not run" in refused(
        user_folder, "words.py:Words", write_columns(user_folder, 3)
    )


@pytest.mark.filterwarnings("ignore")  # of a trace
def test_a_trace_that_reads_other_memory_is_not_chosen(user_folder: Path) -> None:
    """A traced LSTM checks no sizes: with features first it gives any number."""
    net = load_callable(f"{user_folder}/model.py:Lstm")().eval()
    torch.jit.trace(net, torch.rand(3, 4, 6)).save(user_folder / "net.ts")
    config = init_config(user_folder, "net.ts", write_columns(user_folder, 6, 4))
    assert config.inputs[0].permute == (0, 2, 1)


@pytest.mark.long
def test_a_busy_host_does_not_change_the_config(user_folder: Path) -> None:
    """Although trials take longer. All rows of the file are in the reference."""
    file = write_columns(user_folder, 6, 15)
    init_config(user_folder, "model.py:Lstm", file)
    before = (user_folder / "config.yaml").read_bytes()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        init_config(user_folder, "model.py:Lstm", file, "--force")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert (user_folder / "config.yaml").read_bytes() == before
    with np.load(user_folder / "reference.npz") as reference:
        assert {len(reference[name]) for name in reference.files} == {60}


def test_rows_that_see_each_other_stay_bounded(user_folder: Path) -> None:
    (user_folder / "mixed.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.softmax(x, 0)\n"
    )
    config = init_config(user_folder, "mixed.py:Net", write_columns(user_folder, 3))
    assert not config.rows["n"].unbounded and config.rows["n"].max == 60
