"""A session is pickled as its version; another process opens that version once."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.loading import load
from pipeline.promotion.pulling import pull
from registry.bundle import Bundle
from registry.errors import NotFoundError, TrustError
from registry.housekeeping import remove
from registry.ref import Ref
from registry.store.registry import Registry
from registry.trust import sign
from runtime.checked.test_mode import CheckedSession
from runtime.devices.everywhere import MultiDeviceSession
from runtime.errors import LoadError
from runtime.loader import KEPT, Reopening, open_measured_session
from runtime.opening import Opening, open_version
from runtime.session.session import Session
from runtime.versions.live import LiveSession
from tests.models.keys import make_keys
from tests.models.project import TARGET, Built, described
from tests.models.versions import promoted

ROOT = Path(__file__).parents[2]
# Another process in another folder: it opens the pickled sessions and runs one on columns.
OTHER = """
import pickle, sys
blobs, columns = pickle.load(sys.stdin.buffer)
first, second = map(pickle.loads, blobs)
assert first is second and pickle.loads(pickle.dumps(first)) is first
n = len(columns["a"])
jets, tags = first.collection("jets", n), first.collection("tags", n)
for name, values in columns.items():
    jets[name][:] = values
first.run(jets, tags)
origin = first.origin
values = {name: tags[name].copy() for name in "xyz"}
sys.stdout.buffer.write(pickle.dumps((origin.version, origin.digest, origin.target, values)))
"""


def answers(session: Session, columns: dict[str, Any]) -> dict[str, Any]:
    """The output columns for these input columns; the others hold zeros."""
    n = len(columns["a"])
    jets, tags = session.collection("jets", n), session.collection("tags", n)
    for name, values in columns.items():
        jets[name][:] = values
    session.run(jets, tags)
    return {name: tags[name].copy() for name in "xyz"}


def reopening(session: Session) -> Reopening:
    assert isinstance(session.reopening, Reopening)
    return session.reopening


def test_unpickling_gives_the_session_that_is_open(registry: Registry) -> None:
    session = load("jets@production", registry=registry)
    reopening(session).share(session)
    assert pickle.loads(pickle.dumps(session)) is session


def test_a_closed_session_is_opened_again_once(registry: Registry) -> None:
    session = load("jets@production", registry=registry)
    reopening(session).share(session)
    before = answers(session, {"a": np.ones(3)})
    blob = pickle.dumps(session)
    session.close()
    restored = pickle.loads(blob)
    assert restored is not session
    assert pickle.loads(blob) is restored
    assert np.array_equal(answers(restored, {"a": np.ones(3)})["x"], before["x"])


def test_the_sessions_used_last_are_kept(registry: Registry) -> None:
    """One more than are kept is shared; of the others, the second one was used least lately."""
    threads = range(1, KEPT + 2)  # different ones, so that no two sessions are the same
    sessions = [load("jets@production", registry=registry, threads=n) for n in threads]
    first, second, *_, last = sessions
    for session in (*sessions[:KEPT], first, last):
        reopening(session).share(session)
    assert pickle.loads(pickle.dumps(first)) is first
    assert pickle.loads(pickle.dumps(last)) is last
    assert pickle.loads(pickle.dumps(second)) is not second


def test_another_process_gives_the_same_bits_of_the_same_version(
    jets: Built, registry: Registry, tmp_path: Path
) -> None:
    session = load("jets@production", registry=registry)
    blobs = [pickle.dumps(session), pickle.dumps(session)]
    promoted(registry, described(jets.bundle, tmp_path / "next", "the next one"))
    columns = {name: np.random.default_rng(i).normal(size=37) for i, name in enumerate("abcdef")}
    process = subprocess.run(
        [sys.executable, "-c", OTHER],
        input=pickle.dumps((blobs, columns)),
        env={"PYTHONPATH": str(ROOT), "PIPELINE_CACHE": str(tmp_path / "cache")},
        cwd="/",
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr.decode()
    version, digest, target, values = pickle.loads(process.stdout)
    assert (version, digest, target) == ("1", jets.bundle.digest, TARGET)
    expected = answers(session, columns)
    assert all(np.array_equal(values[name], expected[name]) for name in "xyz")


@pytest.mark.parametrize(
    ("kind", "ref", "options"),
    [
        (Session, Path("pulled"), {"engine_name": "exported"}),
        (CheckedSession, "jets/1", {"mode": "test", "engine_name": "exported"}),
        (MultiDeviceSession, "jets", {"device": "auto"}),
    ],
)
def test_a_session_is_opened_again_as_it_was_loaded(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    kind: type[Session], ref: str | Path, options: dict[str, Any],
) -> None:  # fmt: skip
    pull(registry, "jets@production", tmp_path / "pulled")
    monkeypatch.chdir(tmp_path)
    session = load(ref, registry=registry, **options)
    restored = pickle.loads(pickle.dumps(session))
    assert type(restored) is kind
    assert restored is not session
    assert artifact_of(restored) == artifact_of(session)


def artifact_of(session: Session) -> tuple[str, str | None] | None:
    """The engine and the bundle's digest; None for a session of several devices."""
    origin = session.origin
    return None if origin is None else (origin.engine, origin.digest)


def test_a_pickled_session_keeps_its_target(registry: Registry) -> None:
    """Hosts that can run a better target open the same artifact."""
    assert reopening(load("jets", registry=registry)).opening.target == TARGET


def test_a_pickled_session_does_not_show_its_registry(registry: Registry) -> None:
    """Its address may hold a password."""
    assert registry.uri not in repr(reopening(load("jets", registry=registry)))


@pytest.mark.parametrize("from_folder", [False, True])
def test_the_keys_that_a_caller_trusts_travel_with_it(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_folder: bool
) -> None:
    """In another folder, the process still refuses a version that another key has signed since."""
    mine, other = (make_keys(tmp_path, name) for name in ("mine", "other"))
    registry.sign(registry.find("jets/1"), mine.private)
    pull(registry, "jets@production", pulled := tmp_path / "pulled")
    monkeypatch.chdir(tmp_path)
    session = load(
        pulled if from_folder else "jets/1",
        registry=registry, trusted_keys="mine.pem", engine_name="exported",
    )  # fmt: skip
    blob = pickle.dumps(session)
    monkeypatch.chdir("/")
    pickle.loads(blob).close()
    registry.sign(registry.find("jets/1"), other.private)
    sign(Bundle.open(pulled), other.private)
    with pytest.raises(TrustError, match="none of those trusted"):
        pickle.loads(blob)


def test_a_version_that_is_not_what_it_was_is_refused(
    jets: Built, registry: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "pulled"
    pull(registry, "jets@production", folder)
    blob = pickle.dumps(load(folder))
    promoted(registry, described(jets.bundle, tmp_path / "next", "the next one"))
    folder.rename(tmp_path / "old")
    pull(registry, "jets@production", folder)
    with pytest.raises(LoadError, match="digest") as caught:
        pickle.loads(blob)
    assert jets.bundle.digest[:12] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_version_that_is_gone_is_refused(jets: Built, empty: Registry, tmp_path: Path) -> None:
    empty.register(jets.bundle)
    empty.register(described(jets.bundle, tmp_path / "other", "another one"))
    blob = pickle.dumps(load("jets/1", mode="test", registry=empty, engine_name="exported"))
    remove(empty, Ref("jets", 1))
    with pytest.raises(NotFoundError, match="jets/1"):
        pickle.loads(blob)


def require_not_pickled(session: Session | LiveSession) -> None:
    with pytest.raises(LoadError, match="cannot be pickled") as caught:
        pickle.dumps(session)
    assert "\n" not in str(caught.value)


def test_a_session_for_measurements_is_not_pickled(registry: Registry) -> None:
    opened = open_version(Opening("jets/1", registry=registry))
    require_not_pickled(open_measured_session(opened, TARGET, "exported"))


def test_a_live_session_is_not_pickled_but_its_version_is(registry: Registry) -> None:
    live = load("jets@production", live=True, registry=registry)
    require_not_pickled(live)
    assert reopening(live.current).opening.ref == "jets/1"
