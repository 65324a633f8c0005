"""Export and import: what is taken along, what is not, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from registry import Bundle, BundleError, Decision, NotFoundError, PromotionRefused, Ref, Registry
from registry.history.event_log import Event
from registry.housekeeping.export_import import export_to, import_from
from registry.housekeeping.pushing import push
from registry.trust import read_trusted
from tests.models import registries
from tests.models.bundles import PASSED, made_bundle, write_annex
from tests.models.keys import make_keys
from tests.models.shared import made_once

CUDA = "cuda/sm_90"


@pytest.fixture(scope="module")
def exportable(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """A folder with the registry `store` and a key pair, `release`.

    jets/2 is in production, with one more target and a signature; jets/1 was there before.
    """

    def make(folder: Path) -> None:
        registries.copy(empty_database.parent, folder / "store")
        registry = Registry(f"sqlite:///{folder}/store/registry.db")
        bundles = [made_bundle(folder / "bundles" / str(seed), seed) for seed in range(2)]
        versions = [registry.register(bundle) for bundle in bundles]
        registry.add_target(versions[1], write_annex(folder / "annex", bundles[1], CUDA))
        registry.sign(versions[1], make_keys(folder, "release").private)
        for version in versions:
            registry.promote(version, "production", PASSED)
        registry.approve(versions[1], "ada", "looks good")
        refused = [Decision("speed", False, "2", "1.1", "too slow")]
        with pytest.raises(PromotionRefused):
            registry.promote(versions[0], "production", refused)

    return made_once(tmp_path_factory, "store-to-export", make)


@pytest.fixture
def source(registry: Registry, exportable: Path) -> Registry:
    registries.copy(exportable / "store", registries.file_of(registry).parent)
    return registry


@pytest.mark.parametrize("form", ["folder", "file.tar"])
def test_an_export_is_a_folder_or_a_file(
    source: Registry, away: Registry, tmp_path: Path, form: str
) -> None:
    export = export_to(source, Ref("jets"), tmp_path / "out" / form)
    assert (list(export.versions), len(export.history)) == ([1, 2], 5)
    report = import_from(away, tmp_path / "out" / form)
    assert [item.version.ref for item in report.versions.values()] == ["jets/1", "jets/2"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == [form]


@pytest.fixture
def imported(source: Registry, away: Registry, tmp_path: Path) -> Registry:
    """Another registry, which has imported the model."""
    export_to(source, Ref("jets"), tmp_path / "out")
    import_from(away, tmp_path / "out")
    return away


def test_versions_are_imported_with_their_annexes(source: Registry, imported: Registry) -> None:
    old, new = source.versions("jets"), imported.versions("jets")
    assert [one.digest for one in new] == [one.digest for one in old]
    assert [one.annexes for one in new] == [one.annexes for one in old]
    for version in new:
        imported.open(version).verify()


def test_a_version_is_imported_with_its_signature(imported: Registry, exportable: Path) -> None:
    version, key = imported.find("jets/2"), read_trusted(exportable / "release.pem")
    imported.require_signature(version, imported.open(version), [key])  # or TrustError


def test_a_version_says_where_it_was_imported_from(source: Registry, imported: Registry) -> None:
    origin = imported.find("jets/2").origin
    assert (origin["version"], origin["registry"]) == ("jets/2", source.uri)


def test_the_history_is_imported_as_a_record(source: Registry, imported: Registry) -> None:
    events = imported.history("jets")
    assert [event.kind for event in events] == ["import"] * 5
    assert [event.imported["event"] for event in events] == [
        event.to_json() for event in source.history("jets")
    ]
    assert {event.imported["registry"] for event in events} == {source.uri}
    assert [event.version for event in events] == [2, 1, 2, 2, 1]


def test_an_imported_history_moves_nothing(imported: Registry) -> None:
    assert [version.aliases for version in imported.versions("jets")] == [(), ()]
    assert imported.find("jets/2").promotion("production") is None
    events = imported.history("jets")
    assert all(event.before == event.after == {} for event in events)
    assert all(event.approver == "" for event in events)


def test_a_second_import_changes_nothing(imported: Registry, tmp_path: Path) -> None:
    report = import_from(imported, tmp_path / "out")
    assert report.events == 0
    assert not any(item.new for item in report.versions.values())
    assert (len(imported.versions("jets")), len(imported.history("jets"))) == (2, 5)


def test_an_event_that_is_exported_again_keeps_its_first_registry(
    source: Registry, imported: Registry, tmp_path: Path
) -> None:
    imported.approve(imported.find("jets/1"), "bob")
    export_to(imported, Ref("jets"), tmp_path / "back")
    assert import_from(source, tmp_path / "back").events == 6
    records = [event.imported for event in source.history("jets") if event.kind == "import"]
    assert [record["registry"] for record in records] == [source.uri] * 5 + [imported.uri]


def test_of_two_imports_at_once_one_brings_the_events(
    source: Registry, away: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second import runs just after the first one has read the list of events."""
    export_to(source, Ref("jets"), tmp_path / "out")
    plain_history = Registry.history

    def history(registry: Registry, name: str) -> Sequence[Event]:
        monkeypatch.setattr(Registry, "history", plain_history)
        events = plain_history(registry, name)
        assert import_from(registry, tmp_path / "out").events == 5
        return events

    monkeypatch.setattr(Registry, "history", history)
    assert import_from(away, tmp_path / "out").events == 0
    assert len(away.history("jets")) == 5


def test_one_version_is_imported_under_another_name(
    source: Registry, away: Registry, tmp_path: Path, bundle: Bundle
) -> None:
    away.register(bundle, "tagger")  # so the version numbers differ
    export = export_to(source, Ref("jets", 2), tmp_path / "out")
    assert list(export.versions) == [2]
    report = import_from(away, tmp_path / "out", "tagger")
    assert {old: item.version.ref for old, item in report.versions.items()} == {2: "tagger/2"}
    assert [event.imported["event"]["kind"] for event in away.history("tagger")] == [
        "build",
        "promotion",
        "approval",
    ]
    assert [event.version for event in away.history("tagger")] == [2, 2, 2]


@pytest.mark.parametrize("ref", [Ref("tracks"), Ref("jets", 9)], ids=str)
def test_a_missing_model_or_version_is_not_exported(
    source: Registry, tmp_path: Path, ref: Ref
) -> None:
    with pytest.raises(NotFoundError):
        export_to(source, ref, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_no_folder(source: Registry, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match="exists already"):
        export_to(source, Ref("jets"), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def another_version(export: Path) -> None:
    shutil.rmtree(export / "versions/2")
    shutil.copytree(export / "versions/1", export / "versions/2")


def other_content(name: str) -> Callable[[Path], object]:
    return lambda export: (export / name).write_bytes(b"other")


PROGRAM, ANNEX = "versions/2/program.pt2", "versions/2/annexes/cuda/sm_90/aoti/model.so"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_content(PROGRAM), r"program\.pt2 is truncated or altered"),
        (other_content(ANNEX), r"model\.so is truncated or altered"),
        (another_version, r"versions/2 is not what export\.json says"),
        (other_content("export.json"), "not JSON"),
        (lambda export: (export / "export.json").unlink(), "not an export"),
        (shutil.rmtree, "out: cannot be read"),
    ],
    ids=["program", "annex", "version", "record", "no record", "no export"],
)
def test_a_damaged_export_is_refused_before_anything_comes_in(
    source: Registry, away: Registry, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    export_to(source, Ref("jets"), tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(BundleError, match=message):
        import_from(away, tmp_path / "out")
    assert away.list() == []


def test_an_export_of_a_newer_schema_is_refused(
    source: Registry, away: Registry, tmp_path: Path
) -> None:
    export_to(source, Ref("jets", 1), tmp_path / "out")
    data = json.loads((tmp_path / "out/export.json").read_text())
    (tmp_path / "out/export.json").write_text(json.dumps(data | {"schema_version": 2}))
    with pytest.raises(BundleError, match="update soa-pipeline"):
        import_from(away, tmp_path / "out")


def refusal_of_archive(
    registry: Registry, folder: Path, names: Sequence[str], kind: bytes = tarfile.REGTYPE
) -> str:
    """The error for a tar with members of these names, in `folder / "in"`."""
    (folder / "in").mkdir()
    with tarfile.open(folder / "in/x.tar", "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, content = kind, "/etc/passwd", b"abc"
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(BundleError, match="neither folder nor tar of an export") as caught:
        import_from(registry, folder / "in/x.tar")
    return str(caught.value)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\b"])
def test_an_archive_that_reaches_outside_is_refused(
    away: Registry, tmp_path: Path, name: str
) -> None:
    refusal_of_archive(away, tmp_path, [name])
    assert [path.name for path in tmp_path.glob("in/*")] == ["x.tar"]


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE],
    ids=["symbolic link", "hard link", "pipe"],
)
def test_an_archive_of_links_is_refused(away: Registry, tmp_path: Path, kind: bytes) -> None:
    message = refusal_of_archive(away, tmp_path, ["export.json"], kind)
    assert "export.json is not a plain file" in message


def test_an_archive_with_two_files_of_one_name_is_refused(away: Registry, tmp_path: Path) -> None:
    refusal_of_archive(away, tmp_path, ["export.json", "export.json"])


def test_pushed_versions_are_exported_with_their_origin(
    source: Registry, away: Registry, tmp_path: Path
) -> None:
    source.fetch(source.find("jets/2"), tmp_path / "pulled")
    push(away, tmp_path / "pulled")
    export = export_to(away, Ref("jets"), tmp_path / "out")
    assert export.versions[1].origin.keys() == {"pushed_by", "pushed_at"}
