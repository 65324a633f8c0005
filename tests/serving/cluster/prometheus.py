"""A real Prometheus on this host, to ask it what KEDA would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.local.process import LocalProcess, free_ports
from serving.metrics import get

VARIABLE = "PIPELINE_PROMETHEUS"


def find(name: str) -> Path:
    """`prometheus` or `promtool`, from the folder that the variable names or PATH; or skip."""
    if found := shutil.which(name, path=os.environ.get(VARIABLE)) or shutil.which(name):
        return Path(found)
    pytest.skip(f"no {name} on PATH or in ${VARIABLE}")


def check_config(config: dict[str, Any], folder: Path) -> str:
    """What promtool says about a configuration, and whether it takes it."""
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [find("promtool"), "check", "config", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, query: str) -> list[float]:
        """The values of an instant query, one for each series."""
        return [float(text) for text in self.ask_text(query)]

    def ask_text(self, query: str) -> list[str]:
        """The same in Prometheus's own words."""
        asked = urllib.parse.urlencode({"query": query})
        answer = json.loads(get(f"http://{self._address}/api/v1/query?{asked}"))
        assert answer["status"] == "success", answer
        return [each["value"][1] for each in answer["data"]["result"]]


@contextmanager
def running(config: dict[str, Any], folder: Path) -> Iterator[Prometheus]:
    binary = find("prometheus")
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    (port,) = free_ports("127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    process = LocalProcess(
        [
            binary, f"--config.file={file}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        folder / "prometheus.log",
    )  # fmt: skip
    try:
        process.wait_for(f"http://{address}/-/ready", 60)
        yield Prometheus(address)
    finally:
        process.stop()
