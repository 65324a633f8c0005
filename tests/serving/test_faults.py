"""A few of the campaign's faults on a real Triton and a server that answers wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tagged import Tags
from tests.serving.campaigns import faults


@pytest.mark.long
def test_no_event_is_lost_done_twice_or_mixed(
    real_triton: None, tags: Tags, tmp_path: Path
) -> None:
    lines: list[str] = []
    if not faults.run({"behind": 4, "liar": 5}, 3, tags, tmp_path, lines.append):
        pytest.fail("\n".join(lines))
    assert "behind: killed behind the proxy" in lines
