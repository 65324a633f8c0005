"""A user's C++ project: the installed library, a generated header, a bundle's folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import pipeline
import soa_pipeline
from engines.kinds import host_cpu_levels
from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle
from registry.bundle.digests import seal
from registry.bundle.pulled import PulledNote, write_note
from registry.errors import BundleError
from registry.store.registry import Registry
from registry.trust import sign
from runtime.watch import PROFILE, Watcher, make_profile, read_counts
from runtime.watch.profile import components
from soa import Signature
from tests.models import cplusplus
from tests.models.authorities import certify
from tests.models.cplusplus import ROOT, computed, execute, run
from tests.models.keys import make_keys
from tests.models.project import PASSED, TARGET, Built, cli, described, in_tiles, resealed
from tests.models.shared import made_once
from tests.models.watched import watched

HERE = Path(__file__).parent
AOTI = f"targets/{TARGET}/aoti"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cplusplus.installed(tmp_path_factory)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, prefix: Path, jets: Built) -> Path:
    """The build folder, beside which jets.hpp lies."""

    def make(folder: Path) -> None:
        cli("cxx", f"{jets.bundle.path}/", "-o", folder / "jets.hpp")
        headers = (f"-DHEADERS={folder}", f"-DEXAMPLES={ROOT / 'examples' / 'cpp'}")
        cplusplus.built(HERE, folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}", *headers)

    return made_once(tmp_path_factory, "downstream", make) / "build"


@pytest.fixture(scope="module")
def pulled_once(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a version in production, as `pipeline pull` makes it."""
    folder = tmp_path_factory.mktemp("pulled")
    registry = Registry(f"sqlite:///{folder}/store/registry.db")
    registry.promote(registry.register(jets.bundle), "production", PASSED)
    pull(registry, "jets@production", folder / "pulled")
    return folder / "pulled"


@pytest.fixture
def pulled(pulled_once: Path, tmp_path: Path) -> Path:
    """A copy of the folder that `pipeline pull` made; production runs it."""
    return shutil.copytree(pulled_once, tmp_path / "pulled", symlinks=True)


def promoted(folder: Path) -> Path:
    """Adds the note of a promotion, as anybody can who may write to the folder."""
    write_note(folder, PulledNote("jets/7", Bundle.open(folder).digest, "ada", "2026-01-01"))
    return folder


def score(
    project: Path, folder: Path, *words: str, n: int = 5, env: Mapping[str, str] | None = None
) -> list[str]:
    """The lines that score.cpp prints for n rows: the origin, then `column row bits`."""
    done = run(project / "score", folder, n, *words, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


class Refusal(NamedTuple):
    """What score.cpp prints of an exception: its class and its code, and its one line."""

    kind: str
    text: str


def refused(
    project: Path, folder: Path, *words: str, env: Mapping[str, str] | None = None
) -> Refusal:
    """How score.cpp refuses a folder."""
    done = run(project / "score", folder, 5, *words, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    kind, _, text = line.partition(": ")
    return Refusal(kind, text)


def test_each_file_of_the_library_compiles_by_itself() -> None:
    """The other tests build the library as one file, its users do not. g++ must not fail."""
    native = ROOT / "engines" / "native"
    flags = ("-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{native}")
    words = ("g++", *flags, f"-I{native}/include")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file: execute(*words, file), (native / "library").glob("*.cpp")))


def test_what_was_promoted_gives_the_bits_that_python_computes(project: Path, pulled: Path) -> None:
    session = pipeline.load(pulled, engine_name="aoti")
    for n in (0, 1, 33, 1000):
        origin, *bits = score(project, pulled, n=n)
        assert origin == f"jets jets/1 {Bundle.open(pulled).digest} {TARGET} aoti"
        assert bits == computed(session, n)


@pytest.fixture(scope="module")
def profiled_jets(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with bins, of other rows than those of the tests: some values lie outside."""

    def edit(folder: Path, _: dict[str, Any]) -> None:
        random = np.random.default_rng(0)
        signature = Signature.from_dict(jets.bundle.manifest.signature)
        names = [component.key for component in components(signature)]
        rows = {name: random.normal(1, 1, 50).astype(np.float32) for name in names}
        (folder / PROFILE).write_text(make_profile([rows]).to_json())

    bundle = resealed(jets.bundle, tmp_path_factory.mktemp("profiled") / "jets", edit)
    return promoted(bundle.path)


def test_calls_are_counted_as_python_counts_them(
    project: Path, profiled_jets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("python", "cpp")}
    monkeypatch.setenv("PIPELINE_COUNTS", str(places["python"]))
    session = pipeline.load(profiled_jets, engine_name="aoti", watch=1.0)
    computed(session, 33)
    assert isinstance(session.watcher, Watcher)
    session.watcher.write()
    env = {"PIPELINE_WATCH": "1", "PIPELINE_COUNTS": str(places["cpp"])}
    score(project, profiled_jets, "any_version", n=33, env=env)
    digest = Bundle.open(profiled_jets).digest
    ours, theirs = (read_counts([place], digest) for place in places.values())
    assert (ours.calls, ours.model) == (theirs.calls, theirs.model) == (1, "jets")
    assert ours.columns == theirs.columns and len(ours.columns) > 3


@pytest.mark.parametrize("share", ["0", ""])
def test_no_call_is_counted_where_no_share_is_asked_for(
    project: Path, profiled_jets: Path, tmp_path: Path, share: str
) -> None:
    env = {"PIPELINE_WATCH": share, "PIPELINE_COUNTS": str(tmp_path / "none")}
    score(project, profiled_jets, "any_version", env=env)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("share", ["half", "1,5", "0.5 ", "nan", "2", "1e999"])
def test_a_share_that_is_no_fraction_is_refused(
    project: Path, profiled_jets: Path, share: str
) -> None:
    refusal = refused(project, profiled_jets, "any_version", env={"PIPELINE_WATCH": share})
    assert refusal.kind == "Error load" and f"PIPELINE_WATCH={share}" in refusal.text


def test_calls_run_where_counts_cannot_be_written(
    project: Path, profiled_jets: Path, tmp_path: Path
) -> None:
    """`score` requires that the program succeeds without a warning."""
    (tmp_path / "file").touch()
    env = {"PIPELINE_WATCH": "1", "PIPELINE_COUNTS": str(tmp_path / "file")}
    score(project, profiled_jets, "any_version", env=env)


def test_threads_and_forks_are_counted(project: Path, profiled_jets: Path, tmp_path: Path) -> None:
    """Four threads call 500 times each, and the last child once, on 900 values a column. No child
    waits for a lock that a thread of its parent held, and each has its own file."""
    env = {"PIPELINE_WATCH": "1", "PIPELINE_COUNTS": str(tmp_path)}
    done = run(project / "forks", profiled_jets, 4, 500, 20, env=env)
    assert done.returncode == 0, done.stderr
    digest = Bundle.open(profiled_jets).digest
    counts = [read_counts([file], digest) for file in tmp_path.iterdir()]
    assert sorted(of_process.calls for of_process in counts) == [1, 4 * 500]
    for of_process in counts:
        values = {sum(bins) for bins in of_process.columns.values()}
        assert values == {900 * of_process.calls}


def test_production_asks_for_a_promotion_of_this_bundle(
    project: Path, jets: Built, pulled: Path
) -> None:
    refusal = refused(project, jets.bundle.path)
    assert refusal.kind == "PromotionError load-not-promoted" and "pipeline pull" in refusal.text
    note = json.loads((pulled / "PROMOTED.json").read_text())
    (pulled / "PROMOTED.json").write_text(json.dumps(note | {"digest": "0" * 64}))
    assert refused(project, pulled).kind == "PromotionError load-altered"


def test_a_note_of_a_promotion_that_cannot_be_read_is_refused(project: Path, pulled: Path) -> None:
    (pulled / "PROMOTED.json").write_text("{")
    assert refused(project, pulled).kind == "BundleError bundle"


def test_test_mode_runs_what_was_not_promoted(project: Path, jets: Built) -> None:
    origin, *_ = score(project, jets.bundle.path, "test")
    assert origin.split()[1] == "-"  # no version


# Damages to a bundle's folder; each returns the name of the file that the error must name.


def truncate(folder: Path) -> str:
    """The library lacks its last byte."""
    (library,) = (folder / AOTI).glob("*.so")
    library.write_bytes(library.read_bytes()[:-1])
    return library.name


def flip(folder: Path) -> str:
    """One bit of the weights differs."""
    weights = folder / AOTI / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[3] ^= 1
    weights.write_bytes(content)
    return "weights.bin"


def remove(folder: Path) -> str:
    """The program is missing."""
    (folder / "program.pt2").unlink()
    return "program.pt2"


def later(folder: Path) -> str:
    """The manifest is one of a later schema, and sealed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 2}))
    seal(folder)
    return "manifest.json"


@pytest.mark.parametrize("damage", [truncate, flip, remove, later])
def test_a_folder_that_is_not_the_sealed_bundle(
    project: Path, jets: Built, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    """tests/engines/native/test_records.py has more folders that were altered."""
    folder = tmp_path / "damaged"
    shutil.copytree(jets.bundle.path, folder)
    name = damage(folder)
    refusal = refused(project, folder, "test", "any_version")
    with pytest.raises(BundleError) as caught:
        pipeline.load(folder, mode="test")
    assert refusal.kind == f"BundleError {caught.value.code}" and name in refusal.text


@pytest.mark.parametrize("place", ["nowhere", "."], ids=["missing", "empty"])
def test_a_folder_that_is_no_bundle_is_refused(project: Path, tmp_path: Path, place: str) -> None:
    assert refused(project, tmp_path / place).kind == "BundleError bundle"


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=["P-384", "P-521"])
def test_signatures_of_other_curves_are_checked(
    project: Path, pulled: Path, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    own, other = make_keys(tmp_path, "own", curve), make_keys(tmp_path, "other", curve)
    sign(Bundle.open(pulled), own.private)
    assert score(project, pulled, f"keys={own.public}")
    assert refused(project, pulled, f"keys={other.public}").kind == "TrustError trust"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Words for `keys=`: lists of files, or a folder. `pulled` is signed by `own`, if at all."""
    own, other = make_keys(tmp_path, "own"), make_keys(tmp_path, "other")
    (tmp_path / "trusted").mkdir()
    shutil.copy(own.public, tmp_path / "trusted")
    return {
        "own": str(own.public),
        "other": str(other.public),
        "one of two": f"{other.public}:{own.public}",
        "a folder": str(tmp_path / "trusted"),
        "private": str(own.private),
    }


@pytest.fixture
def signed(pulled: Path, keys: dict[str, str]) -> Path:
    """The pulled folder, signed with the key `own`."""
    sign(Bundle.open(pulled), Path(keys["private"]))
    return pulled


def test_a_bundle_without_a_signature_is_refused(
    project: Path, pulled: Path, keys: dict[str, str]
) -> None:
    assert refused(project, pulled, f"keys={keys['own']}").kind == "TrustError trust"


@pytest.mark.parametrize("trusted", ["own", "one of two", "a folder"])
def test_a_signature_by_a_trusted_key_is_taken(
    project: Path, signed: Path, keys: dict[str, str], trusted: str
) -> None:
    assert score(project, signed, f"keys={keys[trusted]}")


@pytest.mark.parametrize("trusted", ["other", "private"])
def test_a_signature_by_no_trusted_key_is_refused(
    project: Path, signed: Path, keys: dict[str, str], trusted: str
) -> None:
    """A private key in place of a public one is no trusted key."""
    assert refused(project, signed, f"keys={keys[trusted]}").kind == "TrustError trust"


def test_the_keys_of_the_host_must_not_be_empty(project: Path, signed: Path) -> None:
    env = {"PIPELINE_TRUSTED_KEYS": ""}
    assert refused(project, signed, env=env).kind == "TrustError trust"


def test_test_mode_asks_for_no_signature(project: Path, signed: Path, keys: dict[str, str]) -> None:
    assert score(project, signed, "test", env={"PIPELINE_TRUSTED_KEYS": keys["other"]})


def test_a_signature_is_of_exactly_these_files(
    project: Path, signed: Path, keys: dict[str, str]
) -> None:
    """A bundle that is changed and sealed again has the right digests, but no signature."""
    manifest = json.loads((signed / "manifest.json").read_text())
    (signed / "manifest.json").write_text(json.dumps(manifest | {"description": "forged"}))
    seal(signed)
    promoted(signed)
    refusal = refused(project, signed, "any_version", f"keys={keys['own']}")
    assert refusal.kind == "TrustError trust" and "exactly these files" in refusal.text


@pytest.mark.parametrize("trusted", ["own", "one of two"])
def test_a_signature_may_serve_the_host_and_the_caller(
    project: Path, signed: Path, keys: dict[str, str], trusted: str
) -> None:
    env = {"PIPELINE_TRUSTED_KEYS": keys[trusted]}
    assert score(project, signed, f"keys={keys[trusted]}", env=env)


@pytest.mark.parametrize(
    ("of_host", "of_caller"), [("own", "other"), ("other", "own"), ("other", "other")]
)
def test_each_group_of_keys_must_have_signed(
    project: Path, signed: Path, keys: dict[str, str], of_host: str, of_caller: str
) -> None:
    """The host's group, in PIPELINE_TRUSTED_KEYS, and the caller's."""
    env = {"PIPELINE_TRUSTED_KEYS": keys[of_host]}
    refusal = refused(project, signed, f"keys={keys[of_caller]}", env=env)
    assert refusal.kind == "TrustError trust"


MEANWHILE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Puts a file in another's place as soon as somebody opens the library of an artifact. */
void *dlopen(const char *path, int mode) {
  void *(*real)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
  void *opened = real(path, mode);
  const char *from = getenv("FROM"), *to = getenv("TO");
  if (path != NULL && strstr(path, "/aoti/") != NULL && rename(from, to) != 0) abort();
  return opened;
}
"""


@pytest.mark.parametrize("name", ["weights.bin", "arguments.txt", "target.txt"])
def test_a_file_that_is_replaced_while_cpp_opens_it(
    project: Path, pulled: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "meanwhile.c").write_text(MEANWHILE)
    library = tmp_path / "meanwhile.so"
    execute("gcc", "-shared", "-fPIC", tmp_path / "meanwhile.c", "-o", library, "-ldl")
    file = pulled / AOTI / name
    shutil.copy(file, tmp_path / name)  # equal content: comparing it finds nothing
    env = {"LD_PRELOAD": str(library), "FROM": str(tmp_path / name), "TO": str(file)}
    refusal = refused(project, pulled, env=env)
    assert refusal.kind == "BundleError bundle-altered" and name in refusal.text
    assert score(project, pulled)  # now that nobody replaces it


def unverified(_: Path, manifest: dict[str, Any]) -> None:
    """Production runs nothing of this target."""
    manifest["targets"][TARGET]["status"] = "unverified"


def failed(_: Path, manifest: dict[str, Any]) -> None:
    """`aoti` failed validation; the engine that was chosen instead needs Python."""
    record = manifest["targets"][TARGET]
    record["chosen"] = "exported"
    record["below"] = []
    record["candidates"]["aoti"]["status"] = "invalid"


@pytest.mark.parametrize(
    ("edit", "word", "code"),
    [
        (unverified, f"target={TARGET}", "load-not-verified"),
        (failed, "engine=aoti", "load-target"),
    ],
)
def test_cpp_runs_in_production_only_what_was_verified(
    project: Path, jets: Built, tmp_path: Path, edit: Callable[..., None], word: str, code: str
) -> None:
    """`word` asks for it by name; `code` is of the refusal if nothing is asked for."""
    folder = promoted(resealed(jets.bundle, tmp_path / "edited", edit).path)
    assert refused(project, folder, "any_version", word).kind == "HostError load-not-verified"
    assert refused(project, folder, "any_version").kind == f"HostError {code}"
    assert score(project, folder, "any_version", "test", word)


def test_certificates_are_refused(project: Path, pulled: Path, tmp_path: Path) -> None:
    root = certify(tmp_path, "root", authority=True)
    ada = certify(tmp_path, "ada", root)
    sign(Bundle.open(pulled), ada.private, chain=[ada.pem])
    refusal = refused(project, pulled, f"keys={root.pem}")
    assert refusal.kind == "TrustError trust" and "certificate" in refusal.text


def test_test_mode_runs_the_bundles_own_reference(
    project: Path, jets: Built, tmp_path: Path
) -> None:
    def edit(folder: Path, _: dict[str, Any]) -> None:
        file = folder / "reference.safetensors"
        content = bytearray(file.read_bytes())
        np.frombuffer(content, np.float32, 1, len(content) - 4)[:] += 0.01  # the last value
        file.write_bytes(content)

    folder = resealed(jets.bundle, tmp_path / "other", edit).path
    refusal = refused(project, folder, "test", "any_version")
    assert refusal.kind == "DeviationError deviation" and "'probabilities': 1 of" in refusal.text
    assert score(project, promoted(folder), "any_version")  # production does not run it


def test_a_target_of_another_processor_family_is_refused(
    project: Path, jets: Built, tmp_path: Path
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"]["cpu/aarch64"] = manifest["targets"].pop(TARGET)

    other = resealed(jets.bundle, tmp_path / "other", edit).path
    refusal = refused(project, other, "test", "any_version")
    assert refusal.kind == "HostError target"
    assert "cpu/aarch64: it lacks another processor family" in refusal.text


def test_a_target_that_the_bundle_does_not_have_is_refused(project: Path, jets: Built) -> None:
    refusal = refused(project, jets.bundle.path, "test", "target=cpu/x86-64-v1")
    assert refusal.kind == "HostError load-target"


def test_an_engine_that_needs_python_is_refused(project: Path, jets: Built) -> None:
    refusal = refused(project, jets.bundle.path, "test", "engine=torchscript")
    assert refusal.kind == "HostError load-target"
    assert "torchscript is no native library" in refusal.text


def test_the_fastest_native_engine_runs_where_another_was_chosen(
    project: Path, jets: Built, tmp_path: Path
) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["chosen"] = "exported"

    folder = resealed(jets.bundle, tmp_path / "other", edit).path
    assert score(project, folder, "test", "any_version")[0].endswith(" aoti")


def test_a_header_of_another_version_is_refused_unless_any_is_taken(
    project: Path, jets: Built, tmp_path: Path
) -> None:
    folder = described(jets.bundle, tmp_path / "two", "the second").path
    refusal = refused(project, folder, "test")
    assert refusal.kind == "HeaderError header"
    assert jets.bundle.digest[:12] in refusal.text and "pipeline cxx" in refusal.text
    assert score(project, folder, "test", "any_version")


def test_a_header_of_other_columns_is_refused(project: Path, jets: Built, tmp_path: Path) -> None:
    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        arguments = folder / AOTI / "arguments.txt"
        arguments.write_text(arguments.read_text().replace("column tags z", "column tags w"))
        renamed = json.dumps(manifest["signature"]).replace('"z"', '"w"')
        manifest["signature"] = json.loads(renamed)

    folder = promoted(resealed(jets.bundle, tmp_path / "other", edit).path)
    refusal = refused(project, folder, "any_version")
    assert refusal.kind == "HeaderError header" and "'tags'" in refusal.text


def test_another_type_or_name_does_not_compile(project: Path, prefix: Path, tmp_path: Path) -> None:
    """Each use is a function in a line of its own, and g++ finds an error in each wrong line."""
    right = [
        "const float *p = j.a; (void)p",
        "float *m = nullptr; jets::jets r(m, 0); jets::tags(m, 0).x[0] = 1",
    ]
    wrong = [
        "const double *p = j.a",
        "const float *p = j.pt",
        "j.a = static_cast<int *>(nullptr)",
        "jets::hits h",
        "j.a[0] = 1",
        "const float *c = nullptr; jets::tags t(c, 5)",
    ]
    source = tmp_path / "use.cpp"
    uses = [
        f"void use{k}(jets::jets &j) {{ {use}; (void)j; }}" for k, use in enumerate(right + wrong)
    ]
    source.write_text("\n".join(['#include "jets.hpp"', *uses, ""]))
    flags = ("-std=c++17", "-fsyntax-only", f"-I{project.parent}", f"-I{prefix}/include")
    messages = subprocess.run(["g++", *flags, source], capture_output=True, text=True).stderr
    errors = {int(line) for line in re.findall(r"use\.cpp:(\d+):\d+: error", messages)}
    first = 2 + len(right)  # lines count from 1, and the first one is the include
    assert errors == set(range(first, first + len(wrong)))


def test_without_torch_the_library_is_named(project: Path, jets: Built) -> None:
    done = run(project / "score", jets.bundle.path, 5, "test", env={"LD_LIBRARY_PATH": ""})
    assert done.returncode == 1
    assert "libtorch_cpu.so" in done.stderr and "LD_LIBRARY_PATH" in done.stderr


def test_tiles_and_threads_give_the_same_bits(project: Path, jets: Built, tmp_path: Path) -> None:
    folder = in_tiles(jets.bundle, tmp_path / "tiled", 128).path
    one, two, three = (
        score(project, folder, "test", "any_version", f"threads={threads}", n=999)
        for threads in (1, 2, 3)
    )
    assert one == two == three


@pytest.mark.parametrize("configured", [1, 2])
def test_threads_share_the_rows_of_lanes(
    project: Path, bare_jets: Built, tmp_path: Path, configured: int
) -> None:
    """The answers of this version are the ids of the threads. The caller asks for two threads, if
    the version is not configured for them."""
    folder = promoted(watched(bare_jets.bundle, tmp_path / "watched", configured).path)
    words = () if configured == 2 else ("threads=2",)
    lines = score(project, folder, "any_version", *words, n=1000, env={"TOGETHER": "1"})
    assert len({line.split()[2] for line in lines[1:] if line.startswith("x")}) == 2


def test_many_threads_share_one_model_and_get_its_bits(project: Path, jets: Built) -> None:
    """threads.cpp prints how many answers differ, how often the weights and libtorch are mapped,
    and the resident memory in kB before and after the calls."""
    done = run(project / "threads", jets.bundle.path, 16, 40)
    different, mapped, _, before, after = map(int, done.stdout.split())
    assert (different, mapped) == (0, 1)
    assert after - before < 16 * 2048  # kB: stacks, events and scratch, but no second model


def test_each_cluster_of_entries_runs_at_once(project: Path, jets: Built) -> None:
    done = run(project / "clusters", jets.bundle.path)
    # Two slots run three clusters; the cluster of one entry runs in one slot only.
    assert done.stdout == "5 runs, 0 off\n"
    assert (done.returncode, "entry 300 is in no cluster" in done.stderr) == (1, True)


# Loads a folder, in test mode if there is a second argument. It prints the code, the refusal or the
# engine, and the number of arguments.
C = """
#include <stdio.h>
#include <soa_load.h>
int main(int argc, char **argv) {
  char message[256] = "";
  soa_model *model = 0;
  soa_origin *origin = 0;
  soa_loading loading = {.test = argc > 2};
  int code = soa_load(argv[1], &loading, &model, &origin, message, sizeof message);
  const char *engine = code ? "" : origin->engine;
  printf("%d %s%s %d\\n", code, soa_refusal(), engine, (int)soa_model_arguments(model));
  soa_model_close(model);
  soa_origin_delete(origin);
  return 0;
}
"""


def test_the_c_interface_by_pkg_config(prefix: Path, jets: Built, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    (tmp_path / "use.c").write_text(C)
    path = f"PKG_CONFIG_PATH={prefix}/lib/pkgconfig"
    flags = execute("env", path, "pkg-config", "--cflags", "--libs", "soa-model").split()
    flags += ["-std=c99", "-Wall", "-Werror", f"-Wl,-rpath,{prefix}/lib"]
    execute("gcc", tmp_path / "use.c", "-o", tmp_path / "use", *flags)
    assert run(tmp_path / "use", jets.bundle.path, "test").stdout == "0 aoti 3\n"
    assert run(tmp_path / "use", jets.bundle.path).stdout == "17 load-not-promoted 0\n"
    version = execute("env", path, "pkg-config", "--modversion", "soa-model")
    assert version.strip() == soa_pipeline.__version__


def test_the_tool_file_of_scram_leads_to_the_installed_files(prefix: Path) -> None:
    tool = xml.parse(prefix / "share" / "soa-model" / "soa-model.xml").getroot()
    assert (tool.tag, tool.get("name")) == ("tool", "soa-model")
    default = {entry.get("name"): entry.get("default") for entry in tool.iter("environment")}
    for name, file in (("INCLUDE", "soa_model.hpp"), ("LIBDIR", "libsoa_model.so")):
        place = str(default[name]).replace("$SOA_MODEL_BASE", str(prefix))
        assert Path(place, file).exists()


@pytest.fixture(scope="module")
def fortran(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gfortran") is None:
        pytest.skip("gfortran is not installed")
    program = tmp_path_factory.mktemp("fortran") / "score_matrix"
    source = ROOT / "examples" / "cpp" / "score_matrix.f90"
    libraries = (f"-L{prefix}/lib", "-lsoa_model", f"-Wl,-rpath,{prefix}/lib")
    execute("gfortran", "-Wall", source, f"-J{program.parent}", "-o", program, *libraries)
    return program


def printed_by_fortran(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the Fortran program, in the form of score.cpp."""
    assert done.returncode == 0, done.stderr
    names = dict(zip("012", "xyz", strict=True))
    lines = [line.split() for line in done.stdout.splitlines()]
    return [f"{names[column]} {row} {bits.lower()}" for column, row, bits in lines]


def test_the_fortran_example(fortran: Path, project: Path, jets: Built) -> None:
    """40 rows of 6 columns, and 3 columns of answers."""
    lines = printed_by_fortran(run(fortran, jets.bundle.path, 40, 6, 3))
    assert lines == score(project, jets.bundle.path, "test", n=40)[1:]


def test_the_fortran_example_refuses_a_folder_in_one_line(fortran: Path) -> None:
    done = run(fortran, fortran.parent, 40, 6, 3)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.long  # it builds the library without libtorch
def test_programs_without_libtorch_give_the_bits_of_python(
    project: Path,
    bare_jets: Built,
    fortran: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if "x86-64-v3" not in host_cpu_levels():
        pytest.skip("the artifact is for x86-64-v3")
    prefix = cplusplus.installed(tmp_path_factory, shim=True)
    env = {"LD_LIBRARY_PATH": str(prefix / "lib")}

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["chosen"] = "aoti"  # this program cannot run it

    folder = resealed(bare_jets.bundle, tmp_path / "chosen", edit).path
    session = pipeline.load(folder, mode="test", engine_name="lanes")
    for n in (1, 40, 999):
        origin, *bits = score(project, folder, "test", "any_version", n=n, env=env)
        assert origin.endswith(" lanes") and bits == computed(session, n)
        assert n != 40 or printed_by_fortran(run(fortran, folder, n, 6, 3, env=env)) == bits
    done = run(project / "threads", folder, 64, 40, env=env)
    different, _, libtorch, before, after = map(int, done.stdout.split())
    assert (different, libtorch) == (0, 0), done.stderr
    assert before < 40_000 and after - before < 64 * 1024  # kB
    print(done.stdout)


@pytest.mark.long
def test_the_rdataframe_example_has_the_mean_score_of_python(
    project: Path, prefix: Path, jets: Built, tmp_path: Path
) -> None:
    uproot = pytest.importorskip("uproot")
    if shutil.which("root-config") is None:
        pytest.skip("ROOT is not installed")
    rng = np.random.default_rng(1)
    columns = {name: rng.random(3000, np.float32) for name in "abcdef"}
    with uproot.recreate(tmp_path / "rows.root") as file:
        tree = file.mktree("Events", dict.fromkeys("abcdef", "float32"))
        for begin in range(0, 3000, 700):
            tree.extend({name: values[begin : begin + 700] for name, values in columns.items()})
    source = ROOT / "examples" / "cpp" / "dataframe.cpp"
    flags = execute("root-config", "--cflags", "--libs").split()
    ours = (f"-I{prefix}/include", f"-L{prefix}/lib", "-lsoa_model", f"-Wl,-rpath,{prefix}/lib")
    execute(
        "g++", source, "-o", tmp_path / "dataframe", *ours, *flags, "-Wl,--allow-shlib-undefined"
    )
    words = (jets.bundle.path, tmp_path / "rows.root", "Events", "jets", "tags", "y")
    done = run(tmp_path / "dataframe", *words)
    assert done.returncode == 0, done.stderr
    session = pipeline.load(jets.bundle.path, mode="test", engine_name="aoti")
    scores = []
    for begin in range(0, 3000, 1000):
        part = {name: values[begin : begin + 1000] for name, values in columns.items()}
        jets_part = pipeline.Collection.from_arrays(session.layout("jets"), part, 1000)
        tags = session.collection("tags", 1000)
        session.run(jets_part, tags)
        scores.append(np.array(tags["y"]))
    count, _, _, _, mean = done.stdout.split()
    assert count == "3000"
    assert float(mean) == pytest.approx(np.concatenate(scores).mean(dtype=np.float64), abs=2e-6)
