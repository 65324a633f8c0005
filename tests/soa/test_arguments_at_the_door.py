"""Values of a wrong kind for an argument of a public function: one line of ours, and no Python
error from inside."""

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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_REGISTRY", f"sqlite:///{tmp_path}/registry.db")


def refused(said: str, call: Callable[[], object]) -> list[str]:
    """Lines for a call that raises anything but an error of ours with one line."""
    try:
        call()
    except SoaPipelineError as error:
        return [f"{said}: several lines: {error}"] if "\n" in str(error) else []
    except Exception as error:
        return [f"{said}: {type(error).__name__}: {error}"]
    return []


def tried(said: str, function: Any, *given: Any, **named: Any) -> Iterator[str]:
    """Calls with each of the wrong values in place of each argument in turn."""
    for value in WRONG:
        for i in range(len(given)):
            changed = [*given[:i], value, *given[i + 1 :]]
            yield from refused(f"{said}, {i}: {value!r}", partial(function, *changed, **named))
        for name in named:
            changed_name = named | {name: value}
            yield from refused(
                f"{said}, {name}={value!r}", partial(function, *given, **changed_name)
            )


@pytest.mark.parametrize("load", [pipeline.load, runtime.load])
def test_load(load: Any) -> None:
    every = dict.fromkeys(
        ("registry", "max_age_s", "trusted_keys", "target", "engine_name", "threads", "instances",
         "builder", "prover", "lookup", "mode", "device")
    )  # fmt: skip
    own = dict.fromkeys(
        ("live", "build", "remote", "canary", "share", "canary_limits", "shadow",
         "shadow_fraction", "shadow_record")
    )  # fmt: skip
    names = every if load is runtime.load else every | own
    wrong = [line for name in names for line in tried("load", load, REF, **{name: None})]
    assert wrong == []
    folder = Path("no such folder")
    assert [line for name in every for line in tried("load", load, folder, **{name: None})] == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"threads": "2"}, "threads"),
        ({"trusted_keys": 5}, "trusted_keys"),
        ({"target": 5}, "target"),
        ({"ref": None}, "ref"),
    ],
)
def test_the_line_says_where_what_and_what_to_do(given: dict[str, Any], named: str) -> None:
    with pytest.raises(pipeline.LoadError) as caught:
        pipeline.load(**{"ref": REF} | given)
    said = str(caught.value)
    assert said.startswith(f"load: {named} is ") and "give" in said
    assert given[named] is None or repr(given[named]) in said


def test_sessions(session: Session) -> None:
    jets, tags = session.collection("jets", 3), session.collection("tags", 3)
    for kind in (session, MultiDeviceSession(session.signature, lambda device: session)):
        binding = kind.bind(jets, tags)
        wrong = [
            *tried("layout", kind.layout, "jets"),
            *tried("collection", kind.collection, "jets", 3, 3),
            *tried("bind", kind.bind, jets, tags, graph=False),
            *tried("run", kind.run, jets, tags, stream=None),
            *tried("run_many", kind.run_many, [binding], 1, stream=None),
            *tried("binding", binding, 3, stream=None),
            *tried("resize", binding.resize, 3),
            *tried("rebind", binding.rebind, jets, tags),
        ]
        assert wrong == []


def test_collections() -> None:
    made, zeros = Collection(LAYOUT, 3), np.zeros(3, np.float32)
    bytes_ = np.zeros(4096, np.uint8)
    wrong = [
        *tried("Collection", Collection, LAYOUT, 3, "cpu", capacity=3),
        *tried("wrap", Collection.wrap, LAYOUT, bytes_, 3, capacity=3, nbytes=4096),
        *tried("from_columns", Collection.from_columns, LAYOUT, {}, 3),
        *tried("from_arrays", Collection.from_arrays, LAYOUT, {}, 3),
        *tried("[]", made.__getitem__, "pt"),
        *tried("tensor", made.tensor, "pt"),
        *tried("component", made.component, "pt", 0),
        *tried("span", made.span, "pt", 0),
        *tried("run", made.run, "v", 0, 2),
        *tried("fill", made.fill, "pt", zeros),
        *tried("copy_from", made.copy_from, made),
        *tried("rows", made.rows, 3),
        *tried("window", made.window, 0, 3),
        *tried("to", made.to, "cpu"),
        *tried("as_collection", as_collection, {"pt": zeros}, None, fill={}),
        *tried("from_jagged", from_jagged, [], building.mlp_signature(), "jets"),
    ]
    for function in (to_numpy, to_arrow, to_awkward, to_pandas, to_polars):
        wrong += tried(function.__name__, function, made, ["pt"])
    assert wrong == []


def test_a_run_of_more_columns_than_there_are_is_refused() -> None:
    made = Collection(LAYOUT, 3)
    with pytest.raises(CollectionError, match=r"no 3 columns from 'v'\[1\] on"):
        made.run("v", 1, 3)  # v has two components, and one column is behind it


def test_layouts() -> None:
    wrong = [
        *tried("Layout", Layout, LAYOUT.columns, 128, "buffer"),
        *tried("[]", LAYOUT.__getitem__, "pt"),
        *(line for make in (column, scalar, eigen) for line in tried("column", make, "x", "int8")),
    ]
    assert wrong == []


def test_builds_jobs_and_connections() -> None:
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
