"""The simulation compared with queues whose waiting times are known. Seeds are fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from simpy import Environment

from benchmarks.scaling.batcher import Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.disturbances import Disturbances
from benchmarks.scaling.model import Load, Shape, System, simulate
from benchmarks.scaling.processors import Processors
from benchmarks.scaling.server import Server
from benchmarks.scaling.theory import (
    erlang_c,
    time_shared_evenly,
    wait_many_servers,
    wait_one_server,
)

ARRIVALS = 10_000


def arrive(env: Environment, rate: float, visit: Callable[[], Iterator[Any]]) -> list[float]:
    """Poisson arrivals, each of which runs `visit`; returns how many seconds each took."""
    rng, stayed = random.Random(7), []

    def one() -> Iterator[Any]:
        begun = env.now
        yield from visit()
        stayed.append(env.now - begun)

    def source() -> Iterator[Any]:
        for _ in range(ARRIVALS):
            yield env.timeout(rng.expovariate(rate))
            env.process(one())  # type: ignore[arg-type]

    env.process(source())  # type: ignore[arg-type]
    env.run()
    assert len(stayed) == ARRIVALS
    return stayed


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_server_with_one_instance_is_m_d_1(load: float) -> None:
    env = Environment()
    server = Server(
        env, Costs(run=1.0), Batching(), Processors(env, random.Random(1)), random.Random(1)
    )
    stayed = arrive(env, load, lambda: server.answer(1))
    assert mean(stayed) - 1.0 == pytest.approx(wait_one_server(load, 1.0), rel=0.15)
    assert server.counters.queue_s / ARRIVALS == pytest.approx(mean(stayed) - 1.0)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_cores_with_long_slices_are_m_m_c(servers: int) -> None:
    env, rng, rate = Environment(), random.Random(3), 0.7 * servers
    cpu = Processors(env, rng, servers, slice_s=math.inf)

    def visit() -> Iterator[Any]:
        yield cpu.work(rng.expovariate(1.0))

    wait = mean(arrive(env, rate, visit)) - 1.0
    assert wait == pytest.approx(wait_many_servers(rate, 1.0, servers), rel=0.15)


def test_a_core_with_short_slices_is_shared_evenly() -> None:
    env, rng = Environment(), random.Random(3)
    cpu = Processors(env, rng, 1, slice_s=0.05)

    def visit() -> Iterator[Any]:
        yield cpu.work(rng.choice((0.25, 1.75)))

    assert mean(arrive(env, 0.5, visit)) == pytest.approx(time_shared_evenly(0.5, 1.0), rel=0.15)


def test_whoever_is_runnable_may_be_next() -> None:
    env = Environment()
    cpu = Processors(env, random.Random(3), 1)
    left: list[int] = []

    def visit(number: int) -> Iterator[Any]:
        yield cpu.work(1e-3)
        left.append(number)

    for number in range(50):
        env.process(visit(number))  # type: ignore[arg-type]
    env.run()
    assert sorted(left) == list(range(50)) != left
    assert env.now == pytest.approx(50e-3)


def test_erlang_c_by_hand() -> None:
    assert erlang_c(0.5, 1) == pytest.approx(0.5)
    assert erlang_c(1.0, 2) == pytest.approx(1 / 3)
    assert wait_one_server(0.5, 1.0, variance=1.0) == wait_many_servers(0.5, 1.0, 1)


@pytest.mark.parametrize("load", [1.0, 1.5])
def test_a_saturated_queue_has_no_mean(load: float) -> None:
    with pytest.raises(ValueError, match="no steady state"):
        wait_one_server(load, 1.0)


def test_a_proxy_is_m_d_1_too() -> None:
    system = System(Shape(Costs(), proxy_s=1.0, cores=math.inf))
    stayed = arrive(system.env, 0.7, lambda: system.request(1))
    assert mean(stayed) - 1.0 == pytest.approx(wait_one_server(0.7, 1.0), rel=0.15)


def test_closed_clients_saturate_what_is_slowest() -> None:
    fed = Costs(client=0.3e-3, request=0.2e-3, run=0.5e-3)
    alone = simulate(Shape(fed), Load(1), 1.0)
    assert alone.rate == pytest.approx(1000, rel=0.01)
    assert alone.quantile(0.5) == pytest.approx(1e-3)
    one_core = simulate(Shape(fed), Load(32), 2.0, 0.2)
    assert one_core.rate == pytest.approx(1 / 0.7e-3, rel=0.02)  # request and run share the core
    many = simulate(Shape(fed, cores=8), Load(32), 2.0, 0.2)
    assert many.rate == pytest.approx(2000, rel=0.02)  # one instance, 0.5 ms a run
    slow = simulate(Shape(replace(fed, client=1e-3), client_cores=1), Load(32), 2.0, 0.2)
    assert slow.rate == pytest.approx(1000, rel=0.02)  # limited by the clients' one core


def test_clients_wake_up_once_for_answers_that_come_together() -> None:
    fed = Costs(client=0.1e-3, run=5e-3, client_wake=1e-3)
    shape = Shape(fed, Batching(max_rows=8), client_cores=1)
    assert simulate(shape, Load(1), 1.0).quantile(0.5) == pytest.approx(6.1e-3)
    together = simulate(shape, Load(4), 1.0, 0.2)
    assert max(together.latencies) < 2 * 5e-3 + 1e-3 + 4 * 0.1e-3 + 1e-9


def test_disturbances_come_by_the_second_and_leave_the_mean() -> None:
    fed = Costs(extras=(-4e-3, 1e-3, 3e-3), extras_every=1.0)
    for seconds in (0.01, 0.1, 10.0):
        work = Disturbances(fed, random.Random(1))
        taken = [work.disturbed(seconds) for _ in range(int(5000 / seconds))]
        assert min(taken) >= seconds / 2
        assert mean(taken) == pytest.approx(seconds, rel=1e-3)
    assert Disturbances(Costs(), random.Random(1)).disturbed(0.3) == 0.3


def test_batching_pays_for_a_run_once() -> None:
    fed = Costs(run=1e-3)
    alone = simulate(Shape(fed), Load(16), 1.0, 0.1)
    merged = simulate(Shape(fed, Batching(max_rows=8)), Load(16), 1.0, 0.1)
    assert merged.rate == pytest.approx(8 * alone.rate, rel=0.02)
