"""Errors in building and calling: compilers that fail, wrong indices, dependent rows."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines import EngineError, NotApplicableError, Portable, Target, engine
from engines.lanes.compiling import choose_widths, compilers
from engines.lanes.index import Indices
from engines.lanes.operators import LOWERINGS, Operator
from engines.lanes.planning import HEADERS, make_plan, make_row_program, write_source
from engines.lanes.tensor_builder import Builder
from engines.lanes.values import Tensor as Lowered
from runtime.session.session import Session
from tests.engines.lanes.harness import (
    MOST,
    Compiled,
    Function,
    Prepared,
    compiled,
    compiled_row,
    prepared,
)


class Small(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(x) * 3,)


X = torch.linspace(-9, 9, 2 * MOST).reshape(MOST, 2)


@pytest.fixture(scope="module")
def small() -> Prepared:
    return prepared(Small(), [X], ["y"])


@pytest.fixture(scope="module")
def usual(small: Prepared) -> Tensor:
    """The answers of a library made by the first compiler that this host has."""
    return small.compiled()(X)["y"]


# When its library is loaded, sets the bits 15 and 6 of MXCSR: denormals are taken for 0, as results
# and as operands.
SWITCHES = """
#include <xmmintrin.h>
__attribute__((constructor)) static void flush() { _mm_setcsr(_mm_getcsr() | 0x8040); }
"""


def script(folder: Path, text: str) -> str:
    """The path of a shell script, as a compiler for CXX."""
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_the_message_of_a_compiler_that_fails_is_in_the_error(
    small: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = "echo 'network.cpp:1: error: no space left on device' >&2; exit 1"
    monkeypatch.setenv("CXX", script(tmp_path, fails))
    with pytest.raises(EngineError, match="no space left") as caught:
        small.compiled()
    assert not isinstance(caught.value, NotApplicableError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [AssertionError(), KeyError("x"), RuntimeError("so\nso")])
@pytest.mark.parametrize("where", ["lowering", "element"])
def test_an_error_of_the_compiler_names_the_operator(
    small: Prepared, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fails(build: Builder, op: Operator, x: Lowered, /) -> Lowered:
        if where == "lowering":
            raise error
        return build.view(x, op.shape, later)

    def later(index: Indices) -> Indices:
        raise error

    monkeypatch.setitem(LOWERINGS, "tanh", fails)
    with pytest.raises(NotApplicableError, match="tanh") as caught:
        small.compiled()
    assert "\n" not in str(caught.value) and type(error).__name__ in str(caught.value)


def test_a_compiler_that_hangs_is_ended_after_a_time(
    small: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(compilers, "_TIMEOUT_S", 0.3)
    with pytest.raises(EngineError, match="within"):
        small.compiled()


@pytest.mark.parametrize(
    "named",
    ["g++ -ffast-math", "g++ -Ofast", "ccache g++ -mdaz-ftz", "g++ @options", 'g++ "unclosed',
     "g++ network.o", "no-such-compiler"],
)  # fmt: skip
@pytest.mark.parametrize("engine_name", ["lanes", "aoti", "aoti-standalone"])
def test_a_compiler_that_is_missing_or_may_change_numbers_is_refused(
    small: Prepared, named: str, engine_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", named)
    source, target = Portable(small.program, None), Target.parse("cpu")
    with pytest.raises(EngineError) as refused:
        engine(engine_name).compile(source, target, {}, tmp_path)
    assert str(refused.value).startswith("CXX") and "\n" not in str(refused.value)


def test_options_that_change_no_number_are_taken(
    small: Prepared, usual: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "env g++ --sysroot=/ -fuse-ld=bfd -B/usr/bin -pipe")
    assert torch.equal(small.compiled()(X)["y"], usual)


def test_messages_of_a_compiler_may_have_another_encoding(
    small: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path, r"printf 'error: f\374r x\n' >&2; exit 1"))
    with pytest.raises(EngineError, match=r"error: f.r x"):
        small.compiled()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the constructor sets MXCSR")
def test_a_compiler_that_computes_in_another_mode_is_noticed(
    small: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrapper that adds a constructor when it links, as -ffast-math does: the library takes
    denormals for 0."""
    (tmp_path / "mode.cpp").write_text(SWITCHES)
    plain = 'case " $* " in *" -c "*) exec g++ "$@";; esac'
    own = f'{plain}; exec g++ "$@" -x c++ {tmp_path}/mode.cpp'
    monkeypatch.setenv("CXX", script(tmp_path, own))
    denormals = np.full(9, 1e-40, np.float32)
    with pytest.raises(EngineError, match="floating-point"):
        small.compiled()
    assert (denormals * np.float32(0.5) > 0).all()  # this process computes as before


def test_the_identity_of_a_compiler_is_what_it_says_of_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = Target.parse("cpu")
    monkeypatch.delenv("CXX", raising=False)
    usual = compilers.compiler_identity(target)
    monkeypatch.setenv("CXX", script(tmp_path, "echo g++ 99.1"))
    other = compilers.compiler_identity(target)
    assert usual != other and other.endswith("g++ 99.1")


def test_flags_of_the_environment_change_no_bit(
    small: Prepared, usual: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-ffast-math -O0")
    assert torch.equal(small.compiled()(X)["y"], usual)


@pytest.fixture(params=["g++", "clang++"])
def cxx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets CXX to a compiler; skips if it is not installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here")
    monkeypatch.setenv("CXX", request.param)


@pytest.mark.usefixtures("cxx")
def test_every_compiler_gives_the_same_bits(small: Prepared, usual: Tensor) -> None:
    assert torch.equal(small.compiled()(X)["y"], usual)


@pytest.mark.usefixtures("cxx")
def test_a_network_in_parts_gives_the_bits_of_the_whole(
    small: Prepared, usual: Tensor, tmp_path: Path
) -> None:
    """Each width of the code and what they share are compiled apart, then linked."""
    target = Target.parse("cpu")
    plan = make_plan(make_row_program(small.program))
    widths = choose_widths(plan, target)
    source = write_source(plan, widths)
    (tmp_path / "network.cpp").write_text(source.text)
    (tmp_path / "weights.bin").write_bytes(source.weights)
    (tmp_path / "target.txt").write_text(f"soa-target 1\n{target}\n")
    library = tmp_path / "network.so"
    compilers.compile_library(tmp_path / "network.cpp", HEADERS, target, library, 1 + len(widths))
    assert len([*tmp_path.glob("*.o")]) == 1 + len(widths)
    opened = engine("lanes").open(library, torch.device("cpu"))
    whole = Compiled(small.model, small.signature, Session(small.signature, opened))
    assert torch.equal(whole(X)["y"], usual)


@pytest.fixture(scope="module")
def looked_up() -> Compiled:
    table = torch.arange(1.0, 7.0).reshape(6, 1)
    outputs: dict[str, Callable[..., Tensor]] = {
        "embedded": lambda x, i: nn.functional.embedding(i, table),
        "gathered": lambda x, i: x.gather(1, i),
        "scattered": lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0),
    }
    inputs = [torch.ones(MOST, 6), torch.randint(0, 6, (MOST, 2))]
    return compiled_row(Function(outputs), inputs, list(outputs))


@pytest.mark.parametrize("index", [-1, 6, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_an_index_that_leads_nowhere_stays_within_the_memory(
    looked_up: Compiled, index: int
) -> None:
    """Row 4 has no answer for it; the other rows have those of eager torch."""
    places = torch.tensor([[0, 5]]).repeat(9, 1)
    places[4, 1] = index
    answers = looked_up(torch.ones(9, 6), places)
    others = torch.arange(9) != 4
    for name, wanted in looked_up.eager(torch.ones(8, 6), places[others]).items():
        own = answers[name][others]
        assert torch.equal(own, wanted.reshape(own.shape)), name
    assert answers["embedded"][4, 1].isnan() and answers["gathered"][4, 1].isnan()
    assert answers["scattered"][4].sum() == 1


def test_no_rows_have_no_answers(looked_up: Compiled) -> None:
    answers = looked_up(torch.ones(0, 6), torch.zeros(0, 2, dtype=torch.int64))
    assert {name: len(answer) for name, answer in answers.items()} == dict.fromkeys(answers, 0)


class Determinant(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.linalg.det(x),)


def test_the_error_has_the_line_of_the_model_without_code() -> None:
    with pytest.raises(NotApplicableError, match=r"test_build\.py:\d+"):
        compiled(Determinant(), [torch.randn(MOST, 3, 3)], ["y"])


class Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.linalg.eigvalsh(x + x.mT),)


def test_an_operator_without_code_is_named() -> None:
    with pytest.raises(NotApplicableError, match="no code for _linalg_eigh"):
        compiled(Eigenvalues(), [torch.randn(MOST, 3, 3)], ["y"])


# Calls the library `argv[1]` on the columns in the file `argv[2]`, in a thread with a stack of
# 128 kB. The answers replace the file.
_IN_A_SMALL_THREAD = """
import ctypes, sys, threading
import numpy as np

class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64)
                for name in ("version", "columns", "scratch", "rows", "arguments")]

x = np.load(sys.argv[2])
library = ctypes.CDLL(sys.argv[1])
facts = Facts.in_dll(library, "soa_lanes_facts")
columns = np.zeros((facts.columns, x.shape[1]), np.float32)
columns[:len(x)] = x
places = (ctypes.c_void_p * len(columns))(*(each.ctypes.data for each in columns))
scratch = np.zeros(facts.scratch + 64, np.uint8)
begin = scratch.ctypes.data + -scratch.ctypes.data % 64
call = lambda: library.soa_lanes_run(
    places, None, ctypes.c_int64(0), ctypes.c_int64(x.shape[1]), ctypes.c_void_p(begin))
threading.stack_size(128 << 10)
thread = threading.Thread(target=call)
thread.start()
thread.join()
np.save(sys.argv[2], columns[len(x):])
"""


def test_a_sort_of_many_elements_needs_little_stack(tmp_path: Path) -> None:
    """3,000 elements of a row, with NaN and equal ones, in a thread with a stack of 128 kB."""
    torch.manual_seed(0)
    weights = torch.randn(500).mul(8).round()
    some = [0, 1, 65, 700, 1500, 2400, 2998, 2999]  # places in the order that are outputs

    def apply(x: Tensor) -> Tensor:
        spread = (x[:, :, None] * weights).flatten(1)
        up, down = (torch.sort(spread, dim=1, stable=True, descending=d) for d in (False, True))
        double = torch.sort(spread.double(), dim=1, stable=True)
        results = [up.values, up.indices, down.values, down.indices]
        results += [double.values, double.indices]
        return torch.cat([values[:, some].float() for values in results], 1)

    x = torch.randn(MOST, 6).mul(4).round()
    x[1, 2], x[2, 3], x[3] = math.nan, math.inf, 0.0
    program = prepared(Function({"y": apply}), [x], ["y"]).program
    engine("lanes").compile(Portable(program, None), Target.parse("cpu"), {}, tmp_path)
    columns = tmp_path / "columns.npy"
    np.save(columns, x.T.numpy())
    command = [sys.executable, "-c", _IN_A_SMALL_THREAD, str(tmp_path / "network.so"), str(columns)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = torch.from_numpy(np.load(columns)).T
    torch.testing.assert_close(answers, apply(x), rtol=0, atol=0, equal_nan=True)
