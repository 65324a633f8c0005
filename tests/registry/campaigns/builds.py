"""Builders of targets, many at once: of two of one target one wins, and the other is told.

python -m tests.registry.campaigns.builds --builders 6
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from registry import Annex, Bundle, Registry, RegistryError
from tests.models import bundles
from tests.registry.campaigns import workers

TARGETS = ("cpu/x86-64-v4", "cuda/sm_90", "rocm/gfx90a")


def add(uri: str, annex: Path, ref: str) -> None:
    registry = Registry(uri)
    registry.add_target(registry.find(ref), Annex.open(annex))


def at_once(folder: Path, builders: int) -> list[int]:
    """How many of the builders of each target were told that another was quicker."""
    uri = workers.prepare(folder, 1)
    bundle = Bundle.open(folder / "bundles/0")

    def register() -> None:
        Registry(uri).register(bundle, "jets")

    workers.run(register)
    children: dict[int, str] = {}
    read, write = os.pipe()
    for target in TARGETS:
        for seed in range(builders):
            place = folder / "annexes" / target / str(seed)
            bundles.write_annex(place, bundle, target, seed)

            def work(place: Path = place) -> None:
                os.close(write)
                os.read(read, 1)  # until all are there
                try:
                    add(uri, place, "jets/1")
                except RegistryError as error:
                    assert "already: built later" in str(error), error
                    os._exit(7)

            children[workers.fork(work)] = target
    os.close(write)
    os.close(read)
    told = dict.fromkeys(TARGETS, 0)
    for pid, target in children.items():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 7), status
        told[target] += status == 7
    workers.run(lambda: _nothing_left(uri, folder))
    return list(told.values())


def _nothing_left(uri: str, folder: Path) -> None:
    version = Registry(uri).find("jets/1")
    assert version.annexes.keys() == set(TARGETS)
    Registry(uri).open(version)
    there = {path.parent.name for path in (folder / "store").rglob("annex.json")}
    assert there == set(version.annexes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builders", type=int, default=6, help="Of each target, at once.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-builds-") as folder:
        workers.warm_up()
        told = at_once(Path(folder), arguments.builders)
        print(f"{arguments.builders} builders of each target at once, told so: {told}")


if __name__ == "__main__":
    main()
