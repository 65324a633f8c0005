"""How a name is looked up, and what is served if no registry can be asked."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from registry.errors import (
    BundleError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
    TrustError,
)
from registry.promotion.policy import Policy
from registry.store import Lookup
from registry.store.host_cache import Cache, cache_root
from registry.store.registry import Registry
from registry.trust import read_trusted
from runtime.errors import LoadError
from runtime.loader import load
from runtime.opening import LOOKUPS, LookupPolicy, Opening, open_artifact, open_version
from runtime.session import in_tiles
from runtime.session.session import Session
from tests.models.keys import KeyPair, make_keys
from tests.models.project import TARGET, Built, described
from tests.models.versions import negated, promoted

NAME = "jets@production"


def lookup_of(session: Session) -> Lookup:
    """How the session's version was looked up."""
    assert session.origin is not None
    assert session.origin.lookup is not None
    return session.origin.lookup


def version_of(session: Session) -> str | None:
    assert session.origin is not None
    return session.origin.version


def require_runs(session: Session) -> None:
    """Requires that the three probabilities of each of five rows add up to 1."""
    jets, tags = session.collection("jets", 5), session.collection("tags", 5)
    session.run(jets, tags)
    assert float(tags.tensor("x").sum() + tags["y"].sum() + tags["z"].sum()) == pytest.approx(5)


def move_away(registry: Registry) -> None:
    """Moves the registry's database and files away."""
    folder = Path(registry.uri.removeprefix("sqlite:///")).parent
    folder.rename(folder.with_name("moved"))


def test_a_fresh_lookup_asks_each_time(registry: Registry) -> None:
    session = load(NAME, registry=registry)
    lookup = lookup_of(session)
    assert (lookup.policy, lookup.asked, lookup.stale) == ("fresh", True, None)
    move_away(registry)
    with pytest.raises(NotFoundError, match="nothing is registered"):
        load(NAME, registry=registry)


def test_a_fresh_lookup_opens_a_version_in_the_store_itself(registry: Registry) -> None:
    load(NAME, registry=registry)
    assert Cache(cache_root()).entries() == []


@pytest.fixture
def first(registry: Registry) -> Session:
    """A session whose version this host keeps. The registry is gone since."""
    session = load(NAME, registry=registry, lookup="prefer-cache")
    move_away(registry)
    return session


def test_the_kept_version_of_an_open_session_is_in_use(first: Session, jets: Built) -> None:
    assert lookup_of(first).asked
    (entry,) = Cache(cache_root()).entries()
    assert (entry.digest, entry.in_use) == (jets.bundle.digest, True)


@pytest.mark.parametrize("lookup", ["prefer-cache", "offline"])
def test_a_kept_version_is_served_without_the_registry(
    first: Session, registry: Registry, caplog: pytest.LogCaptureFixture, lookup: LookupPolicy
) -> None:
    with caplog.at_level(logging.WARNING, "soa-pipeline"):
        session = load(NAME, registry=registry, lookup=lookup)
    assert caplog.text == ""
    require_looked_up_before(session, first)


def test_a_warning_names_a_version_that_is_served_for_too_long(
    first: Session, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "soa-pipeline"):
        stale = load(NAME, registry=registry, lookup="prefer-cache", max_age_s=0)
    assert "jets@production: the registry cannot be asked, so jets/1 is served" in caplog.text
    assert "nothing is registered" in str(lookup_of(stale).stale)
    require_looked_up_before(stale, first)


def require_looked_up_before(session: Session, first: Session) -> None:
    """The session runs with what was looked up for the first one."""
    assert lookup_of(session).at == lookup_of(first).at
    assert not lookup_of(session).asked
    assert type(session) is Session
    require_runs(session)


@pytest.mark.usefixtures("first")
def test_a_fresh_lookup_does_not_take_a_kept_version(registry: Registry) -> None:
    with pytest.raises(NotFoundError):
        load(NAME, registry=registry)


def test_offline_needs_neither_mlflow_nor_a_network(registry: Registry) -> None:
    load(NAME, registry=registry, lookup="prefer-cache")
    move_away(registry)
    script = (
        "import sys\n"
        "def watch(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        raise RuntimeError(event)\n"
        "    if event == 'import' and arguments[0].partition('.')[0] == 'mlflow':\n"
        "        raise ImportError('no mlflow')\n"
        "sys.addaudithook(watch)\n"
        "from runtime.loader import load\n"
        "print(load(sys.argv[1], registry=sys.argv[2], lookup='offline').origin)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, NAME, registry.uri],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stderr == ""
    assert process.stdout.startswith("jets/1 (")


def test_what_was_found_lately_is_not_asked_again(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    load(NAME, registry=registry, lookup="prefer-cache")
    promoted(registry, negated(jets.bundle, tmp_path / "two"))
    assert version_of(load(NAME, registry=registry, lookup="prefer-cache")) == "1"
    now = load(NAME, registry=registry, lookup="prefer-cache", max_age_s=0)
    assert (version_of(now), lookup_of(now).asked) == ("2", True)
    assert version_of(load(NAME, registry=registry, lookup="offline")) == "2"


def test_a_fresh_lookup_is_recorded_for_the_others(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    load(NAME, registry=registry, lookup="prefer-cache")
    promoted(registry, negated(jets.bundle, tmp_path / "two"))
    load(NAME, registry=registry, lookup="prefer-cache", max_age_s=0)
    registry.rollback("jets")
    assert version_of(load(NAME, registry=registry)) == "1"
    move_away(registry)
    assert version_of(load(NAME, registry=registry, lookup="prefer-cache", max_age_s=0)) == "1"


class TestGates:
    """A lookup without the registry serves nothing that the registry would have refused."""

    def test_never_promoted(self, registry: Registry, jets: Built, tmp_path: Path) -> None:
        registry.register(described(jets.bundle, tmp_path / "other", "other"))
        load("jets/2", mode="test", registry=registry, lookup="prefer-cache")
        with pytest.raises(LoadError, match="jets/2 was never promoted"):
            load("jets/2", registry=registry, lookup="prefer-cache")
        with pytest.raises(LoadError, match="jets/2: not known here for mode='production'"):
            load("jets/2", registry=registry, lookup="offline")
        load("jets/2", mode="test", registry=registry, lookup="offline")

    def test_withdrawn(self, registry: Registry, jets: Built, tmp_path: Path) -> None:
        """A version that the registry last refused is not served after the registry has gone."""
        load(NAME, registry=registry, lookup="prefer-cache")
        other = registry.register(described(jets.bundle, tmp_path / "other", "other"))
        with registry.client() as client:  # by hand, without any gate
            client.set_registered_model_alias("jets", "production", str(other.number))
        with pytest.raises(LoadError, match="jets/2 was never promoted"):
            load(NAME, registry=registry)
        move_away(registry)
        for lookup in LOOKUPS[1:]:
            with pytest.raises((LoadError, NotFoundError)):
                load(NAME, registry=registry, lookup=lookup)

    def test_a_version_whose_alias_was_deleted_is_not_served_any_more(
        self, registry: Registry
    ) -> None:
        load(NAME, registry=registry, lookup="prefer-cache")
        with registry.client() as client:
            client.delete_registered_model_alias("jets", "production")
        with pytest.raises(NotFoundError, match="no such alias"):
            load(NAME, registry=registry, lookup="prefer-cache", max_age_s=0)
        with pytest.raises(LoadError, match="not known here"):
            load(NAME, registry=registry, lookup="offline")

    @pytest.fixture
    def release(self, registry: Registry, tmp_path: Path) -> KeyPair:
        """The key with which a version must be signed, says the registry's policy."""
        release = make_keys(tmp_path, "release")
        registry.set_policy(Policy(signed_by=(read_trusted(release.public).pem,)))
        return release

    @pytest.fixture
    def signature(self, registry: Registry, release: KeyPair, jets: Built) -> Path:
        """The signature that this host keeps of the version. The registry is gone since."""
        registry.sign(registry.find(NAME), release.private)
        load(NAME, registry=registry, lookup="prefer-cache")
        move_away(registry)
        return cache_root() / jets.bundle.digest / "bundle.sig"

    @pytest.mark.usefixtures("release")
    def test_a_version_that_is_not_signed_is_not_kept(self, registry: Registry) -> None:
        with pytest.raises(TrustError, match=r"^jets/1: not signed"):
            load(NAME, registry=registry, lookup="prefer-cache")
        with pytest.raises(LoadError, match="not known here"):
            load(NAME, registry=registry, lookup="offline")

    @pytest.mark.parametrize("lookup", LOOKUPS[1:])
    def test_a_signature_is_asked_for_without_the_registry(
        self, registry: Registry, signature: Path, lookup: LookupPolicy
    ) -> None:
        require_runs(load(NAME, registry=registry, lookup=lookup, max_age_s=0))
        signature.unlink()
        with pytest.raises(TrustError, match=r"not signed; .*the registry's policy"):
            load(NAME, registry=registry, lookup=lookup, max_age_s=0)

    @pytest.mark.usefixtures("signature")
    def test_the_callers_keys_count_offline(self, registry: Registry, tmp_path: Path) -> None:
        other = make_keys(tmp_path, "other")
        with pytest.raises(TrustError, match="none of those trusted"):
            load(NAME, registry=registry, lookup="offline", trusted_keys=[other.public])

    @pytest.fixture
    def damaged(self, registry: Registry, jets: Built) -> None:
        """A bit of the version that this host keeps is flipped."""
        load(NAME, registry=registry, lookup="prefer-cache")
        path = cache_root() / jets.bundle.digest / jets.bundle.manifest.program
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    @pytest.mark.usefixtures("damaged")
    def test_a_flipped_bit(self, registry: Registry) -> None:
        """Offline the version is refused; with the registry it is fetched again."""
        with pytest.raises(BundleError, match=r"program\.pt2 is truncated or altered"):
            load(NAME, registry=registry, lookup="offline")
        require_runs(load(NAME, registry=registry, lookup="prefer-cache"))
        require_runs(load(NAME, registry=registry, lookup="offline"))

    @pytest.mark.usefixtures("damaged")
    @pytest.mark.parametrize("lookup", LOOKUPS[1:])
    def test_a_flipped_bit_without_the_registry(
        self, registry: Registry, lookup: LookupPolicy
    ) -> None:
        move_away(registry)
        with pytest.raises((BundleError, RegistryUnavailableError)):
            load(NAME, registry=registry, lookup=lookup, max_age_s=0)


@pytest.fixture
def record(registry: Registry, tmp_path: Path) -> Path:
    """The file of a recorded lookup, which found version 1."""
    load(NAME, registry=registry, lookup="prefer-cache")
    (path,) = (tmp_path / "cache" / "resolved").glob("*.json")
    assert json.loads(path.read_text())["content"]["version"]["number"] == 1
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"number": 1', '"number": 2'),
        lambda text: text[:-20],
        lambda _: "[]",
    ],
    ids=["another version", "cut off", "a list"],
)
def test_a_damaged_record_is_refused(
    registry: Registry, record: Path, damage: Callable[[str], str]
) -> None:
    record.write_text(damage(record.read_text()))
    with pytest.raises(RegistryError, match=r"\.json: damaged: "):
        load(NAME, registry=registry, lookup="offline")


def test_a_damaged_record_is_replaced_by_the_registrys_answer(
    registry: Registry, record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record.write_text("[]")
    with caplog.at_level(logging.WARNING, "soa-pipeline"):
        session = load(NAME, registry=registry, lookup="prefer-cache")
    assert "jets@production: no usable record, so the registry is asked: " in caplog.text
    assert lookup_of(session).asked
    assert not lookup_of(load(NAME, registry=registry, lookup="offline")).asked


def test_an_entry_is_in_use_as_long_as_an_artifact_of_it_is_open(registry: Registry) -> None:
    cache = Cache(cache_root())
    opened = open_version(Opening(NAME, registry=registry, lookup="prefer-cache"))
    whole = open_artifact(opened, TARGET, "aoti", torch.device("cpu"))
    tiles = in_tiles(whole, opened.signature, 64)
    del whole, opened
    assert [entry.in_use for entry in cache.entries()] == [True]
    del tiles
    assert [entry.in_use for entry in cache.entries()] == [False]


def test_an_entry_is_in_use_as_long_as_it_is_bound(registry: Registry) -> None:
    cache = Cache(cache_root())
    session = load(NAME, registry=registry, lookup="prefer-cache")
    jets, tags = session.collection("jets", 5), session.collection("tags", 5)
    binding = session.bind(jets, tags)
    del session
    assert cache.shrink(0) == []
    binding()
    del binding
    assert len(cache.shrink(0)) == 1


def test_offline_a_version_that_was_removed_from_the_cache_is_refused(registry: Registry) -> None:
    load(NAME, registry=registry, lookup="prefer-cache").close()
    assert len(Cache(cache_root()).shrink(0)) == 1
    move_away(registry)
    with pytest.raises(LoadError, match=r"jets/1 was found before, but .* is not in the cache"):
        load(NAME, registry=registry, lookup="offline")


def test_without_a_cache_a_fresh_load_works_and_another_is_refused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "file" / "cache"))
    require_runs(load(NAME, registry=registry))
    with pytest.raises(BundleError, match="cannot use the cache"):
        load(NAME, registry=registry, lookup="prefer-cache")


def test_an_unknown_way_of_looking_up_is_refused(registry: Registry) -> None:
    with pytest.raises(LoadError, match="lookup 'cache': use one of 'fresh', 'prefer-cache', 'of"):
        load(NAME, registry=registry, lookup="cache")  # type: ignore[arg-type]
