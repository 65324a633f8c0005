"""Many promoters at once, one process each: the history has all promotions, in one order.

python -m tests.registry.campaigns.promoters --promoters 20
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from registry import Bundle, Registry
from registry.mlflow import aliases_of
from tests.models.bundles import PASSED
from tests.registry.campaigns import invariants, workers

VERSIONS = 5


def race(
    folder: Path, promoters: int, registry_uri: str | None = None, lease_s: float | None = None
) -> None:
    """Each promotes one of five versions to production. AssertionError if the history is wrong."""
    workers.warm_up(lease_s)
    uri, name = workers.prepare(folder, VERSIONS, registry_uri), workers.new_name()

    def register() -> None:
        for seed in range(VERSIONS):
            Registry(uri).register(Bundle.open(folder / "bundles" / str(seed)), name)

    workers.run(register)

    def promoter(number: int) -> Callable[[], object]:
        """Looks up a version; the result promotes it."""
        registry = Registry(uri)
        version = registry.find(f"{name}/{number % VERSIONS + 1}")
        label = [f"promoter {number}"]
        return lambda: registry.promote(version, "production", PASSED, policies=label)

    exit_codes = workers.at_once([partial(promoter, number) for number in range(promoters)])
    assert exit_codes == [0] * promoters, exit_codes
    workers.run(lambda: check(Registry(uri), name, promoters))


def check(registry: Registry, name: str, promoters: int) -> None:
    """Checks that each event continues from the aliases that the one before it left."""
    done = {f"promoter {number}": "promotion" for number in range(promoters)}
    invariants.check_always(registry, name, done, [])
    invariants.check_settled(registry, name)
    events = registry.history(name)
    assert len(events) == promoters
    aliases: Mapping[str, int] = {}
    for event in events:
        promoted = int(event.policies[0].removeprefix("promoter ")) % VERSIONS + 1
        assert event.version == event.after["production"] == promoted
        assert event.replaced == aliases.get("production")
        if event.replaced not in (None, promoted):
            assert event.after["previous"] == event.replaced
        aliases = event.after
    with registry.client() as client:
        assert aliases_of(client.get_registered_model(name)) == events[-1].after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--promoters", type=int, default=20)
    workers.add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soa-promoters-") as folder:
        begun = time.monotonic()
        race(Path(folder), options.promoters, options.registry, options.lease)
    print(f"{options.promoters} promoters, one order, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
