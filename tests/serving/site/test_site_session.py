"""A session on several servers, which work, are away, slow or full, or answer wrongly."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import pipeline
from engines.errors import RunError
from pipeline.errors import ConfigError
from runtime.checked.test_mode import CheckedSession
from runtime.errors import LoadError
from runtime.loader import load as load_here
from runtime.session.session import Session
from serving.client.options import HEADERS
from serving.errors import NowhereError, ServingError
from serving.remote.remote_model import RemoteModel
from serving.site.options import Site
from serving.site.router import OnDevice, Router
from serving.site.site_session import SiteSession
from serving.wire import FORMS, Form
from tests.models.forked import in_a_child
from tests.models.rogues import Calls
from tests.models.tagged import ROW_BYTES, Event, Tags
from tests.serving.conftest import until
from tests.serving.grpc_server import Server, aborts, nan
from tests.serving.proxy import Proxy

# On a busy machine an answer may take seconds. A test that waits for a deadline shortens it with
# `hurry`, after the servers have answered.
POLICY = {"deadline_s": 60.0, "attempt_s": 30.0, "health_s": 0.1}


@pytest.fixture(scope="module")
def local(tags: Tags) -> Iterator[Session]:
    session = load_here("tagged/1", registry=tags.registry)
    yield session


@pytest.fixture
def one(tags: Tags, local: Session) -> Server:
    """A server of tagged/1, which does not listen yet; `two` is another one."""
    return Server(local, tags.deployed.service)


@pytest.fixture
def two(tags: Tags, local: Session) -> Server:
    return Server(local, tags.deployed.service)


def site(*urls: str, fall_back: bool = True, name: str = "", **policy: Any) -> Site:
    """A site with servers s0, s1, … at these addresses."""
    servers = [{"name": f"s{i}", "url": url} for i, url in enumerate(urls)]
    local = {"fall_back": fall_back}
    return Site.model_validate(
        {"site": name, "servers": servers, "local": local, "policy": {**POLICY, **policy}}
    )


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    """Closes the sessions that a test has opened."""
    yield
    while _OPENED:
        _OPENED.pop().close()


_OPENED: list[Any] = []


def load(tags: Tags, where: Site, **options: Any) -> Any:
    """A session at a site; it is closed after the test."""
    session = pipeline.load("tagged/1", site=where, registry=tags.registry, **options)
    _OPENED.append(session)
    return session


def hurry(session: Any, checks: bool = False, **limits: float) -> None:
    """Changes the time limits of later requests, and with `checks` those of health checks."""
    router = session.executable
    router.policy = router.policy.model_copy(update=limits)
    for place in router.places:
        client = place.executable.client
        client.options = replace(client.options, deadline_s=router.policy.attempt_s)
        if checks:
            router._checks[place]._within_s = router.policy.attempt_s


def ran(session: Session, number: int = 1, n: int = 5) -> Event:
    """An event that the session has run."""
    event = Event.make(session, number, n)
    session.run(event.given, event.found)
    return event


def answered(session: Session, local: Session, number: int = 1, n: int = 5) -> Event:
    """Runs an event in the session, and requires the local session's answer."""
    event = ran(session, number, n)
    event.require_right(local)
    return event


def nobody() -> str:
    """An address where nothing listens (another process could take the port, but hardly does)."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"triton://127.0.0.1:{bound.getsockname()[1]}"


def test_events_run_on_all_servers(tags: Tags, local: Session, one: Server, two: Server) -> None:
    with one.listening() as a, two.listening() as b:
        session = load(tags, site(a, b))
        events = [Event.make(session, i, i % 50 + 1) for i in range(60)]
        futures = [session.run_async(event.given, event.found) for event in events]
        for event, future in zip(events, futures, strict=True):
            assert future.result()["found"] is event.found
            event.require_right(local)
        report = session.report()
        assert (report.answered, report.fell_back) == (60, 0)
        assert {place.state for place in report.places} == {"good"}
        assert one.requests > 0
        assert two.requests > 0


def test_checks_of_an_idle_site_change_no_mean_time(tags: Tags, one: Server) -> None:
    with one.listening() as url:
        session = load(tags, site(url))
        ran(session)
        router = session.executable
        assert isinstance(router, Router)
        (place,) = router.places
        before = session.report().place("s0").mean_us
        for _ in range(2):
            router.judge(place, None, None)
        assert session.report().place("s0").mean_us == before


def test_a_canary_at_a_site_runs_where_it_is_served(
    tags: Tags, local: Session, one: Server
) -> None:
    """Nobody serves the second version, so it runs here."""
    with one.listening() as url:
        session = load(tags, site(url), canary="tagged/2", share=0.25)
        for number in range(8):
            answered(session, local, number + 1)
        events = [Event.make(session, number, 5) for number in range(12)]
        session.run_many([session.bind(event.given, event.found) for event in events[:8]])
        futures = [session.run_async(event.given, event.found) for event in events[8:]]
        for event, future in zip(events[8:], futures, strict=True):
            assert future.result()["found"] is event.found
        for event in events:
            event.require_right(local)
        assert session.inner.report().place("s0").answered == 15
        assert session.canary.report().fell_back == 5
        seen = session.seen
        assert (seen.canary_calls, seen.production_calls) == (5, 15)
        # Closing waits for the answers under way, which are recorded, too.
        goes_on = threading.Event()
        one.fault = lambda answer, context: answer if goes_on.wait(60) else None
        for number in range(20):
            event = Event.make(session, number, 5)
            session.run_async(event.given, event.found)
        threading.Timer(0.5, goes_on.set).start()
        session.close()
    (record,) = tags.registry.find("tagged/2").shadows.values()
    assert (record.canary_calls, record.production_calls) == (10, 30)


def test_a_binding_runs_again_on_fewer_rows_and_here(
    tags: Tags, local: Session, one: Server
) -> None:
    """The local call of a binding uses the binding's current rows and memory."""
    with one.listening() as url:
        session = load(tags, site(url))
        event = Event.make(session, 5, 40)
        binding = session.bind(event.given, event.found)
        binding()
        event.require_right(local)
    until(lambda: session.report().place("s0").state == "bad")
    for n in (40, 7, 20):
        event.spoil()
        binding(n)
        assert (event.found["event"][:n] == 5).all()
        assert (event.found["event"][n:] == -1).all()
    other = Event.make(session, 6, 30)
    binding.rebind(other.given, other.found)
    binding()
    other.require_right(local)
    assert session.report().fell_back == 4


def test_where_nobody_listens_events_run_here(tags: Tags, local: Session) -> None:
    session = load(tags, site(nobody()))
    events = [Event.make(session, i, 10) for i in range(20)]
    session.run_many([session.bind(event.given, event.found) for event in events])
    for event in events:
        event.require_right(local)
    report = session.report()
    assert (report.fell_back, report.retried) == (20, 0)
    assert report.place("s0").state == "bad"
    assert not report.place("s0").failed


def test_while_its_server_is_dead_a_session_runs_here(
    tags: Tags, local: Session, one: Server
) -> None:
    with one.listening() as url:
        session = load(tags, site(url))
        ran(session)
    for number in range(20):
        answered(session, local, number)
    report = session.report()
    assert (report.place("s0").state, report.fell_back) == ("bad", 20)


def test_a_server_that_comes_back_is_used_again(tags: Tags, local: Session, one: Server) -> None:
    with one.listening() as url:
        session = load(tags, site(url))
    until(lambda: session.report().place("s0").state == "bad")
    before = one.requests
    with one.listening(url.removeprefix("triton://")):
        until(lambda: session.report().place("s0").state == "trial")
        fell_back = session.report().fell_back
        answered(session, local)
        assert one.requests > before
        report = session.report()
        assert (report.place("s0").state, report.fell_back) == ("good", fell_back)


def test_each_change_of_a_servers_state_is_logged(
    tags: Tags, local: Session, one: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "soa_pipeline.site")
    with one.listening() as url:
        session = load(tags, site(url))
    until(lambda: session.report().place("s0").state == "bad")
    with one.listening(url.removeprefix("triton://")):
        until(lambda: session.report().place("s0").state == "trial")
        answered(session, local)
    messages = [record.getMessage() for record in caplog.records]
    assert any("tagged/1: s0 is bad (was good): server 127.0.0.1" in text for text in messages)
    assert any("tagged/1: s0 is good (was trial): answers" in text for text in messages)


def test_a_late_answer_is_written_nowhere(tags: Tags, local: Session, one: Server) -> None:
    """The server answers, wrongly, after the request was given up and run locally."""
    late = threading.Event()

    def hang(answer: Any, context: Any) -> Any:
        late.wait(30)
        answer.raw_output_contents[1] = b"\x7f" * len(answer.raw_output_contents[1])
        return answer

    with one.listening() as url:
        session = load(tags, site(url))
        hurry(session, attempt_s=0.3)
        one.fault = hang
        event = answered(session, local, 3, 9)
        late.set()
        time.sleep(0.2)  # the answer comes
        event.require_right(local)
        report = session.report()
        assert report.place("s0").failed == {"DeadlineError": 1}
        assert report.fell_back == 1


def test_a_wrong_answer_is_asked_for_elsewhere(
    tags: Tags, local: Session, one: Server, two: Server
) -> None:
    def short(answer: Any, context: Any) -> Any:
        answer.outputs[0].shape[0] -= 1
        return answer

    one.fault, two.fault = nan(1), short
    with one.listening() as a, two.listening() as b:
        session = load(tags, site(a, b))
        for i in range(20):
            answered(session, local, i, 5)
        report = session.report()
        assert report.fell_back == 20
        # After three failures in a row, a server gets only an occasional trial request.
        for place in report.places:
            assert 3 <= place.failed["AnswerError"] < 20
            assert place.answered == 0


def test_one_event_that_servers_refuse_closes_none(tags: Tags, local: Session, one: Server) -> None:
    one.fault = aborts(grpc.StatusCode.INTERNAL, "the kernel failed", 1)
    with one.listening() as url:
        session = load(tags, site(url))
        for i in range(3):
            answered(session, local, i, 5)
        report = session.report()
        assert (report.fell_back, report.place("s0").answered) == (1, 2)
        assert report.place("s0").state == "good"


def test_a_full_queue_is_left_alone_for_a_while(
    tags: Tags, local: Session, one: Server, two: Server
) -> None:
    full = "[request id: 1] Exceeds maximum queue size"
    one.fault = aborts(grpc.StatusCode.UNAVAILABLE, full)
    with one.listening() as a, two.listening() as b:
        session = load(tags, site(a, b, health_s=30.0))
        for i in range(30):
            answered(session, local, i, 5)
        first = session.report().place("s0")
        assert (first.state, first.failed) == ("busy", {"BusyError": 1})
        assert session.report().place("s1").answered == 30


def test_a_server_that_gets_another_version_is_not_used(
    tags: Tags, local: Session, one: Server, two: Server
) -> None:
    with one.listening() as a, two.listening() as b:
        session = load(tags, site(a, b))
        until(lambda: {place.state for place in session.report().places} == {"good"})
        restarted = Server(local, replace(one.service, digest="f" * 64))
        one.core = restarted.core  # with other files, which is not noticed yet
        for i in range(10):
            answered(session, local, i, 5)


def test_a_server_that_has_another_bundle_is_not_used(tags: Tags, one: Server) -> None:
    one.service = replace(one.service, digest="e" * 64)
    with one.listening() as url:
        place = load(tags, site(url)).report().place("s0")
        assert place.state == "bad"
        assert "is bundle eeeeeeeeeeee" in place.reason


def test_a_server_that_is_not_ready_gets_nothing(tags: Tags, local: Session, one: Server) -> None:
    one.ready = False
    with one.listening() as url:
        session = load(tags, site(url))
        event = ran(session)
        event.require_right(local)
        assert one.requests == 0
        one.ready = True
        until(lambda: session.report().place("s0").state == "trial")
        session.run(event.given, event.found)
        assert one.requests == 1


@pytest.fixture
def deserted(tags: Tags, one: Server) -> Any:
    """A session without a fall-back, whose only server has gone."""
    with one.listening() as url:
        session = load(tags, site(url, fall_back=False))
        hurry(session, deadline_s=1.0, attempt_s=0.5)
    return session


def test_without_falling_back_a_call_fails_and_writes_nothing(deserted: Any) -> None:
    event = Event.make(deserted, 1, 5)
    with pytest.raises(NowhereError, match=r"^tagged/1: no answer anywhere within .* s, no fall-b"):
        deserted.run(event.given, event.found)
    assert event.untouched
    assert deserted.report().nowhere == 1


def test_without_falling_back_a_future_has_the_same_error(deserted: Any) -> None:
    event = Event.make(deserted, 1, 5)
    future = deserted.run_async(event.given, event.found)
    with pytest.raises(NowhereError, match=r"s0: .*server 127\.0\.0\.1:\d+: no answer"):
        future.result()
    assert event.untouched


def test_a_site_without_any_server_cannot_be_loaded_without_falling_back(tags: Tags) -> None:
    nowhere = site(nobody(), fall_back=False, name="T2_XX", deadline_s=0.5, attempt_s=0.5)
    with pytest.raises(NowhereError, match=r"^tagged/1 at T2_XX: .* s0: "):
        load(tags, nowhere)


def test_without_falling_back_it_waits_for_a_server(
    tags: Tags, local: Session, one: Server
) -> None:
    with one.listening() as url:
        session = load(tags, site(url, fall_back=False))
    event = Event.make(session, 1, 5)
    future = session.run_async(event.given, event.found)
    until(lambda: session.report().place("s0").state == "bad")
    with one.listening(url.removeprefix("triton://")):
        future.result()
    event.require_right(local)


def test_lower_preferences_come_first(tags: Tags, one: Server, two: Server) -> None:
    with one.listening() as a, two.listening() as b:
        chosen = Site.model_validate(
            {
                "servers": [
                    {"name": "far", "url": a, "preference": 2},
                    {"name": "near", "url": b, "preference": 1},
                ],
                "policy": POLICY,
            }
        )
        session = load(tags, chosen)
        event = Event.make(session, 1, 5)
        for _ in range(5):
            session.run(event.given, event.found)
        assert (one.requests, two.requests) == (0, 5)


def test_a_device_of_this_host_is_a_place(tags: Tags, local: Session) -> None:
    chosen = Site.model_validate({"local": {"devices": ["cpu"], "fall_back": False}})
    session = load(tags, chosen)
    answered(session, local)
    assert session.report().place("cpu").answered == 1


def test_a_model_may_have_rules_of_its_own(tags: Tags, one: Server, two: Server) -> None:
    with one.listening() as a, two.listening() as b:
        data = site(a, b).model_dump()
        rule = {"servers": ["s1"], "fall_back": False}
        session = load(tags, Site.model_validate({**data, "models": {"tagged": rule}}))
        assert [place.name for place in session.report().places] == ["s1"]
        assert session.executable.fall_back is None


def test_test_mode_compares_wherever_it_ran(tags: Tags, one: Server) -> None:
    with one.listening() as url:
        session = load(tags, site(url), mode="test")
        assert isinstance(session, CheckedSession)
        ran(session)
        assert session.report.events == 1
        assert one.requests == 1


def test_a_closed_session_takes_nothing_and_ends_its_threads(tags: Tags, one: Server) -> None:
    threads = threading.active_count()
    with one.listening() as url:
        session = load(tags, site(url))
        event = Event.make(session, 1, 5)
        session.close()
        with pytest.raises(RunError, match="the session is closed"):
            session.run(event.given, event.found)
    assert event.untouched
    until(lambda: threading.active_count() <= threads)


def test_a_fork_leaves_the_session_to_its_parent(tags: Tags, local: Session) -> None:
    session = load(tags, site(nobody()))
    event = ran(session)
    run, run_async = (
        partial(call, event.given, event.found) for call in (session.run, session.run_async)
    )
    for use in (run, run_async, session.report):
        assert in_a_child(use).startswith("RunError: this session was opened before a fork")
    assert in_a_child(session.close) == "nothing"
    session.run(event.given, event.found)
    event.require_right(local)


def test_the_environment_names_the_site_of_this_host(
    tags: Tags, local: Session, one: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.yaml"
    monkeypatch.setenv("PIPELINE_SITE", str(file))
    with one.listening() as url:
        file.write_text(f"servers:\n  - {{name: here, url: '{url}', compression: gzip}}\n")
        session = pipeline.load("tagged/1", device="site", registry=tags.registry)
        _OPENED.append(session)
        assert isinstance(session, SiteSession) and session.origin is not None
        assert (session.origin.target, session.origin.engine) == ("site", "here")
        answered(session, local)
        assert one.requests == 1


def test_a_mistake_in_the_site_of_this_host_is_named_with_its_line(
    tags: Tags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.yaml"
    monkeypatch.setenv("PIPELINE_SITE", str(file))
    file.write_text("servers: 3")
    with pytest.raises(ConfigError, match=r"site\.yaml:1: servers: found 3; expected a list"):
        pipeline.load("tagged/1", device="site", registry=tags.registry)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cpu"}, "target with device 'site'"),
        ({"device": "cuda"}, "a site with device 'cuda'"),
    ],
)
def test_what_the_site_decides_is_not_the_callers(
    tags: Tags, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load(tags, site(), **options)


def test_a_site_has_no_device_auto(tags: Tags) -> None:
    chosen = Site.model_validate({"local": {"devices": ["auto"]}})
    with pytest.raises(LoadError, match="device 'auto' in a site"):
        load(tags, chosen)


class Metrics:
    """Triton's metrics page, with numbers that a test sets."""

    def __init__(self) -> None:
        self.waited_us = self.answered = self.pending = 0
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.text().encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def text(self) -> str:
        """The page, as Triton writes it."""
        labels = '{model="tagged",version="1"}'
        return (
            f"# HELP nv_inference_queue_duration_us Cumulative\n"
            f"nv_inference_queue_duration_us{labels} {self.waited_us}\n"
            f'nv_inference_queue_duration_us{{model="other",version="1"}} 1e12\n'
            f"nv_inference_request_success{labels} {self.answered}\n"
            f"nv_inference_pending_request_count{labels} {self.pending}\n"
        )

    def __enter__(self) -> Metrics:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_a_server_with_a_long_queue_gets_nothing(tags: Tags, local: Session, one: Server) -> None:
    with one.listening() as url, Metrics() as page:
        data = site(url, queue_us=1000.0).model_dump()
        data["servers"][0]["metrics"] = page.url
        session = load(tags, Site.model_validate(data))

        def wait_for(state: str, waited_us: int, answered: int, pending: int = 0) -> None:
            """Adds waiting times to the metrics at each look, until the server has this state."""
            page.pending = pending

            def has_state() -> bool:
                page.waited_us += waited_us
                page.answered += answered
                return bool(session.report().place("s0").state == state)

            until(has_state)

        event = Event.make(session, 1, 5)
        wait_for("good", waited_us=900, answered=1)
        session.run(event.given, event.found)
        assert one.requests == 1
        wait_for("busy", waited_us=50_000, answered=10)
        session.run(event.given, event.found)
        assert one.requests == 1
        assert session.report().fell_back == 1
        event.require_right(local)
        wait_for("good", waited_us=400, answered=1)
        session.run(event.given, event.found)
        assert one.requests == 2
        wait_for("busy", waited_us=0, answered=0, pending=3)  # no request leaves the queue
        wait_for("good", waited_us=0, answered=0)


def test_a_request_that_is_too_large_for_a_message_runs_here(
    tags: Tags, local: Session, one: Server
) -> None:
    with one.listening() as url:
        session = load(tags, site(url))
        (model,) = (place.executable for place in session.executable.places)
        assert isinstance(model, RemoteModel)
        client = model.client
        client.options = replace(client.options, message_bytes=HEADERS + 1)
        answered(session, local, 1, 100)
        place = session.report().place("s0")
        assert (place.failed, place.state) == ({"TooLargeError": 1}, "good")


# -- forms, and more rows than a message carries --------------------------------------------------


def speaking(tags: Tags, local: Session, form: Form) -> Server:
    """A server that takes requests of this form; blocks cannot be merged."""
    service = replace(tags.deployed.service, requests=form, merge=form != "blocks")
    return Server(local, service)


def cutting(rows: int, *urls: str, **options: Any) -> Site:
    """A site whose servers accept this many rows in a message."""
    data = site(*urls, **options).model_dump()
    for server in data["servers"]:
        server["message_bytes"] = HEADERS + rows * ROW_BYTES
    return Site.model_validate(data)


def test_each_server_is_spoken_to_in_its_own_form(tags: Tags, local: Session) -> None:
    servers = [speaking(tags, local, form) for form in FORMS]
    with ExitStack() as stack:
        urls = [stack.enter_context(server.listening()) for server in servers]
        session = load(tags, site(*urls))
        events = [Event.make(session, i, i % 50) for i in range(120)]
        futures = [session.run_async(event.given, event.found) for event in events]
        for event, future in zip(events, futures, strict=True):
            future.result()
            event.require_right(local)
        report = session.report()
        assert (report.answered, report.fell_back, report.retried) == (120 - 3, 0, 0)  # 3 empty
        assert all(server.requests for server in servers)


@pytest.mark.parametrize("form", ["columns", "rows"])
def test_more_rows_than_a_message_carries_go_in_several(
    tags: Tags, local: Session, form: Form
) -> None:
    one = speaking(tags, local, form)
    with one.listening() as url:
        session = load(tags, cutting(50, url))
        event = ran(session, 1, 180)
        assert one.rows == [45] * 4
        event.require_right(local, exact=False)
        report = session.report()
        assert (report.answered, report.retried, report.fell_back) == (4, 0, 0)


def test_a_part_that_fails_is_asked_for_elsewhere(tags: Tags, local: Session) -> None:
    """The first server answers two parts and fails; the other, of another form, gets the rest."""
    one, two = speaking(tags, local, "columns"), speaking(tags, local, "rows")

    def fail_at_the_third(answer: Any, context: Any) -> Any:
        if one.requests > 2:
            one.rows.pop()
            one.ready = False  # and is not tried again
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return answer

    one.fault = fail_at_the_third
    with one.listening() as a, two.listening() as b:
        data = cutting(20, a, b).model_dump()
        data["servers"][1]["preference"] = 1
        session = load(tags, Site.model_validate(data))
        event = ran(session, 7, 100)
        assert (one.rows, two.rows) == ([20, 20], [20, 20, 20])
        event.require_right(local, exact=False)
        report = session.report()
        assert (report.retried, report.fell_back) == (1, 0)
        assert report.place("s0").failed == {"ServerGoneError": 1}


@pytest.fixture
def wrong_from_the_second_on(tags: Tags, local: Session) -> Server:
    """A server that answers its first request, and gives NaN for all later ones."""
    server = speaking(tags, local, "rows")
    wrong = nan(1)
    server.fault = lambda answer, context: wrong(answer, context) if server.requests > 1 else answer
    return server


def test_where_no_server_answers_the_rest_all_of_it_runs_here(
    tags: Tags, local: Session, wrong_from_the_second_on: Server
) -> None:
    with wrong_from_the_second_on.listening() as url:
        session = load(tags, cutting(50, url))
        event = ran(session, 3, 100)
        event.require_right(local, exact=False)
        assert session.report().fell_back == 1


def test_where_no_server_answers_the_rest_nothing_is_written_without_falling_back(
    tags: Tags, wrong_from_the_second_on: Server
) -> None:
    with wrong_from_the_second_on.listening() as url:
        session = load(tags, cutting(50, url, fall_back=False))
        hurry(session, deadline_s=32.0)  # the second part may still begin
        event = Event.make(session, 3, 100)
        with pytest.raises(
            NowhereError, match=r"at row 50, .*; its first 50 rows were answered, and are not wri"
        ):
            session.run(event.given, event.found)
        assert event.untouched


def test_a_server_that_comes_back_in_another_form_is_used_again(
    tags: Tags, local: Session, one: Server
) -> None:
    with one.listening() as url:
        session = load(tags, site(url))
        for form in ("rows", "blocks", "columns"):
            until(lambda: session.report().place("s0").state == "good")
            other = speaking(tags, local, form)
            one.core, one.service = other.core, other.service
            answered = session.report().place("s0").answered
            event = Event.make(session, 2, 2)  # 2 rows: blocks look like rows

            def is_used(event: Event = event, answered: int = answered) -> bool:
                event.spoil()
                session.run(event.given, event.found)
                event.require_right(local)
                return bool(session.report().place("s0").answered > answered)

            until(is_used)


def test_a_server_whose_tls_fails_gets_nothing(tags: Tags, local: Session, one: Server) -> None:
    """The server gets nothing: without TLS it is another one."""
    with one.listening() as url:
        data = site(url).model_dump()
        data["servers"][0]["tls"] = {}
        session = load(tags, Site.model_validate(data))
        answered(session, local)
        assert session.report().place("s0").state == "bad"
        assert one.requests == 0


def test_a_report_of_an_unknown_place_names_those_there_are(tags: Tags, one: Server) -> None:
    with one.listening() as url, load(tags, site(url)) as session:
        report = session.report()
    with pytest.raises(ServingError, match="s0"):
        report.place("s9")


def test_a_missing_certificate_is_refused(tags: Tags, tmp_path: Path) -> None:
    data = site(nobody()).model_dump()
    data["servers"][0]["tls"] = {"root_certificates": str(tmp_path / "root.pem")}
    with pytest.raises(ServingError, match=r"root\.pem: No such file"):
        load(tags, Site.model_validate(data))


def test_a_connection_that_died_without_a_word_is_replaced(
    tags: Tags, local: Session, one: Server
) -> None:
    with one.listening() as url, Proxy(int(url.rpartition(":")[2])) as proxy:
        session = load(tags, site(proxy.url))
        event = ran(session)
        assert session.report().fell_back == 0, session.report().place("s0").reason
        hurry(session, checks=True, attempt_s=0.3)
        proxy.forget()
        event.spoil()
        session.run(event.given, event.found)
        event.require_right(local)
        assert session.report().fell_back == 1
        until(lambda: session.report().place("s0").state == "trial")
        hurry(session, attempt_s=30.0)
        event.spoil()
        session.run(event.given, event.found)
        event.require_right(local)
        assert session.report().place("s0").answered == 2


def arguments_of(session: Session, event: Event) -> list[torch.Tensor]:
    """The arguments with which the session's artifact would be called."""
    binding = session.bind(event.given, event.found)
    return [span.tensor() for span in binding._arguments]


def test_answers_of_another_device_come_back(local: Session) -> None:
    event = Event.make(local, 1, 5)
    on_device = OnDevice(local.executable, torch.device("cpu"), local.signature)
    on_device(arguments_of(local, event))
    event.require_right(local)


def test_after_an_error_on_another_device_nothing_is_written(local: Session) -> None:
    event = Event.make(local, 1, 5)

    def fail(arguments: Any) -> None:
        for argument in arguments[1:]:
            argument.zero_()
        raise RuntimeError("out of memory")

    meta = torch.device("meta")
    with pytest.raises(RuntimeError, match="out of memory"):
        OnDevice(Calls(fail), meta, local.signature)(arguments_of(local, event))
    assert event.untouched
