"""Altered files of every kind that users pass: each is read, or refused in one line of ours."""

from __future__ import annotations

import json
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.exported import quiet_torch
from engines.exported.archive import load_program
from pipeline.applying.sources import open_source
from pipeline.config import load_config
from pipeline.config.site_file import load_site
from registry.housekeeping.export_import import open_as_folder
from stages.model import ModelSource, build_model, read_state
from stages.reference import read_rows, read_set
from stages.reference.answers import Reference
from tests.fuzz.hostile import altered_json, damaged, only_ours, put, texts
from tests.models.archives import MODEL, doctored, record, save_program
from tests.models.building import mlp_signature

ROOT = Path(__file__).resolve().parents[2]
CONFIG = (ROOT / "tests/pipeline/config/full.yaml").read_text()
SITE: dict[str, Any] = {
    "site": "T2", "models": {"jets": {"servers": ["gpu"], "fall_back": True}},
    "servers": [{"name": "gpu", "url": "triton://host:8001", "metrics": "http://h:8002/m",
                 "tls": {"root_certificates": "ca.pem"}, "message_bytes": 100_000}],
    "local": {"devices": ["cuda:0"], "preference": 1},
    "policy": {"deadline_s": 10.0, "attempt_s": 2.0},
}  # fmt: skip


# -- YAML -----------------------------------------------------------------------------------------

AS_DATA = yaml.safe_load(CONFIG)


@given(content=st.one_of(altered_json(AS_DATA), damaged(CONFIG.encode())))
def test_any_config_is_read_or_refused(place: Path, content: bytes) -> None:
    """JSON content is valid YAML."""
    with only_ours():
        load_config(put(place / "config.yaml", content))


@given(content=altered_json(SITE))
def test_any_site_is_read_or_refused(place: Path, content: bytes) -> None:
    with only_ours():
        load_site(put(place / "site.yaml", content))


# -- archives --------------------------------------------------------------------------------------

PRINTABLE = texts.map(lambda text: "".join(c for c in text if c.isprintable()))


def member(name: str, size: int, kind: bytes, link: str, pax: dict[str, str], stored: int) -> bytes:
    """A member whose header says what it likes, with `stored` bytes of content."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname, info.pax_headers = size, kind, link, pax
    header = info.tobuf(tarfile.PAX_FORMAT, errors="replace")
    return header + b"x" * stored + b"\0" * (-stored % 512)


KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE,
     tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME,
     tarfile.XHDTYPE, tarfile.CONTTYPE, b"?"]
)  # fmt: skip
PAX = st.dictionaries(
    st.sampled_from(
        ["size", "path", "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.size",
         "GNU.sparse.realsize", "GNU.sparse.map", "GNU.sparse.name"]
    ),
    st.one_of(st.sampled_from(["1", "0", "9" * 30, "0,1", "export.json", "../x"]), PRINTABLE),
    max_size=3,
)  # fmt: skip
SIZES = st.one_of(st.integers(0, 3000), st.sampled_from([10**6, 8 << 30, 2**60]))
NAMES = st.one_of(
    st.sampled_from(["export.json", "versions/1/a", "versions", "../x", "/x", "a/"]),
    texts.map(lambda text: text.replace("\0", "")),
)
MEMBER = st.builds(member, NAMES, SIZES, KINDS, NAMES, PAX, st.integers(0, 3000))
ARCHIVES = (
    st.lists(MEMBER, max_size=4)
    .map(b"".join)
    .flatmap(lambda content: st.one_of(st.just(content + bytes(1024)), damaged(content)))
)


@given(content=ARCHIVES)
def test_an_archive_of_an_export_writes_no_more_than_its_own_size(
    place: Path, content: bytes
) -> None:
    folder = place / "in"
    with only_ours(), open_as_folder(put(folder / "export.tar", content), folder) as unpacked:
        written = [path for path in unpacked.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in written) <= len(content)
    assert [path.name for path in folder.iterdir()] == ["export.tar"]


@pytest.fixture(scope="module")
def program(place: Path) -> Path:
    return save_program(place / "program.pt2")


FEWER = settings(max_examples=settings().max_examples * 2 // 5)
"""For tests in which torch is slow."""
RECORDS = (
    MODEL,
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)


@FEWER
@given(data=st.data())
def test_a_program_with_an_altered_record_is_read_or_refused(
    place: Path, program: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(RECORDS))
    content = data.draw(altered_json(record(program, name)))
    with only_ours():
        load_program(doctored(program, place / "altered.pt2", {name: content}))


@FEWER
@given(data=st.data())
def test_a_damaged_program_is_read_or_refused(
    place: Path, program: Path, data: st.DataObject
) -> None:
    with only_ours():
        load_program(put(place / "altered.pt2", data.draw(damaged(program.read_bytes()))))


SHAPES = st.recursive(
    st.sampled_from(
        ["Integer(2)", "Integer(-1)", "Integer(10000000)", "Symbol('s77', integer=True)", "s77",
         "Rational(1, 2)", "Float('0.5', precision=53)", "oo", "true", "Integer(0)"]
    ),
    lambda parts: st.builds(
        lambda name, args: f"{name}({', '.join(args)})",
        st.sampled_from(
            ["Add", "Mul", "Pow", "Max", "Min", "Mod", "FloorDiv", "PythonMod", "LShift", "Abs",
             "PowByNatural", "FloatPow", "ModularIndexing", "TruncToInt", "Eq", "floor"]
        ),
        st.lists(parts, min_size=1, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


@FEWER
@given(text=st.one_of(SHAPES, texts))
def test_any_shape_in_a_program_is_read_or_refused(place: Path, program: Path, text: str) -> None:
    """Reading also ends: sympy evaluates any expression that it gets."""
    model = record(program, MODEL)
    sizes = model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = text
    content = json.dumps(model).encode()
    with only_ours():
        load_program(doctored(program, place / "shape.pt2", {MODEL: content}))


# -- reference inputs ------------------------------------------------------------------------------

SIGNATURE = mlp_signature(4)


def reference() -> Reference:
    """Four rows of inputs, and the answers to three of them."""
    columns = {c.name: torch.zeros(4) for c in SIGNATURE.layouts["jets"].columns}
    return Reference({"jets": columns}, ({"n": 3},), ({"probabilities": torch.zeros(3, 3)},))


@st.composite
def altered_references(draw: st.DrawFn, content: bytes) -> bytes:
    """A file of safetensors in which the header, or the cases in it, are altered.

    It begins with the length of the header in eight bytes; the header is JSON.
    """
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    # safetensors writes these keys in another order each time.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = draw(altered_json(header))
    if draw(st.booleans()):
        cases = draw(altered_json([{"n": 3}]))
        header["__metadata__"]["cases"] = cases.decode(errors="replace")
        text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


@given(data=st.data())
def test_any_reference_is_read_or_refused(place: Path, data: st.DataObject) -> None:
    path = place / "reference.safetensors"
    reference().save(path)
    content = path.read_bytes()
    put(path, data.draw(st.one_of(altered_references(content), damaged(content))))
    with only_ours():
        Reference.load(path, SIGNATURE)
    with only_ours():
        read_set(SIGNATURE, path)


def test_the_reference_that_is_altered_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "sound.safetensors"
    reference().save(path)
    assert Reference.load(path, SIGNATURE).cases == ({"n": 3},)
    assert read_set(SIGNATURE, path)["jets"]["a"].shape == (4,)


# -- one flipped bit -------------------------------------------------------------------------------

NUMBERS = np.random.default_rng(1).normal(size=(8, 3000)).astype("f4")
"""Noise: deflate stores it as it is, and has nothing of its own by which it sees a flipped bit."""


class Scaled(torch.nn.Module):
    """Multiplies by weights."""

    def __init__(self, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        values = torch.zeros(3000) if scale is None else scale
        self.scale = torch.nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def write_weights(path: Path) -> None:
    """Writes weights of Scaled."""
    torch.save({"scale": torch.from_numpy(NUMBERS[0])}, path)


def write_program(path: Path) -> None:
    """Writes Scaled as an exported program."""
    model = Scaled(torch.from_numpy(NUMBERS[0]))
    torch.export.save(torch.export.export(model, (torch.zeros(2, 3000),)), path)


def write_script(path: Path) -> None:
    """Writes Scaled as TorchScript."""
    with quiet_torch():
        torch.jit.save(torch.jit.script(Scaled(torch.from_numpy(NUMBERS[0]))), path)


# What each kind of file holds, as a list of arrays.


def state(model: torch.nn.Module) -> list[Any]:
    """The weights of a model."""
    return [value.numpy() for _, value in sorted(model.state_dict().items())]


def inputs_of(path: Path) -> list[Any]:
    """The columns of a file of reference inputs."""
    columns = read_rows(SIGNATURE, path)["jets"]
    return [columns[name].numpy() for name in sorted(columns)]


def columns_of(path: Path) -> list[Any]:
    """The columns of a file that `pipeline apply` scores."""
    with open_source(path) as source:
        names = sorted(source.columns)
        count = source.edges(names)[-1]
        batches = list(source.batches(names, 0, count, 1000))
        return [np.concatenate([np.asarray(batch[name]) for batch in batches]) for name in names]


# How a file is written, and what is read from it.
READ: dict[str, tuple[Callable[[Path], Any], Callable[[Path], list[Any]]]] = {
    "weights.pt": (write_weights, lambda path: [read_state(path)["scale"].numpy()]),
    "program.pt2": (write_program, lambda path: state(build_model(ModelSource(program=path)))),
    "model.ts": (write_script, lambda path: state(build_model(ModelSource(torchscript=path)))),
    "stored.npz": (lambda path: np.savez(path, **INPUTS), inputs_of),
    "deflated.npz": (lambda path: np.savez_compressed(path, **INPUTS), inputs_of),
    "rows.npz": (lambda path: np.savez(path, **INPUTS), columns_of),
    "small.npz": (lambda path: np.savez_compressed(path, **INPUTS), columns_of),
    "rows.parquet": (
        lambda path: pq.write_table(pa.table(INPUTS), path, write_page_checksum=True),
        columns_of,
    ),
}
INPUTS: Any = {
    f"jets/{c.name}": values
    for c, values in zip(SIGNATURE.layouts["jets"].columns, NUMBERS, strict=False)
}


@pytest.mark.parametrize("name", READ)
def test_a_flipped_bit_is_an_error_or_changes_nothing_that_is_read(
    tmp_path: Path, name: str
) -> None:
    """One bit in each of 60 bytes, one after the other."""
    write, read = READ[name]
    path = tmp_path / name
    write(path)
    content, wanted = path.read_bytes(), read(path)
    for place in random.Random(name).sample(range(len(content)), 60):
        flipped = bytearray(content)
        flipped[place] ^= 4
        put(path, bytes(flipped))
        with only_ours():
            arrays = read(path)
            assert len(arrays) == len(wanted)
            for array, right in zip(arrays, wanted, strict=True):
                np.testing.assert_array_equal(array, right)
