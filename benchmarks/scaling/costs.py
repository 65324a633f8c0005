"""What a request and a run cost, in seconds: the only thing that the simulation is fed with."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds on a core, except `wait`, in which nothing works.

    A request costs its client `client + client_row * rows`, `client_wake` more where an answer
    finds the clients' core idle, and tritonserver
    `request + request_row * rows`. A run of some requests keeps its instance busy with
    `inside` (tritonserver) and `run + run_request * requests + run_row * rows` (the Python stub);
    after it come `reply` before the answers go out, and `behind` that nobody waits for.
    Once in `extras_every` seconds of work on average, one of `extras` is added to what it takes,
    each as likely as the others; their mean is 0.
    """

    client: float = 0.0
    client_row: float = 0.0
    client_wake: float = 0.0
    request: float = 0.0
    request_row: float = 0.0
    inside: float = 0.0
    reply: float = 0.0
    behind: float = 0.0
    run: float = 0.0
    run_request: float = 0.0
    run_row: float = 0.0
    wait: float = 0.0
    extras: tuple[float, ...] = ()
    extras_every: float = math.inf

    def of_client(self, rows: int) -> float:
        return self.client + self.client_row * rows

    def of_request(self, rows: int) -> float:
        return self.request + self.request_row * rows

    def of_stub(self, requests: int, rows: int) -> float:
        return self.run + self.run_request * requests + self.run_row * rows

    def of_run(self, requests: int, rows: int) -> float:
        return self.inside + self.of_stub(requests, rows)
