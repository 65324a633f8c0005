"""Gates in a config: the rows, outputs, files and functions that they may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_config, metric_code, metrics_fingerprint
from tests.pipeline.config import mistakes
from tests.pipeline.config.mistakes import load

FULL = (Path(__file__).parent / "full.yaml").read_text()
GATES = """\
  latency_p99_us: [{rows: {n: 100}, max: 50}]
  memory_mb: [{rows: {n: 4096}, max: 300}]
  max_artifact_mb: 20
  shadow: {min_events: 1000, max_abs: 1e-3}
  metrics:
    data: test.npz
    label: is_top
    functions:
      auc: {function: roc_auc, output: p_top, min: 0.9, max_drop: 0.01}
      eff: {function: efficiency, output: p_top, background: 0.01}
      own: {function: own.py:mine, output: probabilities, label: flavour}
"""


@pytest.fixture
def text(folder: Path) -> str:
    """A config with every gate; the files that it names exist."""
    (folder / "test.npz").write_text("rows")
    (folder / "own.py").write_text("def mine(): ...")
    return FULL.replace("session:", f"{GATES}session:")


def test_every_gate_of_a_config(folder: Path, text: str) -> None:
    gates = load(folder, text).gates
    assert gates.metrics is not None and gates.shadow is not None and gates.memory_mb is not None
    assert gates.metrics.functions["auc"].max_drop == 0.01
    assert (gates.shadow.min_events, gates.shadow.max_errors) == (1000, 0)
    assert gates.memory_mb[0].rows == {"n": 4096}


def test_the_code_of_a_metric_is_found_from_the_configs_folder(folder: Path, text: str) -> None:
    assert metric_code(load(folder, text)) == {"own": f"{folder / 'own.py'}:mine"}


def test_other_labelled_rows_have_another_fingerprint(folder: Path, text: str) -> None:
    config = load(folder, text)
    before = metrics_fingerprint(config)
    assert before.keys() == {"own", "data"}
    (folder / "test.npz").write_text("other rows")
    after = metrics_fingerprint(config)
    assert [name for name in before if before[name] != after[name]] == ["data"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{n: 100}", "{n: 100, m: 1}", "latency_p99_us[0].rows.m: found 'm'"),
        ("{n: 100}", "{n: 5000}", "latency_p99_us[0].rows.n: found 5000; n has 1 to 4096"),
        ("[{rows: {n: 100}, max: 50}]", "[]", "latency_p99_us: found no entry"),
        ("output: p_top, min", "output: p_tip, min", "auc.output: found 'p_tip'; allowed: pro"),
        (
            "    label: is_top\n",
            "",
            "gates.metrics: 'auc' has no label; give it one, or a label for",
        ),
        ("test.npz", "no.npz", "gates.metrics.data: the file"),
        ("own.py:mine", "no.py:mine", "functions.own.function: the file"),
        ("background: 0.01", "min: 1", "eff: an efficiency has a working point; give background"),
        ("background: 0.01", "background: 0.01, threshold: 1", "give background or threshold"),
        ("roc_auc", "roc_auc, background: 0.1", "found background with roc_auc; only efficiency"),
    ],
)
def test_a_mistake_in_a_gate_is_the_only_problem(
    folder: Path, text: str, old: str, new: str, says: str
) -> None:
    assert text.count(old) >= 1
    [problem] = mistakes.refused(load_config, folder / "c.yaml", text.replace(old, new, 1))
    assert says in problem
