"""The costs of a request and of a run in seconds: the only measured input of the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds on a core, except `wait`, in which nothing works.

    A request costs its client `client + client_row * rows`, and `client_wake` more if the clients'
    core is idle when the answer comes. It costs tritonserver `request + request_row * rows`. A run
    of some requests keeps its instance busy for `inside` (tritonserver) and for
    `run + run_request * requests + run_row * rows` (the Python stub). After the run come `reply`,
    before the answers are sent, and `behind`, for which nobody waits. On average once in
    `extras_every` seconds of work, one of `extras` is added to its time; each is equally probable,
    and their mean is 0.
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
