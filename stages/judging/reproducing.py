"""Reproduce: check if an artifact gives the same bits on other processors, threads and tiles.

Other processors are emulated by qemu. qemu has no AVX-512: an artifact that needs it is not
compared on them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.processes import command, run_isolated, search_path
from engines.target import Target
from registry.promotion import Bits
from runtime.opening import Opened, digest_answers, hold_files, open_candidate
from runtime.session import Session, in_tiles
from soa.signature import Signature
from stages.errors import NotMeasuredError

PROCESSORS = ("Haswell", "Skylake-Client", "EPYC", "max")
"""Names of qemu's processors: two Intel and one AMD with AVX2, and one with all that qemu has."""
THREADS = (1, 2, 3)
_LIMIT_S = 600.0


def reproduce(opened: Opened, target: str, engine_name: str, folder: Path) -> Iterator[Bits]:
    """Run an artifact in each way, and yield the digest of its answers for each.

    The ways are: where it was built, with several numbers of threads here, in tiles, and on each of
    the emulated `PROCESSORS`. An artifact for GPUs is not run. `folder` is for scratch files.
    Raises NotMeasuredError if memory or time runs out.
    """
    manifest = opened.bundle.manifest
    if Target.parse(target).device != "cpu":
        yield Bits(target, engine_name, "on a GPU", None, "only CPUs are compared")
        return
    candidate = manifest.targets[target].candidates[engine_name]
    if candidate.bits is not None:
        yield Bits(target, engine_name, "where it was built", candidate.bits)
    with hold_files(opened, target, engine_name) as files:
        job = {
            "engine": engine_name,
            "file": str(files.file(candidate.files[0])),
            "signature": manifest.signature,
            "reference": str(files.file(manifest.reference)),
        }
        tile = candidate.tile or 0
        function = "stages.judging.reproducing:bits_here"
        outcome = run_isolated(function, {**job, "tile": tile}, folder, _LIMIT_S)
        if outcome.killed:
            raise NotMeasuredError(f"the bits of {engine_name} on {target}: {outcome.error}")
        ways = [Way("here", None, why=str(outcome.error))]
        if outcome.ok:
            ways = [Way(**fields) for fields in outcome.value]
        for way in ways:
            yield Bits(target, engine_name, way.how, way.digest, way.why, every=way.every)
        for processor in PROCESSORS:
            way = _run_under_qemu(processor, job)
            yield Bits(target, engine_name, way.how, way.digest, way.why)


@dataclass(frozen=True)
class Way:
    """A way to run an artifact, and the digest of its answers. `every` tells whether all cases of
    the reference ran, or only some rows. If `digest` is None, `why` says why there is none."""

    how: str
    digest: str | None
    every: bool = False
    why: str = ""


def bits_here(
    engine: str, file: str, signature: dict[str, Any], reference: str, tile: int
) -> list[dict[str, Any]]:
    """Run an artifact in each way on this host. This runs in a child process.

    `file` and `reference` are paths. `tile` is the number of rows of a tile; 0: no tiles are tried.
    A signature with unbounded rows runs all cases in tiles only. Returns the fields of a `Way` for
    each way; there is at least one.
    """
    parsed, reference_file = Signature.from_dict(signature), Path(reference)
    bounded = not any(rows.unbounded for rows in parsed.ranges.values())
    ways: list[Way] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        artifact = open_candidate(engine, Path(file), torch.device("cpu"), threads)
        session = Session(parsed, artifact)
        if threads == 1:
            ways.append(Way("here", digest_answers(session, reference_file)))
        if bounded:
            bits = digest_answers(session, reference_file, every=True)
            ways.append(Way(f"with {threads} threads", bits, every=True))
        if tile:
            session = Session(parsed, in_tiles(artifact, parsed, tile, threads))
            bits = digest_answers(session, reference_file, every=True)
            how = f"in tiles of {tile} rows with {threads} threads"
            ways.append(Way(how, bits, every=True))
    return [asdict(way) for way in ways]


def _run_under_qemu(processor: str, job: dict[str, Any]) -> Way:
    """Run an artifact on a processor that qemu emulates. `job` is the input of the program that
    runs there, runtime/opening/same_bits.py. Raises NotMeasuredError if memory or time runs out."""
    how = f"on qemu's {processor}"
    qemu = shutil.which("qemu-x86_64")
    if qemu is None:
        return Way(how, None, why="qemu-x86_64 is not installed")
    command_line = [qemu, "-cpu", processor, *command("runtime.opening.same_bits")]
    try:
        completed = subprocess.run(
            command_line, input=json.dumps(job), capture_output=True, text=True, check=False,
            errors="replace", timeout=_LIMIT_S, env={**os.environ, "PYTHONPATH": search_path()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = f"the bits {how}: no answer within {_LIMIT_S:g} s"
        raise NotMeasuredError(why) from None
    if completed.returncode == -signal.SIGKILL:
        raise NotMeasuredError(f"the bits {how}: killed, as the kernel does where memory runs out")
    printed = completed.stdout.strip()
    if completed.returncode or not printed:
        lines = completed.stderr.strip().splitlines() or [f"it ended with {completed.returncode}"]
        return Way(how, None, why=lines[-1])
    if printed == "None":
        return Way(how, None, why="bfloat16 is not compared")
    return Way(how, printed)
