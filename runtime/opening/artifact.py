"""The last step of opening: an engine opens exactly the files whose digests were checked.

`Engine.open` is called only in this file, for files of a version that has passed the checks of its
mode. The exception is `open_candidate`: the stages validate an artifact before it is in a bundle.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import Executable, engine
from engines.errors import EngineError
from engines.target import Target, check_host_runs
from runtime.errors import LoadError
from runtime.session import RangedExecutable, in_tiles

if TYPE_CHECKING:  # a process that only validates does not import the registry
    import torch

    from registry.bundle import Bundle, Pinned
    from runtime.opening.request import Opened


def open_artifact(
    opened: Opened,
    target: str,
    engine_name: str | None,
    device: torch.device,
    threads: int = 1,
    instances: int | None = None,
) -> Executable:
    """Open the artifact of one engine for a target; the caller has checked that it may be used.

    `engine_name`: None opens the artifact chosen for the target, or those chosen for different row
    counts. `instances`: how many runs may be active at once; None: as the engine decides. Raises
    LoadError if unbounded rows need tiles, and the artifact has none.
    """
    check_host_runs(Target.parse(target))
    record = opened.bundle.manifest.targets[target]
    by_engine: dict[str, Executable] = {}
    for name in record.engines() if engine_name is None else [engine_name]:
        files, tile = _artifact_files(opened, target, name), record.candidates[name].tile or 0
        for dim, rows in opened.signature.ranges.items():
            if rows.unbounded and not 0 < 2 * tile <= rows.max:
                raise LoadError(
                    f"{opened.bundle.path}: rows of {dim!r} are unbounded, and {name} has tile "
                    f"{tile}; 1 to {rows.max // 2} are possible: build the version again"
                )
        executable = _open_files(opened.bundle, name, files, device, threads, instances)
        by_engine[name] = in_tiles(executable, opened.signature, tile, threads)
    main = by_engine[str(engine_name or record.chosen)]
    if engine_name is not None or not record.below:
        return main
    return RangedExecutable([(below.rows, by_engine[below.engine]) for below in record.below], main)


def open_program(opened: Opened, device: torch.device) -> Executable:
    """Open the portable program on torch's own kernels: the reference of test mode.

    It never runs in tiles, so it shows if an artifact must not run in tiles.
    """
    return _open_files(opened.bundle, "exported", [opened.bundle.manifest.program], device)


def copy_artifact(opened: Opened, target: str, engine_name: str, into: Path) -> Path:
    """Copy the files of an artifact, exactly as they were hashed, into a folder.

    Returns the copy of the first one, which an engine opens. The caller makes another form of the
    artifact from the copies.
    """
    files = _artifact_files(opened, target, engine_name)
    copy_files(opened.bundle, files, into)
    return into / files[0]


def copy_files(bundle: Bundle, files: Sequence[str], into: Path) -> None:
    """Copy files of a bundle, exactly as they were hashed, into a folder, under their names."""
    with _pinned_files(bundle, files) as pinned:
        for name in files:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pinned.file(name), into / name)
        pinned.check()


@contextmanager
def hold_files(opened: Opened, target: str, engine_name: str) -> Iterator[Pinned]:
    """Hold an artifact's files, the program and the reference open for another process.

    That process validates the artifact. The files are those that were hashed, and are checked again
    when the `with` block ends.
    """
    manifest = opened.bundle.manifest
    names = [*_artifact_files(opened, target, engine_name), manifest.program, manifest.reference]
    with _pinned_files(opened.bundle, names, for_others=True) as pinned:
        yield pinned
        pinned.check()


def open_candidate(
    engine_name: str, file: Path, device: torch.device, threads: int = 1
) -> Executable:
    """Open an artifact by its path, to compile or validate it. Only the stages call this."""
    return engine(engine_name).open(file, device, threads)


def _artifact_files(opened: Opened, target: str, engine_name: str) -> Sequence[str]:
    """Return the names of an artifact's files; the engine opens the first one.

    Raises LoadError if there are none.
    """
    files = opened.bundle.manifest.targets[target].candidates[engine_name].files
    if not files:
        raise LoadError(f"{opened.bundle.path}: {engine_name} made no artifact for {target}")
    return files


def _open_files(
    bundle: Bundle,
    engine_name: str,
    files: Sequence[str],
    device: torch.device,
    threads: int = 1,
    instances: int | None = None,
) -> Executable:
    """Have an engine open the first of `files`, which may need the others; return the executable.

    Raises BundleError if a file was replaced or written to after its digest was checked, or while
    it was opened. Files in the cache stay there as long as the executable lives.
    """
    try:
        opening_engine = engine(engine_name)
        with _pinned_files(bundle, files, close=device.type == "cpu") as pinned:
            executable = opening_engine.open(pinned.file(files[0]), device, threads, instances)
            pinned.check()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LoadError(
            f"{bundle.path}: {engine_name} runs on torch, which is not installed here: pip install "
            "torch",
            code="load-without-torch",
        ) from None
    if device.type != "cpu":  # for recorded runs a GPU's artifact is opened a second time
        weakref.finalize(executable, pinned.close)
    if bundle.holds:
        weakref.finalize(executable, _end_holds, bundle.holds)
    return executable


@contextmanager
def _pinned_files(
    bundle: Bundle, files: Sequence[str], *, close: bool = True, for_others: bool = False
) -> Iterator[Pinned]:
    """Hold files of a bundle open in the `with` block, as they were hashed.

    `close`: False leaves them open after the block, except after an error. `for_others`: other
    processes open them, too. Errors of an engine name the bundle's folder.
    """
    from registry.bundle import Pinned

    pinned = Pinned(bundle, files, for_others=for_others)
    try:
        yield pinned
    except EngineError as error:
        pinned.close()
        message = str(error).replace(str(pinned.folder), str(bundle.path))
        raise type(error)(message, code=error.code) from error
    except BaseException:
        pinned.close()
        raise
    if close:
        pinned.close()


def _end_holds(holds: tuple[object, ...]) -> None:
    """Let go of `holds`, which keeps the files in the cache until the executable is deleted."""
