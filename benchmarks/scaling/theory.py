"""Formulas for the mean waiting time in queues, in the unit of the service time.

The simulation is tested against them. They also give results for sizes that are too large to
simulate.
"""

from __future__ import annotations


def wait_one_server(rate: float, service: float, variance: float = 0.0) -> float:
    """M/G/1 (Pollaczek and Khinchine); `variance` 0: M/D/1. Raises ValueError at saturation."""
    load = _load(rate, service, 1)
    return load / (1 - load) * (service + variance / service) / 2


def wait_many_servers(rate: float, service: float, servers: int) -> float:
    """M/M/c, with exponential service times (Erlang C)."""
    load = _load(rate, service, servers)
    return erlang_c(load * servers, servers) * service / (servers * (1 - load))


def erlang_c(offered: float, servers: int) -> float:
    """The probability of waiting, from Erlang B's recurrence, which does not overflow."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def time_shared_evenly(rate: float, service: float) -> float:
    """M/G/1 with processor sharing: the time in the system, for any distribution."""
    return service / (1 - _load(rate, service, 1))


def _load(rate: float, service: float, servers: int) -> float:
    load = rate * service / servers
    if not 0 <= load < 1:
        raise ValueError(f"a load of {load:.2f} has no steady state")
    return load
