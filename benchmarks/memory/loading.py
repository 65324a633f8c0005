"""The cost of checking digests and signature of a bundle: `python -m benchmarks.memory.loading`.

Three ways take turns: a bundle is opened without checking the digests of its files, with checking
them, and with checking its signature too. Each way then opens the artifact of `aoti`, or the
portable program. It is timed in a process that has imported everything, and as a whole process,
from the start of Python to a session. The files are in the page cache.

The lookup of a name is timed too: the registry is asked and the files are opened in place; it is
asked and they are opened from the filled cache; the cache is used without asking; and offline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Only what the timed processes need is imported here, the rest in functions.
from registry.bundle.bundle import Bundle
from registry.trust import read_trusted, require_signature
from runtime.loader import device_here, load, measured_session
from runtime.opening import LookupPolicy, Opening, open_candidate, open_version
from runtime.session.session import Session
from soa import Signature

if TYPE_CHECKING:
    from benchmarks.subject import Subject
    from pipeline.report.tables import Table

_WAYS = ("without digests", "digests", "digests and signature")
_ENGINES = ("aoti", "exported")
_LOOKUPS: dict[str, tuple[LookupPolicy, float]] = {
    "fresh, in place": ("fresh", 0.0),
    "prefer-cache, asked": ("prefer-cache", 0.0),
    "prefer-cache, not asked": ("prefer-cache", 3600.0),
    "offline": ("offline", 0.0),
}


def main() -> None:
    if len(sys.argv) == 3:
        _look_up(*sys.argv[1:])
        return
    if len(sys.argv) > 1:
        place, way, name = sys.argv[1:]
        _load(Path(place), way, name)
        return
    from benchmarks.subject import Wide, subject
    from benchmarks.table import print_machine
    from pipeline.report.tables import new_table, show

    print_machine()
    for hidden in (120, 2850):
        made = subject(features=6, highest=4096, model=Wide(6, hidden))
        folder = _bundle(made)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        table = new_table(f"loading a bundle of {size / 1e6:.1f} MB", "", *_WAYS)
        for name in _ENGINES:
            warm = _in_turns(partial(_loaded, folder, name), _WAYS, 9)
            table.add_row(f"{name}, everything imported", *warm)
            fresh = _in_turns(partial(_started, folder, name), _WAYS, 5)
            table.add_row(f"{name}, whole process", *fresh)
        show([table])
        show([by_name(folder, made.folder, size)])
        shutil.rmtree(made.folder)


def by_name(folder: Path, place: Path, size: int, warm: int = 9, whole: int = 5) -> Table:
    """Time the lookup of a name. `place`: the folder of the registry and the cache."""
    from pipeline.report.tables import new_table
    from registry.promotion import Decision
    from registry.store.registry import Registry

    os.environ["PIPELINE_CACHE"] = str(place / "cache")
    registry = Registry(f"sqlite:///{place}/registry/registry.db")
    passed = [Decision("none", True, "", "", "for a benchmark")]
    registry.promote(registry.register(Bundle.open(folder)), "production", passed)
    for way in _LOOKUPS:
        _look_up(registry.uri, way)  # fills the cache
    table = new_table(f"looking up a name, {size / 1e6:.1f} MB", "", *_LOOKUPS)
    imported = _in_turns(partial(_look_up, registry.uri), _LOOKUPS, warm)
    table.add_row("everything imported", *imported)
    table.add_row("whole process", *_in_turns(partial(_process, registry.uri), _LOOKUPS, whole))
    return table


def _look_up(uri: str, way: str) -> None:
    policy, max_age_s = _LOOKUPS[way]
    load("bench@production", registry=uri, lookup=policy, max_age_s=max_age_s)


def _loaded(folder: Path, name: str, way: str) -> None:
    _load(folder, way, name)


def _started(folder: Path, name: str, way: str) -> None:
    _process(str(folder), way, name)


def _in_turns(load: Callable[[str], None], ways: Iterable[str], times: int) -> list[str]:
    """The shortest time of each way in ms, and its ratio to the first way.

    The shortest counts, because other work on the machine only adds time.
    """
    took: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(times + 1):
        for way in took:
            start = time.perf_counter()
            load(way)
            if turn:  # the first warms up
                took[way].append(1e3 * (time.perf_counter() - start))
    least = {way: min(each) for way, each in took.items()}
    first = next(iter(least.values()))
    return [f"{ms:.1f} ms x{ms / first:.2f}" for ms in least.values()]


def _load(folder: Path, way: str, name: str) -> None:
    if way == _WAYS[0]:
        bundle = Bundle.open(folder, verify=False)
        (record,) = bundle.manifest.targets.values()
        file = bundle.file(record.candidates[name].files[0])
        made = open_candidate(name, file, device_here("cpu"))
        Session(Signature.from_dict(bundle.manifest.signature), made)
        return
    opened = open_version(Opening(folder, mode="test"))
    if way == _WAYS[2]:
        require_signature(opened.bundle, [read_trusted(folder.parent / "release.pem")])
    (target,) = opened.bundle.manifest.targets
    measured_session(opened, target, name)


def _process(*arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks.memory.loading", *arguments]
    subprocess.run(command, check=True)


def _bundle(made: Subject) -> Path:
    """A signed bundle with the program, TorchScript, the reference and the artifact of `aoti`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from engines import Target
    from registry.bundle.digests import seal
    from registry.bundle.manifest import Candidate, Capture, Manifest, Provenance, TargetRecord
    from registry.trust import sign

    target = str(Target.parse("cpu"))
    made.executable("aoti")
    folder = made.folder / "bundle"
    artifact = folder / "targets" / target / "aoti"
    shutil.copytree(made.folder / "aoti-cpu", artifact)
    files = sorted(artifact.iterdir(), key=lambda file: file.suffix != ".so")
    for file in ("program.pt2", "model.ts", "reference.safetensors"):
        shutil.copy(made.folder / file, folder)
    manifest = Manifest(
        name="bench",
        signature=made.signature.to_dict(),
        capture=Capture(torchscript="scripted"),
        torchscript="model.ts",
        targets={
            target: TargetRecord(
                status="verified",
                chosen="aoti",
                candidates={
                    "aoti": Candidate(
                        status="valid", files=[str(file.relative_to(folder)) for file in files]
                    ),
                    "exported": Candidate(status="valid", files=["program.pt2"]),
                },
            )
        },
        provenance=Provenance(created="", config_sha256="", config={}, python=sys.version),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    seal(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    (made.folder / "release.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (made.folder / "release.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    sign(Bundle.open(folder), made.folder / "release.key")
    return folder


if __name__ == "__main__":
    main()
