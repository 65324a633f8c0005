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
Asked = Callable[[str], None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    def ask(where: str) -> None:
        monkeypatch.setenv(VARIABLE, where)
        telemetry.cache_clear()

    telemetry.cache_clear()
    yield ask
    monkeypatch.undo()
    telemetry.cache_clear()


def bound(session: Session, n: int = 7) -> Binding:
    return session.bind(session.collection("jets", n), session.collection("tags", n))


def samples(text: str) -> dict[str, float]:
    """The samples with our labels, by name; failures also by error."""
    found = {}
    for sample in (sample for family in families(text) for sample in family.samples):
        if "le" not in sample.labels and LABELS.items() <= sample.labels.items():
            found[" ".join([sample.name, sample.labels.get("error", "")]).strip()] = sample.value
    return found


def served() -> str:
    there = telemetry()
    assert there is not None and there.port is not None
    with urlopen(f"http://127.0.0.1:{there.port}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_without_the_variable_a_call_is_the_native_one(
    mlp: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    telemetry.cache_clear()
    binding = bound(mlp.session("lanes"))
    assert binding._native is binding.prepared.run


def test_calls_rows_and_failures(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    asked("0")
    broken = False

    def then(*_: object) -> None:
        if broken:
            raise ValueError('a "quoted" reason')

    binding = bound(Session(mlp_signature(), rogues.Rogue(then), origin=ORIGIN))
    binding()
    binding(5)
    broken = True
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError):
        binding(2)
    found = samples(served())
    assert found["soa_call_seconds_count"] == 2
    assert found["soa_rows_total"] == 12
    assert found["soa_failures_total ValueError"] == 1
    assert 0 < found["soa_call_seconds_sum"] < 60
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == module.log.name]
    assert line == {"event": "failure", **LABELS, "error": 'a "quoted" reason'}


def test_a_call_with_too_many_rows_is_a_failure(asked: Asked) -> None:
    asked("0")
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
    found = samples(served())
    assert found["soa_failures_total BindError"] == 4
    assert found["soa_call_seconds_count"] == 1 and found["soa_rows_total"] == 7


def test_native_calls_and_those_of_run_many_are_counted(asked: Asked, mlp: Built) -> None:
    asked("0")  # any free port
    opened = mlp.session("lanes")
    session = Session(opened.signature, opened.executable, origin=ORIGIN)
    one, other = bound(session, 7), bound(session, 3)
    one()
    session.run_many([one, other], threads=2)
    counted = samples(served())
    assert counted["soa_call_seconds_count"] == 3
    assert counted["soa_rows_total"] == 7 + 7 + 3


def test_a_file_of_this_process(asked: Asked, tmp_path: Path) -> None:
    asked(str(tmp_path / "soa-{pid}.prom"))
    bound(Session(mlp_signature(), rogues.honest(), origin=ORIGIN))()
    there = telemetry()
    assert there is not None
    there.write()
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"soa-\d+\.prom", file.name)
    assert samples(file.read_text())["soa_rows_total"] == 7


@pytest.mark.parametrize(("where", "code"), [("70000", "port"), ("none/soa.prom", "load")])
def test_what_cannot_be_written_or_served(asked: Asked, where: str, code: str) -> None:
    asked(where)
    with pytest.raises(LoadError, match=VARIABLE) as refused:
        bound(Session(mlp_signature(), rogues.honest()))
    assert refused.value.code == code


def test_the_dashboard_asks_for_what_is_there(asked: Asked) -> None:
    asked("0")
    bound(Session(mlp_signature(), rogues.honest(), origin=ORIGIN))()
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    wanted = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"soa_\w+", target["expr"])
    }
    given = {s.name for family in families(served()) for s in family.samples}
    assert "soa_rows_total" in wanted
    assert wanted - given <= {"soa_failures_total"}  # absent until the first failure


_WRITTEN = """
import atexit, multiprocessing.util, shutil, sys, tempfile, time
from pathlib import Path
from runtime import process

process._EVERY_S = 0.01
folder = Path(tempfile.mkdtemp())
atexit.register(time.sleep, 0.3)  # what else the program does when it ends
atexit.register(shutil.rmtree, folder)
process.keep_written(lambda: print(folder.is_dir(), flush=True), "a test")
"""


def test_the_last_write_comes_before_the_program_removes_its_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITTEN], capture_output=True, text=True, check=True
    )
    assert ({*done.stdout.split()}, done.stderr) == ({"True"}, "")
