"""Networks of the campaign `tests.campaigns.networks`: what `init` writes is right."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from pipeline import load
from pipeline.config import load_config
from registry.store.registry import Registry
from tests.campaigns.networks.cases import CASES
from tests.campaigns.networks.walk import answers_of, outside, owned
from tests.models.project import cli


@pytest.mark.long  # test_init.py runs what `init` writes for a small network
@pytest.mark.parametrize(
    "name",
    ["MixtureDensity", "DeepSets", "VariationalEncoder", "BatchSecond", "EdgeConvolution"],
)
def test_a_network_goes_in_at_the_first_try(
    name: str, empty: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "owner"
    folder.mkdir()
    monkeypatch.chdir(folder)
    network = owned(CASES[name], folder)
    cli("init", *network.words, "--engine", "lanes")
    assert load_config(Path("config.yaml")).rows["n"].unbounded
    result = cli("run", "config.yaml", "--quick", "--registry", empty.uri, "--json")
    with closing(load(json.loads(result.stdout)["bundle"], mode="test")) as session:
        assert outside(answers_of(session, network), network.expected) == 0
