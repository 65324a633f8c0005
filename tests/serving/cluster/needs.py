"""What deployments need, without a version: of every vendor."""

from __future__ import annotations

from dataclasses import replace

from engines.target import Target
from serving.cluster.needs import Needs, Storage, prometheus_at

CPU = Needs(
    name="jets",
    model="jets",
    version="jets/1",
    digest="ab" * 32,
    target=Target("cpu", "x86-64-v3"),
    vendor="cpu",
    image="registry.example/soa-triton:1",
    cpus=2,
    memory_gib=2,
    shm_mib=64,
    gpus=0,
    storage=Storage.parse("pvc:models"),
    min_servers=1,
    max_servers=10,
    queue_ms=20,
    prometheus=None,
    connections_per_s=100,
)
NVIDIA = replace(
    CPU, target=Target("cuda", "sm_90"), vendor="nvidia", gpus=2, shm_mib=700,
    storage=Storage.parse("/cvmfs/cms.example.org/models"),
)  # fmt: skip
AMD = replace(
    CPU, target=Target("rocm", "gfx90a"), vendor="amd", gpus=1, max_servers=1,
    storage=Storage.parse("nfs:files.example.org:/export/models"),
    prometheus=prometheus_at("https://metrics.example.org"),
)  # fmt: skip
ALL = {"cpu": CPU, "nvidia": NVIDIA, "amd": AMD}
