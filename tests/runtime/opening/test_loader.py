"""Loading: what each mode accepts, from a registry or from a folder, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
    registry = Registry(f"sqlite:///{folder}/registry.db")
    registry.promote(registry.register(jets.bundle), "production", PASSED)
    registry.register(described(jets.bundle, folder / "other", "other"))
    return registry


@pytest.fixture(scope="module")
def pulled(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of jets/1, with the note of its promotion; no test may change it."""
    folder = tmp_path_factory.mktemp("pulled") / "jets"
    pull(registry, "jets@production", folder)
    return folder


@pytest.fixture
def copy(pulled: Path, tmp_path: Path) -> Path:
    """A copy of the pulled folder, which a test may damage."""
    return Path(shutil.copytree(pulled, tmp_path / "copy"))


@pytest.mark.parametrize("ref", ["jets@production", "jets/1"])
@pytest.mark.parametrize("by_uri", [False, True])
def test_production_takes_what_was_promoted(registry: Registry, ref: str, by_uri: bool) -> None:
    session = load(ref, registry=registry.uri if by_uri else registry)
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
def test_test_mode_takes_what_was_not(registry: Registry, name: str) -> None:
    session = load("jets/2", mode="test", registry=registry, engine_name=name)
    assert isinstance(session, CheckedSession)
    require_right(session, name)
    assert session.report.events == 1
    assert session.report.worst["probabilities"].outside == 0


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("form", [Path, str])
def test_test_mode_takes_a_folder(
    jets: Built, form: Callable[[Path], str | Path], name: str
) -> None:
    session = load(form(jets.bundle.path), mode="test", engine_name=name)
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
    error = in_a_child(lambda: load(jets.bundle.path, mode="test", threads=2))
    assert error.startswith("RunError: OpenMP's threads do not come through a fork")


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
    folder, caller = vouched(bundle), {threading.get_native_id()}
    assert computing_threads(load(folder, threads=1), 1000) == caller
    monkeypatch.setenv("TOGETHER", "1")  # the artifact waits until a second thread has begun
    session = load(folder, threads=None if configured else 2)
    assert computing_threads(session, 5) == caller
    both = computing_threads(session, 1000)
    assert len(both) == 2
    assert caller < both


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
torch_works = float(torch.ones(4, 4).mm(torch.ones(4, 4)).sum()) == 64
print(json.dumps([session.origin.engine, heavy, torch_works, bare == answers()]))
"""


def test_a_pulled_folder_runs_without_torch_registry_and_mlflow(
    pulled: Path, tmp_path: Path
) -> None:
    """Of torch, only the native library is loaded; torch may be imported later."""
    (tmp_path / "empty").mkdir()
    process = subprocess.run(
        [sys.executable, "-c", _BARE, str(pulled)],
        cwd=tmp_path / "empty",
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (process.returncode, process.stderr) == (0, "")
    engine, heavy, torch_works, same_answers = json.loads(process.stdout)
    assert (engine, heavy) == ("aoti", [])
    assert torch_works
    assert same_answers
    assert not list((tmp_path / "empty").iterdir())


def test_a_folder_that_was_not_promoted_is_not_for_production(
    registry: Registry, tmp_path: Path
) -> None:
    pull(registry, "jets/2", tmp_path / "copy")  # it was not promoted
    with pytest.raises(LoadError, match="is a folder that no promotion vouches for: make one with"):
        load(tmp_path / "copy")


@pytest.mark.parametrize("mode", ["production", "test"])
def test_a_folder_that_was_altered_is_refused(copy: Path, mode: Mode) -> None:
    (library,) = copy.rglob("*.so")
    content = bytearray(library.read_bytes())
    content[-1] ^= 1
    library.write_bytes(content)
    with pytest.raises(BundleError, match=rf"{library.name} is truncated or altered"):
        load(copy, mode=mode)


def test_the_note_of_another_bundle_is_refused(copy: Path, jets: Built, tmp_path: Path) -> None:
    other = described(jets.bundle, tmp_path / "forged", "forged")
    shutil.copy(copy / "PROMOTED.json", other.path)
    with pytest.raises(LoadError, match=r"is not the bundle that was promoted as jets/1: its dig"):
        load(other.path)


@pytest.mark.parametrize("text", ["", "[]", '{"ref": "jets/1"}'])
def test_a_note_without_its_fields_is_refused(copy: Path, text: str) -> None:
    (copy / "PROMOTED.json").write_text(text)
    with pytest.raises(BundleError, match=r"PROMOTED\.json: not the record of a promotion"):
        load(copy)


@pytest.mark.parametrize("text", ["", "[]", '{"ref": "jets/1"}'])
def test_test_mode_reads_no_note(copy: Path, text: str) -> None:
    (copy / "PROMOTED.json").write_text(text)
    require_right(load(copy, mode="test"))


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


@pytest.mark.parametrize(("ref", "message"), [("jets", r"write \./jets"), ("tracks", "nothing is")])
def test_a_name_makes_no_registry(beside_jets: Path, ref: str, message: str) -> None:
    with pytest.raises(NotFoundError, match=message):
        load(ref, registry=f"sqlite:///{beside_jets}/none/registry.db")
    assert not (beside_jets / "none").exists()


@pytest.mark.parametrize("ref", ["./nothing", "jets@", ""])
def test_text_that_is_no_version_and_no_folder_is_refused(registry: Registry, ref: str) -> None:
    with pytest.raises(RegistryError):
        load(ref, registry=registry)


# Mode, device, target, engine


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_an_option_that_cannot_be_met_is_refused(
    pulled: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((LoadError, TargetError), match=message):
        load(pulled, **options)


@pytest.fixture
def auto(pulled: Path) -> MultiDeviceSession:
    """A session that runs where the data is."""
    session = load(pulled, device="auto", instances=3)
    assert isinstance(session, MultiDeviceSession)
    return session


def test_a_device_is_used_from_its_first_event_on(auto: MultiDeviceSession) -> None:
    assert auto.devices == []
    auto.run(auto.collection("jets", 40), auto.collection("tags", 40))
    assert auto.devices == [torch.device("cpu")]


def test_a_session_for_all_devices_has_the_answers_of_one_for_the_cpu(
    auto: MultiDeviceSession, pulled: Path
) -> None:
    jets, tags = auto.collection("jets", 40), auto.collection("tags", 40)
    for column in jets.layout.columns:
        jets.tensor(column.name).copy_(torch.linspace(1, 40, 40))
    auto.run(jets, tags)
    expected = auto.collection("tags", 40)
    load(pulled).run(jets, expected)
    assert torch.equal(tags.memory()[0], expected.memory()[0])


def test_a_closed_session_for_all_devices_binds_nothing(auto: MultiDeviceSession) -> None:
    jets, tags = auto.collection("jets", 40), auto.collection("tags", 40)
    auto.close()
    with pytest.raises(RunError, match="the session is closed"):
        auto.bind(jets, tags)


def test_production_leaves_torch_no_thread_to_start(pulled: Path) -> None:
    """This runs in a process of its own, as torch accepts the inter-op setting only once."""
    code = (
        "import sys, torch; from runtime.loader import load; load(sys.argv[1]);"
        "print(torch.get_num_threads(), torch.get_num_interop_threads())"
    )
    command = [sys.executable, "-c", code, str(pulled)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stdout.split() == ["1", "1"], process.stderr


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


LACKING = "cpu/x86-64-v2" if host_cpu_levels()[0] == "aarch64" else "cpu/aarch64"
"""A target that this host cannot run."""


def test_a_named_target_that_this_host_lacks_is_refused(jets: Built, tmp_path: Path) -> None:
    folder = retargeted(jets, tmp_path / "edited", LACKING).path
    with pytest.raises(TargetError, match=f"this host cannot run {LACKING}: it lacks"):
        load(folder, mode="test", target=LACKING)


def test_a_version_for_other_cpus_is_refused(jets: Built, tmp_path: Path) -> None:
    folder = retargeted(jets, tmp_path / "edited", LACKING).path
    with pytest.raises(TargetError, match=f"this CPU can run: {LACKING}: it lacks"):
        load(folder, mode="test")


def test_a_version_for_gpus_alone_is_refused_on_a_cpu(jets: Built, tmp_path: Path) -> None:
    folder = retargeted(jets, tmp_path / "edited", "cuda/sm_1").path
    with pytest.raises(TargetError, match="no artifact for the CPU; this version holds: cuda/sm_1"):
        load(folder, mode="test")


def test_production_runs_only_what_was_verified_on_the_target(jets: Built, tmp_path: Path) -> None:
    folder = vouched(retargeted(jets, tmp_path / "edited", TARGET, status="unverified"))
    with pytest.raises(LoadError, match=f"jets is unverified on {TARGET}: production runs only"):
        load(folder)


def test_test_mode_runs_what_was_not_verified(jets: Built, tmp_path: Path) -> None:
    folder = retargeted(jets, tmp_path / "edited", TARGET, status="unverified").path
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
    ("engine", "mode", "message"),
    [
        ("torchscript", "production", "the torchscript artifact .* is refused: too far off"),
        ("aoti", "production", "the aoti artifact .* is failed: it crashed"),
        ("aoti", "test", f"aoti made no artifact for {TARGET}"),
        ("onnxruntime", "production", "no artifact of 'onnxruntime' .* it has: aoti, exported"),
        ("", "production", "no artifact of '' .* it has: aoti, exported"),
    ],
)
def test_an_engine_that_has_nothing_to_run_is_refused(
    of_exported: Path, engine: str, mode: Mode, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load(of_exported, mode=mode, engine_name=engine)


@pytest.fixture
def invalid(jets: Built, tmp_path: Path) -> Path:
    """A folder in which every artifact is invalid."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        record.update(status="failed", chosen=None)
        for candidate in record["candidates"].values():
            candidate.update(status="invalid", reason="too far off")

    return resealed(jets.bundle, tmp_path / "edited", edit).path


def test_a_target_without_a_valid_artifact_is_refused(invalid: Path) -> None:
    with pytest.raises(LoadError, match=r"no valid artifact on .*: aoti: too far off; exported: "):
        load(invalid, mode="test", target=TARGET)


def test_an_invalid_artifact_is_run_by_its_name(invalid: Path) -> None:
    require_right(load(invalid, mode="test", target=TARGET, engine_name="exported"))


@pytest.mark.parametrize(("n", "engine"), [(49, "aoti"), (50, "torchscript")])
def test_the_manifest_chooses_the_engine_by_rows(
    jets: Built, tmp_path: Path, n: int, engine: str
) -> None:
    """Each n has the bits of its engine, which are others than those of the other engine."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        record["chosen"] = "torchscript"
        record["below"] = [{"rows": 50, "engine": "aoti"}]

    folder = resealed(jets.bundle, tmp_path / "edited", edit).path
    session = load(folder, mode="test")
    assert session.origin is not None
    assert session.origin.engine == "torchscript (aoti below 50 rows)"
    inputs = session.collection("jets", n)
    for i, column in enumerate(inputs.layout.columns):
        inputs.tensor(column.name).copy_(torch.linspace(1, 9 + i, n))
    bits = {
        name: output_bytes(load(folder, mode="test", engine_name=name), inputs)
        for name in ("aoti", "torchscript")
    }
    mixed = output_bytes(session, inputs)
    assert [name for name, content in bits.items() if content == mixed] == [engine]


def output_bytes(session: Session, inputs: Collection) -> bytes:
    outputs = session.collection("tags", inputs.n)
    session.run(inputs, outputs)
    return outputs.memory()[0].numpy().tobytes()
