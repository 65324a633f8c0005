"""Many builders of targets at once: one of each target wins, and the others are told.

python -m tests.registry.campaigns.builds --builders 6
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from registry import Bundle, Registry, RegistryError
from tests.models import bundles
from tests.registry.campaigns import workers

TARGETS = ("cpu/x86-64-v4", "cuda/sm_90", "rocm/gfx90a")


def at_once(folder: Path, builders: int) -> list[int]:
    """How many builders of each target were told that another one was quicker."""
    uri = workers.prepare(folder, 1)
    bundle = Bundle.open(folder / "bundles/0")

    def register() -> None:
        Registry(uri).register(bundle, "jets")

    workers.run(register)

    def builder(target: str, seed: int) -> Callable[[], object]:
        annex = bundles.write_annex(folder / "annexes" / target / str(seed), bundle, target, seed)
        registry = Registry(uri)
        version = registry.find("jets/1")

        def add() -> None:
            try:
                registry.add_target(version, annex)
            except RegistryError as error:
                assert "already: built later" in str(error), error
                os._exit(7)

        return add

    made = [(target, seed) for target in TARGETS for seed in range(builders)]
    ended = workers.at_once([partial(builder, *each) for each in made])
    assert set(ended) <= {0, 7}, ended
    told = dict.fromkeys(TARGETS, 0)
    for (target, _), status in zip(made, ended, strict=True):
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
