"""Needs of deployments for each vendor, without a version, and the chart's schema of values.

The schema is that of SuperSONIC (https://github.com/fastmachinelearning/SuperSONIC,
helm/supersonic, Apache-2.0).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engines.target import Target
from serving.cluster.needs import ClusterOptions, Needs

SCHEMA = Path(__file__).with_name("supersonic-values.schema.json")
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
