"""A package's public names stay what they are, whichever of its modules are imported."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from soa_pipeline import PACKAGES
from tests.models.forked import in_a_child


def import_every_module() -> None:
    """Import all modules of all packages, and compare the public names before and after."""
    packages = {name: importlib.import_module(name) for name in PACKAGES}
    before = {
        (name, public): getattr(package, public)
        for name, package in packages.items()
        for public in getattr(package, "__all__", ())
    }
    assert len(before) > 80
    for name, package in packages.items():
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.rpartition(".")[2].startswith("lib"):  # native libraries
                import_ours(module.name)
    hidden = [
        f"{name}.{public}"
        for (name, public), value in before.items()
        if getattr(packages[name], public) is not value
        or importlib.util.find_spec(f"{name}.{public}")
    ]
    assert not hidden, hidden


def import_ours(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # only Triton's server has it
        if str(error.name).split(".")[0] in PACKAGES:
            raise


def test_importing_a_module_hides_no_public_name() -> None:
    """Runs in a child: the names that an import binds in a package cannot be removed again."""
    assert in_a_child(import_every_module) == "nothing"
