"""Any arguments of `bind` and of a binding are taken, or refused in one line of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import Executable
from engines.errors import RunError
from runtime.errors import BindError
from runtime.session.session import Session
from soa import Collection, Layout, column
from tests.fuzz.hostile import only_ours, values
from tests.models.building import JETS, TAGS, mlp_signature


class Counts(Executable):
    """An executable that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.calls += 1


RUNS = Counts()
SESSION = Session(mlp_signature(100), RUNS)
OTHER = Layout([column("a", "float64")])

collections = st.builds(
    lambda layout, n, spare: Collection(layout, n, capacity=n + spare),
    st.sampled_from([JETS, JETS, TAGS, TAGS, OTHER]),
    st.sampled_from([0, 1, 5, 100, 101]),
    st.integers(0, 3),
)
anything = st.one_of(
    collections, values, st.sampled_from([object(), np.zeros(3), torch.zeros(3), JETS, {1, 2}, len])
)
names = st.sampled_from(["jets", "tags", "", 1, None, ("jets",), b"jets"])
given_to_bind = st.one_of(
    anything,
    st.dictionaries(names, anything, max_size=3),
    collections.map(lambda c: {"jets": c}),
    collections.map(lambda c: {"tags": c}),
)
row_counts = st.one_of(
    st.integers(0, 5),
    anything,
    st.sampled_from([np.int64(2), np.array(2), np.array([1, 2]), torch.tensor(3), 2.0, 10**400]),
    st.dictionaries(st.one_of(st.just("n"), names), st.one_of(st.integers(-1, 7), values)),
)


@given(given_to_bind, given_to_bind)
def test_any_arguments_are_bound_or_refused(inputs: Any, outputs: Any) -> None:
    with only_ours():
        binding = SESSION.bind(inputs, outputs)
        assert binding.inputs["jets"].layout == JETS and binding.outputs["tags"].layout == TAGS
        assert 0 <= binding.rows["n"] <= 100


@given(st.lists(row_counts, max_size=3), given_to_bind, given_to_bind)
def test_a_refused_call_or_rebinding_leaves_a_binding_that_runs(
    counts: list[Any], inputs: Any, outputs: Any
) -> None:
    binding = SESSION.bind(Collection(JETS, 3, capacity=5), Collection(TAGS, 3, capacity=5))
    for rows in counts:
        before, calls = binding.rows, RUNS.calls
        try:
            binding(rows)
        except (BindError, RunError) as error:
            assert "\n" not in str(error)
            assert (binding.rows, RUNS.calls) == (before, calls)
        assert 0 <= binding.rows["n"] <= 5
    with only_ours():
        binding.rebind(inputs, outputs)
    binding()  # it must not raise
