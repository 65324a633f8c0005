"""The shim's operators and functions, compared with torch's on random shapes and strides."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@settings(max_examples=settings().max_examples * 3 // 2)
@given(seeds, st.integers(1, 3), st.booleans(), st.integers(1, 3), st.booleans())
def test_convolutions_are_exact_up_to_rounding(
    shim: ctypes.CDLL, seed: int, nd: int, channels_last: bool, groups: int, biased: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    kernel = [number(1, 3) for _ in range(nd)]
    by, pad, apart = ([number(low, 2) for _ in range(nd)] for low in (1, 0, 1))
    least = [a * (k - 1) + 1 for a, k in zip(apart, kernel, strict=True)]
    image = [number(low, low + 8) for low in least]
    inner, outer = number(1, 5), number(1, 20)
    make = strided if nd < 3 and not channels_last else dense
    x = make(draw, number(1, 3), groups * inner, *image)
    w = make(draw, groups * outer, inner, *kernel)
    bias = torch.randn(groups * outer, generator=draw) if biased else None
    if channels_last and nd == 2:
        x = x.to(memory_format=torch.channels_last)
    output, none = ctypes.c_void_p(), ctypes.c_void_p()
    with handles(shim, x, w, *([bias] if bias is not None else [])) as (image_of, weight, *plus):
        code = shim.aoti_torch_cpu_convolution(
            image_of, weight, ctypes.byref(plus[0]) if plus else none,
            longs(by), ctypes.c_int64(nd), longs(pad), ctypes.c_int64(nd),
            longs(apart), ctypes.c_int64(nd), 0, longs([0] * nd), ctypes.c_int64(nd),
            ctypes.c_int64(groups), ctypes.byref(output),
        )  # fmt: skip
    assert code == 0
    answer = taken(shim, output)
    arguments = (by, pad, apart, False, [0] * nd, groups)
    exact = torch.convolution(x.double(), w.double(), None, *arguments)
    weight_of = torch.convolution(x.double().abs(), w.double().abs(), None, *arguments)
    if bias is not None:
        shaped = bias.double().view(-1, *[1] * nd)
        exact, weight_of = exact + shaped, weight_of + shaped.abs()
    require_close(answer, exact, weight_of, inner * math.prod(kernel))
    if make is strided:
        return
    # torch's convolution is only asked for its strides, not run: torch 2.13 crashes with some
    # groups, a dilation, a bias and channels last (oneDNN's brg_conv_fwd:avx2).
    with FakeTensorMode() as mode:
        added = None if bias is None else mode.from_tensor(bias)
        theirs = torch.convolution(mode.from_tensor(x), mode.from_tensor(w), added, *arguments)
    for size, mine, other in zip(answer.shape, answer.stride(), theirs.stride(), strict=True):
        assert size == 1 or mine == other


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
