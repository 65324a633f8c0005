"""Needs of deployments for each vendor, without a version, and the chart's own values.

These and their schema are from SuperSONIC 0.3.1 (helm/supersonic in
https://github.com/fastmachinelearning/SuperSONIC, Apache-2.0).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from engines.target import Target
from serving.cluster.needs import ClusterOptions, Needs

SCHEMA = Path(__file__).with_name("supersonic-values.schema.json")
VALUES = Path(__file__).with_name("supersonic-values.yaml")
_OPTIONS = ClusterOptions("registry.example/soa-triton:1")
CPU = Needs(
    name="jets",
    model="jets",
    version="jets/1",
    digest="ab" * 32,
    target=Target("cpu", "x86-64-v3"),
    cpus=2,
    memory_gib=2,
    shm_mib=64,
    gpus=0,
    queue_ms=20,
    options=_OPTIONS,
)
NVIDIA = replace(
    CPU, target=Target("cuda", "sm_90"), gpus=2, shm_mib=700,
    options=replace(_OPTIONS, models="/cvmfs/cms.example.org/models"),
)  # fmt: skip
AMD = replace(
    CPU, target=Target("rocm", "gfx90a"), gpus=1,
    options=replace(
        _OPTIONS, max_servers=1, models="nfs:files.example.org:/export/models",
        prometheus="https://metrics.example.org",
    ),
)  # fmt: skip
ALL = {"cpu": CPU, "nvidia": NVIDIA, "amd": AMD}


def installed(values: dict[str, Any]) -> dict[str, Any]:
    """The values that the chart's templates get: its own, changed by these."""
    return _changed(yaml.safe_load(VALUES.read_text()), values)


def _changed(own: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    whole = dict(own)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(own.get(key), dict)
        whole[key] = _changed(own[key], value) if both else value
    return whole
