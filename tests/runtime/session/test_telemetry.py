"""Metrics of a process's calls for Prometheus; without the setting there are none."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from runtime.errors import BindError, LoadError
from runtime.session import Binding, Origin, Session
from runtime.session import telemetry as module
from runtime.session.telemetry import VARIABLE, telemetry
from tests.models import rogues
from tests.models.building import Built, mlp_signature

ROOT = Path(__file__).parents[3]
ORIGIN = Origin("jets", "3", "digest", "cpu/x86-64-v3", "lanes")
LABELS = {"model": "jets", "version": "3", "engine": "lanes", "target": "cpu/x86-64-v3"}
SetUp = Callable[[str], None]
"""Sets the variable: a port, 0 for any free one, or the path of a file."""


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetUp]:
    """Metrics are written or served as this sets up, until the test ends."""

    def set_variable(where: str) -> None:
        monkeypatch.setenv(VARIABLE, where)
        telemetry.cache_clear()

    telemetry.cache_clear()
    yield set_variable
    monkeypatch.undo()
    telemetry.cache_clear()


def bound(session: Session, n: int = 7) -> Binding:
    return session.bind(session.collection("jets", n), session.collection("tags", n))


def samples(text: str) -> dict[str, float]:
    """The samples with our labels, by name; failures also by error."""
    values = {}
    for family in families(text):
        for sample in family.samples:
            if "le" not in sample.labels and LABELS.items() <= sample.labels.items():
                name = f"{sample.name} {sample.labels.get('error', '')}".strip()
                values[name] = sample.value
    return values


def served() -> str:
    """What Prometheus gets from this process."""
    exporter = telemetry()
    assert exporter is not None and exporter.port is not None
    with urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_without_the_variable_a_call_is_the_native_one(
    mlp: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    telemetry.cache_clear()
    binding = bound(mlp.session("lanes"))
    assert binding._native is binding.prepared.run


def fail_on_two_rows(n: int, *_: object) -> None:
    if n == 2:
        raise ValueError('a "quoted" reason')


def test_calls_are_counted_with_their_rows_and_times(set_up: SetUp) -> None:
    set_up("0")
    binding = bound(Session(mlp_signature(), rogues.honest(), origin=ORIGIN), 7)
    binding()
    binding(5)
    values = samples(served())
    assert values["soa_call_seconds_count"] == 2
    assert values["soa_rows_total"] == 7 + 5
    assert 0 < values["soa_call_seconds_sum"] < 60


def test_a_failure_is_counted_by_its_error_and_not_as_a_call(set_up: SetUp) -> None:
    set_up("0")
    binding = bound(Session(mlp_signature(), rogues.Rogue(fail_on_two_rows), origin=ORIGIN), 7)
    binding()
    with pytest.raises(ValueError):
        binding(2)
    values = samples(served())
    assert values["soa_failures_total ValueError"] == 1
    assert (values["soa_call_seconds_count"], values["soa_rows_total"]) == (1, 7)


def test_a_failure_is_logged_as_json(set_up: SetUp, caplog: pytest.LogCaptureFixture) -> None:
    set_up("0")
    binding = bound(Session(mlp_signature(), rogues.Rogue(fail_on_two_rows), origin=ORIGIN))
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError):
        binding(2)
    (record,) = (record for record in caplog.records if record.name == module.log.name)
    line = json.loads(record.getMessage())
    assert line == {"event": "failure", **LABELS, "error": 'a "quoted" reason'}


def test_a_call_with_too_many_rows_is_a_failure(set_up: SetUp) -> None:
    set_up("0")
    session = Session(mlp_signature(), rogues.honest(), origin=ORIGIN)
    binding = bound(session)
    most = session.signature.ranges["n"].max
    for n in (8, most + 1):  # more than is bound, more than the model takes
        with pytest.raises(BindError):
            binding(n)
    for jets, tags in ((3, 2), (most + 1, most + 1)):
        with pytest.raises(BindError):
            session.run(session.collection("jets", jets), session.collection("tags", tags))
    binding()
    values = samples(served())
    assert values["soa_failures_total BindError"] == 4
    assert (values["soa_call_seconds_count"], values["soa_rows_total"]) == (1, 7)


def test_native_calls_and_those_of_run_many_are_counted(set_up: SetUp, mlp: Built) -> None:
    set_up("0")
    session = Session(mlp.signature, mlp.executable("lanes"), origin=ORIGIN)
    seven, three = bound(session, 7), bound(session, 3)
    seven()
    session.run_many([seven, three], threads=2)
    values = samples(served())
    assert values["soa_call_seconds_count"] == 3
    assert values["soa_rows_total"] == 7 + 7 + 3


def test_a_file_of_this_process(set_up: SetUp, tmp_path: Path) -> None:
    """`{pid}` in its name becomes the number of the process."""
    set_up(str(tmp_path / "soa-{pid}.prom"))
    bound(Session(mlp_signature(), rogues.honest(), origin=ORIGIN))()
    exporter = telemetry()
    assert exporter is not None
    exporter.write()
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"soa-\d+\.prom", file.name)
    assert samples(file.read_text())["soa_rows_total"] == 7


@pytest.mark.parametrize(("where", "code"), [("70000", "port"), ("none/soa.prom", "load")])
def test_a_place_that_cannot_be_written_or_served_is_refused(
    set_up: SetUp, where: str, code: str
) -> None:
    set_up(where)
    with pytest.raises(LoadError, match=VARIABLE) as caught:
        bound(Session(mlp_signature(), rogues.honest()))
    assert caught.value.code == code


def test_the_dashboard_asks_for_what_is_there(set_up: SetUp) -> None:
    set_up("0")
    bound(Session(mlp_signature(), rogues.honest(), origin=ORIGIN))()
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    named = {name for target in targets for name in re.findall(r"soa_\w+", target["expr"])}
    available = {sample.name for family in families(served()) for sample in family.samples}
    assert "soa_rows_total" in named
    assert named - available <= {"soa_failures_total"}  # absent until the first failure


_WRITTEN = """
import atexit, multiprocessing.util, shutil, sys, tempfile, time
from pathlib import Path
from runtime import process

process._EVERY_S = 0.01
folder = Path(tempfile.mkdtemp())
atexit.register(time.sleep, 0.3)  # what else the program does when it ends
atexit.register(shutil.rmtree, folder)
process.write_regularly(lambda: print(folder.is_dir(), flush=True), "a test")
"""


def test_the_last_write_comes_before_the_program_removes_its_folder() -> None:
    process = subprocess.run(
        [sys.executable, "-c", _WRITTEN], capture_output=True, text=True, check=True
    )
    assert ({*process.stdout.split()}, process.stderr) == ({"True"}, "")
