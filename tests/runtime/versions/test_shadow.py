"""What a shadow compares, with hand-written executables; tests/pipeline/promotion has the rest."""

from __future__ import annotations

import pytest

from engines import Executable
from registry.shadow_record import ShadowRecord
from runtime.session.session import Session
from runtime.versions.second import Results
from runtime.versions.shadow import ShadowedSession
from soa import Signature
from tests.models import rogues
from tests.models.building import mlp_signature

BEGUN = ShadowRecord(
    version="jets/2", digest="2" * 64, production="jets/1", production_digest="1" * 64
)
N = 37


@pytest.fixture
def records() -> list[ShadowRecord]:
    """What a session records; it does so when it is closed."""
    return []


def shadowed(
    production: Executable,
    shadow: Executable,
    records: list[ShadowRecord],
    signature: Signature | None = None,
) -> ShadowedSession:
    """A session whose shadow gets all events."""
    signature = signature or rogues.split_signature()
    inner, beside = Session(signature, production), Session(signature, shadow)
    return ShadowedSession(inner, beside, 1.0, Results(BEGUN, records.append))


@pytest.mark.parametrize("output", [0, 1])
def test_every_output_is_compared(output: int, records: list[ShadowRecord]) -> None:
    session = shadowed(rogues.split_off_by(0, 0), rogues.split_off_by(0.25, output), records)
    session.run(session.collection("jets", N), session.collection("tags", N))
    session.close()
    (record,) = records
    names = [bound.name for bound in session.signature.outputs]
    assert record.events == 1
    expected = dict.fromkeys(names, 0.0) | {names[output]: 0.25}
    assert record.max_abs == expected
    assert record.max_rel[names[output]] == float("inf")  # production answered 0


@pytest.mark.parametrize("dtype", ["bool", "uint16", "uint32", "int8", "float16", "bfloat16"])
def test_every_dtype_is_compared(dtype: str, records: list[ShadowRecord]) -> None:
    ones, zeros = rogues.Rogue(lambda n, x, y: y.fill_(1)), rogues.Rogue(lambda n, x, y: y.zero_())
    session = shadowed(ones, zeros, records, mlp_signature(output=dtype))
    session.run(session.collection("jets", N), session.collection("tags", N))
    session.close()
    assert (records[0].events, records[0].error) == (1, "")
    assert records[0].max_abs == records[0].max_rel == {"probabilities": 1.0}


def test_integers_that_are_one_double_differ(records: list[ShadowRecord]) -> None:
    large = 2**60
    production = rogues.Rogue(lambda n, x, y: y.fill_(large))
    shadow = rogues.Rogue(lambda n, x, y: y.fill_(large + 1))
    session = shadowed(production, shadow, records, mlp_signature(output="int64"))
    session.run(session.collection("jets", N), session.collection("tags", N))
    session.close()
    assert records[0].max_abs == {"probabilities": 1.0}
    assert records[0].max_rel == {"probabilities": 1.0 / large}
