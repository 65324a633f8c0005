"""Byte offsets, compared with numbers computed by hand and with the C++ formula."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from soa.dtypes import DTYPES, itemsize
from soa.errors import LayoutError
from soa.layout import Column, Layout, column, eigen, opaque, scalar
from tests.soa.strategies import ROWS, layouts

MEMBERS = (
    column("pt", "float32"),
    column("q", "int8"),
    column("e", "float64"),
    scalar("run", "uint32"),
    eigen("dir", "float32", 3),
    eigen("cov", "float32", 2, 3),
    column("flag", "bool"),
    column("h", "bfloat16"),
)

# fmt: off
# One row: alignment, n, then the offsets of pt, q, e, run, dir, cov, flag, h, and the total.
BY_HAND = [
    # n = 0: every pitch is 0, but the scalar keeps its own 128.
    (128, 0, [0, 0, 0, 0, 128, 128, 128, 128], 128),
    # n = 1: every pitch is 128; dir takes 3 * 128 = 384, cov 6 * 128 = 768.
    (128, 1, [0, 128, 256, 384, 512, 896, 1664, 1792], 1920),
    # n = 31: pt 124 -> 128, q 31 -> 128, e 248 -> 256, h 62 -> 128.
    (128, 31, [0, 128, 256, 512, 640, 1024, 1792, 1920], 2048),
    # n = 32: pt 128 -> 128 and e 256 -> 256, exactly full: no padding. The offsets are those of 31.
    (128, 32, [0, 128, 256, 512, 640, 1024, 1792, 1920], 2048),
    # n = 33: pt 132 -> 256, q 33 -> 128, e 264 -> 384, run 128, dir 3 * 256 = 768,
    #         cov 6 * 256 = 1536, flag 33 -> 128, h 66 -> 128.
    (128, 33, [0, 256, 384, 768, 896, 1664, 3200, 3328], 3456),
    # n = 33: pt 132 -> 192, q 33 -> 64, e 264 -> 320, run 64, dir 3 * 192 = 576,
    #         cov 6 * 192 = 1152, flag 33 -> 64, h 66 -> 128.
    (64, 33, [0, 192, 256, 576, 640, 1216, 2368, 2432], 2560),
    # n = 33: pt 132 -> 144, q 33 -> 48, e 264 -> 272, run 16, dir 3 * 144 = 432,
    #         cov 6 * 144 = 864, flag 33 -> 48, h 66 -> 80.
    (16, 33, [0, 144, 192, 464, 480, 912, 1776, 1824], 1904),
    # n = 1: every pitch is 16; dir takes 48, cov 96.
    (16, 1, [0, 16, 32, 48, 64, 112, 208, 224], 240),
]
# fmt: on


@pytest.mark.parametrize(("alignment", "n", "offsets", "total"), BY_HAND)
def test_offsets_are_those_computed_by_hand(
    alignment: int, n: int, offsets: list[int], total: int
) -> None:
    layout = Layout(MEMBERS, alignment)
    assert list(layout.offsets(n).values()) == offsets
    assert layout.nbytes(n) == total


def test_pitch_and_padded_length_are_those_computed_by_hand() -> None:
    layout = Layout(MEMBERS)
    assert layout.pitch("cov", 33) == 256  # 33 * 4 = 132 -> 256
    assert layout.padded_length("cov", 33) == 64  # 256 / 4
    assert layout.padded_length("h", 33) == 64  # 66 -> 128; 128 / 2
    assert layout.pitch("run", 10_000) == 128  # one value, whatever n is


def test_components_are_column_major() -> None:
    # A 2 x 3 matrix is stored as (0,0) (1,0) (0,1) (1,1) (0,2) (1,2).
    cov = eigen("cov", "float32", 2, 3)
    assert [cov.component_of(i) for i in range(cov.components)] == [0, 2, 4, 1, 3, 5]
    assert [eigen("v", "float32", 3).component_of(i) for i in range(3)] == [0, 1, 2]
    assert (column("x", "float32").components, column("x", "float32").component_of(0)) == (1, 0)


CARRIED = (opaque("hit", 12), column("id", "uint64"), Column("head", "opaque300", "scalar"))

# The size and pointer arithmetic of SoALayout.h for MEMBERS, CARRIED and one more: the current
# alignSize, and the one of older releases, whose unsigned wrap-around at n = 0 must give the same
# result. Eigen::Map with an inner stride puts coefficient (row, col) of a column-major matrix at
# (col * rows + row) * stride.
PROGRAM = r"""
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

struct Member {
  std::size_t size, count;
  bool scalar;
};
const Member members[] = {
    {sizeof(float), 1}, {sizeof(std::int8_t), 1}, {sizeof(double), 1},
    {sizeof(std::uint32_t), 1, true},
    {sizeof(float), 3}, {sizeof(float), 6},  // a vector, and a matrix of 2 x 3
    {sizeof(bool), 1}, {sizeof(std::uint16_t), 1}, {sizeof(std::array<float, 3>), 1},
    {sizeof(std::uint64_t), 1}, {sizeof(std::array<char, 300>), 1, true}, {sizeof(bool), 1}};

static std::size_t alignSize(std::size_t size, std::size_t alignment) {
  return ((size + alignment - 1) / alignment) * alignment;
}
static std::size_t before(std::size_t size, std::size_t alignment) {
  return ((size - 1) / alignment + 1) * alignment;
}

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    std::size_t n = std::strtoul(argv[i], nullptr, 10), at = 0, matrix = 0;
    std::size_t alignment = std::strtoul(argv[i + 1], nullptr, 10);
    for (const Member& member : members) {
      std::size_t size = member.size * (member.scalar ? 1 : n);
      if (alignSize(size, alignment) != before(size, alignment)) return 1;
      if (member.count == 6) matrix = at;
      std::printf("%zu ", at);
      at += alignSize(size, alignment) * member.count;
    }
    std::printf("%zu", at);
    std::size_t stride = alignSize(n * sizeof(float), alignment) / sizeof(float);
    for (int row = 0; row < 2; ++row)
      for (int col = 0; col < 3; ++col)
        std::printf(" %zu", matrix + (col * 2 + row) * stride * sizeof(float));
    std::printf("\n");
  }
}
"""


def test_offsets_are_those_of_the_cpp_formula(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler, "g++ is a requirement of this project"
    source = tmp_path / "walk.cc"
    source.write_text(PROGRAM)
    binary = tmp_path / "walk"
    subprocess.run([compiler, "-std=c++17", "-Wall", "-o", binary, source], check=True)
    cases = list(itertools.product([*range(70), 127, 128, 129, 4099], [8, 16, 32, 64, 128, 256]))
    arguments = [str(value) for case in cases for value in case]
    printed = subprocess.run([binary, *arguments], check=True, capture_output=True, text=True)
    lines = printed.stdout.splitlines()
    assert len(lines) == len(cases)
    for (n, alignment), line in zip(cases, lines, strict=True):
        layout = Layout([*MEMBERS, *CARRIED, column("last", "bool")], alignment)
        offsets = layout.offsets(n)
        pitch = layout.pitch("cov", n)
        entries = [offsets["cov"] + layout["cov"].component_of(i) * pitch for i in range(6)]
        expected = [*offsets.values(), layout.nbytes(n), *entries]
        assert [int(word) for word in line.split()] == expected, (n, alignment)


CARRYING = (*CARRIED, column("x", "float32"))


def test_what_is_carried_only_is_no_number() -> None:
    assert [member.name for member in Layout(CARRYING).numbers] == ["x"]


def test_what_is_carried_only_is_padded_in_a_buffer() -> None:
    layout = Layout(CARRYING, 16)
    assert (layout.pitch("hit", 33), layout.pitch("id", 33)) == (400, 272)  # 396 and 264
    assert layout.row_step == 4  # so many x take 16 bytes; what is carried does not count


def test_what_is_carried_only_has_an_alignment_of_its_own_in_separate_columns() -> None:
    apart = Layout(CARRYING, storage="columns")
    assert [apart.alignment_of(member.name) for member in apart.columns] == [1, 8, 1, 4]
    assert (apart.alignment, apart.row_step) == (1, 1)


def test_a_buffer_is_aligned_to_128_bytes_if_nothing_is_said() -> None:
    assert Layout(CARRYING).alignment == 128


@given(layouts(), ROWS)
def test_columns_are_aligned_and_never_overlap(layout: Layout, n: int) -> None:
    offsets = layout.offsets(n)
    reached = 0
    for member in layout.columns:
        elements = 1 if member.kind == "scalar" else n
        used = elements * itemsize(member.dtype)
        pitch = layout.pitch(member.name, n)
        for k in range(member.components):
            start = offsets[member.name] + k * pitch
            assert start == reached  # only the columns' own padding lies between them
            assert start % layout.alignment == 0
            assert used <= pitch < used + layout.alignment
            reached = start + pitch
    assert reached == layout.nbytes(n)


@pytest.mark.parametrize(
    ("size", "dtypes"),
    [
        (1, {"bool", "int8", "uint8"}),
        (2, {"int16", "uint16", "float16", "bfloat16"}),
        (4, {"int32", "uint32", "float32"}),
        (8, {"int64", "float64"}),
    ],
)
def test_the_size_of_each_dtype(size: int, dtypes: set[str]) -> None:
    assert {dtype for dtype in DTYPES if itemsize(dtype) == size} == dtypes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_takes_the_bytes_of_its_elements_rounded_up(dtype: str) -> None:
    used, alignment = 3 * itemsize(dtype), 8
    whole_steps = (used + alignment - 1) // alignment
    assert Layout([column("x", dtype)], alignment).nbytes(3) == whole_steps * alignment


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: column("2x", "float32"), "'2x' is not an identifier"),
        (lambda: column("x", "float"), "column 'x': unknown dtype 'float'"),
        (lambda: opaque("x", 0), "column 'x': unknown dtype 'opaque0'"),
        (lambda: eigen("x", "opaque3", 2), "Eigen column 'x' is opaque3"),
        (lambda: Column("x", "int8", "row"), "'x': kind 'row'"),  # type: ignore[arg-type]
        (lambda: Column("x", "int8", "column", (2,)), r"column 'x' has no shape, found \[2\]"),
        (lambda: eigen("x", "float32"), r"Eigen column 'x' has shape \[\]"),
        (lambda: eigen("x", "float32", 2, 2, 2), r"'x' has shape \[2, 2, 2\]"),
        (lambda: eigen("x", "float32", 2.0), r"'x' has shape \[2.0\]"),  # type: ignore[arg-type]
        (lambda: Layout([]), "at least one column"),
        (lambda: Layout([column("x", "int8"), scalar("x", "int8")]), "'x' is declared twice"),
        (lambda: Layout([column("x", "int8")], 96), "96 is not a power of two"),
        (lambda: Layout([column("x", "int8")], 64.0), "64.0 is not"),  # type: ignore[arg-type]
        (lambda: Layout([column("x", "float64")], 4), "smaller than one element of 'x'"),
        (lambda: Layout(MEMBERS, storage="rows"), "storage 'rows'"),  # type: ignore[arg-type]
        (lambda: Layout(MEMBERS)["eta"], "no column 'eta' in the layout, which has: pt, q"),
        (lambda: Layout(MEMBERS).nbytes(-1), "-1 elements"),
    ],
)
def test_layouts_that_cannot_be_are_refused(make: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        make()
