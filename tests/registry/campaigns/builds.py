"""Builders of targets: killed with SIGKILL before each of their writes, and many at once.

    python -m tests.registry.campaigns.builds --builders 6

A builder's writes are the files that it copies into the registry, one by one, and MLflow's own.
After each kill the version has the target whole or not at all, and the next builder goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from registry import Annex, Bundle, Registry, RegistryError
from tests.models import bundles
from tests.registry.campaigns import workers

TARGETS = ("cpu/x86-64-v4", "cuda/sm_90", "rocm/gfx90a")
_MOST_POINTS = 12
_CLIENT = ("create_run", "set_model_version_tag", "set_terminated")


def killed_before(write: int) -> None:
    """End this process with SIGKILL when it comes to its write of this number, from 0."""
    from mlflow.tracking import MlflowClient

    left = [write]

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return plain(*arguments, **more)

        return call

    shutil.copyfile = counted(shutil.copyfile)
    for name in _CLIENT:
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))


def add(uri: str, annex: Path, ref: str) -> None:
    registry = Registry(uri)
    registry.add_target(registry.find(ref), Annex.open(annex))


def check(registry: Registry, ref: str, target: str, digests: set[str]) -> bool:
    """The target is there whole, and one of these, or not at all; and nothing else has changed."""
    version = registry.find(ref)
    opened = registry.open(version)
    assert opened.digest == version.digest
    assert registry.open(version, annexes=()).manifest.targets.keys() == {bundles.V3}
    done = [
        event.annexes[target]
        for event in registry.history(version.name)
        if (event.kind, event.state, event.version) == ("build", "done", version.number)
    ]
    if target not in version.annexes:
        assert target not in opened.manifest.targets
        assert done == []
        return False
    assert version.annexes[target] in digests
    assert opened.file(f"annexes/{target}/aoti/model.so").stat().st_size == 5000
    assert done == [version.annexes[target]]
    return True


@dataclass(frozen=True)
class Killed:
    """A version, what a builder was to add to it when it was killed, and what the next one adds."""

    uri: str
    ref: str
    target: str
    first: Annex
    second: Annex

    def builder(self, write: int) -> None:
        killed_before(write)
        add(self.uri, self.first.path, self.ref)

    def had_it(self) -> bool:
        """After the kill, and after the next builder: told so, or as if nobody had been there."""
        registry = Registry(self.uri)
        had = check(registry, self.ref, self.target, {self.first.digest})
        try:
            registry.add_target(registry.find(self.ref), self.second)
        except RegistryError as error:
            assert had, error
            assert f"has {self.target} already" in str(error), error
            registry.approve(registry.find(self.ref), "somebody")  # any writer settles
        else:
            assert not had
        kept = self.first if had else self.second
        assert check(registry, self.ref, self.target, {kept.digest})
        version = registry.find(self.ref)
        assert (version.targets[self.target], version.chosen[self.target]) == ("verified", "aoti")
        assert all(event.state != "open" for event in registry.history(version.name))
        return had


def killed(folder: Path) -> tuple[int, int]:
    """Points at which a builder was killed, and at how many the version had its target."""
    uri = workers.prepare(folder, _MOST_POINTS)
    workers.run(lambda: _register(uri, folder, _MOST_POINTS))
    had = 0
    for point in range(_MOST_POINTS):
        bundle = Bundle.open(folder / "bundles" / str(point))
        first, second = (
            bundles.write_annex(folder / f"{point}.{seed}", bundle, TARGETS[0], seed)
            for seed in (1, 2)
        )
        case = Killed(uri, f"jets/{point + 1}", TARGETS[0], first, second)
        _, status = os.waitpid(workers.fork(partial(case.builder, point)), 0)
        had_it = workers.answer(case.had_it)
        if status == 0:  # it has fewer writes than this
            assert had_it
            return point, had
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        had += had_it
    raise AssertionError("a builder writes more than expected")


def _register(uri: str, folder: Path, count: int) -> None:
    for number in range(count):
        Registry(uri).register(Bundle.open(folder / "bundles" / str(number)), "jets")


def at_once(folder: Path, builders: int) -> list[int]:
    """How many of the builders of each target were told that another was quicker."""
    uri = workers.prepare(folder, 1)
    bundle = Bundle.open(folder / "bundles/0")
    workers.run(lambda: _register(uri, folder, 1))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--builders", type=int, default=6, help="Of each target, at once.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-builds-") as folder:
        workers.warm_up()
        points, had = killed(Path(folder) / "killed")
        print(f"killed at {points} points: the version had its target at {had} of them, whole")
        told = at_once(Path(folder) / "at once", arguments.builders)
        print(f"{arguments.builders} builders of each target at once, told so: {told}")


if __name__ == "__main__":
    main()
