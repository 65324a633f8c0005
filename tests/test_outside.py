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
from pathlib import Path

import pytest

import soa_pipeline
from engines.exported.archive import load_program
from pipeline.cli.housekeeping import cached_name
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
from serving.client.calls import _credentials
from serving.client.options import Tls
from soa.errors import SoaPipelineError
from soa.files import open_plain, read_plain
from soa.records import as_record, parse_json

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for name in soa_pipeline.PACKAGES for path in (ROOT / name).rglob("*.py")]


@functools.cache
def called() -> dict[str, set[str]]:
    """The names of functions and methods that each module calls."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
        found[path.relative_to(ROOT).as_posix()] = names
    return found


def callers(*names: str) -> set[str]:
    """The modules that call a function or method with one of these names."""
    return {path for path, found in called().items() if not found.isdisjoint(names)}


OWN_STEPS = {  # what a step leaves for the next one, in a folder of the work or of a child process
    "engines/processes/isolation.py", "engines/processes/job.py", "engines/processes/warm.py",
    "stages/capture.py", "stages/compile.py",
    "stages/validate.py", "stages/emulate.py", "engines/lanes/devices.py",
}  # fmt: skip
OWN_SOURCE = {
    "pipeline/config/assemble.py",
    "pipeline/building/provenance.py",
    "stages/model/source.py",
}
OWN_SERVER = {  # its log, and files that were built for it
    "serving/local/external_program.py", "serving/local/triton.py", "serving/native/tensorrt.py",
    "serving/triton/repository.py",
}  # fmt: skip
SYSTEM = {"engines/kinds/cpu.py", "stages/benchmark.py"}  # /proc
OURS = {  # schemas, templates, the source
    "pipeline/init/commented.py", "pipeline/init/writing.py", "serving/cluster/deployment_files.py",
    "soa/declared.py",
}  # fmt: skip


def test_one_function_reads_files_of_others() -> None:
    allowed = OWN_STEPS | OWN_SOURCE | OWN_SERVER | SYSTEM | OURS
    assert callers("read_text", "read_bytes") <= allowed
    # A reference, before it is sealed or from a bundle that was verified.
    assert callers("safe_open") == {
        "stages/reference/answers.py", "stages/reference/nonfinite.py",
        "runtime/opening/same_bits.py",
    }  # fmt: skip


def test_one_function_parses_json() -> None:
    # They parse JSON that they have just written.
    of_our_own = {"pipeline/cli/inspection.py", "registry/bundle/manifest.py", "soa/records.py"}
    of_our_own |= {"stages/reference/answers.py"}  # the head of a safetensors file
    of_our_own |= {"engines/processes/forked.py"}  # pickles of its own child
    triton = {"serving/triton/model.py"}  # what Triton passes to it
    assert callers("loads") <= OWN_STEPS | OURS | of_our_own | triton
    assert callers("safe_load", "safe_load_all", "compose", "full_load", "unsafe_load") <= OURS | {
        "pipeline/config/yaml_lines.py"
    }
    assert callers("eval", "exec", "sympify", "literal_eval") <= {
        # Module.eval of torch
        "engines/torchscript.py", "stages/model/source.py", "pipeline/building/in_memory.py",
        "soa/declared.py",  # literals of our own source
    }  # fmt: skip


def test_one_function_prints() -> None:
    assert callers("echo") == {"pipeline/report/tables.py", "pipeline/cli/answers.py"}  # JSON
    bars = {"pipeline/cli/applying.py", "pipeline/cli/answers.py"}  # on a terminal
    assert callers("Console", "Text") == bars
    # `html.escape` and `re.escape`.
    assert callers("escape") == {"soa/text.py", "engines/exported/archive.py"}
    prints = callers("print") - callers("new_table", "microseconds")
    # In child processes: into a log, or to return the bits found under qemu.
    assert prints == {"stages/validate.py", "runtime/opening/same_bits.py"}
    silencers = {"engines/exported/engine.py", "registry/mlflow/access.py"}
    assert callers("getLogger") == silencers | {"soa/text.py"}


# -- files -----------------------------------------------------------------------------------------


def test_only_plain_files_of_bounded_size(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    assert read_plain(file, largest=5) == read_plain(link, links=True) == b"12345"
    for path, more, why in (
        (link, {}, "is a symbolic link"),
        (file, {"largest": 4}, "is larger than 4 bytes"),
        (tmp_path / "pipe", {}, "is not a plain file"),
        (tmp_path, {}, "is not a plain file"),
        (Path("/dev/zero"), {}, "is not a plain file"),
        (tmp_path / "a\0b", {}, "null"),
    ):
        with pytest.raises(OSError, match=why):
            read_plain(path, **more)  # type: ignore[arg-type]
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
    kept = LookupCache(folder, "r", "production")
    kept._path("jets").parent.mkdir()
    pipe.rename(kept._path("jets"))
    return kept.read("jets")


def exported(folder: Path, pipe: Path) -> object:
    pipe.rename(folder / EXPORT)
    return import_from(Registry(f"sqlite:///{folder}/none.db"), folder)


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
    lambda folder, pipe: _credentials(Tls(root_certificates=pipe)),
]


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_makes_nobody_wait(tmp_path: Path, read: Callable[[Path, Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SoaPipelineError) as caught:
        read(tmp_path, tmp_path / "pipe")
    assert "\n" not in str(caught.value)


def test_a_pipe_in_the_cache_has_no_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    (tmp_path / "annex.json").write_text('{"name": "jets", "target": "cpu/x86-64-v3"}')
    assert cached_name(tmp_path) == "jets cpu/x86-64-v3"


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 5000, "1" * 5000, '"\\ud800"', "\ud800", "{}x", ""]
)
def test_json_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_a_record_names_the_field() -> None:
    with pytest.raises(ValueError, match="b: a whole number"):
        as_record(dict[str, int], {"a": 1, "b": "x", "c": None})


@pytest.mark.parametrize("annexes", [None, [], 5, {"cpu/x86-64-v3": None}])
def test_annexes_of_a_note_are_said(tmp_path: Path, annexes: object) -> None:
    """`null` once meant all annexes in the folder."""
    note = {"ref": "jets/1", "digest": "0" * 64, "by": "ada", "at": "now", "annexes": annexes}
    (tmp_path / PROMOTED).write_text(json.dumps(note))
    with pytest.raises(SoaPipelineError, match="annexes"):
        load(tmp_path)


def test_tags_that_are_no_targets() -> None:
    """A target becomes a folder when a version is pulled."""
    keys = [DIGEST, "annex.cpu.x86-64-v3", "annex../tmp/x", "annex.etc", "target.a.b.c/../d"]
    found = StoredVersion("jets", 1, 1, "1", "/nowhere", dict.fromkeys(keys, "0" * 64))
    version = Version.of(found, {})
    assert (list(version.annexes), list(version.targets)) == (["cpu/x86-64-v3"], [])


# -- archives --------------------------------------------------------------------------------------


def sparse(into: Path, size: int) -> Path:
    """An archive with one stored byte, which claims to be the last byte of a file of `size`."""
    member = tarfile.TarInfo(EXPORT)
    member.pax_headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size),
        "GNU.sparse.name": EXPORT,
    }  # fmt: skip
    where = f"1\n{size - 1}\n1\n".encode().ljust(512, b"\0")
    member.size = len(where) + 1
    with tarfile.open(into, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(where + b"x"))
    return into


def test_an_archive_gives_no_more_than_it_is_large(tmp_path: Path) -> None:
    path = sparse(tmp_path / "export.tar", 1 << 33)
    with tarfile.open(path) as tar:
        assert tar.getmembers()[0].size == 1 << 33
    with pytest.raises(SoaPipelineError, match="is not a plain file"):
        import_from(Registry(f"sqlite:///{tmp_path}/none.db"), path)
    assert [each.name for each in tmp_path.iterdir()] == ["export.tar"]
