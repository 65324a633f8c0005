"""Benchmark: time the valid candidates together, with the eager model as the baseline.

Every contestant starts from SoA columns and ends in SoA columns, so every copy that it needs is
inside its time. Contestants take turns in one process, in an order shuffled every round, because
the speed of a shared machine drifts.
"""

from __future__ import annotations

import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from runtime.opening import open_candidate
from runtime.session import Session, in_tiles
from soa.dtypes import torch_dtype
from soa.memory import Collection, read_block
from soa.signature import BoundBlock, Signature
from stages.model import outputs_in_order
from stages.reference import Arrays, Case, Reference, filled_collections, label
from stages.reports import COPIES, EAGER, BenchmarkReport, Timing

K = TypeVar("K")

_CPU = torch.device("cpu")
_TURN_S = 0.002  # a turn repeats a shorter call until it takes about this long
_WARM_CALLS = 3
_TRIES, _LONG_TURN_S = 5, 0.02  # an interrupted turn is timed again, unless it takes so long
_MIN_ROUNDS, _MAX_ROUNDS = 7, 200
_FIRST_ROUNDS = 3  # after these, much slower contestants are dropped
# A first call this long counts as warm, and is not timed again. A round this long is run only a few
# times.
_LONG_S = 0.5
_WORTH = 0.95  # another engine is taken if it needs less than this part of the overall one's time
_NOISE = 1.03  # engines within this factor of the best are equal; the first named one is taken
_HOPELESS = 2.0  # times the fastest: a slower candidate takes part in the first rounds only


def benchmark_cases(signature: Signature) -> list[Case]:
    """The cases to time: the typical sizes of the config; if it names none, 1 row and the most
    rows.

    With several dimensions, case i has the i-th size of each; a shorter list repeats its last size.
    """
    per_dim: dict[str, list[int]] = {}
    for dim in signature.dims:
        rows = signature.ranges[dim]
        per_dim[dim] = list(rows.typical) or sorted({max(1, rows.min), rows.max})
    longest = max(len(sizes) for sizes in per_dim.values())
    return [
        {dim: sizes[min(i, len(sizes) - 1)] for dim, sizes in per_dim.items()}
        for i in range(longest)
    ]


def ladder(signature: Signature) -> list[Case]:
    """The cases of `benchmark_cases`; with one row dimension also 1, 10, 100 … and the most rows,
    in ascending order."""
    cases = benchmark_cases(signature)
    if len(signature.dims) > 1:
        return cases
    (dim,) = signature.dims
    rows = signature.ranges[dim]
    sizes = {case[dim] for case in cases} | {10**exponent for exponent in range(10)} | {rows.max}
    return [{dim: n} for n in sorted(sizes) if max(rows.min, 1) <= n <= rows.max]


def benchmark(
    signature: Signature,
    sessions: Mapping[str, Session],
    inputs: Arrays,
    model: torch.nn.Module | None = None,
    seconds: float = 1.0,
) -> BenchmarkReport:
    """Time all sessions, by candidate, and the eager `model` if it is given, in turns.

    It takes about `seconds` for each size, with one torch thread, as in production. The fastest
    candidate has the smallest geometric mean of times. With one row dimension, another candidate
    is chosen for those sizes at which it saves 5 %.
    """
    (report,) = benchmark_targets(signature, {"": sessions}, inputs, model, seconds).values()
    return report


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in this process, as in production, until the block ends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def benchmark_targets(
    signature: Signature,
    sessions: Mapping[str, Mapping[str, Session]],
    inputs: Arrays,
    model: torch.nn.Module | None = None,
    seconds: float = 1.0,
) -> dict[str, BenchmarkReport]:
    """Time the candidates of several targets of one device, `sessions[target][name]`, in one race.

    Times from one race may be compared, so the reports of the targets may be, too. A session that
    several targets share is timed once. `model` and `seconds` are as for `benchmark`.
    """
    distinct = {session for by_name in sessions.values() for session in by_name.values()}
    timings: dict[str, dict[str, dict[str, Timing]]] = {target: {} for target in sessions}
    with one_thread():
        for case in ladder(signature):
            runs: dict[Session | str, Callable[[], None]] = {
                session: bind_call(session, inputs, case) for session in distinct
            }
            baseline: dict[str, Timing] = {}
            if model is not None:
                runs[EAGER] = row_major_call(signature, model, inputs, case)
                copies = row_major_call(signature, None, inputs, case)
                # The copies are timed alone: beside them, the race would drop all others as slow.
                baseline = race({COPIES: copies}, _TURN_S)
            raced = race(runs, seconds, stay=())
            if model is not None:
                baseline[EAGER] = raced[EAGER]
            for target, by_name in sessions.items():
                timed = {name: raced[session] for name, session in by_name.items()}
                timings[target][label(case)] = timed | baseline
    return {
        target: _make_report(signature, timings[target], names=list(by_name))
        for target, by_name in sessions.items()
    }


def _make_report(
    signature: Signature, timings: dict[str, dict[str, Timing]], names: list[str]
) -> BenchmarkReport:
    """Choose the fastest of the engines `names`, and those for fewer rows, from the times
    `timings[case label][contestant]`, and report the choice with the times."""
    fastest = fastest_overall(timings, names)
    if fastest is None or len(signature.dims) > 1:
        return BenchmarkReport(timings, fastest)
    (dim,) = signature.dims
    sizes = [case[dim] for case in ladder(signature)]
    by_size = [{name: timings[label({dim: n})][name] for name in names} for n in sizes]
    chosen, below = choose_by_rows(sizes, by_size, fastest)
    return BenchmarkReport(timings, chosen, below=below)


def fastest_overall(timings: Mapping[str, Mapping[str, Timing]], names: list[str]) -> str | None:
    """The engine with the smallest geometric mean of times over all sizes; None if `names` is
    empty. If several engines are equal within the noise, the first of them in `names` is taken."""

    def log_mean(name: str) -> float:
        return math.fsum(math.log(_cost(rows[name])) for rows in timings.values()) / len(timings)

    if not names:
        return None
    best = min(map(log_mean, names))
    return next(name for name in names if log_mean(name) <= best + math.log(_NOISE))


def choose_by_rows(
    sizes: Sequence[int], timings: Sequence[Mapping[str, Timing]], overall: str
) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Choose an engine for each number of rows.

    Returns the engine for the most rows, and pairs `(rows, engine)`, ascending: this engine is for
    fewer than `rows` rows. `timings` has the times by engine at each of the `sizes`.

    The engine `overall` is chosen unless another one saves enough, since a second artifact costs
    memory and a load. If the choice changes between two sizes, it does so at their geometric mean.
    """
    engine_at: list[tuple[int, str]] = []
    for n, times in sorted(zip(sizes, timings, strict=True), key=lambda pair: pair[0]):
        best = min(times, key=lambda name: _cost(times[name]))
        engine_at.append((n, best if _is_faster(times[best], times[overall]) else overall))
    below: list[tuple[int, str]] = []
    for (n, name), (larger, following) in pairwise(engine_at):
        if name != following:
            middle = math.ceil(math.sqrt(max(n, 1) * larger))
            below.append((max(middle, n + 1), name))
    _, at_largest = engine_at[-1]
    return at_largest, tuple(below)


def _cost(timing: Timing) -> float:
    """The time to compare, in microseconds: the geometric mean of the median and the 5th
    percentile, which noise changes least."""
    return math.sqrt(timing.median_us * timing.p05_us)


def _is_faster(timing: Timing, other: Timing) -> bool:
    """Whether `timing` is shorter than `other` by at least 5 %, both in the median and in the 5th
    percentile."""
    return timing.median_us < other.median_us * _WORTH and timing.p05_us < other.p05_us * _WORTH


def race(
    runs: Mapping[K, Callable[[], object]], seconds: float, stay: Container[K] | None = None
) -> dict[K, Timing]:
    """Time callables in turns, by name, for about `seconds`.

    Each turn repeats a short call until it takes about 2 ms; in each round every contestant has one
    turn, in random order. A contestant that is much slower than the fastest is dropped after a few
    rounds; or after its first call, if one round takes longer than `seconds`. Those in `stay` are
    never dropped; if `stay` is None, nobody is.
    """
    call_s = {name: _time_once_s(run) for name, run in runs.items()}
    call_s |= {name: time_warm_s(runs[name]) for name, cold in call_s.items() if cold < _LONG_S}
    repeats = {name: max(1, round(_TURN_S / max(call, 1e-7))) for name, call in call_s.items()}
    turns_us: dict[K, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0).shuffle
    names = list(runs)  # the contestants that still take part

    def round_s() -> float:
        return max(1e-6, sum(call_s[name] * repeats[name] for name in names))

    def near_the_fastest(times: Mapping[K, float]) -> list[K]:
        limit = _HOPELESS * min(times.values())
        return [name for name in names if stay is None or name in stay or times[name] <= limit]

    def run_rounds(count: int) -> None:
        for _ in range(count):
            shuffle(names)
            for name in names:
                turns_us[name].append(_time_turn_us(runs[name], repeats[name]))

    if round_s() > max(seconds, _LONG_S):
        names = near_the_fastest(call_s)
        for name in runs.keys() - set(names):
            turns_us[name].append(call_s[name] * 1e6)
    rounds = _round_count(round_s(), seconds)
    run_rounds(_FIRST_ROUNDS)
    if rounds > _FIRST_ROUNDS:
        names = near_the_fastest({name: statistics.median(turns_us[name]) for name in names})
        rounds = _round_count(round_s(), seconds)
    run_rounds(rounds - _FIRST_ROUNDS)
    return {name: _summarize(times) for name, times in turns_us.items()}


def _round_count(round_s: float, seconds: float) -> int:
    """How many rounds take about `seconds`, if one takes `round_s`. There are at least
    `_FIRST_ROUNDS`, and `_MIN_ROUNDS` unless a round is long."""
    least = _MIN_ROUNDS if round_s <= max(seconds, _LONG_S) else _FIRST_ROUNDS
    return max(least, min(_MAX_ROUNDS, math.ceil(seconds / round_s)))


def _time_turn_us(run: Callable[[], object], repeat: int) -> float:
    """Call `run` `repeat` times, and return the time of one call in microseconds.

    If the system ran something else meanwhile, a short turn is timed again, up to `_TRIES` times;
    the shortest counts.
    """
    shortest = math.inf
    for _ in range(_TRIES):
        before = _count_interruptions()
        begun = time.perf_counter()
        for _ in range(repeat):
            run()
        shortest = min(shortest, time.perf_counter() - begun)
        if _count_interruptions() == before or shortest > _LONG_TURN_S:
            break
    return shortest / repeat * 1e6


def _count_interruptions() -> int:
    """How often the system has taken the processor from this process so far (its involuntary
    context switches)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _time_once_s(run: Callable[[], object]) -> float:
    """Call `run` once, and return the time in seconds."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def time_warm_s(run: Callable[[], object]) -> float:
    """Call `run` a few times, and return the shortest time in seconds, since the system may
    interrupt a call."""
    return min(_time_once_s(run) for _ in range(_WARM_CALLS))


def _summarize(times_us: list[float]) -> Timing:
    """The median, and the 5th and 95th percentile, of times in microseconds."""
    ordered = sorted(times_us)
    last = len(ordered) - 1
    p05_us, p95_us = ordered[round(0.05 * last)], ordered[round(0.95 * last)]
    return Timing(statistics.median(ordered), p05_us, p95_us, rounds=len(ordered))


def measure_p99_us(run: Callable[[], object]) -> float:
    """The 99th percentile of the times of single calls, in microseconds.

    At least 200 calls are timed, and for at least a second; some calls before are not timed.
    """
    for _ in range(10):  # not timed: caches and branch predictors get warm
        run()
    starts_ns: list[int] = []
    until = time.perf_counter_ns() + 1e9
    while len(starts_ns) < 200 or starts_ns[-1] < until:
        starts_ns.append(time.perf_counter_ns())
        run()
    starts_ns.append(time.perf_counter_ns())
    calls = sorted(following - start for start, following in pairwise(starts_ns))
    return calls[math.ceil(0.99 * len(calls)) - 1] / 1e3


def memory_here(
    name: str, file: str, signature: dict[str, Any], reference: str, rows: Case, tile: int
) -> float:
    """By how many MB it raises the peak memory of this process to open and run an artifact of the
    engine `name`. The memory of the collections does not count.

    Call it in a separate process that has imported torch. The arguments are plain data: `file` and
    `reference` are paths, `rows` is the case to run, in tiles of `tile` rows (0: all at once).
    """
    torch.set_num_threads(1)
    parsed = Signature.from_dict(signature)
    collections = filled_collections(parsed, Reference.load(Path(reference)).inputs, rows, _CPU)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    before = _read_peak_mb()
    executable = in_tiles(open_candidate(name, Path(file), _CPU), parsed, tile)
    binding = Session(parsed, executable).bind(*collections)
    for _ in range(3):
        binding()
    return _read_peak_mb() - before


def _read_peak_mb() -> float:
    """The peak of this process's memory in MB, from /proc (VmHWM, in KiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()  # trusted
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def bind_call(session: Session, inputs: Arrays, case: Case) -> Callable[[], None]:
    """Bind a session to the reference inputs of a case, and return a function that runs it. The
    function returns when the outputs are written, also on a GPU."""
    binding = session.bind(*filled_collections(session.signature, inputs, case, session.device))
    if session.device.type == "cpu":
        return binding

    def run() -> None:
        binding()
        torch.cuda.synchronize(session.device)

    return run


def row_major_call(
    signature: Signature,
    model: Callable[..., Any] | None,
    inputs: Arrays,
    case: Case,
    device: torch.device = _CPU,
) -> Callable[[], None]:
    """A function that runs the eager model on the reference inputs of a case, as a user would who
    has columns: it copies columns on `device` to row-major tensors, calls the model, and copies its
    outputs to columns. If `model` is None, it does only the copies."""
    sources, written = filled_collections(signature, inputs, case, device)
    blank = [
        torch.zeros(bound.shape(case[bound.rows]), device=device) for bound in signature.outputs
    ]

    def run() -> None:
        with torch.no_grad():
            # The copies that this project avoids.
            arguments = []
            for bound in signature.inputs:
                block = read_block(bound, sources[bound.block.collection], device)
                arguments.append(block.to(torch_dtype(bound.plan.dtype)))
            returned = blank if model is None else outputs_in_order(model(*arguments), signature)
            for bound, value in zip(signature.outputs, returned, strict=True):
                _write_columns(bound, value, written[bound.block.collection])
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return run


def _write_columns(bound: BoundBlock, value: torch.Tensor, collection: Collection) -> None:
    """Copy an output of the model into its columns in `collection`, a component at a time."""
    n = 1 if bound.plan.kind == "scalars" else collection.n
    columns = [collection.layout[name] for name in bound.block.columns]
    places = [
        (column.name, column.component_of(i))
        for column in columns
        for i in range(column.components)
    ]
    for (name, component), values in zip(places, value.reshape(n, -1).unbind(1), strict=True):
        collection.span(name, component).first(n).tensor().copy_(values)
