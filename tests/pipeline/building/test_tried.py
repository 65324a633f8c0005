"""A model that takes its number of rows as a plain number, from its config to production.

No graph shows that its rows are independent. A trial does, and the version says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pipeline
from registry import Bundle
from stages.model import load_callable
from stages.reference.answers import random_inputs
from tests.models.project import Project, cli, refusal, write_project

ROWS = "n: {max: 1000, typical: [1000]}"
UNBOUNDED = (ROWS, "n: {max: 200, typical: [200], unbounded: true}")
MODEL = """

class _Tokens(PointwiseFirst):
    def forward(self, x):
        token = torch.linspace(-1, 1, 3).expand(len(x), 3)
        return (super().forward(x) + token)[torch.arange(len(x))].softmax(1)


def tokens(hidden=48):
    return _Tokens(0, hidden)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose model takes its number of rows as a plain number."""
    project = write_project(tmp_path_factory.mktemp("tried"))
    model = project.folder / "model.py"
    (project.folder / "tokens.py").write_text(model.read_text() + MODEL)
    text = project.config.read_text()
    for old, new in (
        ("model.py:talkative", "tokens.py:tokens"),
        ("  weights: weights.safetensors\n", ""),
        ("[aoti, torchscript, exported]", "[lanes, exported]"),
    ):
        assert old in text
        text = text.replace(old, new)
    project.config.write_text(text)
    return project


@pytest.fixture(scope="module")
def bundle(project: Project) -> Bundle:
    """The version of the project, jets/1."""
    return Bundle.open(project.run()["bundle"])


def test_a_version_says_that_its_rows_were_tried(bundle: Bundle) -> None:
    capture = bundle.manifest.capture
    assert "tokens.py:" in capture.tried and not capture.shown


def test_from_the_config_to_production(project: Project, bundle: Bundle) -> None:
    """lanes was chosen, and its answers in production are those of the user's model."""
    (record,) = bundle.manifest.targets.values()
    assert record.chosen == "lanes"
    cli("promote", "jets/1", "--to", "production", "--registry", project.registry)
    session = pipeline.load("jets@production", registry=project.registry)
    columns = random_inputs(session.signature, 3, {})["jets"]
    jets, tags = session.collection("jets", 1000), session.collection("tags", 1000)
    for name, values in columns.items():
        jets.fill(name, values)
    session.run(jets, tags)
    model = load_callable(f"{project.folder}/tokens.py:tokens")().eval()
    with torch.no_grad():
        expected = model(torch.stack(list(columns.values()), 1))
    answers = torch.stack([torch.as_tensor(tags[name]) for name in "xyz"], 1)
    torch.testing.assert_close(answers, expected, atol=1e-5, rtol=1e-4)


def test_a_policy_may_ask_that_independence_is_shown(project: Project, bundle: Bundle) -> None:
    policy = project.folder / "policy.yaml"
    policy.write_text("independence: shown\n")
    where = ("--policy", policy, "--registry", project.registry)
    text = cli("promote", "jets/1", "--to", "staging", *where, code=1).output
    assert "independence" in text and "tokens.py:" in text


def test_show_says_that_independence_was_tried(project: Project, bundle: Bundle) -> None:
    shown = cli("show", "jets/1", "--registry", project.registry).output
    assert "none found, tried" in shown


def test_unbounded_rows_need_that_independence_is_shown(project: Project, tmp_path: Path) -> None:
    message = refusal("run", project.variant("any.yaml", UNBOUNDED), "--work", tmp_path)
    assert "only tried, not shown" in message and "tokens.py:" in message


def test_a_config_may_say_that_a_trial_is_enough(project: Project) -> None:
    enough = project.variant("enough.yaml", UNBOUNDED, ("[lanes, exported]", "[exported]"))
    enough.write_text(enough.read_text() + "gates: {independence: tried}\n")
    capture = Bundle.open(project.run(enough)["bundle"]).manifest.capture
    assert capture.dependence == "" and capture.tried
