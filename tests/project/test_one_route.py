"""Reads the source: only runtime/opening turns a reference into an artifact that runs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from tests.models.our_modules import dotted, modules

OPENING = "runtime/opening/"


@functools.cache
def used(tree: ast.AST) -> set[str]:
    """Every name that a module imports, and every attribute that it uses, with its dotted path."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(dotted(node))
    return names


def users(*names: str) -> set[str]:
    """The modules in which one of these is used."""
    return {path for path, tree in modules() if used(tree) & set(names)}


def folders(paths: Iterable[str]) -> set[str]:
    return {path.rpartition("/")[0] + "/" for path in paths}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_an_engine_opens_in_one_module() -> None:
    """Other modules that use an engine compile with it, or read its properties."""
    importers = users("engines.base.engine", "engines.base") - {"engines/__init__.py"}
    assert folders(importers) == {OPENING, "stages/", "pipeline/building/"}
    read = {path: attributes_of_engines(tree) for path, tree in modules() if path in importers}
    (opener,) = (path for path, attributes in read.items() if "open" in attributes)
    assert folders([opener]) == {OPENING}
    assert read[opener] == {"open"}


def attributes_of_engines(tree: ast.AST) -> set[str]:
    """The attributes that are read of `engine(...)`, or of variables that hold its result."""
    variables = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("engine(")
        for target in node.targets
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (dotted(node.value) in variables or dotted(node.value).startswith("engine("))
    }


def test_what_engines_open_with_is_used_by_engines() -> None:
    """Others: deploy, which checks the files for Triton's own backends, and model sources."""
    openers = {"torch.jit.load", "torch.export.load", "onnxruntime.InferenceSession"}
    internals = ("engines.native._native", "engines.aoti")
    outside = {
        path
        for path, tree in modules()
        if not path.startswith("engines/")
        and any(name in openers or name.startswith(internals) for name in used(tree))
    }
    assert folders(outside) == {"serving/native/", "stages/model/"}


def test_one_module_of_runtime_opening_makes_every_opened_version() -> None:
    makers = {
        path
        for path, tree in modules()
        if any(dotted(call.func).rpartition(".")[2] == "Opened" for call in calls(tree))
    }
    assert len(makers) == 1
    assert folders(makers) == {OPENING}


def test_only_runtime_opening_takes_bundles_from_a_registry_or_a_folder() -> None:
    """Other modules open only bundles that they have just written, or only check a seal: those
    that build, and the ones that show the page of a pushed version or MLflow's copy."""
    openers = {
        path
        for path, tree in modules()
        if not path.startswith("registry/")
        for call in calls(tree)
        if dotted(call.func).endswith(
            ("Bundle.open", "Annex.open", "open_folder", "store.open", "registry.open")
        )
    }
    builders = {"stages/", "pipeline/building/"}
    assert folders(openers) - {OPENING} == builders | {"pipeline/", "pipeline/cli/"}


def test_only_stages_open_candidates() -> None:
    """The only other way: stages open an artifact, to validate it, before a bundle has it."""
    assert folders(users("runtime.opening.open_candidate")) == {
        "stages/timing/",
        "stages/judging/",
        "pipeline/building/",
    }
