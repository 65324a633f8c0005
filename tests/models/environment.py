"""Environment variables that the tests, and the processes that they start, run with."""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Any

COMPILER = Path(__file__).parent / "compiler"


def settle(root: Path) -> None:
    """Set those that nobody has set; what was compiled is kept below `root`.

    Torch reads some of them when it is imported: this comes before.
    """
    # torch's idle threads sleep: those of one test process would spin on the core another needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A third less time in g++ for every aoti artifact; its kernels are compiled as ever.
    os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
    # Nine children that each try one of the CPU's instructions, before every compilation.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # And no time in g++ at all for what was compiled before, in this run or an earlier one.
    if "TESTS_COMPILED" not in os.environ and "clang" not in os.environ.get("CXX", ""):
        os.environ["TESTS_COMPILED"] = str(root / ".pytest_cache" / "compiled")
        os.environ["TESTS_CXX"] = os.environ.get("CXX", "g++")
        os.environ["CXX"] = str(COMPILER / "g++")
        Path(os.environ["TESTS_COMPILED"]).mkdir(parents=True, exist_ok=True)
        # CXX keeps what AOTInductor has compiled, this one what CMake has.
        os.environ.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", str(COMPILER / "kept"))


def remember_types() -> None:
    """Keep the types of the fields of torch's records. When torch reads a program, it asks Python
    for them again for each record, which is a third of the time."""
    ask, known = typing.get_type_hints, dict[tuple[Any, int], dict[str, Any]]()

    def answer(of: Any, globalns: Any = None, *more: Any, **named: Any) -> dict[str, Any]:
        if globalns is None or more or named or not isinstance(of, type):
            return ask(of, globalns, *more, **named)
        key = of, id(globalns)
        if key not in known:
            known[key] = ask(of, globalns)
        return known[key]

    typing.get_type_hints = answer  # type: ignore[assignment]
