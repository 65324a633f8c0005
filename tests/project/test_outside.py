"""Only some modules read data from outside or print it; all others use these modules."""

from __future__ import annotations

import ast
import errno
import functools
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.exported.archive import load_program
from pipeline.cli.housekeeping import read_cached_name
from pipeline.config import load_config, load_policy
from pipeline.config.site_file import load_site
from registry.bundle.digests import SUMS, open_file
from registry.bundle.pulled import PROMOTED, read_note
from registry.housekeeping.export_import import EXPORT, import_from
from registry.mlflow.store_protocol import StoredVersion
from registry.store.host_cache import Cache
from registry.store.recorded_lookups import LookupCache
from registry.store.registry import Registry
from registry.trust import read_trusted
from registry.version import DIGEST, Version
from runtime.loader import load
from serving.client.calls import _read_credentials
from serving.client.options import Tls
from soa.errors import SoaPipelineError
from soa.files import open_plain, read_plain
from soa.records import as_record, parse_json
from tests.models.our_modules import ROOT, dotted, modules


@functools.cache
def calls() -> tuple[Call, ...]:
    """Every call in the product."""
    all_calls: list[Call] = []
    for path, tree in modules():
        lines = (ROOT / path).read_text().splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "attr", getattr(function, "id", ""))
                ours = any(
                    line.endswith("# trusted") for line in lines[node.lineno - 1 : node.end_lineno]
                )
                all_calls.append(Call(path, name, dotted(function), ours))
    return tuple(all_calls)


@dataclass(frozen=True)
class Call:
    path: str
    name: str
    function: str
    ours: bool
    """True if the line ends with `# trusted`: this program made the text, as in an earlier step or
    a child process, or the system did."""


def callers(*names: str) -> set[str]:
    """The modules that call a function or method with one of these names, on text of others."""
    return {call.path for call in calls() if call.name in names and not call.ours}


def test_only_soa_files_reads_files_of_others() -> None:
    assert callers("read_text", "read_bytes") == set()
    # A reference, before it is sealed or from a bundle that was verified.
    assert callers("safe_open") == {
        "stages/reference/answers.py", "stages/reference/nonfinite.py",
        "runtime/opening/same_bits.py",
    }  # fmt: skip


def test_one_module_parses_json_and_one_yaml() -> None:
    assert callers("loads") == {"soa/records.py"}
    assert callers("compose", "safe_load", "safe_load_all") == {"pipeline/config/yaml_lines.py"}


def test_no_text_is_evaluated_as_python() -> None:
    assert callers("full_load", "unsafe_load", "exec", "sympify", "literal_eval") == set()
    # `eval` only puts a network into its mode for inference.
    assert {call.function for call in calls() if call.name == "eval"} <= {
        f"{module}.eval" for module in ("model", "net", "module")
    } | {"torch.jit.load(source.torchscript, map_location='cpu').eval"}


def test_only_the_command_and_its_reports_print() -> None:
    """`reading.py` runs as a child process, which prints its answer for its parent."""
    assert callers("print") <= {"registry/store/reading.py"}
    assert {path.rpartition("/")[0] for path in callers("echo", "Console")} == {
        "pipeline/cli", "pipeline/report",
    }  # fmt: skip


def test_nothing_escapes_markup_of_a_terminal() -> None:
    assert {call.function for call in calls() if call.name == "escape"} <= {
        "html.escape", "re.escape",
    }  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a file of five bytes, a link to it, and a named pipe."""
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_a_file_of_the_largest_size_is_read(files: Path) -> None:
    assert read_plain(files / "file", largest=5) == b"12345"


def test_a_link_is_read_where_links_are_allowed(files: Path) -> None:
    assert read_plain(files / "link", links=True) == b"12345"


def test_a_file_that_is_too_large_is_refused(files: Path) -> None:
    with pytest.raises(OSError, match="is larger than 4 bytes"):
        read_plain(files / "file", largest=4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("link", "is a symbolic link"),
        ("pipe", "is not a plain file"),
        (".", "is not a plain file"),
        ("/dev/zero", "is not a plain file"),
        ("a\0b", "null"),
    ],
)
def test_what_is_no_plain_file_is_refused(files: Path, name: str, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        read_plain(files / name)


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_plain(tmp_path / "gone")
    assert caught.value.errno == errno.ENOENT


def in_a_cache(folder: Path, pipe: Path) -> object:
    (folder / ("0" * 64)).mkdir()
    pipe.rename(folder / ("0" * 64) / SUMS)
    return Cache(folder).hold("0" * 64, None)


def promoted(folder: Path, pipe: Path) -> object:
    pipe.rename(folder / PROMOTED)
    return load(folder)


def looked_up(folder: Path, pipe: Path) -> object:
    lookups = LookupCache(folder, "r", "production")
    lookups._path("jets").parent.mkdir()
    pipe.rename(lookups._path("jets"))
    return lookups.read("jets")


def exported(folder: Path, pipe: Path) -> object:
    pipe.rename(folder / EXPORT)
    return import_from(Registry(f"sqlite:///{folder}/none.db"), folder)


# Each reads a folder, and the named pipe in it, in place of a file.
READERS: list[Callable[[Path, Path], object]] = [
    promoted,
    looked_up,
    in_a_cache,
    exported,
    lambda folder, pipe: read_note(pipe.rename(folder / PROMOTED).parent),
    lambda folder, pipe: open_file(folder, pipe.name),
    lambda folder, pipe: import_from(Registry(f"sqlite:///{folder}/none.db"), pipe),
    lambda folder, pipe: load_config(pipe),
    lambda folder, pipe: load_policy(pipe),
    lambda folder, pipe: load_site(pipe),
    lambda folder, pipe: read_trusted(pipe),
    lambda folder, pipe: load_program(pipe),
    lambda folder, pipe: _read_credentials(Tls(root_certificates=pipe)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_at_once(tmp_path: Path, read: Callable[[Path, Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SoaPipelineError) as caught:
        read(tmp_path, tmp_path / "pipe")
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_a_pipe_does_not_hide_the_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    (tmp_path / "annex.json").write_text('{"name": "jets", "target": "cpu/x86-64-v3"}')
    assert read_cached_name(tmp_path) == "jets cpu/x86-64-v3"


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 5000, "1" * 5000, '"\\ud800"', "\ud800", "{}x", ""]
)
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_a_record_of_the_wrong_type_names_the_field() -> None:
    with pytest.raises(ValueError, match="b: a whole number"):
        as_record(dict[str, int], {"a": 1, "b": "x", "c": None})


@pytest.mark.parametrize("annexes", [None, [], 5, {"cpu/x86-64-v3": None}])
def test_annexes_of_the_wrong_type_are_refused(tmp_path: Path, annexes: object) -> None:
    """`null` once meant all annexes in the folder."""
    note = {"ref": "jets/1", "digest": "0" * 64, "by": "ada", "at": "now", "annexes": annexes}
    (tmp_path / PROMOTED).write_text(json.dumps(note))
    with pytest.raises(SoaPipelineError, match="annexes"):
        load(tmp_path)


def test_tags_that_name_no_target_are_ignored() -> None:
    """A target becomes a folder when a version is pulled, so it must not lead out of the bundle."""
    keys = [DIGEST, "annex.cpu.x86-64-v3", "annex../tmp/x", "annex.etc", "target.a.b.c/../d"]
    stored = StoredVersion("jets", 1, 1, "1", "/nowhere", dict.fromkeys(keys, "0" * 64))
    version = Version.of(stored, {})
    assert list(version.annexes) == ["cpu/x86-64-v3"]
    assert list(version.targets) == []


# -- archives --------------------------------------------------------------------------------------


def sparse_archive(into: Path, size: int) -> Path:
    """An archive with one stored byte, which claims to be the last byte of a file of `size`."""
    member = tarfile.TarInfo(EXPORT)
    member.pax_headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size),
        "GNU.sparse.name": EXPORT,
    }  # fmt: skip
    # One stretch of data: its offset and its length.
    stretches = f"1\n{size - 1}\n1\n".encode().ljust(512, b"\0")
    member.size = len(stretches) + 1
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(stretches + b"x"))
    return into


def test_a_sparse_archive_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    path = sparse_archive(tmp_path / "export.tar", 1 << 33)
    with tarfile.open(path) as tar:
        assert tar.getmembers()[0].size == 1 << 33
    with pytest.raises(SoaPipelineError, match="is not a plain file"):
        import_from(Registry(f"sqlite:///{tmp_path}/none.db"), path)
    assert [path.name for path in tmp_path.iterdir()] == ["export.tar"]
