"""Count the NaN and infinite values of a reference; a stored reference is read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from registry.bundle import Bundle
from soa.dtypes import is_float
from soa.records import as_record, parse_json
from soa.signature import BoundBlock, Signature
from stages.errors import ReferenceDataError

Case = dict[str, int]
"""Row counts by dimension."""

_BFLOAT16_INFINITE = 2.0**128 - 2.0**119  # from this value on, rounding gives infinity
CURE = (
    "give inputs like the real ones (reference: ranges: {column: [low, high]}, or "
    "reference: factory)"
)


def label(case: Case) -> str:
    """A case as text: `n=33`, or `nodes=5,edges=20`."""
    return ",".join(f"{dim}={n}" for dim, n in case.items())


@dataclass(frozen=True)
class Nonfinite:
    """How many of one output's values in a reference are NaN or infinite.

    `by_size` has the pair (number of non-finite values, number of all values) for each case with
    rows, by its label. `first` says where the first non-finite value is, `empty` is the label of a
    case in which no value is finite; both are empty if there is none.
    """

    output: str
    by_size: dict[str, tuple[int, int]]
    first: str = ""
    empty: str = ""

    @property
    def count(self) -> int:
        """The number of values that are NaN or infinite, in all cases."""
        return sum(bad for bad, _ in self.by_size.values())

    @property
    def values(self) -> int:
        """The number of values in all cases."""
        return sum(total for _, total in self.by_size.values())

    @property
    def share(self) -> float:
        """The fraction of all values that is NaN or infinite."""
        return self.count / max(1, self.values)


def count_nonfinite(
    signature: Signature, cases: Sequence[Case], outputs: Sequence[Mapping[str, Any]]
) -> tuple[Nonfinite, ...]:
    """Count the NaN and infinite values of each output.

    `outputs` has the values of each output for each case, as NumPy or torch arrays. Cases without
    rows are left out, since a mean over no rows is NaN.
    """
    return tuple(_count_output(signature, bound, cases, outputs) for bound in signature.outputs)


def read_proof(bundle: Bundle) -> tuple[tuple[Nonfinite, ...], tuple[str, ...]]:
    """Read how much a version's stored reference proves: the counts of each output's non-finite
    values, and its notes on what it does not show. Raises ReferenceDataError if it cannot be
    read."""
    signature = Signature.from_dict(bundle.manifest.signature)
    path = bundle.file(bundle.manifest.reference)
    try:
        with safe_open(path, framework="np") as stored:
            metadata = stored.metadata() or {}
            cases = as_record(list[Case], parse_json(metadata["cases"]))
            # Older references have no notes.
            notes = as_record(tuple[str, ...], parse_json(metadata.get("notes", "[]")))
            outputs = [_read_case(path, stored, signature, i, case) for i, case in enumerate(cases)]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ReferenceDataError(f"{path} is not a stored reference: {error}") from error
    return count_nonfinite(signature, cases, outputs), notes


def _read_case(path: Path, stored: Any, signature: Signature, i: int, case: Case) -> dict[str, Any]:
    """Read the stored answers to case number `i`, by output. Raises ValueError if they do not fit
    the signature."""
    another = ValueError(f"its case {label(case)} is of another signature")
    keys = {bound.name: f"output/{i}/{bound.name}" for bound in signature.outputs}
    if case.keys() != set(signature.dims) or not set(keys.values()) <= set(stored.keys()):
        raise another
    outputs = {name: _read_tensor(path, stored, key) for name, key in keys.items()}
    for bound in signature.outputs:
        if outputs[bound.name].shape != bound.shape(case[bound.rows]):
            raise another
    return outputs


def _read_tensor(path: Path, stored: Any, key: str) -> Any:
    """Read a tensor by its name, as a NumPy array; as a torch tensor if it is bfloat16, which NumPy
    does not have."""
    if stored.get_slice(key).get_dtype() != "BF16":
        return stored.get_tensor(key)
    with safe_open(path, framework="pt") as by_torch:
        return by_torch.get_tensor(key)


def _count_output(
    signature: Signature,
    bound: BoundBlock,
    cases: Sequence[Case],
    outputs: Sequence[Mapping[str, Any]],
) -> Nonfinite:
    """Count the NaN and infinite answers of one output in each case that has rows. `outputs` is as
    in `count_nonfinite`."""
    layout = signature.layouts[bound.block.collection]
    columns = [name for name in bound.block.columns for _ in range(layout[name].components)]
    by_size: dict[str, tuple[int, int]] = {}
    first = empty = ""
    for case, values in zip(cases, outputs, strict=True):
        if not all(case.values()):
            continue
        finite = _finite_mask(values[bound.name], bound.plan.dtypes[0]).reshape(-1, len(columns))
        bad = int((~finite).sum())
        by_size[label(case)] = (bad, finite.size)
        if bad and not first:
            row, column = np.argwhere(~finite)[0].tolist()
            first = f"column {columns[column]!r}, row {row} at {label(case)}"
        if bad == finite.size and not empty:
            empty = label(case)
    return Nonfinite(bound.name, by_size, first, empty)


def _finite_mask(values: Any, dtype: str) -> npt.NDArray[np.bool_]:
    """For each value: whether it is finite in `dtype`, that of the output's columns. A value that
    is too large for the dtype counts as infinite."""
    if not isinstance(values, np.ndarray):  # a torch tensor: NumPy has no bfloat16
        values = (values.float() if "bfloat16" in str(values.dtype) else values).numpy()
    if not is_float(dtype):
        return np.ones(values.shape, bool)
    with np.errstate(over="ignore"):
        in_dtype = values.astype("float32" if dtype == "bfloat16" else dtype)
    finite: npt.NDArray[np.bool_] = np.isfinite(in_dtype)
    if dtype == "bfloat16":
        finite &= np.abs(in_dtype) < _BFLOAT16_INFINITE
    return finite


def why_too_nonfinite(counts: Sequence[Nonfinite], limit: float) -> str | None:
    """Why a reference is refused for its NaN and infinite values, as a sentence; None if it is not.

    It is refused if more than the fraction `limit` of an output is not finite, or if no value of an
    output is finite in some case.
    """
    for counted in counts:
        allowed = counted.share <= limit
        if allowed and not counted.empty:
            continue
        none = f", no value at all is finite at {counted.empty}" if counted.empty else ""
        cure = CURE
        if allowed:
            cure += ", or another reference: seed"
        elif not counted.empty:
            cure += ", or raise reference: nonfinite"
        return (
            f"output {counted.output!r}: {counted.share:.2%} of the reference is NaN or infinite, "
            f"which proves nothing (at most {limit:.2%} is allowed){none}; the first is in "
            f"{counted.first}: {cure}"
        )
    return None
