"""The native runner without Python: many threads and bad input, plain and under sanitizers.

`make sanitize` is the same with more rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.native import sanitize
from tests.models.building import Built


@pytest.mark.parametrize("sanitizer", [None, "address", "thread"])
def test_the_runner_keeps_its_promises(mlp: Built, tmp_path: Path, sanitizer: str | None) -> None:
    if sanitize.compiler() is None:
        pytest.skip("there is no C++ compiler")
    if sanitizer is not None and not sanitize.has_sanitizer(sanitizer, tmp_path):
        pytest.skip(f"{sanitize.compiler()} builds no programs with -fsanitize={sanitizer}")
    done = sanitize.run(sanitize.build(tmp_path, sanitizer), mlp.files["aoti"], rounds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong" in done.stdout
