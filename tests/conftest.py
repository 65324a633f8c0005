"""Fixtures and settings of all tests: GPU tests skip without a GPU, hypothesis has no deadline."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from engines.processes import warm
from tests.models import environment, sqlite
from tests.models.shared import made_once

if TYPE_CHECKING:  # torch takes seconds to import, and many runs select a test without it
    from registry.store.registry import Registry
    from tests.models import project as projects
    from tests.models.building import Built

ROOT = Path(__file__).parents[1]
CORE = ("tests/soa", "tests/engines/lanes", "tests/runtime/session", "tests/stages/judging")
"""The folders of the marker `core`. Their tests need no MLflow, ONNX, Dask or server."""
LONGEST = (
    "lanes/test_header.py",
    "lanes/test_operators.py",
    "lanes/test_rows.py",
    "lanes/test_small_floats.py",
    "lanes/test_special_values.py",
    "lanes/test_trees.py",
    "judging/test_emulate.py",
)
"""Files that compile for minutes: every operator, trees of every library, other compilers, other
processors. They are not in `core`, and come first: no process is left alone with one of them."""

OURS = ("SKHEP_DATA", "HOME", "NO_PROXY", "TESTS_LANES")
"""Variables that tests set and torch does not read when it is imported: a process that has imported
it takes their jobs, too."""

SHORT_RACES = (
    ("pipeline.config.schema", "_QUICK_BENCHMARK_S", 0.1),
    ("pipeline.promotion.measuring", "_SECONDS_A_SIZE", 0.2),
    ("stages.timing.tile_choice", "_SECONDS", 0.1),
)
"""How long artifacts are timed: no test looks at how fast they are."""

environment.settle(ROOT)  # before torch is imported
environment.remember_types()

# No test may fail because a machine is slow or busy.
hypothesis.settings.register_profile("soa", deadline=None, max_examples=30)
hypothesis.settings.load_profile("soa")
# `make campaigns` tries ten times as many.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
# `pytest tests/fuzz --hypothesis-profile campaign`: some minutes, other examples each time.
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=5000)


# Imported modules stay alive: the collector need not visit their million objects each time.
gc.disable()


def pytest_collection_finish() -> None:
    if "torch.export" in sys.modules:
        environment.remember_operators()
    gc.collect()
    gc.freeze()
    gc.enable()
    warm.collect_garbage_seldom()


def in_core(path: Path) -> bool:
    within = any(path.is_relative_to(ROOT / folder) for folder in CORE)
    return within and not path.as_posix().endswith(LONGEST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m core` imports no test of another folder: its libraries may be missing."""
    if config.option.markexpr != "core" or in_core(collection_path):
        return None
    leads_there = any((ROOT / folder).is_relative_to(collection_path) for folder in CORE)
    return None if leads_there else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    for item in items:
        if in_core(item.path) and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.core)
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not on_gpu:
        return
    import torch  # imported here: it takes seconds, and few runs select a GPU test

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this run: no test finds files of other loads, or leaves any in the home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        # Processes that have imported torch are kept: the import takes longer than a test.
        patch.setattr(warm, "_IDLE_S", 600.0)
        patch.setattr(warm, "_READ_LATER", (*warm._READ_LATER, *OURS))
        for module, name, seconds in SHORT_RACES:
            if module in sys.modules:  # a run of few tests imports none of them
                patch.setattr(sys.modules[module], name, seconds)
        yield


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Puts back the number of torch's threads, which loading for production sets."""
    if "torch" not in sys.modules:
        yield
        return
    import torch  # imported before, or a run without torch would wait for it

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def restless() -> Iterator[None]:
    """Makes Python switch threads after a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="session")
def quick_commits() -> None:
    sqlite.quick_commits()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> Path:
    """An empty MLflow database, to copy: MLflow needs a second to make the tables."""
    from registry.store.registry import Registry

    def make(folder: Path) -> None:
        with Registry(f"sqlite:///{folder}/registry.db").client(write=True):
            pass

    return made_once(tmp_path_factory, "template", make) / "registry.db"


@pytest.fixture
def empty(tmp_path: Path, empty_database: Path) -> Registry:
    """An empty registry for this test."""
    from tests.models.versions import copy_of

    return copy_of(empty_database.parent, tmp_path / "store")


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model whose first operation is pointwise, compiled once for every engine."""
    from tests.models import building, mlps

    signature = building.mlp_signature(5000, (1000, 4099))

    def make(folder: Path) -> None:
        (folder / "made").mkdir()
        built = building.build(mlps.PointwiseFirst(), signature, folder / "made")
        building.save(built, folder / "files.json")

    folder = made_once(tmp_path_factory, "mlp", make)
    return building.opened(mlps.PointwiseFirst(), signature, folder / "made", folder / "files.json")


@pytest.fixture(scope="session")
def jets(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> projects.Built:
    """A project that was run once with every engine, and its own registry with jets/1."""
    from tests.models import project

    def make(folder: Path) -> None:
        project.build(project.write_project(folder), page=True)

    folder = made_once(tmp_path_factory, "jets", make)
    return project.copied(folder, tmp_path_factory.mktemp("jets"))


@pytest.fixture(scope="session")
def bare_jets(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> projects.Built:
    """The project of `jets`, with artifacts of aoti and lanes."""
    from tests.models import project

    def make(folder: Path) -> None:
        engines = ("[aoti, torchscript, exported]", "[aoti, lanes]")
        project.build(project.write_project(folder, config=project.CONFIG.replace(*engines)))

    folder = made_once(tmp_path_factory, "bare-jets", make)
    return project.copied(folder, tmp_path_factory.mktemp("bare-jets"))


@pytest.fixture(scope="session")
def loose(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> projects.Built:
    """The project of `jets` on separate columns, some Eigen vectors, one in double precision."""
    from tests.models import project

    def make(folder: Path) -> None:
        made = project.write_project(folder)
        made.variant(
            "config.yaml",
            ("{name: c, dtype: float32}", "{name: c, dtype: float64}"),
            ("      - {name: e, dtype: float32}\n", ""),
            ("{name: f, dtype: float32}", "{name: f, dtype: float32, eigen: [2]}\n"
             "    storage: columns\n    alignment: 16"),
            ("      - {name: y, dtype: float32}\n", ""),
            ("{name: z, dtype: float32}", "{name: z, dtype: float32, eigen: [2]}\n"
             "    storage: columns\n    alignment: 1"),
            ("[a, b, c, d, e, f]}", "[a, b, c, d, f], dtype: float32}"),
            ("columns: [x, y, z]", "columns: [x, z]"),
            ("engines: [aoti, torchscript, exported]", "engines: [aoti]"),
        )  # fmt: skip
        project.build(made)

    folder = made_once(tmp_path_factory, "loose", make)
    return project.copied(folder, tmp_path_factory.mktemp("loose"))


@pytest.fixture(scope="session")
def lists(tmp_path_factory: pytest.TempPathFactory, quick_commits: None) -> projects.Built:
    """The project of `jets` on the sums of jagged columns: n rows with up to four jets each."""
    from tests.models import project

    def make(folder: Path) -> None:
        made = project.write_project(folder)
        with (folder / "model.py").open("a") as file:
            file.write(
                "\n\nclass Lists(PointwiseFirst):\n    def forward(self, x: Tensor) -> Tensor:\n"
                "        return super().forward(x.sum(2))\n\n\ndef lists(hidden: int) -> Lists:\n"
                "    return Lists(0, hidden)\n"
            )
        made.variant(
            "config.yaml",
            ("model.py:talkative", "model.py:lists"),
            ("  tags:\n", "    storage: columns\n    rows: jet\n"
             "    jagged: {rows: n, length: 4}\n  tags:\n"),
            ("max: 1000, typical: [1000]}", "max: 100, typical: [50]}\n"
             "  jet: {max: 300, typical: [150]}"),
            ("engines: [aoti, torchscript, exported]", "engines: [aoti]"),
        )  # fmt: skip
        project.build(made)

    folder = made_once(tmp_path_factory, "lists", make)
    return project.copied(folder, tmp_path_factory.mktemp("lists"))


@pytest.fixture(scope="session")
def heavy(tmp_path_factory: pytest.TempPathFactory, jets: projects.Built) -> projects.Built:
    """The project of `jets` with forty times the weights, for one engine: jets/2 beside jets/1."""
    from registry.store.registry import Registry
    from tests.models import project

    def make(folder: Path) -> None:
        made = project.write_project(folder, hidden=1920)
        made.variant("config.yaml", ("[aoti, torchscript, exported]", "[exported]"))
        Registry(made.registry).register(jets.bundle)
        project.build(made)

    folder = made_once(tmp_path_factory, "heavy", make)
    return project.copied(folder, tmp_path_factory.mktemp("heavy"))
