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


@pytest.fixture(scope="module")
def made() -> Subject:
    return subject(features=3, highest=100)


def test_copies_against_none(made: Subject) -> None:
    panel = copies.measure(made, made.session("exported"), eager(made.model), (1, 33), 0.01)
    assert panel.columns == (1, 33)
    assert list(panel.rows) == [
        "ours",
        "pack, AOTI, unpack",
        "ours: bind",
        "ours: rebind",
        "ours: 2 resizes",
    ]
    assert all(cell and cell.value > 0 for cells in panel.rows.values() for cell in cells)
    assert "from row 33" in copies.cost_of_a_start(made, made.session("exported"), 10, 0.01)


def test_threads(made: Subject) -> None:
    panels = threads.measure(made, made.session("exported"), (3,), (1, 2), 2, 0.01)
    assert [panel.title for panel in panels] == ["3 rows"]
    assert all(cell and cell.value > 0 for cells in panels[0].rows.values() for cell in cells)
    assert "3 rows" in threads.shared_rows(made, (3,), 1, 0.01)


def test_shadow(made: Subject) -> None:
    panel, notes = shadow.measure(made, lambda: made.session("exported"), (3,), 2, 0.01)
    shadows = [f"fraction {f:g}" for f in shadow.FRACTIONS]
    assert [*panel.rows] == ["no shadow", *shadows, *shadow.CANARIES, "canary, keys"]
    assert all(cell and cell.value > 0 for cells in panel.rows.values() for cell in cells)
    assert any(note.startswith("3 rows, fraction 1: ") for note in notes)


def test_memory_over_events(made: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    found = weights.million(made.session("exported").bind(*made.collections(100)), 1000)
    assert len(found) == 11
    assert "RSS over 1,000 bound events of 0 to 99 rows, MB: " in capsys.readouterr().out


def test_the_copying_way_of_a_graph_gives_our_answers() -> None:
    """If the answers differed, the two times would be of different work."""
    made = graph_subject(200, gnn.EDGES_PER_NODE)
    given, ours = gnn.event(made, 100, torch.device("cpu"))
    _, theirs = gnn.event(made, 100, torch.device("cpu"))
    made.session("exported").run(given, ours)
    copying_way(made.signature, eager(made.model), given, theirs)()
    for name, collection in ours.items():
        for column in collection.layout.columns:
            torch.testing.assert_close(
                collection.tensor(column.name), theirs[name].tensor(column.name)
            )


@pytest.mark.cuda
def test_a_bound_call_copies_nothing_between_host_and_gpu() -> None:
    made = graph_subject(200, gnn.EDGES_PER_NODE)
    device = torch.device("cuda", torch.cuda.current_device())
    given, written = gnn.event(made, 100, device)
    binding = made.session("aoti", device).bind(given, written)
    binding()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        binding()
        torch.cuda.synchronize()
    names = [activity.name for activity in profiler.events() or ()]
    assert not [name for name in names if name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]


@pytest.mark.long  # torch.compile takes a quarter of a minute
def test_what_a_gpu_would_be_asked_runs_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([zoo.CONFIGS / "zoo" / "mlp.yaml"], torch.device("cpu"), 0.01)
    said = capsys.readouterr().out
    assert "lanes: valid" in said
    assert "tensorrt builds for CUDA targets" in said
    assert all(name in said for name in ("eager", "torch.compile", "with copies", "10,000"))
