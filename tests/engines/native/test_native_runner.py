"""The native runner compared with torch's own, from many threads; and its refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.aoti.needs import needs_libtorch, needs_proxy_executor
from engines.errors import EngineError, RunError
from engines.native import _native
from engines.native.runner import NativeExecutable
from runtime.session.session import Session
from tests.models.building import Built, bound, values

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[1, 2], ids=["torch-1-thread", "torch-2-threads"])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """MKL's last bits depend on the number of threads; the runner's must not."""
    torch.set_num_threads(request.param)
    yield
    assert torch.get_num_threads() == request.param


@pytest.fixture(scope="module")
def library(mlp: Built) -> Path:
    return mlp.files["aoti"]


@pytest.fixture(scope="module")
def session(mlp: Built, library: Path) -> Session:
    return Session(mlp.signature, NativeExecutable(library, CPU, instances=4))


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 1000, 4099])
def test_gives_the_bits_of_torchs_own_runner(mlp: Built, session: Session, n: int) -> None:
    """Of torch with one thread."""
    from torch._C import _aoti

    binding, tags = bound(mlp, session, n)
    binding()
    theirs, expected = bound(mlp, session, n)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runner = _aoti.AOTIModelContainerRunnerCpu(str(mlp.files["aoti"]), 1)
    # The library holds no weights; torch's runner needs them.
    weights = mlp.model.state_dict()
    names = runner.get_constant_names_to_original_fqns()
    constants = {name: weights[own.removeprefix("model.")] for name, own in names.items()}
    runner.update_constant_buffer(constants, False, True)
    runner.run([span.tensor() for span in theirs._arguments])
    torch.set_num_threads(threads)
    assert torch.equal(values(tags), values(expected))
    torch.testing.assert_close(values(tags).sum(0), torch.ones(n))  # probabilities, not zeros


def test_a_library_of_something_else_is_refused() -> None:
    """stress.cpp tries other files."""
    with pytest.raises(RunError, match="not the library of an artifact"):
        NativeExecutable(Path(_native.__file__), CPU)


Argument = tuple[int, str, tuple[int, ...]]
"""An address, a dtype, and the sizes."""


class TenRows:
    """A prepared call of the small model on ten of 32 rows."""

    def __init__(self, library: Path) -> None:
        self.model = _native.Model(str(library), "cpu", str(library.parent), 1)
        self.features, self.answers = torch.rand(6, 32), torch.zeros(3, 32)
        self.arguments: list[Argument] = [
            (0, "float32", (10, 0)),
            (self.features.data_ptr(), "float32", (6, 32)),
            (self.answers.data_ptr(), "float32", (3, 32)),
        ]
        self.call = self.model.prepare(self.arguments)

    def rows_written(self) -> int:
        """Runs the call and counts the rows whose answers are not 0: they come first."""
        self.answers.zero_()
        self.call.run()
        n = int((self.answers != 0).all(0).sum())
        assert (self.answers[:, :n] != 0).all() and not self.answers[:, n:].any()
        return n


@pytest.fixture
def ten_rows(library: Path) -> TenRows:
    return TenRows(library)


def test_a_call_with_too_few_arguments_is_refused(ten_rows: TenRows) -> None:
    """stress.cpp tries other invalid arguments."""
    with pytest.raises(RunError, match="2 arguments, the artifact takes 3"):
        ten_rows.model.prepare(ten_rows.arguments[:2])


def test_a_refused_update_changes_no_argument(ten_rows: TenRows) -> None:
    """Not even the number of rows, which comes before the null pointer and is valid."""
    with pytest.raises(RunError, match="null pointer"):
        ten_rows.call.update([(0, (0, "float32", (4, 0))), (1, (0, "float32", (6, 32)))])
    assert ten_rows.rows_written() == 10


def test_an_update_with_no_size_is_refused(ten_rows: TenRows) -> None:
    with pytest.raises(ValueError, match="1 or 2 sizes"):
        ten_rows.call.update([(0, (0, "float32", ()))])
    assert ten_rows.rows_written() == 10


def test_an_update_changes_the_number_of_rows(ten_rows: TenRows) -> None:
    ten_rows.call.update([(0, (0, "float32", (4, 0)))])
    assert ten_rows.rows_written() == 4


def test_the_run_for_cuda_graphs_gives_the_same_bits(mlp: Built, library: Path) -> None:
    """Several threads use the single-threaded entry point of graphs, but record no graph."""
    inputs, expected = mlp.collections({"n": 100})
    mlp.session("aoti").run(inputs, expected)
    session = Session(mlp.signature, NativeExecutable(library, CPU, instances=0), CPU)
    wrong: list[int] = []

    def work(thread: int) -> None:
        tags = session.collection("tags", 100)
        binding = session.bind(inputs, tags)
        for _ in range(50):
            tags.memory()[0].zero_()
            binding()
            if not torch.equal(tags.memory()[0], expected["tags"].memory()[0]):
                wrong.append(thread)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_library_that_calls_the_proxy_executor_is_recognised(
    tmp_path: Path, library: Path
) -> None:
    """By the name of the function, which its symbols contain."""
    assert not needs_proxy_executor(library)
    marked = tmp_path / "marked.so"
    marked.write_bytes(library.read_bytes() + b"\0aoti_torch_proxy_executor_call_function\0")
    assert needs_proxy_executor(marked)


def test_a_library_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none\.so cannot be read"):
        needs_proxy_executor(tmp_path / "none.so")


@pytest.mark.parametrize(("linked", "older"), [(b"libtorch_cpu.so", False), (b"libtorch.so", True)])
def test_a_library_of_an_older_torch_is_recognised(
    tmp_path: Path, linked: bytes, older: bool
) -> None:
    library = tmp_path / "linked.so"
    library.write_bytes(b"\x7fELF\0" + linked + b"\0libc.so.6\0")
    assert needs_libtorch(library) == older
