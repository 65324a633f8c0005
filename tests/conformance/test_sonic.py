"""The cases of SONIC, with real Tritons; table.py prints them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.errors import ServerError
from serving.local.triton import find_triton
from tests.conformance.sonic import SONIC, Servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    try:
        find_triton()
    except ServerError as error:
        pytest.skip(str(error))
    with Servers.made(tmp_path_factory.mktemp("sonic")) as both:
        yield both


KILLS = {"same server", "other server"}
"""They start six servers. tests/serving/site kills one of two servers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in KILLS)) for name in SONIC]
)
def test_a_case_goes_as_cmssw_asserts(servers: Servers, name: str) -> None:
    assert SONIC[name].holds(servers)
