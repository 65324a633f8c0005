"""The shim's operators and functions, compared with torch's on random shapes and strides."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engines.native import SHIM
from tests.engines.lanes import ulps
from tests.engines.native import sanitize

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the shim is for x86-64")

# The numbers of c10::ScalarType.
NUMBERS = {torch.float32: 6, torch.float64: 7, torch.int64: 4, torch.int32: 3}
DTYPES = {number: dtype for dtype, number in NUMBERS.items()}
EPSILON = 2.0**-23  # of float32
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 40)


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    return ctypes.CDLL(str(SHIM))


def longs(values: Sequence[int]) -> Any:
    """A C array of int64."""
    return (ctypes.c_int64 * len(values))(*values)


@contextmanager
def handles(shim: ctypes.CDLL, *tensors: Tensor) -> Iterator[list[ctypes.c_void_p]]:
    """Tensors of the shim that use torch's memory."""
    created: list[ctypes.c_void_p] = []
    for x in tensors:
        handle = ctypes.c_void_p()
        assert shim.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.dim()), longs(x.shape),
            longs(x.stride()), ctypes.c_int64(0), NUMBERS[x.dtype], 0, 0, ctypes.byref(handle),
        ) == 0  # fmt: skip
        created.append(handle)
    yield created
    for handle in created:
        shim.aoti_torch_delete_tensor_object(handle)


def taken(shim: ctypes.CDLL, handle: ctypes.c_void_p) -> Tensor:
    """A copy of the shim's tensor, with its strides; the original is freed."""
    dims, dtype, data = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_void_p()
    shape, strides = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
    for name, out in (
        ("dim", dims), ("dtype", dtype), ("data_ptr", data), ("sizes", shape), ("strides", strides)
    ):  # fmt: skip
        assert getattr(shim, f"aoti_torch_get_{name}")(handle, ctypes.byref(out)) == 0
    size, stride = shape[: dims.value], strides[: dims.value]
    steps = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    span = 0 if 0 in size else 1 + steps  # elements from the first to the last
    flat = torch.empty(span, dtype=DTYPES[dtype.value])
    if span:
        ctypes.memmove(flat.data_ptr(), data.value or 0, span * flat.itemsize)
    shim.aoti_torch_delete_tensor_object(handle)
    return flat.as_strided(size, stride)


def strided(draw: torch.Generator, *size: int) -> Tensor:
    """Normal numbers in memory with gaps; the dimensions lie in random order."""
    order = torch.randperm(len(size), generator=draw).tolist()
    wide = [size[d] + int(torch.randint(0, 3, (), generator=draw)) for d in order]
    whole = torch.randn(wide, generator=draw)
    for place, d in enumerate(order):
        whole = whole.narrow(place, 0, size[d])
    return whole.permute([order.index(d) for d in range(len(size))])


def dense(draw: torch.Generator, *size: int) -> Tensor:
    """Normal numbers without gaps."""
    return torch.randn(size, generator=draw)


def require_close(answer: Tensor, exact: Tensor, weight: Tensor, terms: int) -> None:
    """Within the rounding error of a sum of `terms` products, summed in any order. `weight`: the
    sum of the products' absolute values."""
    bound = (terms + 2) * EPSILON * weight + 1e-30
    assert ((answer.double() - exact).abs() <= bound).all()


@given(seeds, sizes, sizes, sizes, st.sampled_from(["mm", "addmm", "bmm", "baddbmm"]))
def test_products_are_exact_up_to_rounding(
    shim: ctypes.CDLL, seed: int, m: int, n: int, k: int, name: str
) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = (3,) if "b" in name else ()
    a, b = strided(draw, *batch, m, k), strided(draw, *batch, k, n)
    out = strided(draw, *batch, m, n)
    shape = [(1, n), (m, 1), (m, n), (n,)][seed % 4]
    added = strided(draw, *shape)
    exact, weight = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    with handles(shim, out, added, a, b) as (to, plus, left, right):
        if "add" in name:
            exact, weight = exact + added, weight + added.abs()
            one = ctypes.c_double(1)
            code = getattr(shim, f"aoti_torch_cpu_{name}_out")(to, plus, left, right, one, one)
        else:
            code = getattr(shim, f"aoti_torch_cpu_{name}_out")(to, left, right)
    assert code == 0
    require_close(out, exact, weight, k)


def test_a_row_alone_and_either_width_give_the_same_bits(programs: Path) -> None:
    subprocess.run([programs, "widths"], check=True)  # its status is not 0 if bits differ


@dataclass(frozen=True)
class Convolution:
    """Inputs, weights, perhaps a bias; a stride, a padding and a dilation for each dimension."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def by_torch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's convolution of other tensors of these shapes."""
        rest = (False, [0] * len(self.stride), self.groups)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, *rest)

    def by_shim(self, shim: ctypes.CDLL) -> Tensor:
        """The shim's answer."""
        dims, output, none = len(self.stride), ctypes.c_void_p(), ctypes.c_void_p()
        count = ctypes.c_int64(dims)
        bias = [] if self.bias is None else [self.bias]
        with handles(shim, self.x, self.weight, *bias) as (x, weight, *added):
            code = shim.aoti_torch_cpu_convolution(
                x, weight, ctypes.byref(added[0]) if added else none,
                longs(self.stride), count, longs(self.padding), count,
                longs(self.dilation), count, 0, longs([0] * dims), count,
                ctypes.c_int64(self.groups), ctypes.byref(output),
            )  # fmt: skip
        assert code == 0
        return taken(shim, output)


@st.composite
def convolutions(draw_example: st.DrawFn, only_dense: bool = False) -> Convolution:
    """Of one to three dimensions. `only_dense`: of tensors without gaps in memory."""
    draw = torch.Generator().manual_seed(draw_example(seeds))
    dims, groups = draw_example(st.integers(1, 3)), draw_example(st.integers(1, 3))
    channels_last = draw_example(st.booleans())

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    kernel = [number(1, 3) for _ in range(dims)]
    stride, padding, dilation = ([number(low, 2) for _ in range(dims)] for low in (1, 0, 1))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]  # fits the kernel
    image = [number(low, low + 8) for low in least]
    inner, outer = number(1, 5), number(1, 20)
    make = dense if only_dense or channels_last or dims == 3 else strided
    x = make(draw, number(1, 3), groups * inner, *image)
    weight = make(draw, groups * outer, inner, *kernel)
    bias = torch.randn(groups * outer, generator=draw) if draw_example(st.booleans()) else None
    if channels_last and dims == 2:
        x = x.to(memory_format=torch.channels_last)
    return Convolution(x, weight, bias, stride, padding, dilation, groups)


@settings(max_examples=settings().max_examples * 3 // 2)
@given(convolutions())
def test_convolutions_are_exact_up_to_rounding(shim: ctypes.CDLL, conv: Convolution) -> None:
    x, weight = conv.x.double(), conv.weight.double()
    exact = conv.by_torch(x, weight, None)
    absolute = conv.by_torch(x.abs(), weight.abs(), None)
    if conv.bias is not None:
        by_channel = conv.bias.double().view(-1, *[1] * len(conv.stride))
        exact, absolute = exact + by_channel, absolute + by_channel.abs()
    terms = conv.weight[0].numel()
    require_close(conv.by_shim(shim), exact, absolute, terms)


@given(convolutions(only_dense=True))
def test_a_convolution_has_torchs_strides(shim: ctypes.CDLL, conv: Convolution) -> None:
    """But for dimensions of size 1, whose stride has no meaning.

    torch's convolution is only asked for its strides, not run: torch 2.13 crashes with some groups,
    a dilation, a bias and channels last (oneDNN's brg_conv_fwd:avx2).
    """
    answer = conv.by_shim(shim)
    with FakeTensorMode() as mode:
        bias = None if conv.bias is None else mode.from_tensor(conv.bias)
        wanted = conv.by_torch(mode.from_tensor(conv.x), mode.from_tensor(conv.weight), bias)
    for size, own, right in zip(answer.shape, answer.stride(), wanted.stride(), strict=True):
        assert size == 1 or own == right


ordered = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32])


def with_ties(draw: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    """Nine whole numbers, so that many are equal, and some NaN."""
    x = torch.randint(-4, 5, size, generator=draw).to(dtype)
    if dtype.is_floating_point:
        x[torch.rand(size, generator=draw) < 0.1] = math.nan
    return x


@given(seeds, st.integers(1, 4), st.integers(1, 300), ordered, st.booleans(), st.booleans())
def test_topk_has_torchs_ties(
    shim: ctypes.CDLL, seed: int, m: int, n: int, dtype: torch.dtype, largest: bool, last: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = with_ties(draw, dtype, m, n, 2).select(2, 0)
    x, dim = (x, 1) if last else (x.t(), 0)
    k = int(torch.randint(0, n + 1, (), generator=draw))
    values, indices = ctypes.c_void_p(), ctypes.c_void_p()
    with handles(shim, x) as (handle,):
        assert shim.aoti_torch_cpu_topk(
            handle, ctypes.c_int64(k), ctypes.c_int64(dim), largest, 1,
            ctypes.byref(values), ctypes.byref(indices),
        ) == 0  # fmt: skip
    wanted = torch.topk(x, k, dim, largest, sorted=True)
    assert torch.equal(taken(shim, indices), wanted.indices)
    torch.testing.assert_close(
        taken(shim, values), wanted.values, rtol=0, atol=0, equal_nan=True, check_stride=False
    )


@given(seeds, st.integers(1, 4), st.integers(0, 100), ordered, st.booleans(), st.booleans())
def test_sort_is_stable(
    shim: ctypes.CDLL, seed: int, m: int, n: int, dtype: torch.dtype, down: bool, last: bool
) -> None:
    x = with_ties(torch.Generator().manual_seed(seed), dtype, m, n)
    x, dim = (x, 1) if last else (x.t(), 0)
    values, indices = ctypes.c_void_p(), ctypes.c_void_p()
    with handles(shim, x) as (handle,):
        assert shim.aoti_torch_cpu_sort_stable(
            handle, None, ctypes.c_int64(dim), down, ctypes.byref(values), ctypes.byref(indices)
        ) == 0  # fmt: skip
    wanted = torch.sort(x, dim=dim, descending=down, stable=True)
    assert torch.equal(taken(shim, indices), wanted.indices)
    torch.testing.assert_close(taken(shim, values), wanted.values, rtol=0, atol=0, equal_nan=True)


@given(seeds, st.integers(1, 20), st.integers(1, 40), st.booleans(), st.booleans())
def test_attention_is_that_of_torch(
    shim: ctypes.CDLL, seed: int, rows: int, keys: int, masked: bool, causal: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    masked = masked and not causal
    q, k, v = (strided(draw, 2, 3, n, 8) for n in (rows, keys, keys))
    mask = torch.where(torch.rand(2, 1, rows, keys, generator=draw) < 0.3, -math.inf, 0.0)
    mask[..., 0] = 0.5
    output, sums, none = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with handles(shim, q, k, v, mask) as (query, key, value, added):
        assert shim.aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
            query, key, value, ctypes.c_double(0), causal, ctypes.byref(added) if masked else none,
            none, ctypes.byref(output), ctypes.byref(sums),
        ) == 0  # fmt: skip
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask.double() if masked else None, is_causal=causal
    )
    torch.testing.assert_close(taken(shim, output).double(), wanted, rtol=2e-6, atol=2e-6)
    assert taken(shim, sums).shape == (2, 3, rows)


@given(seeds, st.lists(st.integers(0, 5), min_size=0, max_size=4), st.sampled_from(list(NUMBERS)))
def test_copies_have_the_same_numbers(
    shim: ctypes.CDLL, seed: int, shape: list[int], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, target = (strided(draw, *shape) for _ in range(2))
    if dtype is not torch.float32:
        x, target = (x * 100).to(dtype), target.to(dtype)
    clone = ctypes.c_void_p()
    with handles(shim, x, target) as (from_x, to_target):
        assert shim.aoti_torch_clone(from_x, ctypes.byref(clone)) == 0
        assert shim.aoti_torch_copy_(to_target, from_x, 0) == 0
    assert torch.equal(taken(shim, clone), x)
    assert torch.equal(target, x)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of functions.cpp."""
    if sanitize.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return sanitize.build_functions(tmp_path_factory.mktemp("shim"), flags=("-g0",))


def test_functions_are_as_exact_as_is_written_down(programs: Path) -> None:
    errors = ulps.measured(programs, "ulps", "100003")  # at every 100,003rd float
    assert len(errors) == 24 + 22  # of the shim, and of `lanes`
    assert {name: error for name, error in errors.items() if not error.within(name)} == {}


def test_functions_of_double_precision_are_off_by_four_places_at_most(programs: Path) -> None:
    ulps_by_name = {name: error.ulps for name, error in ulps.measured(programs, "doubles").items()}
    assert len(ulps_by_name) == 9
    assert max(ulps_by_name.values()) <= 4


def test_what_the_shim_cannot_do_is_an_error(shim: ctypes.CDLL, capfd: Any) -> None:
    doubles = torch.zeros(2, 2, dtype=torch.float64)
    with handles(shim, doubles) as (handle,):
        assert shim.aoti_torch_cpu_mm_out(handle, handle, handle) == 1
    assert "float32" in capfd.readouterr().err
