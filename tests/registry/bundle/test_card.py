"""The card of an artifact says what the manifest says, or the bundle is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry import Bundle, Registry
from registry.bundle.card import CARD
from registry.bundle.digests import seal
from registry.errors import BundleError
from tests.models.project import TARGET, Built, resealed

PLACE = Path("targets", TARGET, "aoti", CARD)
CARDS = {
    "more rows": ("rows n 0 1000", "rows n 0 1001"),
    "another alignment": ("collection tags n 128", "collection tags n 64"),
    "another dtype": ("column jets f float32 4", "column jets f int32 4"),
    "outputs that are read": ("tags x 0 3 output", "tags x 0 3 input"),
    "other inputs": ("jets a 0 6 input", "tags x 0 3 input"),
    "tiles that the manifest does not have": ("windows any", "tile 128 nmm 1000"),
}


@pytest.mark.parametrize("name", CARDS)
def test_what_an_artifact_takes_follows_from_the_manifest(
    jets: Built, tmp_path: Path, name: str
) -> None:
    def edit(folder: Path, _: dict[str, Any]) -> None:
        card = (folder / PLACE).read_text()
        (folder / PLACE).write_text(card.replace(*CARDS[name]))
        assert (folder / PLACE).read_text() != card

    with pytest.raises(BundleError, match=CARD):
        resealed(jets.bundle, tmp_path / "other", edit)


def tiled(rows: int) -> Callable[[Path, dict[str, Any]], None]:
    """An edit of a bundle: the manifest has tiles of 64 rows, and the card at most `rows` rows."""

    def edit(folder: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["candidates"]["aoti"]["tile"] = 64
        text = (folder / PLACE).read_text().replace("rows n 0 1000", f"rows n 0 {rows}")
        (folder / PLACE).write_text(f"{text}tile 64 nmm 1000\n")

    return edit


def test_a_card_with_the_tiles_of_the_manifest_is_opened(jets: Built, tmp_path: Path) -> None:
    tiles = resealed(jets.bundle, tmp_path / "other", tiled(rows=1000))
    assert tiles.manifest.targets[TARGET].candidates["aoti"].tile == 64


def test_a_card_with_more_rows_than_its_tiles_is_refused(jets: Built, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=CARD):
        resealed(jets.bundle, tmp_path / "other", tiled(rows=1001))


def test_a_card_must_agree_on_which_windows_were_validated(jets: Built, tmp_path: Path) -> None:
    def edit(_: Path, manifest: dict[str, Any]) -> None:
        manifest["targets"][TARGET]["candidates"]["aoti"]["windows"] = False

    with pytest.raises(BundleError, match=CARD):
        resealed(jets.bundle, tmp_path / "other", edit)


def test_no_registry_takes_another_card(jets: Built, empty_database: Path, tmp_path: Path) -> None:
    shutil.copy(empty_database, tmp_path / "registry.db")
    folder = Path(shutil.copytree(jets.bundle.path, tmp_path / "other"))
    (folder / PLACE).write_text((folder / PLACE).read_text().replace(*CARDS["more rows"]))
    seal(folder)
    registry = Registry(f"sqlite:///{tmp_path}/registry.db")
    with pytest.raises(BundleError, match=CARD):
        registry.register(Bundle.open(folder, verify=False))
    assert registry.list() == []
