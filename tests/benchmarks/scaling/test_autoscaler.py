"""The autoscaler sees the scraped metric when it polls, and follows its rules."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.scaling.autoscaler import Autoscaler, Scaling
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.metric import settles_at
from benchmarks.scaling.model import Load, Shape, System

# A run takes 50 ms: with 8 clients and one server, a request waits 0.35 s.
COSTS = Costs(run=50e-3)
FAST = Scaling(scrape_s=1, window_s=4, poll_s=3, up_window_s=6, up_period_s=6, down_window_s=12,
               down_period_s=6, start_s=5)  # fmt: skip


def scaled(clients: int, rules: Scaling, seconds: float, requests: float = 1e9) -> Autoscaler:
    system = System(Shape(COSTS))
    autoscaler = Autoscaler(system, rules)
    system.run(Load(clients, requests=requests), seconds)
    return autoscaler


@pytest.mark.parametrize("poll_s", [2.0, 3.0, 7.0])
def test_it_reacts_no_sooner_than_it_polls_and_its_window_is_over(poll_s: float) -> None:
    rules = Scaling(**{**vars(FAST), "poll_s": poll_s})
    decisions = scaled(8, rules, 40).decisions
    assert [each.at for each in decisions] == [poll_s * k for k in range(1, len(decisions) + 1)]
    grown = [each.at for each in decisions if each.servers > 1]
    assert grown
    assert min(grown) >= max(poll_s, rules.up_window_s)


def test_servers_come_one_a_period_and_after_their_start() -> None:
    system = System(Shape(COSTS))
    autoscaler = Autoscaler(system, FAST)
    seen: list[int] = []
    system.env.process(autoscaler._every(1.0, lambda: seen.append(len(system.servers))))
    system.run(Load(8), 40)
    grown = [
        each.at
        for each, before in zip(autoscaler.decisions[1:], autoscaler.decisions, strict=False)
        if each.servers > before.servers
    ]
    assert all(b - a >= FAST.up_period_s for a, b in pairwise(grown))
    assert seen.index(2) + 1 >= grown[0] + FAST.start_s


def test_the_metric_is_the_mean_queue_time_of_a_run() -> None:
    autoscaler = scaled(8, Scaling(**{**vars(FAST), "most": 1}), 20)
    assert autoscaler.decisions[-1].metric_s == pytest.approx(7 * 50e-3, rel=0.01)


def test_it_shrinks_when_the_load_is_gone() -> None:
    decisions = scaled(8, FAST, 120, requests=400).decisions
    assert max(each.servers for each in decisions) > 1
    assert decisions[-1].servers == 1


def test_closed_clients_hide_the_need_for_servers() -> None:
    """It settles where `ceil(clients * service / (servers * threshold))` equals `servers`."""
    decisions = scaled(32, FAST, 150).decisions
    assert abs(decisions[-1].servers - settles_at(32, COSTS.run, FAST.threshold_s)) <= 1
