"""A bundle of each release still opens, and gives the same answers as then.

`jets-VERSION.tar.xz` is the folder that `pipeline pull jets@production` gave with that release. For
a new release, `python -m tests.compatibility.test_golden_bundles` makes it.
"""

from __future__ import annotations

import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Literal

import pytest

import pipeline
from engines.kinds import host_cpu_levels
from pipeline.promotion.pulling import pull
from registry.bundle import Bundle
from registry.store.registry import Registry
from runtime.opening import digest_answers
from soa_pipeline import __version__
from tests.models.project import (
    CONFIG,
    PASSED,
    TARGETS,
    build,
    require_right,
    write_project,
)

HERE = Path(__file__).parent
RELEASES = sorted(file.name.removesuffix(".tar.xz") for file in HERE.glob("jets-*.tar.xz"))
TARGET = "cpu/x86-64-v3"
ENGINES = ("lanes", "aoti-standalone", "torchscript", "exported")
WITHOUT_TORCH = ENGINES[:2]
GNU_STACK, EXECUTABLE = 0x6474E551, 1  # type and flag of a program header in ELF


def unpack(release: str, into: Path) -> Path:
    """The folder of a release's bundle, in `into`."""
    with tarfile.open(HERE / f"{release}.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(into)
    return into / "jets"


@pytest.fixture(scope="module", params=RELEASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(request.param, tmp_path_factory.mktemp("golden"))


@pytest.mark.skipif(TARGET[4:] not in host_cpu_levels(), reason=f"the bundles are for {TARGET}")
@pytest.mark.parametrize("mode", ["production", "test"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_bundle_of_each_release_opens_and_is_right(
    folder: Path, engine: str, mode: Literal["production", "test"]
) -> None:
    """The artifacts that need no torch give the very bits of then."""
    recorded = Bundle.open(folder).manifest.targets[TARGET].candidates[engine].bits
    session = pipeline.load(folder, mode=mode, engine_name=engine)
    assert session.origin is not None
    assert (session.origin.version, session.origin.engine) == ("1", engine)
    require_right(session)
    if engine in WITHOUT_TORCH:
        assert digest_answers(session, folder / "reference.safetensors") == recorded is not None


def test_no_artifact_asks_for_an_executable_stack(folder: Path) -> None:
    """From glibc 2.41 on, the C library refuses to open such a library."""
    libraries = list(folder.glob("targets/**/*.so"))
    assert len(libraries) == len(WITHOUT_TORCH)
    for library in libraries:
        (flags,) = stack_flags(library.read_bytes())
        assert not flags & EXECUTABLE, library.name


def stack_flags(elf: bytes) -> list[int]:
    """The flags of each program header of type GNU_STACK, in a 64-bit ELF file.

    The headers have 56 bytes; at byte 32 of the file is their offset, at byte 56 their number.
    """
    (start,) = struct.unpack_from("<Q", elf, 32)
    (count,) = struct.unpack_from("<H", elf, 56)
    headers = [struct.unpack_from("<II", elf, start + 56 * i) for i in range(count)]
    return [flags for kind, flags in headers if kind == GNU_STACK]


def test_this_release_has_a_bundle() -> None:
    assert f"jets-{__version__}" in RELEASES


def make(scratch: Path) -> Path:
    """Makes the archive: about 400 kB, mostly code of torch's headers in `aoti-standalone`."""
    config = CONFIG.replace(TARGETS, f"targets: [{TARGET}]")
    config = config.replace("[aoti, torchscript, exported]", f"[{', '.join(ENGINES)}]")
    built = build(write_project(scratch / "project", config=config))
    registry = Registry(built.project.registry)
    (version,) = registry.versions("jets")
    pull(registry, registry.promote(version, "production", PASSED).ref, scratch / "jets")
    out = HERE / f"jets-{__version__}.tar.xz"
    with tarfile.open(out, "w:xz", preset=9) as archive:
        archive.add(scratch / "jets", "jets", filter=_nobody)
    return out


def _nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without the user who made the archive."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(make(Path(scratch)))
