"""The benchmarks run, on few rows and for a short time, and their contestants do the same work."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import weights
from benchmarks.row_major import copying_way, eager
from benchmarks.serving import shadow
from benchmarks.speed import copies, gnn, gpu, threads, zoo
from benchmarks.subject import Subject, graph_subject, subject
from benchmarks.table import Panel


@pytest.fixture(scope="module")
def small() -> Subject:
    return subject(features=3, highest=100)


def all_measured(panel: Panel) -> bool:
    """Whether each cell of a table has a positive value."""
    return all(cell and cell.value > 0 for cells in panel.rows.values() for cell in cells)


def test_copies_are_measured_for_each_way_and_size(small: Subject) -> None:
    panel = copies.measure(small, small.session("exported"), eager(small.model), (1, 33), 0.01)
    assert panel.columns == (1, 33)
    assert list(panel.rows) == [
        "ours",
        "pack, AOTI, unpack",
        "ours: bind",
        "ours: rebind",
        "ours: 2 resizes",
    ]
    assert all_measured(panel)


def test_the_cost_of_an_odd_start_is_told(small: Subject) -> None:
    assert "from row 33" in copies.cost_of_a_start(small, small.session("exported"), 10, 0.01)


def test_threads_are_measured_for_each_size(small: Subject) -> None:
    (panel,) = threads.measure(small, small.session("exported"), (3,), (1, 2), 2, 0.01)
    assert panel.title == "3 rows"
    assert all_measured(panel)


def test_the_time_of_threads_that_share_rows_is_told(small: Subject) -> None:
    assert "3 rows" in threads.shared_rows(small, (3,), 1, 0.01)


def test_shadows_and_canaries_are_measured(small: Subject) -> None:
    panel, notes = shadow.measure(small, lambda: small.session("exported"), (3,), 2, 0.01)
    shadows = [f"fraction {f:g}" for f in shadow.FRACTIONS]
    assert [*panel.rows] == ["no shadow", *shadows, *shadow.CANARIES, "canary, keys"]
    assert all_measured(panel)
    assert any(note.startswith("3 rows, fraction 1: ") for note in notes)


def test_memory_is_measured_over_events(small: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    """At the begin and after each tenth of them."""
    memory = weights.million(small.session("exported").bind(*small.collections(100)), 1000)
    assert len(memory) == 11
    assert "RSS over 1,000 bound events of 0 to 99 rows, MB: " in capsys.readouterr().out


def test_the_copying_way_of_a_graph_gives_our_answers() -> None:
    """If the answers differed, the two times would be of different work."""
    graph = graph_subject(200, gnn.EDGES_PER_NODE)
    inputs, ours = gnn.event(graph, 100, torch.device("cpu"))
    _, theirs = gnn.event(graph, 100, torch.device("cpu"))
    graph.session("exported").run(inputs, ours)
    copying_way(graph.signature, eager(graph.model), inputs, theirs)()
    for name, collection in ours.items():
        for column in collection.layout.columns:
            torch.testing.assert_close(
                collection.tensor(column.name), theirs[name].tensor(column.name)
            )


@pytest.mark.cuda
def test_a_bound_call_copies_nothing_between_host_and_gpu() -> None:
    graph = graph_subject(200, gnn.EDGES_PER_NODE)
    device = torch.device("cuda", torch.cuda.current_device())
    binding = graph.session("aoti", device).bind(*gnn.event(graph, 100, device))
    binding()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        binding()
        torch.cuda.synchronize()
    names = [activity.name for activity in profiler.events() or ()]
    assert not [name for name in names if name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]


@pytest.mark.long  # torch.compile takes a quarter of a minute
def test_the_benchmark_for_gpus_runs_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([zoo.CONFIGS / "zoo" / "mlp.yaml"], torch.device("cpu"), 0.01)
    output = capsys.readouterr().out
    assert "lanes: valid" in output
    assert "tensorrt builds for CUDA targets" in output
    assert all(name in output for name in ("eager", "torch.compile", "with copies", "10,000"))
