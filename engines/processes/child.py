"""How a process of our own begins: with our code from where this file lies.

The working folder is the user's. A folder `engines/` in it, or a second checkout, is not ours, and
Python looks there first for what `-m` names. So a child is begun with this file, it takes our
packages from beside this one, and looks into the working folder last, where its parent does at all.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module of ours as a program; its environment has `search_path()`."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), module, *arguments]


def search_path() -> str:
    """PYTHONPATH for a child: where this process finds modules, the working folder last."""
    here = os.getcwd()
    entries = [entry or here for entry in sys.path]
    if Path(here).resolve() != _ROOT:
        entries.sort(key=lambda entry: entry == here)
    return os.pathsep.join(entries)


def _take(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main() -> None:
    ours = _take("soa_pipeline", _ROOT / "soa_pipeline.py")
    for name in ours.PACKAGES:
        _take(name, _ROOT / name / "__init__.py")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
