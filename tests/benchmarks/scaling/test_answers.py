"""How many servers a load needs, and the page with these numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling.batcher import Batching
from benchmarks.scaling.costs import Costs
from benchmarks.scaling.metric import shown
from benchmarks.scaling.model import Load, Shape, simulate
from benchmarks.scaling.report import PAGE, replaced
from benchmarks.scaling.sizing import Sized, closed, opened, share, wave

SHAPE = Shape(Costs(run=2e-3))  # 500 requests a second at most


def test_a_server_takes_nearly_its_capacity_where_waiting_is_allowed() -> None:
    rate = share(SHAPE, 1, limit_s=0.1)
    assert 0.8 * 500 <= rate <= 0.9 * 500
    assert opened(SHAPE, 1, rate).quantile(0.99) <= 0.1


def test_servers_for_clients() -> None:
    assert Sized(10_000, 1, 10.0, 400.0).servers == 3
    assert Sized(100_000, 1, 1.0, 400.0).servers == 250
    assert Sized(1000, 1, 1.0, 0.0).servers is None


def test_one_server_with_its_share_stands_for_all() -> None:
    """Behind a balancer requests wait less: it sends each to a server with a short queue."""
    one, four = (opened(replace(SHAPE, servers=n), 1, 400.0) for n in (1, 4))
    assert four.rate / 4 == pytest.approx(one.rate, rel=0.1)
    assert four.quantile(0.99) < one.quantile(0.99)
    clients = closed(SHAPE, 1, 400.0, 1.0)
    assert clients.rate == pytest.approx(400, rel=0.1)


def test_a_wave_takes_as_many_servers_as_its_work() -> None:
    servers, done_s = wave(SHAPE, jobs=100, rows=1, requests=100, within_s=5.1)
    assert servers == 4  # 10,000 runs of 2 ms
    assert done_s == pytest.approx(5.0, rel=0.01)


def test_the_metric_is_blind_alone_and_too_loud_merged() -> None:
    (alone,) = shown(SHAPE, (16,))
    assert alone.metric_s == pytest.approx(15 * 2e-3, rel=0.05)
    fed = replace(
        SHAPE,
        costs=Costs(run=2e-3, run_request=1e-4, extras=(-1e-3, 1e-3), extras_every=2e-3),
        batching=Batching(16),
    )
    (merged,) = shown(fed, (32,))
    assert merged.metric_s > merged.p99_s


def test_poisson_arrivals_have_their_rate() -> None:
    seen = simulate(SHAPE, Load(rate=100.0), 50.0)
    assert seen.rate == pytest.approx(100, rel=0.05)


def test_a_page_gets_new_text_between_its_markers() -> None:
    page = "before\n<!-- a -->\nold\n<!-- a -->\nafter"
    once = replaced(page, {"a": "new"})
    assert once == "before\n<!-- a -->\n\n```text\nnew\n```\n\n<!-- a -->\nafter"
    assert replaced(once, {"a": "new"}) == once
    with pytest.raises(ValueError, match="must stand in the page twice"):
        replaced(page, {"b": "new"})


def test_the_page_has_every_marker() -> None:
    names = ("measured", "check", "servers", "seeds", "proxy", "metric")
    assert replaced(PAGE.read_text(), dict.fromkeys(names, "text"))
