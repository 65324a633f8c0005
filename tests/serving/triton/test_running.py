"""Versions that are loaded into a Triton that runs already, and unloaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import json_format
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tritonclient.grpc import model_config_pb2, service_pb2

import pipeline
from pipeline.deployment import load_on, unload_from
from runtime.loader import load as load_here
from runtime.session.session import Session
from serving.client.calls import Client
from serving.client.options import HEADERS, RemoteOptions
from serving.errors import ServerError, ServerGoneError, ServingError, TooLargeError
from serving.local.triton import EXPLICIT, ServerOptions, TritonServer
from serving.triton.config import Service, config_message
from serving.triton.versions import (
    config_with_version,
    config_without_version,
    difference_of_requests,
    read_fact,
)
from tests.models.authorities import Certified, certify
from tests.models.project import PASSED, answer, cli, refusal, resealed
from tests.models.tagged import NAME, Event, Tags
from tests.serving.campaigns import loading
from tests.serving.grpc_server import Fault, Server, nan


@pytest.fixture(scope="module")
def local(tags: Tags) -> Iterator[Session]:
    session = load_here(f"{NAME}/1", registry=tags.registry)
    yield session
    session.close()


def refusal_of(tags: Tags, *words: str) -> str:
    """The error of a command on the registry of `tags`."""
    return refusal(*words, "--registry", tags.registry.uri)


def service(tags: Tags, number: int, **changes: Any) -> Service:
    """A version of `tagged`, whose digest repeats its number."""
    digest = str(number) * 64
    return replace(tags.deployed.service, number=number, digest=digest, **changes)


# -- the configuration of several versions --------------------------------------------------------


@pytest.fixture
def three(tags: Tags) -> Any:
    """The configuration of versions 1, 2 and 5, added in this order."""
    one, two, five = (config_message(service(tags, number)) for number in (1, 2, 5))
    return config_with_version(config_with_version(one, [1], two), [1, 2], five)


def test_each_version_has_its_digest(three: Any) -> None:
    assert list(three.version_policy.specific.versions) == [1, 2, 5]
    assert [read_fact(three, "digest", n) for n in (1, 2, 5)] == [str(n) * 64 for n in (1, 2, 5)]


def test_a_client_that_names_no_version_sees_the_digest_of_the_first_one(three: Any) -> None:
    assert read_fact(three, "digest") == read_fact(three, "digest", "") == "1" * 64


def test_without_the_first_version_the_next_one_is_the_first(tags: Tags, three: Any) -> None:
    remaining = config_without_version(three, [2, 5], 1)
    assert list(remaining.version_policy.specific.versions) == [2, 5]
    assert read_fact(remaining, "digest") == read_fact(remaining, "digest", 1) == "2" * 64
    assert read_fact(remaining, "target", 5) == tags.deployed.service.target
    assert read_fact(remaining, "requests", 5) == "columns"
    assert read_fact(remaining, "nothing", 5) == ""


def test_each_version_has_its_target_and_form(tags: Tags, three: Any) -> None:
    assert read_fact(three, "target", 5) == tags.deployed.service.target
    assert read_fact(three, "requests", 5) == "columns"
    assert read_fact(three, "nothing", 5) == ""


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"requests": "rows"}, "inputs"), ({"merge": False}, "inputs"), ({"instances": 3}, None)],
    ids=str,
)
def test_the_part_in_which_requests_of_two_versions_differ_is_named(
    tags: Tags, changes: dict[str, Any], part: str | None
) -> None:
    one, two = config_message(service(tags, 1)), config_message(service(tags, 2, **changes))
    assert difference_of_requests(one, two) == part


def test_rows_that_warm_up_one_version_may_not_fit_another(tags: Tags) -> None:
    one, two = config_message(service(tags, 1)), config_message(service(tags, 2, preferred=(7, 9)))
    assert config_with_version(one, [1], config_message(service(tags, 2))).model_warmup
    assert not config_with_version(one, [1], two).model_warmup


# -- what cannot be loaded ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_loaded_beside_a_bundle_that_the_registry_does_not_have(
    tags: Tags, local: Session, number: int
) -> None:
    foreign = Server(local, service(tags, 1))
    with (
        foreign.listening() as url,
        pytest.raises(ServingError, match="its tagged/1 is bundle 111111111111, the"),
    ):
        load_on(tags.registry, f"{NAME}/{number}", url)


def test_a_model_that_was_not_deployed_by_us_is_not_unloaded(tags: Tags, local: Session) -> None:
    plain = Server(local, replace(tags.deployed.service, backend="onnxruntime"))
    with (
        plain.listening() as url,
        pytest.raises(ServingError, match="its tagged was not made by `pipeline deploy`: unload"),
    ):
        unload_from(tags.registry, f"{NAME}/1", url)


def test_a_model_that_is_larger_than_a_message_is_not_loaded(tags: Tags, local: Session) -> None:
    options = RemoteOptions(message_bytes=HEADERS + 100)
    with (
        Server(local, tags.deployed.service).listening() as url,
        pytest.raises(TooLargeError, match=r"the model tagged of \d+ bytes is more than"),
    ):
        load_on(tags.registry, f"{NAME}/1", url, options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replace",), "--replace is for a running server: add --to"),
        (("--root-certificates", "ca.pem"), "--root-certificates is for a running server"),
        (("--to", "triton://h:1", "--check"), "--check starts a server, and --to names one"),
        (("--to", "triton://h:1", "--unload", "--alone"), "--merge does not go with --unload"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(
    tags: Tags, options: tuple[str, ...], message: str
) -> None:
    result = cli("serve", f"{NAME}/1", *options, "--registry", tags.registry.uri, code=2)
    assert message in result.stderr
    assert result.stdout == ""


class Loading(Server):
    """Loads what it is told. `refused`: the numbers of loads that fail. `meanwhile` is called after
    a load, and `once_asked` after somebody asked what is there. `gone`: the methods whose next call
    finds no server."""

    def __init__(self, session: Session, service: Service, config: Any) -> None:
        super().__init__(session, service)
        self.config, self.loads = config, 0
        self.refused: set[int] = set()
        self.meanwhile: Callable[[], object] = lambda: None
        self.once_asked: Callable[[], object] = lambda: None
        self.gone: set[str] = set()

    @property
    def versions(self) -> list[int]:
        """The versions that are loaded."""
        return list(self.config.version_policy.specific.versions)

    def _fail_if_gone(self, method: str, context: Any) -> None:
        if method in self.gone:
            self.gone.remove(method)
            context.abort(grpc.StatusCode.UNAVAILABLE, "no connection")

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._fail_if_gone("ModelMetadata", context)
        numbers = map(str, self.versions)
        return service_pb2.ModelMetadataResponse(name=request.name, versions=numbers)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelConfigResponse(config=self.config)
        self.once_asked()
        return answer

    def comes_between(self) -> None:
        """Serve version 7 too, which somebody else has loaded."""
        self.config.version_policy.specific.versions[:] = [2, 7]

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        self.loads += 1
        self._fail_if_gone("RepositoryModelLoad", context)
        if self.loads in self.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "out of memory")
        text = request.parameters["config"].string_param
        self.config = json_format.Parse(text, model_config_pb2.ModelConfig())
        self.meanwhile()
        return service_pb2.RepositoryModelLoadResponse()


@pytest.fixture
def loading_two(tags: Tags, local: Session) -> Loading:
    """A server that has tagged/2."""
    two = replace(tags.deployed.service, number=2, digest=tags.registry.find(f"{NAME}/2").digest)
    return Loading(local, tags.deployed.service, config_message(two))


def test_after_wrong_answers_what_was_there_is_loaded_again(
    tags: Tags, loading_two: Loading
) -> None:
    loading_two.fault = nan(0)
    wrong = pytest.raises(ServerError, match="answers are not the reference's")
    with loading_two.listening() as url, wrong:
        load_on(tags.registry, f"{NAME}/1", url)
    assert (loading_two.versions, loading_two.loads) == ([2], 2)


@pytest.mark.parametrize(("replace", "fails_at", "loads"), [(False, 1, 1), (True, 2, 3)])
def test_after_a_load_that_failed_what_was_there_is_still_there(
    tags: Tags, loading_two: Loading, replace: bool, fails_at: int, loads: int
) -> None:
    loading_two.refused = {fails_at}
    with loading_two.listening() as url, pytest.raises(ServingError, match="out of memory"):
        load_on(tags.registry, f"{NAME}/1", url, replace=replace)
    assert (loading_two.versions, loading_two.loads) == ([2], loads)


def test_a_replacement_unloads_what_was_there(tags: Tags, loading_two: Loading) -> None:
    with loading_two.listening() as url:
        assert load_on(tags.registry, f"{NAME}/1", url, replace=True).versions == [1]


def test_if_nothing_can_be_loaded_again_the_error_says_so(tags: Tags, loading_two: Loading) -> None:
    with loading_two.listening() as url:
        loading_two.fault = nan(0)
        loading_two.refused = {2}
        with pytest.raises(ServingError, match=r"is not loaded again: .* out of memory") as caught:
            load_on(tags.registry, f"{NAME}/1", url)
    assert str(caught.value).startswith("the server's answers are not the reference's")
    assert "\n" not in str(caught.value)


def test_a_question_is_asked_again(tags: Tags, loading_two: Loading) -> None:
    loading_two.gone = {"ModelMetadata"}
    with loading_two.listening() as url:
        assert load_on(tags.registry, f"{NAME}/1", url).versions == [1, 2]


def test_a_load_is_not_sent_again(tags: Tags, loading_two: Loading) -> None:
    loading_two.gone = {"RepositoryModelLoad"}  # the next call: a second one would succeed
    with loading_two.listening() as url, pytest.raises(ServerGoneError):
        load_on(tags.registry, f"{NAME}/1", url)


@pytest.mark.parametrize(
    "fault", [lambda answer, context: answer, nan(0)], ids=["right answers", "wrong answers"]
)
def test_of_two_loads_at_once_none_undoes_the_other(
    tags: Tags, loading_two: Loading, fault: Fault
) -> None:
    """The one that was first says so."""
    loading_two.meanwhile = loading_two.comes_between
    loading_two.fault = fault
    with (
        loading_two.listening() as url,
        pytest.raises(ServingError, match=r"somebody else loads tagged .*\[2, 7\]"),
    ):
        load_on(tags.registry, f"{NAME}/1", url)
    assert (loading_two.loads, loading_two.versions) == (1, [2, 7])


@pytest.mark.parametrize(
    "change",
    [partial(load_on, ref=f"{NAME}/1"), partial(unload_from, ref=f"{NAME}/2")],
    ids=["load", "unload"],
)
def test_a_load_of_others_between_question_and_change_is_noticed(
    change: Callable[..., Any], tags: Tags, loading_two: Loading
) -> None:
    loading_two.once_asked = loading_two.comes_between
    with (
        loading_two.listening() as url,
        pytest.raises(ServingError, match=r"somebody else loads tagged .*\[2, 7\], not \[2\]$"),
    ):
        change(tags.registry, url=url)
    assert loading_two.loads == 0


def test_after_a_load_that_was_interrupted_what_was_there_is_loaded_again(
    tags: Tags, loading_two: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on loading."""
    load = Client.load

    def load_and_be_interrupted(client: Client, *arguments: Any) -> None:
        load(client, *arguments)
        if loading_two.loads == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Client, "load", load_and_be_interrupted)
    with loading_two.listening() as url, pytest.raises(KeyboardInterrupt):
        load_on(tags.registry, f"{NAME}/1", url)
    assert (loading_two.versions, loading_two.loads) == ([2], 2)


@dataclass(frozen=True)
class WithTls:
    """The words of a command to a server that speaks TLS, and the certificates of that server."""

    unload: tuple[str, ...]
    root: Certified
    site: Certified


@pytest.fixture
def with_tls(tags: Tags, local: Session, tmp_path: Path) -> Iterator[WithTls]:
    root = certify(tmp_path, "root", authority=True)
    site = certify(tmp_path, "site", root)
    keys = [(site.private.read_bytes(), site.pem.read_bytes())]
    credentials = grpc.ssl_server_credentials(keys)
    with Server(local, tags.deployed.service).listening(credentials=credentials) as url:
        yield WithTls(("serve", f"{NAME}/2", "--to", url, "--unload"), root, site)


def test_a_server_with_tls_does_not_answer_without_its_root(tags: Tags, with_tls: WithTls) -> None:
    assert "no answer after" in refusal_of(tags, *with_tls.unload)


def test_a_server_with_tls_answers_to_who_has_its_root(tags: Tags, with_tls: WithTls) -> None:
    message = refusal_of(tags, *with_tls.unload, "--root-certificates", str(with_tls.root.pem))
    assert message.endswith("does not serve tagged/2; versions there: 1")


def test_a_key_needs_its_certificate(tags: Tags, with_tls: WithTls) -> None:
    message = refusal_of(tags, *with_tls.unload, "--private-key", str(with_tls.site.private))
    assert message.startswith("TLS with private_key and no certificate_chain")


# -- a real server --------------------------------------------------------------------------------


def altered(tags: Tags, folder: Path) -> str:
    """Register a version whose reference has other answers than its network."""

    def edit(path: Path, manifest: dict[str, Any]) -> None:
        file = path / "reference.safetensors"
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "output" in name and tensor.dtype == torch.float32:
                tensor += 1
        save_file(tensors, file, metadata)

    version = tags.registry.register(resealed(tags.bundle, folder, edit))
    return tags.registry.promote(version, "production", PASSED).ref


@dataclass(frozen=True)
class Running:
    """A Triton that runs already. Each test unloads what it has loaded."""

    tags: Tags
    local: Session
    url: str
    stack: ExitStack

    def serve(self, ref: str, *options: str) -> Any:
        """Run the command; returns the versions that are there afterwards."""
        words = ("serve", ref, "--to", self.url, *options)
        return answer(*words, registry=self.tags.registry)["versions"]

    def refusal(self, ref: str, *options: str) -> str:
        """The error of the command."""
        return refusal_of(self.tags, "serve", ref, "--to", self.url, *options)

    def session(self, ref: str) -> Session:
        """A session of a version on the server, which is closed with the server."""
        session = pipeline.load(ref, device=self.url, registry=self.tags.registry)
        self.stack.callback(session.close)
        return session

    def require_right(self, session: Session, number: int) -> None:
        """Run one event, and compare its answers with those of a session in this process."""
        event = Event.make(session, number, 9)
        session.run(event.given, event.found)
        event.require_right(self.local, exact=False)


@pytest.fixture(scope="module")
def running(
    real_triton: None, tags: Tags, local: Session, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server without any version."""
    options = ServerOptions(extra=EXPLICIT)
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer(tmp_path_factory.mktemp("empty"), options))
        yield Running(tags, local, server.url, stack)


@pytest.mark.long
def test_versions_come_and_go(running: Running) -> None:
    assert running.serve(f"{NAME}/1") == [1]
    one = running.session(f"{NAME}/1")
    running.require_right(one, 1)
    assert running.serve(f"{NAME}/2") == [1, 2]
    two = running.session(f"{NAME}/2")
    running.require_right(one, 2)
    running.require_right(two, 3)
    assert running.serve(f"{NAME}/2", "--unload") == [1]
    running.require_right(one, 4)
    assert running.serve(f"{NAME}/2") == [1, 2]
    assert running.serve(f"{NAME}/1", "--unload") == [2]
    running.require_right(running.session(f"{NAME}/2"), 5)
    assert running.serve(f"{NAME}/1", "--replace", "--requests", "rows") == [1]
    running.require_right(running.session(f"{NAME}/1"), 6)
    assert running.serve(f"{NAME}/1", "--unload") == []


@pytest.mark.long
def test_a_version_that_answers_wrongly_is_not_served(running: Running, tmp_path: Path) -> None:
    """The version that is there goes on."""
    wrong = altered(running.tags, tmp_path / "altered")
    running.serve(f"{NAME}/1")
    one = running.session(f"{NAME}/1")
    message = running.refusal(wrong)
    assert message.startswith("the server's answers are not the reference's: output 'score' at")
    running.require_right(one, 1)
    assert running.serve(f"{NAME}/1", "--unload") == []


@pytest.mark.long
def test_a_version_with_other_inputs_is_not_served_beside_another(running: Running) -> None:
    running.serve(f"{NAME}/1")
    message = running.refusal(f"{NAME}/2", "--requests", "rows")
    assert "tagged/1 and 2 together, which have other inputs: --replace changes over" in message
    assert running.serve(f"{NAME}/1", "--unload") == []


@pytest.mark.long
def test_a_canary_that_is_unloaded_loses_no_call(running: Running, local: Session) -> None:
    running.serve(f"{NAME}/1")
    assert running.serve(f"{NAME}/2") == [1, 2]
    options: dict[str, Any] = {"device": running.url, "canary": f"{NAME}/2", "share": 0.5}
    with pipeline.load(f"{NAME}/1", registry=running.tags.registry, **options) as session:
        for number in range(4):
            running.require_right(session, number)
        events = [Event.make(session, number, 9) for number in range(4)]
        session.run_many([session.bind(event.given, event.found) for event in events[:2]])
        futures = [session.run_async(event.given, event.found) for event in events[2:]]
        for future in futures:
            future.result()
        for event in events:
            event.require_right(local, exact=False)
        assert (session.seen.canary_calls, session.seen.production_calls) == (4, 4)

        assert running.serve(f"{NAME}/2", "--unload") == [1]
        for number in range(4):
            running.require_right(session, number)  # production answers
        assert session.withdrawn
    assert running.serve(f"{NAME}/1", "--unload") == []


@pytest.mark.long
def test_no_request_is_lost(real_triton: None, tags: Tags, tmp_path: Path) -> None:
    lines: list[str] = []
    if not loading.run(1, tags, tmp_path, lines.append):
        pytest.fail("\n".join(lines))
