"""The C++ header of a network: right on whole references, the bits of the library, any compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.speed.nvcc import nvcc
from engines import Portable, Target, engine
from engines.errors import EngineError
from engines.lanes import Rows, members_of, named_header
from engines.lanes.compiling.devices import compile_cuda, load_nvrtc
from engines.lanes.planning.self_test import number_text
from runtime.session.session import Session
from soa.signature import BoundBlock
from tests.engines.lanes.harness import Compiled, Prepared, prepared
from tests.models.forests import Forest

CPP, CUDA = Target("source", "cpp"), Target("source", "cuda")
pytestmark = pytest.mark.usefixtures("traced_once", "quick_compiler")
CLANG = next((name for name in ("clang++-19", "clang++") if shutil.which(name)), None)


class TrackPurity(nn.Module):
    """15 features of a track: batch norm, ELU, a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(15, 16), nn.BatchNorm1d(16), nn.ELU())
        self.block = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.first(x)
        x = x + 0.3 * torch.relu(self.block(x))  # a product and a sum, which compilers may fuse
        return (torch.sigmoid(self.last(x)),)


class Steps(nn.Module):
    """An LSTM over three steps of three features, and a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, _ = self.lstm(x)
        return torch.sin(steps[:, -1] * 1000), steps.argmax(1)[:, :2]


class Neighbours(nn.Module):
    """Edge convolution: the three nearest of six points."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        near = torch.cdist(x, x).topk(4, largest=False).indices[:, :, 1:]
        others = x[:, None].expand(-1, 6, -1, -1).gather(2, near[..., None].expand(-1, -1, -1, 4))
        own = x[:, :, None].expand(-1, -1, 3, -1)
        return (self.edge(torch.cat([own, others - own], -1)).relu().amax(2).mean(1),)


class Whole(nn.Module):
    """Integers and bools in and out, sorted, summed and hashed: they wrap around."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ordered, _ = x.sort(-1)
        far = x * 2**61
        return ordered.cumsum(-1), ordered[:, :1] > 2, (far + 2**62 > far) & (far * far >= 0)


class Kind(NamedTuple):
    """A model: how it is made, the shape and the dtype of a row, and the names of its outputs."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: tuple[str, ...]
    dtype: torch.dtype = torch.float32


NETWORKS = {  # by the names of their headers
    "purity": Kind(TrackPurity, (15,), ("p",)),
    "lstm": Kind(Steps, (3, 3), ("a", "b")),
    "edges": Kind(Neighbours, (6, 4), ("f",)),
    "trees": Kind(Forest, (6,), ("score",)),
    "deep": Kind(partial(Forest, (500, 450)), (6,), ("score",)),
    "integers": Kind(Whole, (6,), ("sums", "above", "wrapped"), torch.int64),
}


@dataclass(frozen=True)
class Network:
    """An exported model, and rows of its input."""

    prepared: Prepared
    rows: Tensor

    @cached_property
    def library(self) -> Compiled:
        """The library of `lanes` for this host."""
        return self.prepared.compiled()


@dataclass(frozen=True)
class Headers:
    """Headers with their names and a self-test, as `pipeline source` writes them."""

    folder: Path
    libraries: dict[str, Compiled]
    """The library that includes each."""


@pytest.fixture(scope="module")
def networks() -> dict[str, Network]:
    by_name: dict[str, Network] = {}
    for name, kind in NETWORKS.items():
        torch.manual_seed(5)
        shape = (64, *kind.shape)
        floats = kind.dtype.is_floating_point
        rows = (torch.randn(shape) if floats else torch.randint(-9, 9, shape)).to(kind.dtype)
        by_name[name] = Network(prepared(kind.model(), [rows], kind.outputs), rows)
    return by_name


def with_header(network: Prepared, target: Target, folder: Path) -> Compiled:
    """The library that includes the network's header.

    It is compiled for one of NVIDIA's architectures: tests/pipeline/building/test_header.py has a
    header for all of them.
    """
    source = Portable(network.program, None, network.signature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.lanes.compiling.header._NVIDIA", ("sm_80",))
        files = engine("lanes").compile(source, target, {}, folder)
    opened = engine("lanes").open(folder / files[0], torch.device("cpu"))
    return Compiled(network.model, network.signature, Session(network.signature, opened))


@pytest.fixture(scope="module")
def cpp(networks: dict[str, Network], tmp_path_factory: pytest.TempPathFactory) -> Headers:
    return written(networks, tmp_path_factory.mktemp("cpp"), CPP)


@pytest.fixture(scope="module")
def cuda(networks: dict[str, Network], tmp_path_factory: pytest.TempPathFactory) -> Headers:
    _require_nvrtc()
    return written(networks, tmp_path_factory.mktemp("cuda"), CUDA)


@pytest.fixture(scope="module")
def purity(cpp: Headers) -> Path:
    return cpp.folder / "purity.h"


@pytest.mark.parametrize("language", ["cpp", "cuda"])
def test_a_header_has_the_bits_of_the_library(
    networks: dict[str, Network], language: str, request: pytest.FixtureRequest
) -> None:
    """`rows` for C++; `row`, as in a thread of a GPU, for CUDA."""
    headers: Headers = request.getfixturevalue(language)
    for name, network in networks.items():
        header = headers.libraries[name]
        for n in (0, 1, 7, 33, 64):
            wanted, answers = network.library(network.rows[:n]), header(network.rows[:n])
            assert wanted.keys() == answers.keys()
            for output, values in wanted.items():
                assert torch.equal(answers[output], values), (name, n, output)


def _require_nvrtc() -> None:
    """Skips if CUDA's compiler library is not installed."""
    try:
        load_nvrtc()
    except EngineError as error:
        pytest.skip(str(error))


def written(networks: Mapping[str, Network], folder: Path, target: Target) -> Headers:
    """Writes the header of each network as NAME.h into this folder."""
    libraries: dict[str, Compiled] = {}
    for name, network in networks.items():
        (folder / name).mkdir()
        libraries[name] = with_header(network.prepared, target, folder / name)
        signature, rows = network.prepared.signature, network.rows
        values = _columns(signature.inputs, [rows])
        answers = libraries[name](rows)
        values |= _columns(signature.outputs, [answers[out.name] for out in signature.outputs])
        text = (folder / name / "network.h").read_text()
        whole = named_header(text, name, members_of(signature), Rows(values, len(rows)))
        (folder / f"{name}.h").write_text(whole)
    return Headers(folder, libraries)


def _columns(
    blocks: Iterable[BoundBlock], tensors: Iterable[Tensor]
) -> dict[tuple[str, str], list[np.ndarray[Any, Any]]]:
    """The columns of tensors of rows, by collection and column."""
    return {
        (bound.block.collection, column): [values.flatten(1)[:, k].numpy()]
        for bound, values in zip(blocks, tensors, strict=True)
        for k, column in enumerate(bound.block.columns)
    }


NUMBERS: tuple[np.number[Any], ...] = (
    np.float32(-0.0), np.float32(1e-45), np.float32(3.4028235e38), np.float64(0.1),
    np.float64(-5e-324), np.int32(-(2**31)), np.int64(-(2**63)), np.uint8(255), np.int8(-128),
    np.uint32(2**32 - 1), np.float32(np.inf), np.float64(-np.inf),
)  # fmt: skip
COMPILERS = [
    pytest.param("g++ -std=c++17 -O0", marks=pytest.mark.long),
    "g++ -std=c++20 -O3 -march=native -ffp-contract=fast -Wall -Wextra -Wpedantic -Werror",
    "clang++ -std=c++17 -O2 -march=x86-64-v3 -Wall -Wextra -Wpedantic -Werror",
    "zig -std=c++20 -O1",
]


def compiler(words: str) -> list[str]:
    """A compiler's command; skips if it is not installed."""
    name, *flags = words.split()
    if name == "clang++":
        if CLANG is None:
            pytest.skip("clang++ is not installed")
        name = CLANG
    if name == "zig":
        pytest.importorskip("ziglang")
        return [sys.executable, "-m", "ziglang", "c++", *flags]
    return [name, *flags]


def run(words: str, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Compiles a program and runs it; the result of the compiler if that fails. `words`: as in
    COMPILERS."""
    (folder / "main.cpp").write_text(text)
    program = folder / "main"
    done = subprocess.run(
        [*compiler(words), "-I", str(folder), "-o", str(program), str(folder / "main.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return done
    return subprocess.run([str(program)], capture_output=True, text=True, check=False)


TEST = '#include "purity.h"\nint main() { return purity::self_test(); }\n'


@pytest.mark.parametrize("words", COMPILERS)
def test_any_compiler_gives_the_bits(cpp: Headers, words: str) -> None:
    """All networks in one program, which prints how many numbers of each are wrong."""
    includes = "".join(f'#include "{name}.h"\n' for name in NETWORKS)
    prints = " ".join(f'std::printf("%d\\n", {name}::self_test());' for name in NETWORKS)
    done = run(words, cpp.folder, f"{includes}#include <cstdio>\nint main() {{ {prints} }}\n")
    assert done.stdout.split() == ["0"] * len(NETWORKS), done.stderr


def test_fast_math_is_refused(purity: Path) -> None:
    done = run("g++ -O2 -ffast-math", purity.parent, TEST)
    assert done.returncode != 0 and "-ffast-math" in done.stderr


def test_the_self_test_sees_other_arithmetic(purity: Path) -> None:
    """Here a fused product and sum rounds twice."""
    twice = "#define __builtin_fmaf(a, b, c) ((a) * (b) + (c))\n"
    assert run("g++ -std=c++17 -O2", purity.parent, twice + TEST).returncode != 0


def test_a_gpu_compiler_takes_the_file_and_fuses_nothing(cuda: Headers) -> None:
    """`nvcc` makes an fma of each product and sum unless `--fmad=false` is given."""
    kernel = 'extern "C" __global__ void k(int *n) { *n = purity::self_test(); }\n'
    plain, contracted = (
        compile_cuda(f'#include "purity.h"\n{kernel}'.encode(), "sm_80", cuda.folder, fmad=fmad)
        for fmad in (False, True)
    )
    assert plain.ptx.count(b"fma.rn") == contracted.ptx.count(b"fma.rn") > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_device_code_has_no_vector_and_no_lambda(cuda: Headers, name: str) -> None:
    """NVRTC takes vectors, which nvcc does not; before 13.1 it takes no lambda."""
    command = ["g++", "-E", "-P", "-D__CUDACC__", "-x", "c++", str(cuda.folder / f"{name}.h")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "self_test" in code and "vector_size" not in code
    assert not re.search(r"= \[[&=]?\]\s*\(", code)


def _nvcc() -> str:
    """The path of nvcc; skips if it is not installed."""
    try:
        return nvcc()
    except RuntimeError as error:
        pytest.skip(str(error))


def _self_tests_compile(
    command: list[str], headers: Headers, runtime: str, names: Iterable[str] = NETWORKS
) -> None:
    """Compiles main.cu, a kernel with the self-tests of these networks. `runtime`: an include."""
    includes = "".join(f'#include "{name}.h"\n' for name in names)
    wrong = " + ".join(f"{name}::self_test()" for name in names)
    kernel = f"__global__ void k(int *n) {{ *n = {wrong}; }}\n"
    (headers.folder / "main.cu").write_text(f"{runtime}{includes}{kernel}int main() {{}}\n")
    done = subprocess.run(command, cwd=headers.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "names",
    [("purity", "integers"), pytest.param(tuple(NETWORKS), marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_nvcc_takes_the_files(cuda: Headers, names: tuple[str, ...]) -> None:
    command = [_nvcc(), "-std=c++17", "-arch=sm_90", "-ptx", "-o", "main.ptx", "main.cu"]
    _self_tests_compile(command, cuda, "", names)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("hipcc") is None, reason="hipcc is not installed")
def test_hipcc_takes_the_files(
    networks: dict[str, Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_PLATFORM", "amd")  # it compiles for NVIDIA where it finds nvcc
    command = ["hipcc", "-std=c++17", "--offload-arch=gfx90a", "-o", "main", "-x", "hip", "main.cu"]
    headers = written(networks, tmp_path, Target("source", "hip"))
    _self_tests_compile(command, headers, runtime="#include <hip/hip_runtime.h>\n")


def test_the_self_test_sees_another_weight(purity: Path, tmp_path: Path) -> None:
    text = purity.read_text()
    weight = re.search(r"// w0: .*\n    (-?[0-9.]+)f,", text)
    assert weight is not None
    changed = text[: weight.start(1)] + "0.75" + text[weight.end(1) :]
    (tmp_path / "purity.h").write_text(changed)
    assert run("g++ -O1", tmp_path, TEST).returncode != 0


def renamed(header: Path, name: str) -> str:
    """The text of a header, for a network of another name."""
    text = header.read_text().replace(f"{header.stem}_", f"{name}_")
    return text.replace(f"namespace {header.stem} ", f"namespace {name} ")


def test_two_networks_in_one_program_with_a_qualifier_of_the_users(
    purity: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.h").write_text(renamed(purity, name))
    program = (
        "#define SOA_FN __attribute__((cold))\n#include <cmath>\n"
        '#include "one.h"\n#include "two.h"\n#include "one.h"\n'
        "double weights = std::fma(1.0, 2.0, 3.0);  // no macro of a header is left\n"
        "int main() { return one::self_test() + two::self_test() + (weights != 5.0); }\n"
    )
    done = run("g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror", tmp_path, program)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def other_purity(purity: Path, tmp_path: Path) -> Path:
    """The header of another network with the name of `purity`."""
    header = tmp_path / "purity.h"
    header.write_text(renamed(purity.with_name("integers.h"), "purity"))
    return header


def test_two_versions_of_one_network_are_ambiguous_in_one_file(
    purity: Path, other_purity: Path, tmp_path: Path
) -> None:
    includes = f'#include "{purity}"\n#include "{other_purity}"\n'
    done = run(
        "g++ -std=c++17", tmp_path, f"{includes}int main() {{ return purity::self_test(); }}\n"
    )
    assert done.returncode != 0 and "ambiguous" in done.stderr


def test_each_file_of_a_program_keeps_its_version_of_a_network(
    purity: Path, other_purity: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second.cpp"
    second.write_text(
        f'#include "{other_purity}"\nint second() {{ return purity::self_test(); }}\n'
    )
    main = "int second();\nint main() { return purity::self_test() + second(); }\n"
    done = run(f"g++ -std=c++17 -O1 {second}", tmp_path, f'#include "{purity}"\n{main}')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layer", ["first.0", "block", "last"])
def test_weights_have_the_line_and_the_layer_of_the_model(purity: Path, layer: str) -> None:
    weights = re.compile(rf"float w\d+\[\d+\];  // .*: test_header.py:\d+ {layer}$", re.MULTILINE)
    assert weights.search(purity.read_text())


def test_a_row_is_called_with_numbers_or_with_a_struct(purity: Path) -> None:
    """One output is a number: what ROOT's `Define` takes."""
    numbers = ", ".join(["0.5f"] * 15)
    program = (
        f'#include "purity.h"\n#include <cstdio>\nint main() {{ purity::Input in = {{{numbers}}};\n'
        f'std::printf("%.9g %.9g", purity::row({numbers}), purity::row(in).p_0); }}\n'
    )
    first, second = run("g++ -std=c++17", purity.parent, program).stdout.split()
    assert first == second and 0 < float(first) < 1


def test_numbers_keep_their_bits_as_text(tmp_path: Path) -> None:
    kinds = {"f4": "float", "f8": "double"}
    lines: list[str] = []
    for k, number in enumerate(NUMBERS):  # the status of the program is k + 1 if that is wrong
        kind = kinds.get(number.dtype.str[1:], f"{number.dtype}_t")
        wanted = ", ".join(map(str, number.tobytes()))
        lines += [f"const {kind} x{k} = {number_text(number)};"]
        lines += [f"const unsigned char w{k}[] = {{{wanted}}};"]
        lines += [f"if (std::memcmp(&x{k}, w{k}, sizeof x{k}) != 0) return {k + 1};"]
    head = "#include <cstdint>\n#include <cstring>\nint main() {\n"
    done = run("g++ -std=c++17 -Wall -Werror", tmp_path, head + "\n".join([*lines, "}\n"]))
    assert done.returncode == 0, done.stderr
