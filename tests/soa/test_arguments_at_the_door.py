"""Values of a wrong kind for an argument of a public function: an error of ours, of one line, and
no Python error from inside. Some of the values are right, and may be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipeline
import runtime
from engines.base import engine
from runtime.devices import MultiDeviceSession
from runtime.session import Session
from soa import Collection, CollectionError, Layout, SoaPipelineError, column, eigen, scalar
from soa.memory import (
    as_collection,
    from_jagged,
    to_arrow,
    to_awkward,
    to_numpy,
    to_pandas,
    to_polars,
)
from stages.reference.answers import random_inputs
from tests.models import building, mlps

WRONG: tuple[Any, ...] = (
    None, 5, -1, 2.5, float("nan"), "2", "", b"x", [], [None], [5], {}, {"a": None}, {"jets": 5},
    object(), Path("no such"), np.zeros(3),
)  # fmt: skip
LAYOUT = Layout([column("pt", "float32"), eigen("v", "float32", 2), scalar("s", "float32")])
REF = "no-such-model@production"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    file = tmp_path_factory.mktemp("program") / "program.pt2"
    signature = building.mlp_signature()
    inputs = random_inputs(signature, 0, {})
    building.exported(mlps.PointwiseFirst(), signature, inputs, file)
    return Session(signature, engine("exported").open(file, torch.device("cpu")))


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder and an empty registry."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_REGISTRY", f"sqlite:///{tmp_path}/registry.db")


def failures(title: str, call: Callable[[], object]) -> list[str]:
    """A line if a call raises anything but an error of ours with one line."""
    try:
        call()
    except SoaPipelineError as error:
        return [f"{title}: several lines: {error}"] if "\n" in str(error) else []
    except Exception as error:
        return [f"{title}: {type(error).__name__}: {error}"]
    return []


def tried(title: str, function: Any, *arguments: Any, **named: Any) -> Iterator[str]:
    """The failures of calls with each wrong value in place of each argument in turn."""
    for value in WRONG:
        for i in range(len(arguments)):
            changed = [*arguments[:i], value, *arguments[i + 1 :]]
            yield from failures(f"{title}, {i}: {value!r}", partial(function, *changed, **named))
        for name in named:
            call = partial(function, *arguments, **named | {name: value})
            yield from failures(f"{title}, {name}={value!r}", call)


OF_LOAD = ("registry", "max_age_s", "trusted_keys", "target", "engine_name", "threads", "instances",
           "builder", "prover", "lookup", "mode", "device")  # fmt: skip
OF_PIPELINES_LOAD = ("live", "build", "remote", "canary", "share", "canary_limits", "shadow",
                     "shadow_fraction", "shadow_record")  # fmt: skip
either_load = pytest.mark.parametrize(
    "load", [pipeline.load, runtime.load], ids=["pipeline", "runtime"]
)


@either_load
@pytest.mark.parametrize("option", OF_LOAD)
@pytest.mark.parametrize("source", [REF, Path("no such folder")], ids=["a reference", "a folder"])
def test_load_refuses_a_wrong_option(load: Any, option: str, source: Any) -> None:
    assert [*tried("load", load, source, **{option: None})] == []


@pytest.mark.parametrize("option", OF_PIPELINES_LOAD)
def test_load_of_pipeline_refuses_a_wrong_option(option: str) -> None:
    """Options that `runtime.load` does not have."""
    assert [*tried("load", pipeline.load, REF, **{option: None})] == []


@pytest.mark.parametrize(
    ("name", "value"), [("threads", "2"), ("trusted_keys", 5), ("target", 5), ("ref", None)]
)
def test_the_line_says_where_what_and_what_to_do(name: str, value: Any) -> None:
    with pytest.raises(pipeline.LoadError) as caught:
        pipeline.load(**{"ref": REF} | {name: value})
    text = str(caught.value)
    assert text.startswith(f"load: {name} is ") and "give" in text
    assert value is None or repr(value) in text


@pytest.mark.parametrize("several_devices", [False, True])
def test_sessions_refuse_wrong_arguments(session: Session, several_devices: bool) -> None:
    jets, tags = session.collection("jets", 3), session.collection("tags", 3)
    tested: Any = session
    if several_devices:
        tested = MultiDeviceSession(session.signature, lambda device: session)
    binding = tested.bind(jets, tags)
    wrong = [
        *tried("layout", tested.layout, "jets"),
        *tried("collection", tested.collection, "jets", 3, 3),
        *tried("bind", tested.bind, jets, tags, graph=False),
        *tried("run", tested.run, jets, tags, stream=None),
        *tried("run_many", tested.run_many, [binding], 1, stream=None),
        *tried("binding", binding, 3, stream=None),
        *tried("resize", binding.resize, 3),
        *tried("rebind", binding.rebind, jets, tags),
    ]
    assert wrong == []


def test_collections_refuse_wrong_arguments() -> None:
    collection, zeros = Collection(LAYOUT, 3), np.zeros(3, np.float32)
    memory = np.zeros(4096, np.uint8)
    wrong = [
        *tried("Collection", Collection, LAYOUT, 3, "cpu", capacity=3),
        *tried("wrap", Collection.wrap, LAYOUT, memory, 3, capacity=3, nbytes=4096),
        *tried("from_columns", Collection.from_columns, LAYOUT, {}, 3),
        *tried("from_arrays", Collection.from_arrays, LAYOUT, {}, 3),
        *tried("[]", collection.__getitem__, "pt"),
        *tried("tensor", collection.tensor, "pt"),
        *tried("component", collection.component, "pt", 0),
        *tried("span", collection.span, "pt", 0),
        *tried("run", collection.run, "v", 0, 2),
        *tried("fill", collection.fill, "pt", zeros),
        *tried("copy_from", collection.copy_from, collection),
        *tried("rows", collection.rows, 3),
        *tried("window", collection.window, 0, 3),
        *tried("to", collection.to, "cpu"),
        *tried("as_collection", as_collection, {"pt": zeros}, None, fill={}),
        *tried("from_jagged", from_jagged, [], building.mlp_signature(), "jets"),
    ]
    for function in (to_numpy, to_arrow, to_awkward, to_pandas, to_polars):
        wrong += tried(function.__name__, function, collection, ["pt"])
    assert wrong == []


def test_a_run_of_more_columns_than_there_are_is_refused() -> None:
    collection = Collection(LAYOUT, 3)
    with pytest.raises(CollectionError, match=r"no 3 columns from 'v'\[1\] on"):
        collection.run("v", 1, 3)  # v has two components, and one column is behind it


def test_layouts_refuse_wrong_arguments() -> None:
    wrong = [
        *tried("Layout", Layout, LAYOUT.columns, 128, "buffer"),
        *tried("[]", LAYOUT.__getitem__, "pt"),
    ]
    for make in (column, scalar, eigen):
        wrong += tried(make.__name__, make, "x", "int8")
    assert wrong == []


def test_builds_jobs_and_connections_refuse_wrong_arguments() -> None:
    store = pipeline.Registry()
    wrong = [
        *tried("Registry", pipeline.Registry, None, None),
        *tried("run", pipeline.run, "no.yaml", store, work=None),
        *tried("promote", pipeline.promote, store, REF, "production", reason="", policy=None),
        *tried("apply", pipeline.apply, REF, "a.npz", "out"),
    ]
    options = ("columns", "keep", "tree", "suffix", "mode", "registry", "lookup", "threads", "dask",
               "execute", "progress")  # fmt: skip
    for name in options:
        wrong += tried("apply", pipeline.apply, REF, "a.npz", "out", **{name: None})
    for name in ("deadline_s", "retries", "in_flight", "shared_memory", "compression", "tls",
                 "message_bytes"):  # fmt: skip
        wrong += tried("RemoteOptions", pipeline.RemoteOptions, **{name: None})
    assert wrong == []
