"""A site of real Tritons with different forms of requests, one of which is killed."""

from __future__ import annotations

import math
import os
import signal
from concurrent.futures import wait

import pipeline
from runtime.loader import load as load_here
from serving.client.options import HEADERS
from serving.local.triton import TritonServer
from serving.site.options import Site
from tests.models.tagged import ROW_BYTES, Event, Tags

ROWS = 40  # in a message
POLICY = {"deadline_s": 20.0, "attempt_s": 5.0, "health_s": 0.2}


def test_requests_in_parts_survive_a_server_that_is_killed(real_triton: None, tags: Tags) -> None:
    local = load_here("tagged/1", registry=tags.registry)
    with TritonServer(tags.repository) as columns, TritonServer(tags.in_rows) as rows:
        servers = [
            {"name": name, "url": server.url, "message_bytes": HEADERS + ROWS * ROW_BYTES}
            for name, server in (("columns", columns), ("rows", rows))
        ]
        described = {"servers": servers, "policy": POLICY, "local": {"fall_back": False}}
        session = pipeline.load(
            "tagged/1", site=Site.model_validate(described), registry=tags.registry
        )
        events = [Event.make(session, i, 200 - i) for i in range(150)]
        futures = [session.run_async(event.given, event.found) for event in events]
        wait(futures[:40])
        before = {place.name: place.answered for place in session.report().places}
        os.killpg(rows.pid, signal.SIGKILL)
        for event, future in zip(events, futures, strict=True):
            future.result()
            event.require_right(local, exact=False)
        report = session.report()
        session.close()
    local.close()
    assert before["columns"] > 0  # both had answered before one was killed
    assert before["rows"] > 0
    assert report.place("rows").state == "bad"
    assert (report.fell_back, report.nowhere) == (0, 0)
    assert report.answered == sum(math.ceil(event.found.n / ROWS) for event in events)
