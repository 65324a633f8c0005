"""Installs the wheels of `make wheels` as a user does: in an empty venv, without a compiler.

    make wheels && python -m tests.campaigns.wheels --python python3.11 --python python3.13
    python -m tests.campaigns.wheels --demo --python python3.13

pip installs soa-runtime and its requirements from the index. Each artifact of the golden bundles
that needs no torch is opened, and gives the same bits as where it was built. With `--demo`
soa-pipeline is installed too, and the demo runs from its config to production: the engines that
need a compiler are refused by name, and another one is chosen. Its requirements, above all torch,
are taken from the Python that runs this campaign, so that Python must have the same version.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from registry.bundle import Bundle
from tests.compatibility.test_golden_bundles import RELEASES, TARGET, WITHOUT_TORCH, unpack
from tests.project.test_packaging import execute as executed
from tests.project.test_packaging import succeeded

ROOT = Path(__file__).resolve().parents[2]
_WORKER = """
import json, shutil, sys
from pathlib import Path

assert not [name for name in ("cc", "gcc", "g++", "clang++") if shutil.which(name)]
import soa_runtime
from runtime.opening import digest_answers

folder, said = Path(sys.argv[1]), {}
for name in sys.argv[2:]:
    session = soa_runtime.load(folder, engine_name=name)
    said[name] = digest_answers(session, folder / "reference.safetensors")
assert "torch" not in sys.modules and Path(soa_runtime.__file__).is_relative_to(sys.prefix)
print(json.dumps(said))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", help="by default this one")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--demo", action="store_true", help="with soa-pipeline too")
    given = parser.parse_args()
    for python in given.python or [sys.executable]:
        with tempfile.TemporaryDirectory(prefix="soa-wheels-") as folder:
            print(campaign(python, given.dist.resolve(), Path(folder), demo=given.demo))


def campaign(python: str, dist: Path, folder: Path, *, demo: bool) -> str:
    """A summary. AssertionError for a bit that differs, or a command that fails."""
    bare = folder / "bin"  # the only folder in PATH
    bare.mkdir()
    worker = installed(python, dist, "soa_runtime", folder / "worker")
    seen = [succeeded(executed(worker, "--version", cwd=folder)).strip()]
    for release in RELEASES:
        golden = unpack(release, folder / release)
        candidates = Bundle.open(golden).manifest.targets[TARGET].candidates
        command = (worker, "-c", _WORKER, golden, *WITHOUT_TORCH)
        said = json.loads(succeeded(executed(*command, cwd=folder, env={"PATH": str(bare)})))
        assert said == {name: candidates[name].bits for name in WITHOUT_TORCH}, said
        seen.append(f"{release}: the same bits of {' and '.join(said)}")
    if demo:
        whole = installed(python, dist, "soa_pipeline", folder / "whole", with_ours=True)
        seen.append(lives(whole, folder / "project", bare))
    return "; ".join(seen)


def installed(
    python: str, dist: Path, package: str, venv: Path, *, with_ours: bool = False
) -> Path:
    """The Python of a new venv with a package from `dist` and its requirements from the index.

    With `with_ours` the requirements are those of this Python; its folder comes last in the path.
    """
    succeeded(executed(python, "-m", "venv", venv, cwd=venv.parent))
    (wheel,) = dist.glob(f"{package}-*{platform.machine()}.whl")
    pip = (venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:")
    succeeded(executed(*pip, *(["--no-deps"] if with_ours else []), wheel, cwd=venv.parent))
    if with_ours:
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin" / "python"


def lives(python: Path, project: Path, bare: Path) -> str:
    """Runs the demo with the wheel; returns the chosen engines and why others are refused."""
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, project / name)
    env = {"PATH": str(bare), "HOME": str(project)}
    succeeded(executed(python, "examples/demo.py", cwd=project, env=env))
    show = (python, "-m", "pipeline", "show", "jet-tagger@production", "--json")
    manifest = json.loads(succeeded(executed(*show, cwd=project, env=env)))["manifest"]
    said = []
    for target, record in manifest["targets"].items():
        said.append(f"{target}: {record['chosen']} chosen")
        refused = {name: each["reason"] for name, each in record["candidates"].items()}
        said += [f"{name} refused ({why})" for name, why in refused.items() if why]
    return "; ".join(said)


if __name__ == "__main__":
    main()
