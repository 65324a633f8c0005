"""Loading: what each mode accepts, from a registry or from a folder, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import RunError, TargetError
from engines.kinds import host_cpu_levels
from pipeline.loading import load
from pipeline.promotion.pulling import pull
from registry.bundle import Bundle
from registry.errors import BundleError, NotFoundError, RegistryError
from registry.store.registry import Registry
from runtime import process
from runtime.checked.test_mode import CheckedSession
from runtime.devices.everywhere import MultiDeviceSession
from runtime.errors import LoadError
from runtime.opening import Mode
from runtime.session.session import Session
from soa import Collection
from tests.models.forked import in_a_child
from tests.models.project import PASSED, TARGET, Built, described, require_right, resealed
from tests.models.versions import vouched
from tests.models.watched import watched

ENGINES = ("aoti", "torchscript", "exported")


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder in which no test may leave MLflow's files."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not [path.name for path in Path.cwd().iterdir() if path.name != "jets"]


@pytest.fixture(scope="module")
def registry(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """jets/1 is in production, jets/2 (the same artifacts) was never promoted."""
    folder = tmp_path_factory.mktemp("loader")
    made = Registry(f"sqlite:///{folder}/registry.db")
    made.promote(made.register(jets.bundle), "production", PASSED)
    made.register(described(jets.bundle, folder / "other", "other"))
    return made


@pytest.fixture(scope="module")
def pulled(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pulled") / "jets"
    pull(registry, "jets@production", folder)
    return folder


@pytest.fixture
def copy(pulled: Path, tmp_path: Path) -> Path:
    """A copy of the pulled folder, which a test may damage."""
    return Path(shutil.copytree(pulled, tmp_path / "copy"))


def test_production_takes_what_was_promoted(registry: Registry) -> None:
    for session in (
        load("jets@production", registry=registry),
        load("jets/1", registry=registry.uri),
    ):
        assert type(session) is Session
        assert session.origin is not None
        assert (session.origin.name, session.origin.version) == ("jets", "1")
        assert session.origin.target == TARGET
        require_right(session)


@pytest.mark.parametrize("ref", ["jets", "jets/2"])
def test_production_refuses_what_was_not(registry: Registry, ref: str) -> None:
    with pytest.raises(LoadError) as caught:
        load(ref, registry=registry)
    assert str(caught.value) == (
        "jets/2 was never promoted to production: run `pipeline promote jets/2 --to production`, "
        "or load it with mode='test'"
    )


@pytest.mark.parametrize("name", ENGINES)
def test_test_mode_takes_anything(registry: Registry, jets: Built, name: str) -> None:
    for ref in ("jets/2", jets.bundle.path, str(jets.bundle.path)):
        session = load(ref, mode="test", registry=registry, engine_name=name)
        assert isinstance(session, CheckedSession)
        require_right(session, name)
        assert session.report.events == 1
        assert session.report.worst["probabilities"].outside == 0


def test_test_mode_does_not_change_torchs_threads(jets: Built) -> None:
    torch.set_num_threads(2)
    load(jets.bundle.path, mode="test")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("options", "threads"), [({}, 1), ({"threads": 2}, 2)])
def test_production_sets_torchs_threads(
    registry: Registry, options: dict[str, Any], threads: int
) -> None:
    """By default it uses the caller's thread alone."""
    torch.set_num_threads(3 - threads)
    load("jets@production", registry=registry, **options)
    assert torch.get_num_threads() == threads


def test_several_threads_after_a_fork_are_refused(jets: Built) -> None:
    said = in_a_child(lambda: load(jets.bundle.path, mode="test", threads=2))
    assert said.startswith("RunError: OpenMP's threads do not come through a fork")


def computing_threads(session: Session, n: int) -> set[int]:
    """The threads that compute n rows with the artifact of `watched`."""
    jets, tags = session.collection("jets", n), session.collection("tags", n)
    session.run(jets, tags)
    return set(tags.tensor("x").view(torch.int32).tolist())


@pytest.mark.parametrize("configured", [False, True])
def test_threads_share_the_rows_of_lanes(
    bare_jets: Built, tmp_path: Path, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load(threads=2)` and `session.threads` of the config; few rows stay in one thread."""
    bundle = watched(bare_jets.bundle, tmp_path / "watched", 2 if configured else None)
    folder, here = vouched(bundle), {threading.get_native_id()}
    assert computing_threads(load(folder, threads=1), 1000) == here
    monkeypatch.setenv("TOGETHER", "1")
    session = load(folder, threads=None if configured else 2)
    assert computing_threads(session, 5) == here
    both = computing_threads(session, 1000)
    assert len(both) == 2 and here < both


# Folders


_BARE = """
import json, sys
import pipeline

session = pipeline.load(sys.argv[1])
jets, tags = session.collection("jets", 7), session.collection("tags", 7)

def answers():
    session.run(jets, tags)
    return [tags[name].tolist() for name in "xyz"]

bare = answers()
heavy = [name for name in ("torch", "mlflow", "sqlalchemy") if name in sys.modules]
import torch
import_fits = float(torch.ones(4, 4).mm(torch.ones(4, 4)).sum()) == 64
print(json.dumps([session.origin.engine, heavy, import_fits, bare == answers()]))
"""


def test_a_pulled_folder_runs_without_torch_registry_and_mlflow(
    pulled: Path, tmp_path: Path
) -> None:
    """Of torch, only the native library is loaded; torch may be imported later."""
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _BARE, str(pulled)],
        cwd=tmp_path / "empty",
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ["aoti", [], True, True]
    assert not list((tmp_path / "empty").iterdir())


def test_plain_folder_is_not_for_production(registry: Registry, tmp_path: Path) -> None:
    pull(registry, "jets/2", tmp_path / "copy")  # it was not promoted
    with pytest.raises(LoadError, match="is a folder that no promotion vouches for: make one with"):
        load(tmp_path / "copy")


def test_pulled_folder_that_was_altered(copy: Path) -> None:
    (library,) = copy.rglob("*.so")
    content = bytearray(library.read_bytes())
    content[-1] ^= 1
    library.write_bytes(content)
    for mode in ("production", "test"):
        with pytest.raises(BundleError, match=rf"{library.name} is truncated or altered"):
            load(copy, mode=mode)


def test_note_of_another_bundle(copy: Path, jets: Built, tmp_path: Path) -> None:
    other = described(jets.bundle, tmp_path / "forged", "forged")
    shutil.copy(copy / "PROMOTED.json", other.path)
    with pytest.raises(LoadError, match=r"is not the bundle that was promoted as jets/1: its dig"):
        load(other.path)


@pytest.mark.parametrize("text", ["", "[]", '{"ref": "jets/1"}'])
def test_note_that_is_none(copy: Path, text: str) -> None:
    (copy / "PROMOTED.json").write_text(text)
    with pytest.raises(BundleError, match=r"PROMOTED\.json: not the record of a promotion"):
        load(copy)
    load(copy, mode="test")


@pytest.fixture
def beside_jets(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which has the pulled folder `jets`."""
    monkeypatch.chdir(pulled.parent)
    return pulled.parent


@pytest.mark.usefixtures("beside_jets")
@pytest.mark.parametrize("ref", ["./jets", Path("jets")])
def test_a_path_is_a_folder(registry: Registry, ref: str | Path) -> None:
    require_right(load(ref, registry=registry))


@pytest.mark.usefixtures("beside_jets")
def test_a_name_is_a_model_although_a_folder_has_it_too(registry: Registry) -> None:
    with pytest.raises(LoadError, match="never promoted"):
        load("jets", registry=registry)


@pytest.mark.parametrize(("ref", "says"), [("jets", r"write \./jets"), ("tracks", "nothing is")])
def test_a_name_makes_no_registry(beside_jets: Path, ref: str, says: str) -> None:
    with pytest.raises(NotFoundError, match=says):
        load(ref, registry=f"sqlite:///{beside_jets}/none/registry.db")
    assert not (beside_jets / "none").exists()


@pytest.mark.parametrize("ref", ["./nothing", "jets@", ""])
def test_text_that_is_no_version_and_no_folder_is_refused(registry: Registry, ref: str) -> None:
    with pytest.raises(RegistryError):
        load(ref, registry=registry)


# Mode, device, target, engine


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "fast"}, "mode 'fast' is neither 'test' nor 'production'"),
        *(
            ({"device": name}, f"device '{name}': use 'cpu', 'cuda' or 'cuda:1'")
            for name in ("gpu", "meta", "cpu:x")
        ),
        ({"device": "cuda:99"}, r"device 'cuda:99': torch sees [0-9]+ GPUs here"),
        ({"device": "auto", "target": TARGET}, "with device 'auto': each device has its own targ"),
        ({"threads": 0}, "threads=0: 1 to"),
        ({"instances": 0}, "instances=0: 1 to"),
        ({"target": "cpu/x86-64-v2"}, f"jets has no target cpu/x86-64-v2; it has: {TARGET}"),
        ({"target": "cpu/486"}, "unknown target 'cpu/486'"),
    ],
)
def test_options_that_this_version_or_host_refuses(
    pulled: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises((LoadError, TargetError), match=says):
        load(pulled, **options)


def test_where_the_data_is(pulled: Path, jets: Built) -> None:
    """A session is opened for a device when the first event comes from it."""
    session = load(pulled, device="auto", instances=3)
    assert isinstance(session, MultiDeviceSession)
    assert session.devices == []
    given, written = session.collection("jets", 40), session.collection("tags", 40)
    for c in given.layout.columns:
        given.tensor(c.name).copy_(torch.linspace(1, 40, 40))
    session.run(given, written)
    assert session.devices == [torch.device("cpu")]
    expected = session.collection("tags", 40)
    load(pulled).run(given, expected)
    assert torch.equal(written.memory()[0], expected.memory()[0])
    session.close()
    with pytest.raises(RunError, match="the session is closed"):
        session.bind(given, written)


def test_production_leaves_torch_no_thread_to_start(pulled: Path) -> None:
    """This runs in a process of its own, as torch accepts the inter-op setting only once."""
    code = (
        "import sys, torch; from runtime.loader import load; load(sys.argv[1]);"
        "print(torch.get_num_threads(), torch.get_num_interop_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pulled)], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_a_process_in_production_still_exports(
    pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may do this, and so may a build at first use beside a loaded model on a GPU."""
    monkeypatch.setattr(process, "_tf32", [])
    load(pulled)
    process.settle_tf32(False, "jets")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.export.export(torch.nn.Linear(6, 3), (torch.zeros(4, 6),))


def retargeted(jets: Built, folder: Path, name: str, **changes: Any) -> Bundle:
    """A copy of the bundle whose record names another target."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = {**manifest["targets"][TARGET], **changes}
        manifest["targets"] = {name: record}

    return resealed(jets.bundle, folder, edit)


def test_target_that_this_host_lacks(jets: Built, tmp_path: Path) -> None:
    lacking = "cpu/x86-64-v2" if host_cpu_levels()[0] == "aarch64" else "cpu/aarch64"
    folder = retargeted(jets, tmp_path / "edited", lacking).path
    with pytest.raises(TargetError, match=f"this host cannot run {lacking}: it lacks"):
        load(folder, mode="test", target=lacking)
    with pytest.raises(TargetError, match=f"this CPU can run: {lacking}: it lacks"):
        load(folder, mode="test")
    of_gpu = retargeted(jets, tmp_path / "other", "cuda/sm_1").path
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_1"):
        load(of_gpu, mode="test")


def test_production_runs_only_what_was_verified_on_the_target(jets: Built, tmp_path: Path) -> None:
    folder = vouched(retargeted(jets, tmp_path / "edited", TARGET, status="unverified"))
    with pytest.raises(LoadError, match=f"jets is unverified on {TARGET}: production runs only"):
        load(folder)
    require_right(load(folder, mode="test"))


@pytest.fixture(scope="module")
def of_exported(jets: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A promoted folder of `exported`; its torchscript artifact is invalid, aoti made none."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        candidates = manifest["targets"][TARGET]["candidates"]
        manifest["targets"][TARGET]["chosen"] = "exported"
        candidates["torchscript"].update(status="invalid", reason="too far off")
        candidates["aoti"].update(status="failed", reason="it crashed", files=[])

    return vouched(resealed(jets.bundle, tmp_path_factory.mktemp("exported") / "edited", edit))


def test_production_runs_the_chosen_engine(of_exported: Path) -> None:
    session = load(of_exported)
    require_right(session)
    assert session.origin is not None and session.origin.engine == "exported"


def test_test_mode_runs_an_invalid_artifact(of_exported: Path) -> None:
    require_right(load(of_exported, mode="test", engine_name="torchscript"))


@pytest.mark.parametrize(
    ("engine", "mode", "says"),
    [
        ("torchscript", "production", "the torchscript artifact .* is refused: too far off"),
        ("aoti", "production", "the aoti artifact .* is failed: it crashed"),
        ("aoti", "test", f"aoti made no artifact for {TARGET}"),
        ("onnxruntime", "production", "no artifact of 'onnxruntime' .* it has: aoti, exported"),
        ("", "production", "no artifact of '' .* it has: aoti, exported"),
    ],
)
def test_an_engine_that_has_nothing_to_run_is_refused(
    of_exported: Path, engine: str, mode: Mode, says: str
) -> None:
    with pytest.raises(LoadError, match=says):
        load(of_exported, mode=mode, engine_name=engine)


def test_a_target_without_a_valid_artifact_is_refused(jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        record.update(status="failed", chosen=None)
        for candidate in record["candidates"].values():
            candidate.update(status="invalid", reason="too far off")

    folder = resealed(jets.bundle, tmp_path / "edited", edit).path
    with pytest.raises(LoadError, match=r"no valid artifact on .*: aoti: too far off; exported: "):
        load(folder, mode="test", target=TARGET)
    require_right(load(folder, mode="test", target=TARGET, engine_name="exported"))


def test_another_engine_below_some_rows(jets: Built, tmp_path: Path) -> None:
    """The manifest chooses the engine by rows: each n has the bits of its engine, which are others
    than those of the other engine."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        record["chosen"] = "torchscript"
        record["below"] = [{"rows": 50, "engine": "aoti"}]

    folder = resealed(jets.bundle, tmp_path / "edited", edit).path
    session = load(folder, mode="test")
    assert session.origin is not None
    assert session.origin.engine == "torchscript (aoti below 50 rows)"
    by_engine = {name: load(folder, mode="test", engine_name=name) for name in ENGINES[:2]}
    for n, expected in ((49, "aoti"), (50, "torchscript")):
        given = session.collection("jets", n)
        for k, c in enumerate(given.layout.columns):
            given.tensor(c.name).copy_(torch.linspace(1, 9 + k, n))

        def bits(of: Session, given: Collection = given) -> bytes:
            written = of.collection("tags", given.n)
            of.run(given, written)
            return written.memory()[0].numpy().tobytes()

        same = [name for name, each in by_engine.items() if bits(each) == bits(session)]
        assert same == [expected]
