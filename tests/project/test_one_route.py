"""Reads the source: only runtime/opening turns a reference into an artifact that runs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from tests.models.our_modules import dotted, modules

ROOM = "runtime/opening/"


@functools.cache
def used(tree: ast.AST) -> set[str]:
    """Every name that a module imports, and every attribute that it uses, with its dotted path."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    return found


def users(*names: str) -> set[str]:
    """The modules in which one of these is used."""
    return {path for path, tree in modules() if used(tree) & set(names)}


def folders(paths: set[str]) -> set[str]:
    return {path.rpartition("/")[0] + "/" for path in paths}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_an_engine_opens_in_one_module() -> None:
    """Other modules that use an engine compile with it, or read its properties."""
    have = users("engines.base.engine", "engines.base") - {"engines/__init__.py"}
    assert folders(have) == {ROOM, "stages/", "pipeline/building/"}
    asked = {path: asked_of_engines(tree) for path, tree in modules() if path in have}
    opening = {path for path, said in asked.items() if "open" in said}
    assert len(opening) == 1 and folders(opening) == {ROOM}
    assert asked[opening.pop()] == {"open"}


def asked_of_engines(tree: ast.AST) -> set[str]:
    """The attributes that are read of `engine(...)`, or of variables that hold its result."""
    made = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("engine(")
        for target in node.targets
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (dotted(node.value) in made or dotted(node.value).startswith("engine("))
    }


def test_what_engines_open_with_is_used_by_engines() -> None:
    """Others: deploy, which checks the files for Triton's own backends, and model sources."""
    outside = {
        path
        for path, tree in modules()
        if not path.startswith("engines/")
        and used(tree) & {"torch.jit.load", "torch.export.load", "onnxruntime.InferenceSession"}
        | {
            name
            for name in used(tree)
            if name.startswith(("engines.native._native", "engines.aoti"))
        }
    }
    assert folders(outside) == {"serving/native/", "stages/model/"}


def test_one_module_of_runtime_opening_makes_every_opened_version() -> None:
    makers = {
        path
        for path, tree in modules()
        if any(dotted(call.func).rpartition(".")[2] == "Opened" for call in calls(tree))
    }
    assert len(makers) == 1 and folders(makers) == {ROOM}


def test_bundles_are_taken_from_a_registry_or_a_folder_there() -> None:
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
    making = {"stages/", "pipeline/building/"}
    assert folders(openers) - {ROOM} == making | {"pipeline/", "pipeline/cli/"}


def test_candidates_are_opened_by_the_stages() -> None:
    """The only other way: stages open an artifact, to validate it, before a bundle has it."""
    used_in = folders(users("runtime.opening.open_candidate"))
    assert used_in == {"stages/timing/", "stages/judging/", "pipeline/building/"}
