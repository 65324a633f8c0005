"""The wheels of `make wheels`, as somebody gets them: in an empty venv, without a compiler.

    make wheels && python -m tests.campaigns.wheels                        # each Python on PATH
    python -m tests.campaigns.wheels --python /usr/bin/python3.14 --demo

pip installs soa-runtime, with what it needs, from the index. Each artifact of the golden bundle that
needs no torch is opened, and gives the bits that it gave where it was built. With `--demo` pip
installs soa-pipeline too (torch: some GB), and the demo goes from its config to production: the
engines that need a compiler are refused by name, and another one is chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from tests.compatibility.test_golden_bundles import GOLDENS

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("lanes", "aoti-standalone")
_WORKER = """
import json, shutil, sys
from pathlib import Path

assert not [name for name in ("cc", "gcc", "g++", "clang++") if shutil.which(name)]
import soa_runtime
from runtime.opening import answer_bits

folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    with soa_runtime.load(folder, mode="test" if "torch" in sys.modules else "production",
                          engine_name=name) as session:
        print(name, answer_bits(session, folder / "reference.safetensors"))
assert "torch" not in sys.modules
"""


def execute(*command: str | Path, cwd: Path, path: str | None = None) -> str:
    """What a command says; `path` is its PATH. AssertionError with all of it where it fails."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    own |= {"PATH": path} if path is not None else {}
    done = subprocess.run(
        command, cwd=cwd, env=own | {"HOME": str(cwd)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(python: Path, dist: Path, package: str, folder: Path) -> Path:
    """The Python of a new venv with a package from `dist`, and what it needs from the index."""
    execute(python, "-m", "venv", folder, cwd=folder.parent)
    (wheel,) = dist.glob(f"{package}-*{platform.machine()}.whl")
    asked = f"{wheel}[cpu,onnx]" if package == "soa_pipeline" else str(wheel)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q")
    subprocess.run([*pip, "--only-binary", ":all:", asked], check=True)
    return folder / "bin" / "python"
