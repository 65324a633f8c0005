"""May the rows of several requests share a run, does it pay, and at which sizes?

A server that batches concatenates rows. That is right for a model of jets, and silently wrong for
one whose rows are the nodes of one event. A signature does not tell the two apart, so the model is
asked: some of the reference's rows, alone and in another order, must give the answers they gave
among the others. It is a trial on the reference's rows, not a proof for all rows. Whether merging
pays is what the version's own benchmark says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from registry.bundle import Manifest
from runtime.checked import Tolerance, compare
from runtime.session import Session
from serving.wire import mergeable
from soa.memory import Collection, read_block

# What a call of the Python backend costs beside the artifact, and each further request in it, in
# microseconds: measured with benchmarks/serving.py and benchmarks/scaling.
_CALL_US = 300.0
_REQUEST_US = 100.0
_GOOD = 0.9  # of the best rows a second: as good, since benchmarks repeat no better

Columns = Mapping[str, Mapping[str, torch.Tensor]]

_ROWS = 256


def rows_are_independent(
    session: Session, inputs: Columns, tolerances: Mapping[str, Tolerance]
) -> bool:
    """Whether every row's answer is its own, within the tolerances, on the reference's rows.

    `inputs[collection][column]` are rows to try with, the maximum or fewer; up to 256 are used.
    """
    signature = session.signature
    if not mergeable(signature):
        return False
    (dim,) = signature.dims
    low, high = signature.ranges[dim].min, min(signature.ranges[dim].max, _ROWS)
    some = max(low, high // 3, 1)
    if some >= high:  # no room for a part: nothing can be tried
        return False
    shuffled = torch.randperm(high, generator=torch.Generator().manual_seed(1)).tolist()
    whole = _answers(session, inputs, range(high))
    trials = [shuffled[:some], shuffled, list(range(high - some, high)), shuffled[-some:]]
    return all(_agree(_answers(session, inputs, rows), whole, rows, tolerances) for rows in trials)


def _answers(session: Session, inputs: Columns, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """The outputs by block for these rows of the inputs, in this order."""
    signature = session.signature
    index = torch.tensor(rows)
    given = {name: Collection(signature.layouts[name], len(rows)) for name in inputs}
    for name, collection in given.items():
        for column in collection.layout.columns:
            collection.fill(column.name, inputs[name][column.name][index])
    written = {
        name: given.get(name) or Collection(signature.layouts[name], len(rows))
        for name in signature.output_collections
    }
    session.run(given, written)
    return {b.name: read_block(b, written[b.block.collection]) for b in signature.outputs}


def _agree(
    part: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    rows: Sequence[int],
    tolerances: Mapping[str, Tolerance],
) -> bool:
    index = torch.tensor(rows)
    return all(
        compare(found, whole[name][index], tolerances[name], classifier=False).outside
        <= tolerances[name].max_outside
        for name, found in part.items()
    )


def preferred_sizes(manifest: Manifest, target: str) -> tuple[int, ...]:
    """The batch sizes at which the version's own benchmark served the most rows a second.

    From the times of the engines that a session of this target runs, with the server's cost of a
    call added. Empty where nothing was timed at 2 rows or more.
    """
    times = run_times(manifest, target)
    speeds = {rows: rows / (us + _CALL_US) for rows, us in times.items() if rows >= 2}
    best = max(speeds.values(), default=0.0)
    return tuple(sorted(rows for rows, speed in speeds.items() if speed >= _GOOD * best))


def why_merging_does_not_pay(manifest: Manifest, target: str) -> str | None:
    """For people; None where it may pay, or where 1 row, or more than 1, were not timed.

    Merging pays most for requests of one row. With c for a call, q for each further request in it
    and t(n) for the artifact, requests alone do 1 / (c + t(1)) rows a second, and n of them in a
    run n / (c + (n - 1) q + t(n)). A gain below a tenth is one that no benchmark shows.
    """
    times = run_times(manifest, target)
    if 1 not in times or len(times) < 2:
        return None
    alone = _CALL_US + times[1]
    gains = {
        n: n * alone / (_CALL_US + (n - 1) * _REQUEST_US + us) for n, us in times.items() if n >= 2
    }
    n = max(gains, key=gains.__getitem__)
    if _GOOD * gains[n] > 1:
        return None
    return (
        f"by its benchmark a row takes {times[1] / 1000:.3g} ms alone and "
        f"{times[n] / n / 1000:.3g} ms among {n}, so that merged they would be {gains[n]:.2f} "
        "times as many a second (--merge does it all the same)"
    )


def run_times(manifest: Manifest, target: str) -> Mapping[int, float]:
    """Microseconds of a run by its rows, of the fastest engine that a session may take."""
    record = manifest.targets.get(target)  # a TensorRT plan is for a GPU that the version has not
    times: dict[int, float] = {}
    if record is None:
        return times
    for engine in record.engines():
        for rows, stats in record.candidates[engine].benchmark.items():
            if rows.isdecimal():
                times[int(rows)] = min(times.get(int(rows), stats.median_us), stats.median_us)
    return times
