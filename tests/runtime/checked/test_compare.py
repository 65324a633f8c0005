"""Deviations, compared with numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checked import Tolerance, default_tolerance
from runtime.checked.comparison import MOST_PAIRS, combine, compare
from runtime.checked.deviation import Deviation

NAN, INF = float("nan"), float("inf")
LOOSE = Tolerance(0.1, 0.0)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def of(found: list[float], reference: list[float], dtype: torch.dtype = torch.float32) -> Deviation:
    return compare(
        torch.tensor(found, dtype=dtype), torch.tensor(reference, dtype=dtype), LOOSE, False
    )


def test_absolute_relative_and_outside_by_hand() -> None:
    # gaps 0, 0.5, 0.25, 0.0625; relative 0, 0.5, 0.0625, 0.03125
    found = of([1.0, 1.5, 4.25, -2.0625], [1.0, 1.0, 4.0, -2.0])
    assert (found.elements, found.max_abs, found.max_rel, found.outside) == (4, 0.5, 0.5, 0.5)
    assert (found.worst_row, found.nonfinite_mismatches, found.argmax) == (1, 0, None)


def test_relative_tolerance_scales_with_the_reference() -> None:
    tolerance = Tolerance(0.0, 0.01)
    reference = torch.tensor([100.0, 100.0, 0.0])
    inside = compare(torch.tensor([101.0, 99.0, 0.0]), reference, tolerance, False)
    assert inside.outside == 0.0
    outside = compare(torch.tensor([101.5, 98.5, 1e-30]), reference, tolerance, False)
    assert outside.outside == 1.0


def test_rows_of_several_elements() -> None:
    reference = torch.zeros(5, 2, 3)
    found = reference.clone()
    found[3, 1, 2] = 7.0
    assert compare(found, reference, LOOSE, False).worst_row == 3


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        (torch.float16, 2.0**-10),
        (torch.bfloat16, 2.0**-7),
        (torch.float32, 2.0**-23),
        (torch.float64, 2.0**-52),
    ],
)
def test_units_in_the_last_place_by_hand(dtype: torch.dtype, step: float) -> None:
    # Above 1 the spacing is `step`, below it half of that.
    found = of([1 + 3 * step, 1 - step, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], dtype)
    assert (found.ulp_p50, found.ulp_max) == (0.0, 3.0)
    assert of([1 - step], [1.0], dtype).ulp_max == 2.0
    # Across zero: the smallest positive number is one step from 0, and so is its negative.
    tiny = torch.finfo(dtype).smallest_normal * step
    assert of([tiny], [-tiny], dtype).ulp_max == 2.0
    assert of([0.0], [-0.0], dtype).ulp_max == 0.0


def test_units_in_the_last_place_do_not_overflow() -> None:
    """From -4.0 to 4.0 there are more float64 numbers than an int64 can count."""
    count = 2 * int(torch.tensor(4.0, dtype=torch.float64).view(torch.int64))
    assert count > 2**63
    found = of([4.0], [-4.0], torch.float64)
    assert found.ulp_max == pytest.approx(count, rel=1e-12)


def test_quantiles_by_hand() -> None:
    reference = torch.ones(101, dtype=torch.float64)
    found = reference + torch.arange(101) * 2.0**-52
    quantiles = compare(found, reference, LOOSE, False)
    assert (quantiles.ulp_p50, quantiles.ulp_p99, quantiles.ulp_max) == (50.0, 99.0, 100.0)
    assert quantiles.ulp_bins == (1, 1, 2, 4, 8, 16, 32, 37)  # 0, 1, 2 and 3, 4 to 7, …
    assert combine([quantiles, quantiles]).ulp_bins == (2, 2, 4, 8, 16, 32, 64, 74)


def test_errors_by_powers_of_ten() -> None:
    """Bins: equal, less than 1e-18, then one per decade; non-finite differences are in none."""
    gaps = [0.0, 1e-30, 1e-18, 9e-18, 0.5, 1.0, 9.99, 1e9, 1e300, NAN]
    made = of(gaps, [0.0] * len(gaps), torch.float64)
    assert {i: n for i, n in enumerate(made.error_bins) if n} == {
        0: 1, 1: 1, 2: 2, 19: 1, 20: 2, 29: 2
    }  # fmt: skip
    both = combine([made, of([0.0, 0.0], [0.0, 0.0])])
    assert (both.error_bins[0], sum(both.error_bins)) == (3, 11)


def test_rows_of_another_class() -> None:
    wanted = torch.eye(4)[[0, 1, 2, 3, 1]]
    made = compare(torch.eye(4)[[0, 2, 2, 0, 2]], wanted, LOOSE, True)
    assert (made.argmax, made.reclassified) == (0.4, ((1, 2, 2), (3, 0, 1)))
    assert combine([made, made]).reclassified == ((1, 2, 4), (3, 0, 2))
    assert compare(wanted, wanted, LOOSE, True).reclassified == ()
    many = torch.eye(100)
    assert len(compare(many.roll(1, 0), many, LOOSE, True).reclassified) == MOST_PAIRS


@pytest.mark.parametrize(
    ("found", "reference", "mismatches"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0),
        ([INF, -INF], [INF, -INF], 0),
        ([INF, 1.0], [-INF, 1.0], 1),
        ([1.0, NAN], [1.0, 1.0], 1),
        ([1.0, 1.0], [1.0, NAN], 1),
        ([INF, NAN], [NAN, INF], 2),
        ([1.0, 3e38], [1.0, INF], 1),
    ],
)
def test_nan_and_infinity(found: list[float], reference: list[float], mismatches: int) -> None:
    deviation = of(found, reference)
    assert deviation.nonfinite_mismatches == mismatches
    assert deviation.outside == mismatches / 2
    assert deviation.max_abs == 0.0
    assert math.isfinite(deviation.max_rel)
    if mismatches:
        assert deviation.worst_row == (0 if mismatches == 2 or not math.isfinite(found[0]) else 1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.int64]
)
def test_every_integer_dtype(dtype: torch.dtype) -> None:
    reference = torch.tensor([0, 1, 1]).to(dtype)
    assert compare(reference, reference, Tolerance(0, 0), True).outside == 0.0
    found = compare(torch.tensor([1, 1, 1]).to(dtype), reference, Tolerance(0, 0), False)
    assert found.outside == pytest.approx(1 / 3)
    assert found.worst_row == 0


def test_reference_is_rounded_to_the_outputs_dtype() -> None:
    reference = torch.tensor([1 / 3, 1e6])
    found = compare(reference.half(), reference, Tolerance(0, 0), False)
    assert found.outside == 0.0
    assert found.ulp_max == 0.0


def test_no_elements_is_no_deviation() -> None:
    empty = compare(torch.zeros(0, 3), torch.zeros(0, 3), Tolerance(0, 0), True)
    assert (empty.elements, empty.outside, empty.argmax, empty.worst_row) == (0, 0.0, 1.0, None)
    whole = compare(torch.zeros(0, 3).int(), torch.zeros(0, 3).int(), Tolerance(0, 0), False)
    assert whole.ulp_max is None


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(3,\)"):
        compare(torch.zeros(2), torch.zeros(3), LOOSE, False)


def test_combine_takes_the_worst_and_weighs_fractions() -> None:
    none = compare(torch.zeros(0), torch.zeros(0), LOOSE, True)
    one = compare(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), LOOSE, True)
    three = compare(torch.tensor([[1.0, 2.0]] * 3), torch.tensor([[1.0, 2.5]] * 3), LOOSE, True)
    both = combine([none, one, three])
    assert both.elements == 8
    assert both.max_abs == 1.0
    assert both.outside == pytest.approx((2 + 3) / 8)
    assert both.argmax == 0.0
    assert both.ulp_max == one.ulp_max
    assert combine([none]).outside == 0.0
    assert combine([none, none]).elements == 0


def test_default_tolerances_grow_with_coarser_dtypes() -> None:
    order = [default_tolerance(d) for d in ("float64", "float32", "float16", "bfloat16")]
    assert [t.atol for t in order] == sorted(t.atol for t in order)
    assert default_tolerance("int32") == default_tolerance("bool") == Tolerance(0.0, 0.0)


numbers = st.floats(-65504, 65504, width=16) | st.sampled_from([math.inf, -math.inf])
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)


@given(pairs, st.sampled_from(FLOATS))
def test_what_is_symmetric_is(values: list[tuple[float, float]], dtype: torch.dtype) -> None:
    a, b = [x for x, _ in values], [y for _, y in values]
    one, other = of(a, b, dtype), of(b, a, dtype)
    for name in ("max_abs", "outside", "nonfinite_mismatches", "ulp_p50", "ulp_p99", "ulp_max"):
        assert getattr(one, name) == getattr(other, name), name


@given(st.lists(st.floats(width=16), min_size=1, max_size=20), st.sampled_from(FLOATS))
def test_equal_is_zero(values: list[float], dtype: torch.dtype) -> None:
    a = torch.tensor(values, dtype=dtype)
    found = compare(a, a.clone(), Tolerance(0, 0), True)
    assert (found.max_abs, found.max_rel, found.outside) == (0.0, 0.0, 0.0)
    assert (found.ulp_max, found.argmax, found.nonfinite_mismatches) == (0.0, 1.0, 0)


@given(st.integers(-(2**62), 2**62), st.integers(-3, 3))
def test_integers_agree_only_if_equal(a: int, difference: int) -> None:
    b = a + difference
    found = compare(torch.tensor([a]), torch.tensor([b]), Tolerance(0, 0), False)
    assert (found.outside == 0.0) == (a == b)
    assert (found.max_abs == 0.0) == (a == b)
    assert (found.ulp_p50, found.ulp_p99, found.ulp_max) == (None, None, None)
