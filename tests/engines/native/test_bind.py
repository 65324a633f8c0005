"""Python and C++ take and refuse the same bindings, by one table, and then write the same bytes.

Both bind memory of one arena with the same content. C++ runs under AddressSanitizer and UBSan.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeline
from runtime.session.session import Session
from soa import Collection, Layout
from soa.dtypes import itemsize
from soa.errors import SoaPipelineError
from tests.engines.native import sanitize
from tests.models.cplusplus import Answering
from tests.models.project import TARGET, Built
from tests.models.shared import made_once

SIZE = 1 << 18
OFFSETS = SIZE // 4 * 3
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Memory:
    """A collection's memory, as offsets in the arena: of a buffer, or of each column."""

    name: str
    at: int | Mapping[str, list[int]] | None
    n: int = 64
    room: int | None = None
    first: int | None = None
    const: bool = False

    def line(self) -> str:
        """The memory in the words of binds.cpp."""
        if isinstance(self.at, Mapping):
            kind = "columns"
            places = [f"{name}={','.join(map(str, at))}" for name, at in self.at.items()]
        else:
            kind = "buffer"
            places = ["null" if self.at is None else str(self.at)]
        kind = f"const-{kind}" if self.const else kind
        counts = ["-" if count is None else str(count) for count in (self.room, self.first)]
        return " ".join((self.name, kind, str(self.n), *counts, *places))

    def collection(self, layouts: Mapping[str, Layout], arena: np.ndarray[Any, Any]) -> Collection:
        """The memory as a collection of Python. One that no layout has gets that of the jets."""
        layout = layouts.get(self.name, layouts["jets"])
        room = self.n if self.room is None else self.room
        if self.first is not None and self.room is None:
            room += self.first
        rows = self.n if self.first is None else room
        if isinstance(self.at, Mapping):
            whole = _separate(layout, self.at, rows, room, arena)
        else:
            layout = Layout(layout.columns, max(layout.alignment, 8))
            place = 0 if self.at is None else arena.ctypes.data + self.at
            size = 0 if self.at is None else SIZE - self.at
            whole = Collection.wrap(layout, place, rows, capacity=room, nbytes=size)
        whole = whole.locked() if self.const else whole
        return whole if self.first is None else whole.window(self.first, self.first + self.n)


def _separate(
    layout: Layout, at: Mapping[str, list[int]], n: int, room: int, arena: np.ndarray[Any, Any]
) -> Collection:
    """A collection of separate columns. A column that the layout has not is of float32."""
    layout = Layout(layout.columns, layout.alignment, "columns")
    columns: dict[str, Any] = {}
    for name, places in at.items():
        size = itemsize(layout[name].dtype) if name in layout.by_name else 4
        dtype = layout[name].dtype if name in layout.by_name else "float32"
        pieces = [arena[place : place + room * size].view(dtype) for place in places]
        eigen = name in layout.by_name and layout[name].kind == "eigen"
        columns[name] = pieces if eigen else pieces[0]
    return Collection.from_columns(layout, columns, n)


@dataclass(frozen=True)
class Case:
    """A binding of memory, and its calls: `call`, `call ROWS`, `call DIM=ROWS,…` or `resize ROWS
    [DIM]`."""

    memory: tuple[Memory, ...]
    calls: tuple[str, ...] = ("call",)

    def line(self) -> str:
        """The case in the words of binds.cpp."""
        return "|".join([" ; ".join(memory.line() for memory in self.memory), *self.calls])


@cache
def filled() -> bytes:
    """The content of the arena, the same as in binds.cpp."""
    state, values = 1, np.empty(SIZE // 4, np.float32)
    for i in range(len(values)):
        state = (state * 1664525 + 1013904223) % 2**32
        values[i] = (state >> 8) / (1 << 24)
    offsets = np.arange(SIZE // 32, dtype=np.int64) * 3 % 61
    return values[: SIZE // 16 * 3].tobytes() + offsets.tobytes()


class Python:
    """Binds and calls in Python: the checksum of the arena afterwards, or `refused: …`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        room = np.zeros(SIZE + 4096, np.uint8)
        start = -room.ctypes.data % 4096
        self._arena = room[start : start + SIZE]

    def __call__(self, case: Case) -> str:
        self._arena[:] = np.frombuffer(filled(), np.uint8)
        signature = self.session.signature
        try:
            inputs = {m.name: m.collection(signature.layouts, self._arena) for m in case.memory}
            outputs = [name for name in signature.output_collections if name in inputs]
            written = {name: inputs.pop(name) for name in outputs}
            binding = self.session.bind(inputs, written)
            for call in case.calls:
                verb, *words = call.split()
                run = binding.resize if verb == "resize" else binding
                run(_rows(words, binding.bound))
        except SoaPipelineError as error:
            return f"refused: {error} [{error.code}]"
        return str(zlib.crc32(self._arena.tobytes()))


def _rows(words: list[str], bound: Mapping[str, int]) -> Any:
    """The argument of a call: None, a number, or a number for each row dimension."""
    if not words:
        return None
    if "=" in words[0]:
        pairs = [pair.split("=") for pair in words[0].split(",")]
        return {dim: int(n) for dim, n in pairs}
    return int(words[0]) if len(words) == 1 else {**bound, words[1]: int(words[0])}


# -- a table of cases ------------------------------------------------------------------------------

TAKEN, REFUSED = True, False
JETS = Memory("jets", 0)  # six columns of 64 float32: 256 bytes each
TAGS = Memory("tags", 8192)  # three columns


def jets(at: int | None = 0, n: int = 64, *more: Any, **fields: Any) -> Memory:
    """Inputs in one buffer; `more` are `room` and `first`."""
    return Memory("jets", at, n, *more, **fields)


def tags(at: int | None = 8192, n: int = 64, *more: Any, **fields: Any) -> Memory:
    """Outputs in one buffer; `more` are `room` and `first`."""
    return Memory("tags", at, n, *more, **fields)


BUFFERS: dict[str, tuple[bool, Case]] = {
    "as it should be": (TAKEN, Case((JETS, TAGS))),
    "in the other order": (TAKEN, Case((TAGS, JETS))),
    "const inputs": (TAKEN, Case((jets(const=True), TAGS))),
    "const outputs": (REFUSED, Case((JETS, tags(const=True)))),
    # Shared memory
    "the outputs are the inputs": (REFUSED, Case((JETS, tags(0)))),
    "the outputs begin one column into the inputs": (REFUSED, Case((JETS, tags(256)))),
    "the outputs begin 32 rows into the inputs": (REFUSED, Case((JETS, tags(128)))),
    "the outputs end in the inputs": (REFUSED, Case((jets(8192), tags(8192 - 512)))),
    "the outputs begin in the inputs' last column": (REFUSED, Case((JETS, tags(1280)))),
    "the outputs begin where the inputs end": (TAKEN, Case((JETS, tags(1536)))),
    "the outputs end where the inputs begin": (TAKEN, Case((jets(8192), tags(8192 - 768)))),
    "the outputs lie in the inputs' spare rows": (
        REFUSED, Case((jets(0, 32, 64), tags(128, 32, 64)))
    ),
    "windows of one memory": (TAKEN, Case((jets(0, 32, 64, 0), tags(0, 32, 64, 32)))),
    "windows of one memory that share a row": (
        REFUSED, Case((jets(0, 32, 64, 0), tags(0, 32, 64, 31)))
    ),
    "windows of one memory that share rows of other columns": (
        REFUSED, Case((jets(0, 33, 64, 0), tags(256, 33, 64, 31)))
    ),
    # Collections
    "no outputs": (REFUSED, Case((JETS,))),
    "no inputs": (REFUSED, Case((TAGS,))),
    "nothing": (REFUSED, Case(())),
    "a collection that is not the model's": (REFUSED, Case((JETS, TAGS, Memory("hits", 65536)))),
    "another collection in its place": (REFUSED, Case((Memory("hits", 0), TAGS))),
    "separate columns": (
        REFUSED, Case((Memory("jets", {name: [4096 * i] for i, name in enumerate("abcdef")}), TAGS))
    ),
    # Addresses
    "inputs at no address": (REFUSED, Case((jets(None), TAGS))),
    "outputs at no address": (REFUSED, Case((JETS, tags(None)))),
    "no rows at no address": (TAKEN, Case((jets(None, 0), tags(None, 0)))),
    "inputs that are not aligned": (REFUSED, Case((jets(64), TAGS))),
    "outputs that are not aligned": (REFUSED, Case((JETS, tags(8196)))),
    # Rows
    "rows that differ": (REFUSED, Case((JETS, tags(n=63)))),
    "no rows": (TAKEN, Case((jets(n=0), tags(n=0)))),
    "no rows at an odd address": (TAKEN, Case((jets(n=0), tags(1, 0)))),
    "as many rows as it was compiled for": (TAKEN, Case((jets(n=1000), tags(131072, 1000)))),
    "more rows than it was compiled for": (REFUSED, Case((jets(n=1001), tags(131072, 1001)))),
    "fewer rows than none": (REFUSED, Case((jets(n=-1), tags(n=-1)))),
    "fewer outputs than none": (REFUSED, Case((JETS, tags(n=-64)))),
    "rows beyond all memory": (REFUSED, Case((jets(n=LARGEST), tags(n=LARGEST)))),
    "room to spare": (TAKEN, Case((jets(0, 64, 100), tags(room=70)))),
    "room for fewer rows": (REFUSED, Case((jets(0, 64, 63), TAGS))),
    "room for fewer rows than none": (REFUSED, Case((jets(0, 64, -7), TAGS))),
    "room beyond all memory": (REFUSED, Case((jets(0, 64, LARGEST), TAGS))),
    "room for outputs beyond all memory": (REFUSED, Case((JETS, tags(room=1 << 61)))),
    # Windows
    "a window": (TAKEN, Case((jets(0, 64, 200, 32), tags(65536, 64, 300, 128)))),
    "a window from an odd row on": (TAKEN, Case((jets(0, 64, 200, 33), tags(65536, 64, 300, 7)))),
    "a window and a whole": (TAKEN, Case((jets(0, 64, 200, 1), TAGS))),
    "a window without a word on its room": (TAKEN, Case((jets(0, 64, None, 32), TAGS))),
    "an empty window at the end": (TAKEN, Case((jets(0, 0, 64, 64), tags(n=0)))),
    "a window from before the first row on": (REFUSED, Case((jets(0, 64, 200, -2), TAGS))),
    "a window that ends behind the last row": (REFUSED, Case((jets(0, 64, 200, 137), TAGS))),
    "a window behind the last row": (REFUSED, Case((jets(0, 64, 200, 201), TAGS))),
    "a window from beyond all memory on": (REFUSED, Case((jets(0, 64, 200, LARGEST), TAGS))),
    "a window up to beyond all memory": (REFUSED, Case((jets(0, 64, None, LARGEST), TAGS))),
    "a window of a memory beyond all": (REFUSED, Case((jets(0, 64, LARGEST, 32), TAGS))),
}  # fmt: skip

ROOMY = (jets(0, 64, 100), tags(room=100))
WINDOWS = (jets(0, 64, 200, 33), tags(65536, 64, 300, 7))
CALLS: dict[str, tuple[bool, Case]] = {
    "fewer rows": (TAKEN, Case(ROOMY, ("call 5",))),
    "fewer rows, then all": (TAKEN, Case(ROOMY, ("call 5", "call"))),
    "more rows, then all": (TAKEN, Case(ROOMY, ("call 100", "call"))),
    "no rows": (TAKEN, Case(ROOMY, ("call 0",))),
    "no rows, then all": (TAKEN, Case(ROOMY, ("call 0", "call"))),
    "rows by their dimension": (TAKEN, Case(ROOMY, ("call n=7",))),
    "rows from now on": (TAKEN, Case(ROOMY, ("resize 7", "call"))),
    "rows from now on, and others once": (TAKEN, Case(ROOMY, ("resize 7", "call 3", "call"))),
    "rows from now on, by their dimension": (TAKEN, Case(ROOMY, ("resize 70 n", "call"))),
    "fewer rows than none": (REFUSED, Case(ROOMY, ("call -1",))),
    "more rows than there is room for": (REFUSED, Case(ROOMY, ("call 101",))),
    "more rows from now on": (REFUSED, Case(ROOMY, ("resize 101",))),
    "more rows than there are at all": (REFUSED, Case(ROOMY, (f"call {LARGEST}",))),
    "more rows than it was compiled for": (
        REFUSED, Case((jets(n=900, room=2000), tags(131072, 900, 2000)), ("call 1001",))
    ),
    "rows of another dimension": (REFUSED, Case(ROOMY, ("call zzz=3",))),
    "rows of one dimension too many": (REFUSED, Case(ROOMY, ("call n=3,zzz=3",))),
    "rows of another dimension from now on": (REFUSED, Case(ROOMY, ("resize 3 zzz",))),
    "fewer rows of a window": (TAKEN, Case(WINDOWS, ("call 5", "resize 63", "call"))),
    "more rows of a window": (REFUSED, Case(WINDOWS, ("call 65",))),
    "more rows of a window from now on": (REFUSED, Case(WINDOWS, ("resize 65",))),
    "more rows of a window that begins at the first": (
        REFUSED, Case((jets(0, 64, 200, 0), tags(65536, 64, 200)), ("call 65",))
    ),
}  # fmt: skip

PLACES = {
    "a": [0], "b": [4096], "c": [8192], "d": [16384], "f": [20480, 24576],
}  # fmt: skip
ANSWERS = {"x": [65536], "z": [69632, 73728]}


def inputs(
    n: int = 64,
    room: int | None = None,
    first: int | None = None,
    const: bool = False,
    **places: list[int] | None,
) -> Memory:
    """Inputs in separate columns; `places` replaces some, None leaves one out."""
    at = {name: own for name, own in (PLACES | places).items() if own is not None}
    return Memory("jets", at, n, room, first, const)


def outputs(
    n: int = 64,
    room: int | None = None,
    first: int | None = None,
    const: bool = False,
    **places: list[int] | None,
) -> Memory:
    """Outputs in separate columns, as `inputs`."""
    at = {name: own for name, own in (ANSWERS | places).items() if own is not None}
    return Memory("tags", at, n, room, first, const)


COLUMNS: dict[str, tuple[bool, Case]] = {
    "as it should be": (TAKEN, Case((inputs(), outputs()))),
    "const inputs": (TAKEN, Case((inputs(const=True), outputs()))),
    "const outputs": (REFUSED, Case((inputs(), outputs(const=True)))),
    "one buffer": (REFUSED, Case((jets(), outputs()))),
    "outputs in one buffer": (REFUSED, Case((inputs(), tags(65536)))),
    "a column too few": (REFUSED, Case((inputs(d=None), outputs()))),
    "a column too many": (REFUSED, Case((inputs(q=[32768]), outputs()))),
    "a component too few": (REFUSED, Case((inputs(f=[20480]), outputs()))),
    "a component too many": (REFUSED, Case((inputs(f=[20480, 24576, 28672]), outputs()))),
    "an output's component too few": (REFUSED, Case((inputs(), outputs(z=[69632])))),
    "a column that is not aligned": (REFUSED, Case((inputs(d=[16388]), outputs()))),
    "an output at any element": (TAKEN, Case((inputs(), outputs(x=[65540])))),
    "an output at no element": (REFUSED, Case((inputs(), outputs(x=[65538])))),
    "inputs that share memory": (TAKEN, Case((inputs(b=[0], d=[16]), outputs()))),
    "an output in an input": (REFUSED, Case((inputs(), outputs(x=[4096])))),
    "an output in an input's last element": (REFUSED, Case((inputs(), outputs(x=[4096 + 252])))),
    "an output in an input's component": (REFUSED, Case((inputs(), outputs(z=[69632, 24576])))),
    "an output behind an input": (TAKEN, Case((inputs(), outputs(x=[4096 + 256])))),
    "an output before an input": (TAKEN, Case((inputs(), outputs(x=[4096 - 256])))),
    "an output behind an input, in another that ends later": (
        REFUSED, Case((inputs(a=[8192 + 16], c=[8192]), outputs(x=[8192 + 288])))
    ),
    "outputs that share memory": (REFUSED, Case((inputs(), outputs(x=[73728])))),
    "components that share memory": (REFUSED, Case((inputs(), outputs(z=[69632, 69632])))),
    "an output in an input's spare rows": (
        REFUSED, Case((inputs(32, 64), outputs(32, 64, x=[4096 + 128])))
    ),
    "windows of one column": (
        TAKEN, Case((inputs(32, 64, 3), outputs(32, 100, 35, x=[4096])))
    ),
    "windows of one column that share a row": (
        REFUSED, Case((inputs(32, 64, 3), outputs(32, 100, 34, x=[4096])))
    ),
    "a window": (TAKEN, Case((inputs(9, 64, 5), outputs(9, 64, 7)))),
    "more rows of a window": (REFUSED, Case((inputs(9, 64, 5), outputs(9, 64, 7)), ("call 10",))),
    "fewer rows, then all": (
        TAKEN, Case((inputs(9, 64, 5), outputs(9, 64, 7)), ("call 4", "call"))
    ),
    "room to spare": (TAKEN, Case((inputs(9, 64), outputs(9, 64)), ("call 64",))),
    "no rows": (TAKEN, Case((inputs(0), outputs(0)))),
    "fewer rows than none": (REFUSED, Case((inputs(-1), outputs(-1)))),
}  # fmt: skip

ITEMS = {name: [4096 * i] for i, name in enumerate("abcdef")}
ENDS = {"begin": [OFFSETS], "end": [OFFSETS + 8]}  # each row begins where the one before ends


def lists(*calls: str, **others: Memory) -> Case:
    """Twenty rows of three items each; `others` replaces collections by name."""
    usual = {
        "jets": Memory("jets", ITEMS, 60),
        "offsets": Memory("jets_offsets", ENDS, 20),
        "tags": Memory("tags", 65536, 20),
    }
    return Case(tuple((usual | others).values()), calls or ("call",))


JAGGED: dict[str, tuple[bool, Case]] = {
    "as it should be": (TAKEN, lists()),
    "const": (
        TAKEN,
        lists(
            jets=Memory("jets", ITEMS, 60, const=True),
            offsets=Memory("jets_offsets", ENDS, 20, const=True),
        ),
    ),
    "fewer items than the offsets say": (TAKEN, lists(jets=Memory("jets", ITEMS, 30))),
    "no items": (TAKEN, lists(jets=Memory("jets", ITEMS, 0))),
    "no rows": (
        TAKEN, lists(offsets=Memory("jets_offsets", ENDS, 0), tags=Memory("tags", 65536, 0))
    ),
    "offsets of fewer rows": (REFUSED, lists(offsets=Memory("jets_offsets", ENDS, 19))),
    "offsets of the items' rows": (REFUSED, lists(offsets=Memory("jets_offsets", ENDS, 60))),
    "answers of the items' rows": (REFUSED, lists(tags=Memory("tags", 65536, 60))),
    "no offsets": (REFUSED, Case((lists().memory[0], lists().memory[2]))),
    "offsets without ends": (
        REFUSED, lists(offsets=Memory("jets_offsets", {"begin": [OFFSETS]}, 20))
    ),
    "offsets in one buffer": (REFUSED, lists(offsets=Memory("jets_offsets", OFFSETS, 20))),
    "offsets at no multiple of their size": (
        REFUSED, lists(offsets=Memory("jets_offsets", ENDS | {"end": [OFFSETS + 12]}, 20))
    ),
    "answers over offsets": (REFUSED, lists(tags=Memory("tags", OFFSETS, 20))),
    "answers over items": (REFUSED, lists(tags=Memory("tags", 4096, 20))),
    "rows in the middle": (
        TAKEN,
        lists(
            offsets=Memory("jets_offsets", ENDS, 20, 100, 33), tags=Memory("tags", 65536, 20, 50, 7)
        ),
    ),
    "items in the middle": (TAKEN, lists(jets=Memory("jets", ITEMS, 60, 100, 31))),
    "more items than it was compiled for": (REFUSED, lists(jets=Memory("jets", ITEMS, 301))),
    "fewer rows, then all": (TAKEN, lists("call n=5,jet=60", "call")),
    "fewer items": (TAKEN, lists("call n=20,jet=31")),
    "as many rows as items": (TAKEN, lists("call 11")),
    "items from now on": (TAKEN, lists("resize 31 jet", "call n=3,jet=60", "call")),
    "rows from now on": (TAKEN, lists("resize 3 n", "call")),
    "rows without items": (REFUSED, lists("call n=5")),
    "more rows than there is room for": (REFUSED, lists("call n=21,jet=60")),
    "more items than there is room for": (REFUSED, lists("call n=20,jet=61")),
    "more items from now on": (REFUSED, lists("resize 61 jet")),
    "as many rows as items, and too many": (REFUSED, lists("call 60")),
}  # fmt: skip


@dataclass(frozen=True)
class Both:
    """The same artifact in C++, by the program of binds.cpp, and in Python."""

    cpp: Answering
    python: Python

    def __call__(self, case: Case) -> bool:
        """Whether both take the case; they must agree, also in the bytes or the code."""
        theirs, ours = self.cpp(case.line()), self.python(case)
        refused = ours.startswith("refused: ")
        assert theirs.startswith("refused: ") == refused, (case, theirs, ours)
        if refused:  # both end with the code in brackets
            assert theirs.rpartition(" [")[2] == ours.rpartition(" [")[2], (theirs, ours)
        else:
            assert theirs == ours
        return not refused


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sanitize.compiler() is None:
        pytest.skip("there is no C++ compiler")

    def make(folder: Path) -> None:
        sanitizer = "address" if sanitize.has_sanitizer("address", folder) else None
        built = sanitize.build(folder, sanitizer, name="binds", flags=sanitize.QUICK)
        built.rename(folder / "binds")

    return made_once(tmp_path_factory, "cplusplus-binds", make) / "binds"


Opened = Callable[..., Both]


@pytest.fixture(scope="module")
def opened(program: Path) -> Iterator[Opened]:
    """Opens the artifact of a bundle in both; `before`: a copy, as of an older version."""
    programs: list[Answering] = []
    options = {
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }

    def open_both(bundle: Path, before: Path | None = None) -> Both:
        folder = bundle / "targets" / TARGET / "aoti"
        if before is not None:  # as in versions that were not validated on windows
            lines = (folder / "arguments.txt").read_text()
            folder = shutil.copytree(folder, before)
            (folder / "arguments.txt").write_text(lines.replace("windows any\n", ""))
        checked = pipeline.load(bundle, mode="test", engine_name="aoti")
        plain = Session(checked.signature, checked.executable, any_start=before is None)
        programs.append(Answering(program, folder, **options))
        return Both(programs[-1], Python(plain))

    yield open_both
    for opened_program in programs:
        opened_program.close()


@pytest.fixture(scope="module")
def buffers(opened: Opened, jets: Built) -> Both:
    return opened(jets.bundle.path)


@pytest.fixture(scope="module")
def columns(opened: Opened, loose: Built) -> Both:
    return opened(loose.bundle.path)


@pytest.fixture(scope="module")
def older(opened: Opened, jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return opened(jets.bundle.path, tmp_path_factory.mktemp("older") / "aoti")


@pytest.mark.parametrize("name", BUFFERS)
def test_both_take_or_refuse_buffers(buffers: Both, name: str) -> None:
    taken, case = BUFFERS[name]
    assert buffers(case) == taken


@pytest.mark.parametrize("name", CALLS)
def test_both_take_or_refuse_calls(buffers: Both, name: str) -> None:
    taken, case = CALLS[name]
    assert buffers(case) == taken


@pytest.mark.parametrize("name", COLUMNS)
def test_both_take_or_refuse_separate_columns(columns: Both, name: str) -> None:
    taken, case = COLUMNS[name]
    assert columns(case) == taken


@pytest.fixture(scope="module")
def jagged(opened: Opened, lists: Built) -> Both:
    return opened(lists.bundle.path)


@pytest.mark.parametrize("name", JAGGED)
def test_both_take_or_refuse_jagged_collections(jagged: Both, name: str) -> None:
    taken, case = JAGGED[name]
    assert jagged(case) == taken


OLDER: dict[str, tuple[bool, Case]] = {
    "a window that is aligned": (TAKEN, Case((jets(0, 64, 200, 32), tags(65536, 64, 300, 160)))),
    "inputs from an odd row on": (REFUSED, Case((jets(0, 64, 200, 33), TAGS))),
    "outputs from an odd row on": (REFUSED, Case((JETS, tags(65536, 64, 300, 7)))),
}


@pytest.mark.parametrize("name", OLDER)
def test_a_version_that_was_not_validated_on_windows_refuses_odd_ones(
    older: Both, name: str
) -> None:
    taken, case = OLDER[name]
    assert older(case) == taken


@pytest.mark.parametrize("twice", [jets(), jets(16384), tags(), tags(16384)])
def test_a_collection_given_twice_is_refused(buffers: Both, twice: Memory) -> None:
    """Only in C++: Python passes collections as a mapping, whose keys are unique."""
    answer = buffers.cpp(Case((JETS, TAGS, twice)).line())
    assert answer.startswith("refused: ") and f"'{twice.name}'" in answer


either_storage = pytest.mark.parametrize("storage", ["buffers", "columns"])


@either_storage
@pytest.mark.parametrize("n", [0, 5])
def test_both_make_memory_of_their_own(
    request: pytest.FixtureRequest, storage: str, n: int
) -> None:
    both: Both = request.getfixturevalue(storage)
    assert both.cpp(f"collection jets {n}") == str(n)
    assert both.python.session.collection("jets", n).n == n


@either_storage
@pytest.mark.parametrize(
    ("name", "n"),
    [
        *(("jets", n) for n in (-1, 1 << 50, 1 << 57, 1 << 62, LARGEST)),
        *(("hits", n) for n in (-1, 0, 5, 1 << 50, 1 << 57, 1 << 62, LARGEST)),
    ],
)
def test_both_refuse_memory_of_their_own_that_cannot_be(
    request: pytest.FixtureRequest, storage: str, name: str, n: int
) -> None:
    """Of a collection that the model does not have, or of rows that no host has room for."""
    both: Both = request.getfixturevalue(storage)
    assert both.cpp(f"collection {name} {n}").startswith("refused: ")
    with pytest.raises(SoaPipelineError):
        both.python.session.collection(name, n)


# -- any memory ------------------------------------------------------------------------------------


@st.composite
def counted(draw: st.DrawFn, memory: Memory, n: int) -> Memory:
    """Memory with a capacity and a first row, both mostly valid."""
    first = draw(st.one_of(st.none(), st.integers(0, 70)))
    end = n + (first or 0)
    room = draw(st.one_of(st.none(), st.integers(max(0, end - 1), end + 70)))
    return replace(memory, n=n, room=room, first=first)


SIZES = st.sampled_from([0, 1, 5, 31, 33, 64])


@given(st.data(), SIZES)
def test_both_agree_on_any_buffers(buffers: Both, data: st.DataObject, n: int) -> None:
    places = st.one_of(*[st.integers(0, 32).map(lambda k: 128 * k)] * 6, st.integers(0, 4096))
    memory = [data.draw(counted(at(data.draw(places)), n)) for at in (jets, tags)]
    calls = data.draw(st.lists(st.integers(-1, 140).map("call {}".format), max_size=2))
    buffers(Case(tuple(memory), (*calls, "call")))


@given(st.data(), SIZES)
def test_both_agree_on_any_separate_columns(columns: Both, data: st.DataObject, n: int) -> None:
    # In NumPy an array of no rows loses its address, so it gets only aligned ones.
    step = data.draw(st.sampled_from([1 if n else 16, *[16] * 6]))
    place = st.integers(0, 256).map(lambda k: step * k)

    def drawn(memory: Memory, usual: Mapping[str, list[int]]) -> Memory:
        at = {name: [data.draw(place) for _ in places] for name, places in usual.items()}
        return data.draw(counted(replace(memory, at=at), n))

    columns(Case((drawn(inputs(), PLACES), drawn(outputs(), ANSWERS))))
