"""Find the classes that a package declares, without importing its files.

The first line of a class gives its name in a family (here `engine`) and its place in the order::

    class TorchScriptEngine(Engine, engine="torchscript", order=40): ...

Other keywords are settings of the family. `Declared.load` imports the class. Other installed
packages declare a class of a family by an entry point (`find_installed`).
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soa.errors import SoaPipelineError


@dataclass(frozen=True)
class Declared:
    """A class that a package declares: its name in the family, its module, and its settings.

    `package` is the name and version of the installed package that declares it; empty for ours.
    """

    name: str
    module: str
    class_name: str
    settings: dict[str, Any]
    package: str = ""

    def load(self) -> Any:
        """Import and return the class."""
        return getattr(importlib.import_module(self.module), self.class_name)


@cache
def find_declared(package: str, family: str) -> dict[str, Declared]:
    """Find all classes of a family in one of our packages and its subpackages.

    Returns them by name, sorted by `order`. Raises SoaPipelineError if two have the same name.
    """
    classes: list[Declared] = []
    for module, head in _read_class_heads(package):
        if re.search(rf"\b{family}=", head) is None:
            continue
        (node,) = ast.parse(f"{head} ...", module).body  # a class needs a body
        if isinstance(node, ast.ClassDef):
            keywords = {word.arg: word.value for word in node.keywords if word.arg is not None}
            settings = {key: ast.literal_eval(value) for key, value in keywords.items()}  # trusted
            classes.append(Declared(settings[family], module, node.name, settings))
    classes.sort(key=lambda item: (item.settings.get("order", 0), item.name))
    by_name: dict[str, Declared] = {}
    for item in classes:
        other = by_name.setdefault(item.name, item)
        if other is not item:
            raise SoaPipelineError(
                f"two classes are the {family} {item.name!r}: {other.module}, {item.module}"
            )
    return by_name


@cache
def find_installed(family: str) -> dict[str, Declared]:
    """Find the classes of a family that other installed packages declare, and return them by name.

    A package lists them as entry points of the group `soa_pipeline.<family>`. Raises
    SoaPipelineError if two packages declare the same name.
    """
    from importlib.metadata import entry_points  # reads every installed package: some 40 ms

    by_name: dict[str, Declared] = {}
    for entry in entry_points(group=f"soa_pipeline.{family}"):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
        other = by_name.get(entry.name)
        if other is not None and other.package != package:
            raise SoaPipelineError(
                f"two packages declare the {family} {entry.name!r}: {other.package}, {package}"
            )
        by_name[entry.name] = Declared(entry.name, entry.module, entry.attr, {}, package)
    return by_name


# Every process that runs a model searches for classes. So files are searched once, and only the
# first lines of classes are parsed. Such a line may have parentheses within its parentheses.
_CLASS_HEAD = re.compile(rb"\n(class \w+\((?:[^()]|\([^()]*\))*\):)")


@cache
def _read_class_heads(package: str) -> list[tuple[str, str]]:
    """Read the first line of each class in a package that has keywords, as (module, line) pairs."""
    root = str(Path(__file__).parents[1])
    module_and_head = []
    for folder, _, files in os.walk(os.path.join(root, *package.split("."))):
        parent = folder[len(root) + 1 :].replace(os.sep, ".")
        for file in files:
            if not file.endswith(".py"):
                continue
            with open(os.path.join(folder, file), "rb") as opened:
                heads = _CLASS_HEAD.findall(opened.read())
            module = parent if file == "__init__.py" else f"{parent}.{file[:-3]}"
            module_and_head += [(module, head.decode()) for head in heads if b"=" in head]
    return module_and_head
