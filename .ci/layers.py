"""The import rules, checked on the source.

Imports go down: from a layer to the layers below it, and between the subpackages of a layer in one
direction. Other code uses the public API of a subpackage: it imports names of the package, or a
module that the package names, and no other file in it. No files import each other in a circle; an
import that only type checkers read does not count there.

    python .ci/layers.py          # prints what breaks a rule, and exits with 1
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from soa_pipeline import PACKAGES as LAYERS  # noqa: E402  # the lowest first


def modules() -> dict[str, Path]:
    """Every module by its name; a folder has the name of its package."""
    files = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files}


def imported(path: Path, names: set[str], run: bool = False) -> Iterator[tuple[int, str]]:
    """The line and name of every module, or package, of ours that a file imports. `run`: only what
    is imported when the program runs."""
    tree = ast.parse(path.read_text())
    checked = (
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    )
    left_out = {id(inner) for each in checked for inner in ast.walk(each)} if run else set()
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for each in node.names:
                full = f"{node.module}.{each.name}"
                yield node.lineno, full if full in names else node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)


def public_modules(packages: set[str]) -> set[str]:
    """The modules that packages name as a whole: `from . import signing as signing`."""
    found: set[str] = set()
    for package in packages:
        stub = ROOT.joinpath(*package.split("."), "__init__.pyi")
        for node in ast.parse(stub.read_text()).body if stub.exists() else ():
            if isinstance(node, ast.ImportFrom) and node.module is None:
                found |= {f"{package}.{each.name}" for each in node.names}
    return found


def folder(name: str, packages: set[str]) -> str:
    return name if name in packages else name.rpartition(".")[0]


def main() -> int:
    files = modules()
    packages = {name.removesuffix(".__init__") for name in files if name.endswith(".__init__")}
    names = {name.removesuffix(".__init__") for name in files}
    public = public_modules(packages)
    broken: list[str] = []
    subpackages: dict[str, set[str]] = {}
    for name, path in files.items():
        here = folder(name.removesuffix(".__init__"), packages)
        for line, other in imported(path, names):
            layer = other.split(".")[0]
            if layer not in LAYERS:
                continue
            where, there = f"{path.relative_to(ROOT)}:{line}", folder(other, packages)
            if LAYERS.index(layer) > LAYERS.index(here.split(".")[0]):
                broken.append(f"{where}: imports up, {other}")
            open_to_all = "." not in there or other in packages | public
            if not open_to_all and here != there and not here.startswith(f"{there}."):
                broken.append(f"{where}: imports {other}, a file in the subpackage {there}")
            mine, its = (".".join(each.split(".")[:2]) for each in (here, there))
            if mine != its and "." in mine and "." in its and mine.split(".")[0] == layer:
                subpackages.setdefault(mine, set()).add(its)
    of_files = {
        name.removesuffix(".__init__"): {other for _, other in imported(path, names, run=True)}
        for name, path in files.items()
    }
    for what, graph in (("subpackages", subpackages), ("files", of_files)):
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            broken.append(f"{what} import each other: {' <- '.join(error.args[1])}")
    print(*broken, sep="\n")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
