"""Each request is answered once, unmerged ones in order; choosing the shorter queue balances."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from benchmarks.scaling.batcher import Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.model import Load, Shape, System, least, simulate
from benchmarks.scaling.processors import Processors
from benchmarks.scaling.server import Server

COSTS = Costs(
    client=2e-4, client_row=1e-5, request=1e-4, request_row=1e-5, inside=1e-4, reply=5e-5,
    behind=5e-5, run=2e-4, run_request=1e-4, run_row=2e-5, wait=3e-5, client_wake=1e-4,
    extras=(-1e-4, 1e-4), extras_every=5e-4,
)  # fmt: skip
SHAPES = st.builds(
    Shape,
    st.just(COSTS),
    st.builds(Batching, st.sampled_from((0, 16)), st.just((4,)), st.sampled_from((0.0, 1e-3))),
    servers=st.integers(1, 3),
    instances=st.integers(1, 3),
    client_cores=st.sampled_from((1, math.inf)),
    proxy_s=st.sampled_from((0.0, 1e-4)),
)


@settings(max_examples=40)
@given(SHAPES, st.integers(1, 12), st.integers(1, 6), st.integers(1, 16), st.integers(0, 99))
def test_every_request_is_answered_once(
    shape: Shape, clients: int, requests: int, rows: int, seed: int
) -> None:
    system = System(shape, seed)
    seen = system.run(Load(clients, rows, think_s=1e-4, requests=requests), 60.0)
    counters = system.counters()
    total = clients * requests
    assert seen.sent == seen.answered == len(seen.latencies) == counters.requests == total
    assert counters.rows == total * rows
    assert seen.runs == counters.runs <= total
    assert all(server.active == 0 for server in system.servers)
    if shape.batching.max_rows == 0:
        assert counters.runs == total


def test_without_batching_requests_run_in_the_order_of_arrival() -> None:
    env, left = Environment(), []
    costs = replace(COSTS, extras=())
    server = Server(env, costs, Batching(), Processors(env, random.Random(1)), random.Random(1))

    def one(number: int) -> Iterator[Any]:
        yield env.timeout(number * 1e-5)
        yield from server.answer(1)
        left.append(number)

    for number in range(50):
        env.process(one(number))  # type: ignore[arg-type]
    env.run()
    assert left == list(range(50))
    assert server.counters.runs == 50


def test_a_request_above_the_maximum_is_refused() -> None:
    system = System(Shape(COSTS, Batching(8)))
    with pytest.raises(ValueError, match="9 rows in a request, the server takes 8"):
        system.run(Load(1, rows=9), 1.0)


def test_two_random_choices_keep_servers_evenly_busy() -> None:
    system = System(Shape(COSTS, servers=8))
    system.run(Load(64), 1.0)
    answered = [server.counters.requests for server in system.servers]
    assert max(answered) < 1.1 * min(answered)


def test_the_same_seed_gives_the_same_run() -> None:
    shape, load = Shape(COSTS, Batching(16), servers=2), Load(8, think_s=1e-3)
    one, same, other = (simulate(shape, load, 0.5, seed=seed).latencies for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("enough", [1, 2, 7, 64, 65])
def test_least(enough: int) -> None:
    assert least(lambda count: count >= enough) == enough
    with pytest.raises(ValueError, match="no count up to 4"):
        least(lambda count: False, most=4)
