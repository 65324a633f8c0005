"""Kill campaign: a job on files, killed with SIGKILL at random moments and started again.

    python -m tests.campaigns.apply --rows 10000000 --kills 10

The job scores one Parquet file of generated rows, or several (`--files`), into one file. In the end
every row is there once, in its order, with the eager model's answer. The seed decides the rows and
the moments; at which step a kill hits the job depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from registry.store.registry import Registry
from tests.models import served
from tests.models.building import mlp_signature
from tests.models.mlps import CLASSES, FEATURES, PointwiseFirst
from tests.models.scored import eager
from tests.models.versions import promoted

ROOT = Path(__file__).parents[2]
_GROUP = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-apply-") as folder:
        print(campaign(Path(folder), options.rows, options.files, options.kills, options.seed))


def campaign(folder: Path, rows: int, files: int, kills: int, seed: int) -> str:
    """Returns a summary of the kills. Raises AssertionError if a row is lost, doubled or wrong."""
    registry = Registry(f"sqlite:///{folder}/registry.db")
    model = served.make_bundle(folder / "built", "tagger", PointwiseFirst(1), mlp_signature(4096))
    promoted(registry, model)
    sources = [folder / f"rows{i}.parquet" for i in range(files)]
    for i, path in enumerate(sources):
        generate(path, i * rows // files, (i + 1) * rows // files, seed)
    out = folder / "out.parquet"
    command = [
        sys.executable, "-m", "soa_pipeline", "apply", "tagger@production", *map(str, sources),
        "--out", str(out), "--keep", "event", "--registry", registry.uri,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_CACHE": str(folder / "cache")}
    choice, held, hit = random.Random(seed), 0, 0
    parts = folder / f".{out.name}.pipeline-apply"
    for _ in range(kills):
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as job:
            while job.poll() is None and len(list(parts.glob("*.arrow"))) <= held:
                time.sleep(0.002)  # until it has written more parts than the job before
            time.sleep(choice.random() * 0.5)
            hit += job.poll() is None
            job.kill()
        held = len(list(parts.glob("*.arrow")))
    subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    assert not parts.exists()
    found = pq.ParquetFile(out)
    assert found.metadata.num_rows == rows, (found.metadata.num_rows, rows)
    at = 0
    for group in found.iter_batches(_GROUP, columns=["event", *CLASSES]):
        table = {name: group[name].to_numpy() for name in group.schema.names}
        np.testing.assert_array_equal(table["event"], np.arange(at, at + len(group)))
        expected = eager(features(at, at + len(group), seed))
        for name, values in zip(CLASSES, expected.T, strict=True):
            np.testing.assert_allclose(table[name], values, atol=1e-5, rtol=1e-4)
        at += len(group)
    assert at == rows
    return (
        f"{rows:,} rows of {files} files, {hit} of {kills} jobs killed at work: all are there once"
    )


def features(start: int, stop: int, seed: int) -> dict[str, np.ndarray]:
    """The features of these rows; they do not depend on how the rows are divided into files."""
    every = {}
    for i, name in enumerate(FEATURES):
        bits = np.random.Philox(key=seed + i, counter=0)
        bits.advance(start // 4)
        drawn = np.random.Generator(bits).random(stop - start + start % 4)
        every[name] = drawn[start % 4 :].astype("f4")
    return every


def generate(path: Path, start: int, stop: int, seed: int) -> None:
    with pq.ParquetWriter(path, pa.schema(
        [("event", pa.int64()), *((name, pa.float32()) for name in FEATURES)]
    )) as file:  # fmt: skip
        for low in range(start, stop, _GROUP):
            high = min(low + _GROUP, stop)
            columns = {"event": np.arange(low, high), **features(low, high, seed)}
            file.write_table(pa.table(columns))


if __name__ == "__main__":
    main()
