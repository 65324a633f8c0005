"""C++ reads the JSON that Python reads, and refuses the folders that Python refuses.

Python proves the fields of a record. C++ refuses what is no JSON and what it cannot use; whatever a
record says, it answers.
"""

from __future__ import annotations

import json
import shutil
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
from registry.bundle.digests import seal
from registry.bundle.manifest import Manifest
from registry.bundle.pulled import PulledNote, write_note
from soa.errors import SoaPipelineError
from soa.records import as_record, parse_json
from tests.fuzz.hostile import altered_json, damaged
from tests.models import bundles, cplusplus
from tests.models.cplusplus import ROOT, TORCH, Answering, execute
from tests.models.project import Built, resealed
from tests.models.shared import made_once

HERE = Path(__file__).parent
DIGEST = "ab" * 32


class Readers:
    """Both readers; C++ is the program of records.cpp, which reads one thing after another."""

    def __init__(self, cpp: Answering, file: Path) -> None:
        self.cpp = cpp
        self._file = file

    def json(self, content: bytes) -> str:
        """What C++ reads from JSON, as `shown` writes it; empty if both refuse it."""
        self._file.write_bytes(content)
        if currently_in_test_context():
            note(repr(content[:5000]))
        why, theirs = self._both("json", self._file, lambda: parse_json(content))
        assert bool(why) == theirs.startswith("no: "), (theirs, why)
        return "" if why else theirs.removeprefix("ok ").replace("-nan", "nan")

    def folder(self, folder: Path) -> bool:
        """Whether both take a folder; they must agree, also in the code."""
        why, theirs = self._both("folder", folder, lambda: open_folder(folder))
        assert bool(why) == theirs.startswith("no: "), (theirs, why)
        if why:  # both end with the code in brackets
            assert theirs.rpartition(" [")[2] == why.rpartition(" [")[2], (theirs, why)
        return not why

    def load(self, folder: Path) -> bool:
        """Whether Python runs it in production. If Python does, C++ does."""
        why, theirs = self._both("load", folder, lambda: pipeline.load(folder, engine_name="aoti"))
        assert why or theirs == "ok", (theirs, folder)
        return not why

    def _both(self, kind: str, path: Path, ours: Callable[[], object]) -> tuple[str, str]:
        """Why Python refuses something, or "", and the answer of C++."""
        try:
            ours()
            why = ""
        except (SoaPipelineError, ValueError) as error:
            why = f"{error} [{getattr(error, 'code', '')}]"
        theirs = self.cpp(f"{kind} {path}")
        assert theirs.startswith(("no: ", "ok")), (theirs, path)
        return why, theirs


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
    cpp = Answering(folder / "records", LD_LIBRARY_PATH=str(TORCH))
    yield Readers(cpp, tmp_path_factory.mktemp("records") / "record")
    cpp.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every example overwrites."""
    return tmp_path_factory.mktemp("place")


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed bundle."""
    manifest = as_record(Manifest, bundles.provable(bundles.manifest_data()))
    bundles.write_bundle(tmp_path / "bundle", manifest)
    return tmp_path / "bundle"


def sums(change: Callable[[str], str]) -> Callable[[Path], object]:
    """Changes the text of SHA256SUMS."""

    def edit(folder: Path) -> None:
        file = folder / "SHA256SUMS"
        file.write_text(change(file.read_text()))

    return edit


def linked(name: str) -> Callable[[Path], object]:
    """Adds a link to the manifest."""
    return lambda folder: (folder / name).symlink_to(folder / "manifest.json")


def written(name: str) -> Callable[[Path], object]:
    """Adds a file."""
    return lambda folder: (folder / name).write_text("x")


# Whether both take the folder, and what is done to a sealed bundle.
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
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_both_take_or_refuse_a_folder(readers: Readers, folder: Path, name: str) -> None:
    taken, edit = FOLDERS[name]
    edit(folder)
    assert readers.folder(folder) == taken


@given(st.data())
def test_both_refuse_any_damaged_list_of_digests(
    readers: Readers, place: Path, data: st.DataObject
) -> None:
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


def test_cpp_tests_a_model_of_lists(readers: Readers, lists: Built) -> None:
    assert readers.cpp(f"test {lists.bundle.path}") == "ok"


def test_cpp_finds_other_answers_for_other_lists(
    readers: Readers, lists: Built, tmp_path: Path
) -> None:
    """The reference answers are those of the lists before the edit."""

    def edit(folder: Path, _: dict[str, Any]) -> None:
        stored = load_file(folder / "reference.safetensors")
        with safe_open(folder / "reference.safetensors", "pt") as file:
            about = file.metadata()
        stored["input/jets_offsets/end"][1] = 2  # the end of an empty row
        save_file(stored, folder / "reference.safetensors", about)

    other = resealed(lists.bundle, tmp_path / "other", edit)
    assert "'probabilities'" in readers.cpp(f"test {other.path}")


@pytest.mark.parametrize("note", ["{}", '{"digest": "x"}', '{"digest": 5, "ref": "jets/1"}', "["])
def test_a_note_of_another_form_stops_production_alone(
    readers: Readers, jets: Built, tmp_path: Path, note: str
) -> None:
    folder = Path(shutil.copytree(jets.bundle.path, tmp_path / "bundle"))
    (folder / "PROMOTED.json").write_text(note)
    assert not readers.load(folder)
    assert readers.cpp(f"load {folder}").startswith("no: ")
    assert readers.cpp(f"test {folder}") == "ok"


@given(st.data())
def test_cpp_runs_what_python_runs_for_any_note_of_a_promotion(
    readers: Readers, promoted: Path, data: st.DataObject
) -> None:
    file = promoted / "PROMOTED.json"
    sound = file.read_bytes()
    try:
        file.write_bytes(known(data.draw(altered_json(json.loads(sound)))))
        readers.load(promoted)
    finally:
        file.write_bytes(sound)


@given(st.data())
def test_cpp_runs_what_python_runs_for_any_manifest_sealed_again(
    readers: Readers, promoted: Path, data: st.DataObject
) -> None:
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
        text = json.dumps(json.loads(content), ensure_ascii=False)
    except ValueError:
        text = content.decode(errors="replace")
    assume(not any(unicodedata.category(character) == "Cn" for character in text))
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
    members = [f"{key.encode().hex()}={shown(member)}" for key, member in value.items()]
    return f"[{''.join(members)}]"


@given(st.one_of(JSON, JSON.flatmap(damaged), st.binary()))
def test_both_read_the_same_from_any_json(readers: Readers, content: bytes) -> None:
    """Or both refuse it, which `Readers.json` checks."""
    if by_cpp := readers.json(content):
        assert by_cpp == shown(parse_json(content))


@pytest.mark.parametrize("depth", [199, 200, 201, 202])
@pytest.mark.parametrize(
    ("before", "inside", "after", "deepest"),
    [(b"[", b"", b"]", 201), (b"[", b"1", b"]", 200), (b'{"":', b"1", b"}", 200)],
    ids=["empty lists", "lists", "objects"],
)
def test_how_deep_json_may_go(
    readers: Readers, depth: int, before: bytes, inside: bytes, after: bytes, deepest: int
) -> None:
    """The innermost list counts only if it has a value."""
    taken = bool(readers.json(before * depth + inside + after * depth))
    assert taken == (depth <= deepest)
