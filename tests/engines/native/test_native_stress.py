"""The native runner without Python: many threads and bad input.

`make sanitize` runs the same program under sanitizers, with more rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.native import sanitize
from tests.models.building import Built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sanitize.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return sanitize.build(tmp_path_factory.mktemp("stress"), flags=sanitize.QUICK)


@pytest.mark.parametrize("engine", ["aoti", "lanes"])
def test_no_check_of_the_stress_program_fails(mlp: Built, program: Path, engine: str) -> None:
    done = sanitize.run(program, mlp.files[engine], 40)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 wrong" in done.stdout
