"""A package's public names stay what they are, whichever of its modules are imported."""

from __future__ import annotations

import subprocess
import sys

from soa_pipeline import PACKAGES

# In an interpreter of its own: what an import binds in a package cannot be taken back.
_LOOK = """
import importlib, importlib.util, pkgutil, sys
faces, before = {}, {}
for name in sys.argv[1:]:
    package = faces[name] = importlib.import_module(name)
    for public in getattr(package, "__all__", ()):
        before[name, public] = getattr(package, public)
for name, package in faces.items():
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name.rpartition(".")[2].startswith("lib"):  # a library beside the modules
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # one that only a server of Triton's has
            if error.name.split(".")[0] in faces:
                raise
for (name, public), meant in before.items():
    found = getattr(faces[name], public)
    if found is not meant or importlib.util.find_spec(f"{name}.{public}"):
        print(f"{name}.{public} is {found!r}, and a module")
print(len(before), "names")
"""


def test_importing_a_module_hides_no_public_name() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOOK, *PACKAGES], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if " is " in line] == []
    assert int(done.stdout.split()[-2]) > 80
