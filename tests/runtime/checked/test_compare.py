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


def deviation_of(
    output: list[float], reference: list[float], dtype: torch.dtype = torch.float32
) -> Deviation:
    """The deviation of values from reference values, with a tolerance of 0.1."""
    return compare(
        torch.tensor(output, dtype=dtype), torch.tensor(reference, dtype=dtype), LOOSE, False
    )


def test_a_deviation_is_what_one_counts_by_hand() -> None:
    # gaps 0, 0.5, 0.25, 0.0625; relative 0, 0.5, 0.0625, 0.03125
    deviation = deviation_of([1.0, 1.5, 4.25, -2.0625], [1.0, 1.0, 4.0, -2.0])
    assert (deviation.elements, deviation.max_abs, deviation.max_rel) == (4, 0.5, 0.5)
    assert deviation.outside == 0.5  # the gaps 0.5 and 0.25
    assert deviation.worst_row == 1
    assert (deviation.nonfinite_mismatches, deviation.argmax) == (0, None)


def test_relative_tolerance_scales_with_the_reference() -> None:
    tolerance = Tolerance(0.0, 0.01)
    reference = torch.tensor([100.0, 100.0, 0.0])
    inside = compare(torch.tensor([101.0, 99.0, 0.0]), reference, tolerance, False)
    assert inside.outside == 0.0
    outside = compare(torch.tensor([101.5, 98.5, 1e-30]), reference, tolerance, False)
    assert outside.outside == 1.0


def test_the_worst_row_is_along_the_first_dimension() -> None:
    reference = torch.zeros(5, 2, 3)
    output = reference.clone()
    output[3, 1, 2] = 7.0
    assert compare(output, reference, LOOSE, False).worst_row == 3


each_float = pytest.mark.parametrize(
    ("dtype", "step"),
    [
        (torch.float16, 2.0**-10),
        (torch.bfloat16, 2.0**-7),
        (torch.float32, 2.0**-23),
        (torch.float64, 2.0**-52),
    ],
)
"""`step` is the spacing of the numbers above 1; below it the spacing is half of that."""


@each_float
def test_units_in_the_last_place_are_counted_near_one(dtype: torch.dtype, step: float) -> None:
    deviation = deviation_of([1 + 3 * step, 1 - step, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], dtype)
    assert (deviation.ulp_p50, deviation.ulp_max) == (0.0, 3.0)
    assert deviation_of([1 - step], [1.0], dtype).ulp_max == 2.0


@each_float
def test_units_in_the_last_place_are_counted_across_zero(dtype: torch.dtype, step: float) -> None:
    """The smallest positive number is one step from 0, and so is its negative."""
    smallest = torch.finfo(dtype).smallest_normal * step
    assert deviation_of([smallest], [-smallest], dtype).ulp_max == 2.0
    assert deviation_of([0.0], [-0.0], dtype).ulp_max == 0.0


def test_units_in_the_last_place_do_not_overflow() -> None:
    """From -4.0 to 4.0 there are more float64 numbers than an int64 can count."""
    count = 2 * int(torch.tensor(4.0, dtype=torch.float64).view(torch.int64))
    assert count > 2**63
    assert deviation_of([4.0], [-4.0], torch.float64).ulp_max == pytest.approx(count, rel=1e-12)


def each_number_of_steps() -> Deviation:
    """The deviation of 101 values that are 0, 1, … 100 units in the last place off."""
    reference = torch.ones(101, dtype=torch.float64)
    return compare(reference + torch.arange(101) * 2.0**-52, reference, LOOSE, False)


def test_quantiles_of_units_in_the_last_place_are_exact() -> None:
    deviation = each_number_of_steps()
    assert (deviation.ulp_p50, deviation.ulp_p99, deviation.ulp_max) == (50.0, 99.0, 100.0)


def test_units_in_the_last_place_are_counted_by_powers_of_two() -> None:
    deviation = each_number_of_steps()
    assert deviation.ulp_bins == (1, 1, 2, 4, 8, 16, 32, 37)  # 0, 1, 2 and 3, 4 to 7, …
    assert combine([deviation, deviation]).ulp_bins == (2, 2, 4, 8, 16, 32, 64, 74)


def test_gaps_are_counted_by_powers_of_ten() -> None:
    """Bins: equal, less than 1e-18, then one per decade; non-finite differences are in none."""
    gaps = [0.0, 1e-30, 1e-18, 9e-18, 0.5, 1.0, 9.99, 1e9, 1e300, NAN]
    deviation = deviation_of(gaps, [0.0] * len(gaps), torch.float64)
    assert {i: n for i, n in enumerate(deviation.error_bins) if n} == {
        0: 1, 1: 1, 2: 2, 19: 1, 20: 2, 29: 2
    }  # fmt: skip


def test_counted_gaps_are_combined() -> None:
    three, two = deviation_of([0.0, 1.0, 1.0], [0.0] * 3), deviation_of([0.0, 0.0], [0.0] * 2)
    bins = combine([three, two]).error_bins
    assert (bins[0], sum(bins)) == (3, 5)


def test_rows_of_another_class_are_counted_by_pairs() -> None:
    """A triple: the class of the reference, that of the output, and how many rows have both."""
    reference = torch.eye(4)[[0, 1, 2, 3, 1]]
    deviation = compare(torch.eye(4)[[0, 2, 2, 0, 2]], reference, LOOSE, True)
    assert deviation.argmax == 2 / 5  # the share of rows of the same class
    assert deviation.reclassified == ((1, 2, 2), (3, 0, 1))
    assert combine([deviation, deviation]).reclassified == ((1, 2, 4), (3, 0, 2))


def test_rows_of_the_same_class_make_no_pair() -> None:
    reference = torch.eye(4)
    assert compare(reference, reference, LOOSE, True).reclassified == ()


def test_only_some_pairs_of_classes_are_kept() -> None:
    reference = torch.eye(100)
    deviation = compare(reference.roll(1, 0), reference, LOOSE, True)
    assert len(deviation.reclassified) == MOST_PAIRS


@pytest.mark.parametrize(
    ("output", "reference", "mismatches", "worst_row"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0, None),
        ([INF, -INF], [INF, -INF], 0, None),
        ([INF, 1.0], [-INF, 1.0], 1, 0),
        ([1.0, NAN], [1.0, 1.0], 1, 1),
        ([1.0, 1.0], [1.0, NAN], 1, 1),
        ([INF, NAN], [NAN, INF], 2, 0),
        ([1.0, 3e38], [1.0, INF], 1, 1),
    ],
)
def test_nan_and_infinity_agree_only_with_themselves(
    output: list[float], reference: list[float], mismatches: int, worst_row: int | None
) -> None:
    """They are equal only to themselves, and have no distance from other numbers."""
    deviation = deviation_of(output, reference)
    assert deviation.nonfinite_mismatches == mismatches
    assert deviation.outside == mismatches / len(output)
    assert deviation.max_abs == 0.0
    assert math.isfinite(deviation.max_rel)
    if worst_row is not None:
        assert deviation.worst_row == worst_row


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.int64]
)
def test_integers_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    reference = torch.tensor([0, 1, 1]).to(dtype)
    assert compare(reference, reference, Tolerance(0, 0), True).outside == 0.0
    deviation = compare(torch.tensor([1, 1, 1]).to(dtype), reference, Tolerance(0, 0), False)
    assert deviation.outside == pytest.approx(1 / 3)
    assert deviation.worst_row == 0


def test_reference_is_rounded_to_the_outputs_dtype() -> None:
    reference = torch.tensor([1 / 3, 1e6])
    deviation = compare(reference.half(), reference, Tolerance(0, 0), False)
    assert (deviation.outside, deviation.ulp_max) == (0.0, 0.0)


def test_no_elements_is_no_deviation() -> None:
    empty = compare(torch.zeros(0, 3), torch.zeros(0, 3), Tolerance(0, 0), True)
    assert (empty.elements, empty.outside, empty.argmax, empty.worst_row) == (0, 0.0, 1.0, None)


def test_integers_have_no_units_in_the_last_place() -> None:
    integers = compare(torch.zeros(0, 3).int(), torch.zeros(0, 3).int(), Tolerance(0, 0), False)
    assert integers.ulp_max is None


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(3,\)"):
        compare(torch.zeros(2), torch.zeros(3), LOOSE, False)


def test_combine_takes_the_worst_and_weighs_fractions() -> None:
    none = compare(torch.zeros(0), torch.zeros(0), LOOSE, True)
    one_row = compare(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), LOOSE, True)
    three_rows = compare(
        torch.tensor([[1.0, 2.0]] * 3), torch.tensor([[1.0, 2.5]] * 3), LOOSE, True
    )
    combined = combine([none, one_row, three_rows])
    assert combined.elements == 2 + 3 * 2
    assert combined.max_abs == 1.0
    assert combined.outside == pytest.approx((2 + 3) / 8)
    assert combined.argmax == 0.0
    assert combined.ulp_max == one_row.ulp_max


@pytest.mark.parametrize("count", [1, 2])
def test_combined_nothing_is_no_deviation(count: int) -> None:
    none = compare(torch.zeros(0), torch.zeros(0), LOOSE, True)
    combined = combine([none] * count)
    assert (combined.elements, combined.outside) == (0, 0.0)


def test_default_tolerances_grow_with_coarser_dtypes() -> None:
    from_fine_to_coarse = ("float64", "float32", "float16", "bfloat16")
    limits = [default_tolerance(dtype).atol for dtype in from_fine_to_coarse]
    assert limits == sorted(limits)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_the_default_tolerance_of_integers_is_none(dtype: str) -> None:
    assert default_tolerance(dtype) == Tolerance(0.0, 0.0)


numbers = st.floats(-65504, 65504, width=16) | st.sampled_from([math.inf, -math.inf])
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)


@given(pairs, st.sampled_from(FLOATS))
def test_absolute_gaps_are_the_same_both_ways(
    values: list[tuple[float, float]], dtype: torch.dtype
) -> None:
    left, right = [pair[0] for pair in values], [pair[1] for pair in values]
    forth, back = deviation_of(left, right, dtype), deviation_of(right, left, dtype)
    for name in ("max_abs", "outside", "nonfinite_mismatches", "ulp_p50", "ulp_p99", "ulp_max"):
        assert getattr(forth, name) == getattr(back, name), name


@given(st.lists(st.floats(width=16), min_size=1, max_size=20), st.sampled_from(FLOATS))
def test_equal_values_have_no_deviation(values: list[float], dtype: torch.dtype) -> None:
    output = torch.tensor(values, dtype=dtype)
    deviation = compare(output, output.clone(), Tolerance(0, 0), True)
    assert (deviation.max_abs, deviation.max_rel, deviation.outside) == (0.0, 0.0, 0.0)
    assert (deviation.ulp_max, deviation.argmax, deviation.nonfinite_mismatches) == (0.0, 1.0, 0)


@given(st.integers(-(2**62), 2**62), st.integers(-3, 3))
def test_integers_agree_only_if_equal(number: int, difference: int) -> None:
    output, reference = torch.tensor([number]), torch.tensor([number + difference])
    deviation = compare(output, reference, Tolerance(0, 0), False)
    assert (deviation.outside == 0.0) is (difference == 0)
    assert (deviation.max_abs == 0.0) is (difference == 0)
    assert (deviation.ulp_p50, deviation.ulp_p99, deviation.ulp_max) == (None, None, None)
