"""The C++ reader of records takes what Python takes.

Python proves the fields of a record. C++ refuses what is no JSON and what it cannot use; whatever a
record says, it answers. Both refuse the same folders that were altered after they were sealed.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, currently_in_test_context, given, note
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pipeline
from registry.bundle import open_folder
from registry.bundle.annex import ANNEX_SCHEMA, AnnexRecord
from registry.bundle.bundle import Bundle
from registry.bundle.digests import seal
from registry.bundle.manifest import Manifest, record_from_json
from registry.bundle.pulled import PulledNote, write_note
from soa import Block, RowRange, Signature
from soa.errors import SoaPipelineError
from soa.records import as_record, parse_json, read_record
from tests.fuzz.hostile import altered, altered_json, damaged
from tests.models import bundles, cplusplus, detector
from tests.models.building import mlp_signature
from tests.models.cplusplus import ROOT, TORCH, execute
from tests.models.project import Built, resealed
from tests.models.shared import made_once
from tests.soa.strategies import layouts

HERE = Path(__file__).parent
V3 = bundles.V3
DIGEST = "ab" * 32
AOTI = ("targets", V3, "candidates", "aoti")


def full_manifest() -> dict[str, Any]:
    """A manifest with every possible field."""
    data = bundles.manifest_data()
    data |= {
        "signature": detector.signature().to_dict(),
        "session": {"threads": 2, "instances": None},
        "classifiers": ["probabilities"],
        "labelled": {
            "file": "labelled/data.npz", "source": "rows.npz", "sha256": DIGEST, "rows": 5,
            "code": {"auc": "labelled/auc.py"},
        },
    }  # fmt: skip
    record = data["targets"][V3]
    record |= {
        "below": [{"rows": 10, "engine": "aoti"}, {"rows": 20, "engine": "aoti"}],
        "raced_with": ["cpu/x86-64-v4"],
        "metrics": {"auc": 0.9},
    }
    record["candidates"]["aoti"] |= {
        "reason": None, "tile": 16, "windows": True, "bits": DIGEST, "options": {"x": [1]},
        "facts": {"y": None},
    }  # fmt: skip
    data["capture"] |= {"torchscript_note": None, "precision": "fp32"}
    data["provenance"] |= {"seconds": {"capture": 1.5}}
    return data


MANIFEST = full_manifest()
ANNEX = {
    "schema_version": 1, "name": "jets", "base": DIGEST, "target": V3, "notes": ["n"],
    "record": MANIFEST["targets"][V3], "created": "2026-01-02", "by": "ada", "python": "3",
    "tools": {"torch": "2"}, "host": {"cpu": "x"},
}  # fmt: skip
NOTE = {"ref": "jets/1", "digest": DIGEST, "by": "ada", "at": "x", "annexes": {V3: DIGEST}}
SOUND = {"manifest": MANIFEST, "annex": ANNEX, "note": NOTE}


def in_python(kind: str, content: bytes) -> None:
    if kind == "manifest":
        Signature.from_dict(Manifest.from_json(content).signature)
    elif kind == "annex":
        record_from_json(AnnexRecord, content, "annex.json", ANNEX_SCHEMA)
    elif kind == "note":
        read_record(PulledNote, content)
    else:
        parse_json(content)


class Readers:
    """Both readers; C++ is the program of records.cpp, which reads one thing after another. Where
    Python takes a record, C++ takes it."""

    def __init__(self, program: Path, file: Path) -> None:
        pipe = subprocess.PIPE
        env = {**os.environ, "LD_LIBRARY_PATH": str(TORCH)}
        self._process = subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True, env=env)
        self._file = file

    def __call__(self, kind: str, content: bytes) -> bool:
        """Whether Python takes a record."""
        self._file.write_bytes(content)
        if currently_in_test_context():
            note(repr(content[:5000]))
        return self._both(kind, self._file, lambda: in_python(kind, content))

    def folder(self, folder: Path) -> bool:
        return self._both("folder", folder, lambda: open_folder(folder), alike=True)

    def load(self, folder: Path) -> bool:
        """Whether Python runs it in production."""
        return self._both("load", folder, lambda: pipeline.load(folder, engine_name="aoti"))

    def _both(self, kind: str, path: Path, ours: Callable[[], object], alike: bool = False) -> bool:
        try:
            ours()
            why = ""
        except (SoaPipelineError, ValueError) as error:
            why = f"{error} [{getattr(error, 'code', '')}]"
        theirs = self.cpp(kind, path)
        refused = theirs.startswith("no: ")
        assert refused or theirs.startswith("ok"), (theirs, path)
        assert why or not refused, (theirs, path)
        if alike or kind == "json":
            assert refused == bool(why), (theirs, why, path)
        if alike and why:
            assert theirs.rpartition(" [")[2] == why.rpartition(" [")[2], (theirs, why)
        return not why

    def cpp(self, kind: str, path: Path) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{kind} {path}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    build = cplusplus.installed(tmp_path_factory).parent / "build"

    def make(folder: Path) -> None:
        native = ROOT / "engines" / "native"
        flags = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror")
        include = [f"-I{native / part}" for part in (".", "include", "library")]
        parts = sorted((build / "CMakeFiles" / "soa_model.dir").rglob("*.o"))
        links = (*parts, "-lcrypto", "-ldl", "-pthread")
        execute("g++", *flags, *include, HERE / "records.cpp", *links, "-o", folder / "records")

    folder = made_once(tmp_path_factory, "cplusplus-records", make)
    made = Readers(folder / "records", tmp_path_factory.mktemp("records") / "record")
    yield made
    made.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every example overwrites."""
    return tmp_path_factory.mktemp("place")


# -- a table of cases ------------------------------------------------------------------------------

GONE = object()
SIGNATURE = ("signature",)
HITS = ("signature", "collections", "hits")
FIRST = ("signature", "inputs", 0)
TIMES = {"median_us": 1, "p05_us": 0, "p95_us": 2}
TAKEN: list[tuple[str, tuple[Any, ...], Any]] = [
    ("note", ("annexes",), GONE),
    ("note", ("annexes",), {}),
    ("note", ("ref",), ""),
    ("manifest", ("schema_version",), GONE),
    ("manifest", ("session",), GONE),
    ("manifest", ("session", "threads"), GONE),
    ("manifest", ("session", "instances"), 4096),
    ("manifest", ("description",), "\x1b[31m"),
    ("manifest", ("torchscript",), None),
    ("manifest", ("reference",), GONE),
    ("manifest", ("labelled",), None),
    ("manifest", ("targets",), {}),
    ("manifest", ("targets", "a/b"), {"status": "unverified"}),
    ("manifest", ("targets", V3, "candidates", "exported", "status"), "invalid"),
    ("manifest", (*AOTI, "windows"), GONE),
    ("manifest", (*AOTI, "compile_seconds"), "NaN"),
    ("manifest", (*AOTI, "compile_seconds"), 3),
    ("manifest", (*AOTI, "worst", "probabilities", "max_rel"), "Infinity"),
    ("manifest", (*AOTI, "worst", "probabilities", "max_abs"), float("nan")),
    ("manifest", (*AOTI, "benchmark", "nodes=5,edges=20"), TIMES),
    ("manifest", (*AOTI, "options"), {"any": [None, {"thing": -0.0}]}),
    ("manifest", ("tolerances", "probabilities", "max_outside"), GONE),
    ("manifest", ("provenance", "config", "é\u2028"), 10**400),
    ("manifest", (*HITS, "alignment"), 64),
    ("manifest", (*HITS, "rows"), "m"),
    ("annex", ("notes",), GONE),
    ("annex", ("record", "raced_with"), []),
]  # fmt: skip
REFUSED: list[tuple[str, tuple[Any, ...], Any]] = [
    ("note", (), []),
    ("note", ("by",), GONE),
    ("note", ("at",), None),
    ("note", ("digest",), 5),
    ("note", ("annexes",), None),
    ("note", ("annexes", V3), 1),
    ("note", ("signed",), True),
    ("annex", ("base",), "AB" * 32),
    ("annex", ("record", "status"), "unverified"),
    ("annex", ("record", "chosen"), None),
    ("annex", ("signature",), {}),
    ("manifest", (), "manifest"),
    ("manifest", ("schema_version",), 2),
    ("manifest", ("schema_version",), "1"),
    ("manifest", ("schema_version",), 1.0),
    ("manifest", ("schema_version",), True),
    ("manifest", ("schema_version",), 0),
    ("manifest", ("name",), GONE),
    ("manifest", ("name",), "../jets"),
    ("manifest", ("name",), "j" * 201),
    ("manifest", ("name",), "jets\0"),
    ("manifest", ("program",), "/program.pt2"),
    ("manifest", ("program",), "a//b"),
    ("manifest", ("program",), "a\\b"),
    ("manifest", ("reference",), "../reference"),
    ("manifest", ("reference",), "a\u202eb"),
    ("manifest", ("torchscript",), ""),
    ("manifest", ("extra",), 1),
    ("manifest", ("capture",), {"program": "torch.jit"}),
    ("manifest", ("capture", "precision"), "fp8"),
    ("manifest", ("session", "threads"), 0),
    ("manifest", ("session", "threads"), 4097),
    ("manifest", ("session", "threads"), "2"),
    ("manifest", ("session", "threads"), 2.5),
    ("manifest", ("classifiers",), "probabilities"),
    ("manifest", ("classifiers",), [1]),
    ("manifest", ("targets", "cpu"), {"status": "unverified"}),
    ("manifest", ("targets", "CPU/x"), {"status": "unverified"}),
    ("manifest", ("targets", V3, "status"), "fine"),
    ("manifest", ("targets", V3, "chosen"), None),
    ("manifest", ("targets", V3, "chosen"), "none"),
    ("manifest", ("targets", V3, "below"), [{"rows": 9, "engine": "none"}]),
    ("manifest", ("targets", V3, "below"), [{"rows": 0, "engine": "aoti"}]),
    ("manifest", ("targets", V3, "below"), [{"rows": 9, "engine": "aoti"}] * 2),
    ("manifest", ("targets", V3, "chosen"), "exported"),
    ("manifest", ("targets", V3, "candidates", "a/b"), {"status": "failed"}),
    ("manifest", ("targets", V3, "metrics", "auc"), "0.5"),
    ("manifest", (*AOTI, "status"), "unverified"),
    ("manifest", (*AOTI, "status"), "failed"),
    ("manifest", (*AOTI, "files"), []),
    ("manifest", (*AOTI, "tile"), 0),
    ("manifest", (*AOTI, "windows"), 1),
    ("manifest", (*AOTI, "bits"), "ab"),
    ("manifest", (*AOTI, "compile_seconds"), "1.5"),
    ("manifest", (*AOTI, "benchmark", "n"), TIMES),
    ("manifest", (*AOTI, "benchmark", "10", "median_us"), -1),
    ("manifest", (*AOTI, "benchmark", "10", "median_us"), float("inf")),
    ("manifest", (*AOTI, "benchmark", "10", "median_us"), float("nan")),
    ("manifest", ("tolerances", "probabilities", "atol"), -1e-5),
    ("manifest", ("tolerances", "probabilities", "max_outside"), 1.5),
    ("manifest", ("tolerances", "probabilities", "ulps"), 1),
    ("manifest", ("provenance", "git_dirty"), "yes"),
    ("manifest", ("provenance", "tools", "torch"), 2),
    # The signature
    ("manifest", SIGNATURE, []),
    ("manifest", (*SIGNATURE, "version"), 1),
    ("manifest", (*SIGNATURE, "jagged"), {}),
    ("manifest", (*SIGNATURE, "jagged"), {"hits": 5}),
    ("manifest", (*SIGNATURE, "inputs"), []),
    ("manifest", (*SIGNATURE, "outputs"), []),
    ("manifest", (*SIGNATURE, "rows", "n"), GONE),
    ("manifest", (*SIGNATURE, "rows", "n", "min"), -1),
    ("manifest", (*SIGNATURE, "rows", "n", "max"), 1),
    ("manifest", (*SIGNATURE, "rows", "n", "max"), 2**41),
    ("manifest", (*SIGNATURE, "rows", "n", "max"), 100.0),
    ("manifest", (*SIGNATURE, "rows", "n", "typical"), [10**6]),
    ("manifest", (*SIGNATURE, "rows", "n", "unbounded"), False),
    ("manifest", (*SIGNATURE, "rows", "n", "unbounded"), True),
    ("manifest", (*HITS, "alignment"), 48),
    ("manifest", (*HITS, "alignment"), 4),
    ("manifest", (*HITS, "alignment"), 2**31),
    ("manifest", (*HITS, "storage"), "columns"),
    ("manifest", (*HITS, "storage"), "rows"),
    ("manifest", (*HITS, "rows"), "zzz"),
    ("manifest", (*HITS, "columns"), []),
    ("manifest", (*HITS, "columns", 0, "name"), "b"),
    ("manifest", (*HITS, "columns", 10, "name"), "q r"),
    ("manifest", (*HITS, "columns", 3, "dtype"), "int16"),
    ("manifest", (*HITS, "columns", 3, "dtype"), "float31"),
    ("manifest", (*HITS, "columns", 3, "kind"), "row"),
    ("manifest", (*HITS, "columns", 3, "shape"), [1]),
    ("manifest", (*HITS, "columns", 5, "shape"), [0]),
    ("manifest", (*HITS, "columns", 5, "shape"), [4]),
    ("manifest", (*HITS, "columns", 5, "shape"), [65536, 65536]),
    ("manifest", (*FIRST, "name"), "permuted"),
    ("manifest", (*FIRST, "collection"), "zzz"),
    ("manifest", (*FIRST, "columns"), ["a", "b"]),
    ("manifest", (*FIRST, "columns"), ["a", "b", "zzz"]),
    ("manifest", (*FIRST, "columns"), ["a", "a", "b"]),
    ("manifest", (*FIRST, "columns"), ["a", "b", "run"]),
    ("manifest", (*FIRST, "dtype"), "uint64"),
    ("manifest", (*FIRST, "shape"), [2, 2]),
    ("manifest", (*FIRST, "shape"), [-1, -3]),
    ("manifest", (*FIRST, "broadcast"), True),
    ("manifest", (*FIRST, "broadcast"), False),
    ("manifest", (*FIRST, "plan"), GONE),
    ("manifest", (*FIRST, "plan", "kind"), "columns"),
    ("manifest", (*FIRST, "plan", "order"), [0, 2, 1]),
    ("manifest", (*FIRST, "plan", "order"), [0, True, 2]),
    ("manifest", (*FIRST, "plan", "components", 0, 1), 1),
    ("manifest", (*FIRST, "plan", "dtypes"), ["float64"]),
    ("manifest", (*FIRST, "plan", "feature_shape"), [4]),
    ("manifest", ("signature", "outputs", 0, "columns"), ["q", "p", "q"]),
]  # fmt: skip


def edited(kind: str, path: tuple[Any, ...], value: Any) -> bytes:
    if not path:
        return json.dumps(value).encode()
    data = copy.deepcopy(SOUND[kind])
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data).encode()


def named(row: tuple[str, tuple[Any, ...], Any]) -> str:
    kind, path, value = row
    return f"{kind} {'.'.join(map(str, path))} {'gone' if value is GONE else ascii(value)[:40]}"


@pytest.mark.parametrize("row", TAKEN, ids=named)
def test_what_both_take(readers: Readers, row: tuple[str, tuple[Any, ...], Any]) -> None:
    assert readers(row[0], edited(*row))


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_what_python_refuses(readers: Readers, row: tuple[str, tuple[Any, ...], Any]) -> None:
    assert not readers(row[0], edited(*row))


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle with an annex."""
    manifest = as_record(Manifest, bundles.provable(bundles.manifest_data()))
    bundles.write_bundle(tmp_path / "bundle", manifest)
    bundle = Bundle.open(tmp_path / "bundle")
    annex = tmp_path / "bundle" / "annexes" / bundles.FAR
    bundles.write_annex(annex, bundle, bundles.FAR)
    return bundle.path


def sums(change: Callable[[str], str]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        shutil.rmtree(folder / "annexes")  # they belong to the unchanged bundle
        file = folder / "SHA256SUMS"
        file.write_text(change(file.read_text()))

    return edit


def linked(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).symlink_to(folder / "manifest.json")


def written(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("x")


def with_record(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Changes a record, and seals its folder again."""

    def edit(folder: Path) -> None:
        if name == "manifest.json":
            shutil.rmtree(folder / "annexes")
        file = folder / name
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))
        seal(file.parent)

    return edit


FAR = f"annexes/{bundles.FAR}"
FOLDERS: dict[str, tuple[bool, Callable[[Path], object]]] = {
    "as it is": (True, lambda _: None),
    "sums of sha256sum --binary": (True, sums(lambda text: text.replace("  ", " *"))),
    "a note of MLflow": (True, written("registered_model_meta")),
    "an empty folder": (True, lambda folder: (folder / "empty").mkdir()),
    "sums of another form": (False, sums(lambda text: text.replace("  ", " x"))),
    "sums of Windows": (False, sums(lambda text: text.replace("\n", "\r\n"))),
    "sums without an end": (False, sums(lambda text: text[:-1])),
    "no sums": (False, sums(lambda _: "")),
    "a file listed twice": (False, sums(lambda text: text + text.splitlines()[0] + "\n")),
    "sums without the manifest": (False, sums(lambda t: t.replace("manifest.json", "m.json"))),
    "sums that lead out": (False, sums(lambda text: f"{text}{'0' * 64}  ../x\n")),
    "a file that nothing lists": (False, written("x")),
    "a link to a file": (False, linked("x")),
    "a link in place of MLflow's note": (False, linked("registered_model_meta")),
    "a link in an annex": (False, linked(f"{FAR}/x")),
    "a link beside the annexes": (False, linked("annexes/x")),
    "a file beside the annexes": (False, written("annexes/x")),
    "an annex that was altered": (False, written(f"{FAR}/aoti/model.so")),
    "an annex with another file": (False, written(f"{FAR}/x")),
    "an annex of another target": (
        False, lambda folder: (folder / FAR).rename((folder / FAR).with_name("gfx906"))
    ),
    "an annex of another bundle": (
        False, with_record(f"{FAR}/annex.json", lambda data: data.update(base=DIGEST))
    ),
    "an annex of another model": (
        False, with_record(f"{FAR}/annex.json", lambda data: data.update(name="hits"))
    ),
    "an annex that names a file of the bundle": (
        False,
        with_record(
            f"{FAR}/annex.json",
            lambda data: data["record"]["candidates"]["aoti"].update(files=["model.ts", "x"]),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(readers: Readers, folder: Path, name: str) -> None:
    taken, edit = FOLDERS[name]
    edit(folder)
    assert readers.folder(folder) == taken


@given(st.data())
def test_any_list_of_digests(readers: Readers, place: Path, data: st.DataObject) -> None:
    good = f"{DIGEST}  manifest.json\n{DIGEST}  program.pt2\n".encode()
    (place / "SHA256SUMS").write_bytes(data.draw(damaged(good)))
    assert not readers.folder(place)


# -- what production runs --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def promoted(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as `pipeline pull` leaves it."""
    folder = shutil.copytree(jets.bundle.path, tmp_path_factory.mktemp("promoted") / "bundle")
    write_note(folder, PulledNote("jets/1", jets.bundle.digest, "ada", "2026-01-02"))
    return folder


def test_what_was_promoted_runs_in_both(readers: Readers, promoted: Path) -> None:
    assert readers.load(promoted)


def test_test_mode_of_lists(readers: Readers, lists: Built, tmp_path: Path) -> None:
    assert readers.cpp("test", lists.bundle.path) == "ok"

    def edit(folder: Path, _: dict[str, Any]) -> None:
        stored = load_file(folder / "reference.safetensors")
        with safe_open(folder / "reference.safetensors", "pt") as file:
            about = file.metadata()
        stored["input/jets_offsets/end"][1] = 2  # the end of an empty row
        save_file(stored, folder / "reference.safetensors", about)

    other = resealed(lists.bundle, tmp_path / "other", edit)
    assert "'probabilities'" in readers.cpp("test", other.path)


@pytest.mark.parametrize("note", ["{}", '{"digest": "x"}', '{"digest": 5, "ref": "jets/1"}', "["])
def test_a_note_of_another_form_stops_production_alone(
    readers: Readers, jets: Built, tmp_path: Path, note: str
) -> None:
    folder = Path(shutil.copytree(jets.bundle.path, tmp_path / "bundle"))
    (folder / "PROMOTED.json").write_text(note)
    assert not readers.load(folder)
    assert readers.cpp("load", folder).startswith("no: ")
    assert readers.cpp("test", folder) == "ok"


@given(st.data())
def test_any_note_of_a_promotion(readers: Readers, promoted: Path, data: st.DataObject) -> None:
    file = promoted / "PROMOTED.json"
    sound = file.read_bytes()
    try:
        file.write_bytes(known(data.draw(altered_json(json.loads(sound)))))
        readers.load(promoted)
    finally:
        file.write_bytes(sound)


@given(st.data())
def test_any_manifest_sealed_again(readers: Readers, promoted: Path, data: st.DataObject) -> None:
    kept = {name: (promoted / name).read_bytes() for name in RECORDS}
    try:
        manifest = data.draw(altered_json(json.loads(kept["manifest.json"])))
        (promoted / "manifest.json").write_bytes(known(manifest))
        digest = seal(promoted)
        write_note(promoted, PulledNote("jets/1", digest, "ada", "2026-01-02"))
        readers.load(promoted)
    finally:
        for name, content in kept.items():
            (promoted / name).write_bytes(content)


RECORDS = ("manifest.json", "SHA256SUMS", "PROMOTED.json")


# -- any record ------------------------------------------------------------------------------------


def known(content: bytes) -> bytes:
    """Skips text with unassigned code points: Python refuses all of them, C++ only some."""
    try:
        said = json.dumps(json.loads(content), ensure_ascii=False)
    except ValueError:
        said = content.decode(errors="replace")
    assume(not any(unicodedata.category(c) == "Cn" for c in said))
    return content


TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)
JSON = st.builds(
    lambda value, ascii_, indent: json.dumps(value, ensure_ascii=ascii_, indent=indent).encode(),
    VALUES,
    st.booleans(),
    st.sampled_from([None, 1]),
)


def shown(value: Any) -> str:
    """A value in the format of records.cpp."""
    if value is None:
        return "-,"
    if isinstance(value, bool):
        return f"{str(value).lower()},"
    if isinstance(value, int | float):
        # Python does not distinguish -nan from nan
        return f"{int(isinstance(value, int))}{value:.17g},".replace("-nan", "nan")
    if isinstance(value, str):
        return f"{value.encode().hex()},"
    if isinstance(value, list):
        return f"[{''.join(map(shown, value))}]"
    return f"[{''.join(f'{k.encode().hex()}={shown(each)}' for k, each in value.items())}]"


@given(st.one_of(JSON, JSON.flatmap(damaged), st.binary()))
def test_any_json(readers: Readers, place: Path, content: bytes) -> None:
    if readers("json", content):
        file = place / "value.json"
        file.write_bytes(content)
        found = readers.cpp("json", file).replace("-nan", "nan")
        assert found == f"ok {shown(parse_json(content))}"


@pytest.mark.parametrize("depth", [199, 200, 201, 202])
def test_how_deep_json_may_go(readers: Readers, depth: int) -> None:
    for before, inside, after in ((b"[", b"", b"]"), (b"[", b"1", b"]"), (b'{"":', b"1", b"}")):
        most = 200 if inside else 201
        assert readers("json", before * depth + inside + after * depth) == (depth <= most)


@pytest.mark.parametrize("kind", SOUND)
@given(data=st.data())
def test_any_record(readers: Readers, kind: str, data: st.DataObject) -> None:
    readers(kind, known(data.draw(altered_json(SOUND[kind]))))


@pytest.mark.parametrize("made", [detector.signature(), mlp_signature(5000)])
@given(data=st.data())
def test_any_stored_signature(readers: Readers, made: Signature, data: st.DataObject) -> None:
    stored = data.draw(altered(made.to_dict()))
    readers("manifest", known(json.dumps(MANIFEST | {"signature": stored}).encode()))


@given(st.data(), layouts(storages=("buffer", "columns")), layouts(("float32", "float64")))
def test_any_signature(readers: Readers, data: st.DataObject, given: Any, found: Any) -> None:
    """C++ takes every signature that Python makes."""
    columns = data.draw(st.permutations([c.name for c in given.columns]))
    part = columns[: data.draw(st.integers(1, len(columns)))]
    ranges = {"n": RowRange(data.draw(st.integers(0, 3)), data.draw(st.integers(3, 50)))}
    dtype = data.draw(st.sampled_from([None, "float32"]))
    broadcast = given[part[0]].kind == "scalar" and data.draw(st.booleans())
    block = Block("a", "i", tuple(part), dtype, broadcast=broadcast)
    try:
        blocks = [Block("b", "o", (found.columns[0].name,))]
        made = Signature.build({"i": given, "o": found}, [block], blocks, ranges)
    except SoaPipelineError:
        assume(False)
    assert readers("manifest", json.dumps(MANIFEST | {"signature": made.to_dict()}).encode())
