"""Bit-flip campaign: a damaged real bundle is refused before anything in it is used.

    python -m tests.registry.campaigns.bitflips --seed 1 --flips 10000

The bundle has an artifact of every engine, is signed, and lies in a folder as `pipeline pull` makes
it. For each flip, one byte of one sealed file is changed, `load` in production has to refuse, and
the byte is restored; the files take turns. Each time the kernel reports which files were opened:
each at most once, for its digest, so no engine, linker or unpickler has read one. At the end the
same holds for the process as a whole, and the undamaged bundle loads with every engine.

Then the two unsealed files are changed (the signature, the record of promotion), and the bundle is
damaged in other ways: see `damage`. `--bundle DIR` takes an existing bundle.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from registry.bundle.bundle import Bundle
from registry.bundle.digests import SIGNATURE, SUMS
from registry.bundle.pulled import PROMOTED, PulledNote, write_note
from registry.trust import read_trusted, require_signature, sign
from runtime.loader import load
from soa.errors import SoaPipelineError
from tests.models.keys import KeyPair, make_keys
from tests.registry.campaigns import damage

_BUILD = """
import sys
from pathlib import Path
from tests.models import project
text = project.CONFIG.replace("[aoti,", "[aoti, onnxruntime,")
made = project.build(project.write_project(Path(sys.argv[1]), config=text))
Path(sys.argv[1], "where").write_text(str(made.bundle.path))
"""


# The module that opens the artifacts of each engine.
ENGINE_MODULES = {
    "aoti": "engines.aoti.engine",
    "torchscript": "engines.torchscript",
    "onnxruntime": "engines.onnx.engine",
    "exported": "engines.exported.engine",
}
_ACCESS, _CLOSE, _OPEN, _IS_DIRECTORY, _OVERFLOW = 0x1, 0x18, 0x20, 0x40000000, 0x4000
_EVENT = struct.Struct("iIII")  # inotify_event: watch, mask, cookie, length of the name


class Opens:
    """Counts opened files below `root`, with inotify on every folder.

    Reads and closes are watched too, as the kernel would merge two equal events of opening.
    """

    def __init__(self, root: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders: dict[int, Path] = {}
        for folder, _, _ in os.walk(root):
            watch = libc.inotify_add_watch(
                self._handle, os.fsencode(folder), _ACCESS | _CLOSE | _OPEN
            )
            assert self._handle >= 0 and watch >= 0, os.strerror(ctypes.get_errno())
            self._folders[watch] = Path(folder).relative_to(root)

    def forget(self) -> None:
        """Ignores everything opened so far, even if events were lost."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._handle, 1 << 16):
                pass

    def since(self) -> Counter[str]:
        """How often each file was opened since the last call of `since` or `forget`."""
        counts: Counter[str] = Counter()
        while True:
            try:
                events = os.read(self._handle, 1 << 16)
            except BlockingIOError:
                return counts
            start = 0
            while start < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, start)
                end = start + _EVENT.size + length
                name = events[start + _EVENT.size : end].rstrip(b"\0")
                start = end
                assert not mask & _OVERFLOW
                if mask & _OPEN and not mask & _IS_DIRECTORY:
                    counts[(self._folders[watch] / os.fsdecode(name)).as_posix()] += 1


class Campaign:
    """Changes a signed copy of a bundle, byte by byte, and requires that each change is refused."""

    def __init__(self, bundle: Path, folder: Path, seed: int) -> None:
        self.path = Path(shutil.copytree(bundle, folder / "bundle"))
        self.keys: KeyPair = make_keys(folder, "release")
        opened = Bundle.open(self.path)
        sign(opened, self.keys.private)
        record = PulledNote("jets/1", opened.digest, "ada", "2026-01-01T00:00:00+00:00")
        write_note(self.path, record)
        self.bundle = opened
        self.sealed = [*sorted(opened.files), SUMS]
        self.choice = random.Random(seed)
        self.opens = Opens(self.path)

    def load(self, path: Path | None = None, engine_name: str | None = None) -> None:
        load(path or self.path, trusted_keys=[self.keys.public], engine_name=engine_name)

    def flip(self, name: str) -> None:
        """Changes one byte of a file, requires that it is not loaded, and restores the byte."""
        handle = os.open(self.path / name, os.O_RDWR)
        try:
            offset = self.choice.randrange(os.fstat(handle).st_size)
            good = os.pread(handle, 1, offset)
            os.pwrite(handle, bytes([good[0] ^ self.choice.randrange(1, 256)]), offset)
            self.opens.forget()
            try:
                message = self._refusal(f"{name}: the change at {offset}")
            finally:
                counts = self.opens.since()
                os.pwrite(handle, good, offset)
        finally:
            os.close(handle)
        assert "\n" not in message, message
        assert str(self.path) in message, message
        twice = [file for file, count in counts.items() if count > 1]
        assert not twice, f"{name}: {twice} opened again after {message}"

    def _refusal(self, change: str) -> str:
        """The message with which the bundle is refused; AssertionError if it is loaded."""
        try:
            self.load()
        except SoaPipelineError as error:
            return str(error)
        raise AssertionError(f"{change} was not refused")

    def flip_beside(self, name: str) -> bool:
        """Whether a change of an unsealed file is refused; if not, it must have no effect.

        Such changes are in white space, or in who promoted and when, which decide nothing.
        """
        content = (self.path / name).read_bytes()
        changed = bytearray(content)
        changed[self.choice.randrange(len(content))] ^= self.choice.randrange(1, 256)
        (self.path / name).write_bytes(changed)
        try:
            self.load()
        except SoaPipelineError:
            return True
        finally:
            (self.path / name).write_bytes(content)
        key = read_trusted(self.keys.public)
        reopened = Bundle.open(self.path)
        assert require_signature(reopened, [key]) == key
        assert reopened.digest == self.bundle.digest
        return False

    def require_nothing_loaded(self) -> None:
        """Requires that this process has loaded no library of the bundle, and no engine's module.

        `load_with_each_engine` shows afterwards that these modules do open artifacts.
        """
        assert str(self.path) not in Path("/proc/self/maps").read_text()
        assert not {*ENGINE_MODULES.values(), "onnxruntime"} & sys.modules.keys()

    def load_with_each_engine(self) -> int:
        """Loads the undamaged bundle with each valid engine; returns their number.

        Then its files are opened more than once, and the module of each engine is in this process.
        """
        (target,) = self.bundle.manifest.targets.values()
        valid = [name for name, c in target.candidates.items() if c.status == "valid"]
        for name in valid:
            self.opens.forget()
            self.load(engine_name=name)
            assert self.opens.since()[target.candidates[name].files[0]] > 1, name
            assert ENGINE_MODULES[name] in sys.modules
        assert "onnxruntime" not in valid or "onnxruntime" in sys.modules
        return len(valid)


def built_bundle(folder: Path) -> Path:
    """The path of a new bundle, built by another process: this one must load no engine."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", _BUILD, str(folder)], check=True)
    return Path((folder / "where").read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--beside", type=int, default=300)
    parser.add_argument("--bundle", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = options.bundle or built_bundle(folder / "project")
        campaign = Campaign(bundle, folder, options.seed)
        began = time.perf_counter()
        flipped: Counter[str] = Counter()
        for i in range(options.flips):
            name = campaign.sealed[i % len(campaign.sealed)]
            campaign.flip(name)
            flipped[name] += 1
        took = time.perf_counter() - began
        damages = itertools.chain(damage.of_files(bundle), damage.sealed_again())
        kinds = damage.refusals(campaign.path, folder, damages, campaign.load)
        campaign.require_nothing_loaded()
        engines = campaign.load_with_each_engine()
        beside = {
            name: sum(campaign.flip_beside(name) for _ in range(options.beside // 2))
            for name in (SIGNATURE, PROMOTED)
        }
        size = sum((campaign.path / name).stat().st_size for name in campaign.sealed)
        print(
            f"seed {options.seed}: {flipped.total()} of {options.flips} changes of a byte refused, "
            f"over {len(flipped)} files ({size / 1e6:.2f} MB), {took:.1f} s; no file opened twice"
        )
        print(f"other damage: {kinds.total()} refused ({', '.join(sorted(kinds))})")
        for name, count in beside.items():
            tried = options.beside // 2
            print(f"{name}: {count} of {tried} changes refused, the rest mean nothing")
        print(f"undamaged: loads with {engines} engines")


if __name__ == "__main__":
    main()
