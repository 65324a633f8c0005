"""Environment variables for the tests and for the processes that they start."""

from __future__ import annotations
import __future__

import inspect
import os
import textwrap
import typing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

COMPILER = Path(__file__).parent / "compiler"


def settle(root: Path) -> None:
    """Sets each variable that is not set yet; compiled files are kept below `root`.

    Call it before torch is imported, as torch reads some of them then.
    """
    # torch's idle threads sleep; if they spun, they would take cores from other test processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # g++ takes a third less time for every aoti artifact; the kernels are compiled as usual.
    os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
    # Skips the nine children with which Inductor tries the CPU's instructions before each
    # compilation.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Files that this or an earlier run has compiled take no time in g++ at all.
    if "TESTS_COMPILED" not in os.environ and "clang" not in os.environ.get("CXX", ""):
        os.environ["TESTS_COMPILED"] = str(root / ".pytest_cache" / "compiled")
        os.environ["TESTS_CXX"] = os.environ.get("CXX", "g++")
        os.environ["CXX"] = str(COMPILER / "g++")
        Path(os.environ["TESTS_COMPILED"]).mkdir(parents=True, exist_ok=True)
        # CXX keeps what AOTInductor compiles; this launcher keeps what CMake compiles.
        os.environ.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", str(COMPILER / "kept"))


def remember_types() -> None:
    """Remembers the field types of torch's records.

    When torch reads a program, it asks Python for them again for each record, which takes a third
    of the time.
    """
    ask, known = typing.get_type_hints, dict[tuple[Any, int], dict[str, Any]]()

    def answer(of: Any, globalns: Any = None, *more: Any, **named: Any) -> dict[str, Any]:
        if globalns is None or more or named or not isinstance(of, type):
            return ask(of, globalns, *more, **named)
        key = of, id(globalns)
        if key not in known:
            known[key] = ask(of, globalns)
        return known[key]

    typing.get_type_hints = answer  # type: ignore[assignment]


def remember_operators() -> None:
    """Remembers torch's composite operators.

    Each export asks the dispatcher for them again, once for each namespace, and prepares each of
    them: more than half the time that a small network takes. New operators are still found.
    """
    from torch import _C, _ops, ops
    from torch._export import utils
    from torch.export import exported_program

    ask, known = utils._collect_all_valid_cia_ops, dict[Any, set[Any]]()

    def registered() -> Any:
        """What shows that operators were added: the sizes of namespaces, and composite ones."""
        spaces = [(name, len(getattr(getattr(ops, name), "_dir", ()))) for name in ops._dir]
        composite = _C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        return tuple(spaces), tuple(composite)

    def answer() -> set[Any]:
        if registered() not in known:
            valid = ask()  # which also puts operators into their namespaces
            known.clear()
            known[registered()] = valid
        return known[registered()]

    for module in (utils, exported_program):
        vars(module)["_collect_all_valid_cia_ops"] = answer
    prepares = "autograd_not_implemented"
    vars(exported_program)[prepares] = cache(vars(exported_program)[prepares])
    # Its inner function has annotations, which take most of its time: here they are not evaluated.
    text = textwrap.dedent(inspect.getsource(_ops.OperatorBase.py_impl))
    defined: dict[str, Any] = {}
    code = compile(text, _ops.__file__, "exec", __future__.annotations.compiler_flag)
    exec(code, vars(_ops), defined)
    _ops.OperatorBase.py_impl = defined["py_impl"]  # type: ignore[method-assign]


def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working folder and cache for one test, which sees no registry of this host."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("PIPELINE_REGISTRY", "PIPELINE_ARTIFACTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache" / "soa-pipeline"))
    return folder
