"""How the `aoti` engines build: AOTInductor compiles a program for one target."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from engines.aoti.folding import fold_linear
from engines.aoti.hoisting import hoist_linear
from engines.aoti.needs import needs_proxy_executor
from engines.base import FACTS, Portable
from engines.errors import EngineError
from engines.exported import load_program, move_to_gpu, quiet_torch, read_bools_as_bytes
from engines.kinds import cpu_code_settings, inductor_settings
from engines.target import Target
from soa.dtypes import DTYPES

TARGET = "target.txt"
WEIGHTS, WEIGHTS_INDEX = "weights.bin", "weights.txt"
_ALIGNMENT = 64  # each tensor in weights.bin begins at a multiple of so many bytes
# With one of these options, Inductor packs weights in its own layouts, inside the library.
_PACKS = ("max_autotune", "freezing")
_GENERATED_SOURCES = {".cpp", ".h", ".o", ""}
_CONSTANTS_INSIDE = "aot_inductor.package_constants_in_so"


class AotiBuild:
    """Compiles for `aoti`. A subclass may have other settings, and may rewrite the program
    further."""

    preset: ClassVar[Mapping[str, Any]] = {}
    """Settings of Inductor. The user's options override them."""

    def rewrite(self, program: ExportedProgram) -> Mapping[str, Any]:
        """Change the program in place before it is compiled. Returns the settings of Inductor that
        the changes need."""
        read_bools_as_bytes(program)
        hoist_linear(program)
        fold_linear(program)
        return {}

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Compile as `Engine.compile` says, and write the target for the native runner. An artifact
        for a GPU also gets a facts file, with the level of its host code."""
        files = self._compile(source, target, options, out)
        (out / TARGET).write_text(f"soa-target 1\n{target}\n")  # the native runner reads it
        if target.device == "cpu":
            return [*files, TARGET]
        built = settings_for(target, {**self.preset, **options})
        (out / FACTS).write_text(json.dumps({"host_code": built["cpp.march"]}))
        return [*files, TARGET, FACTS]

    def _compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Build the library into `out`. Returns the names of its files, the library first.

        The weights get files of their own if the library can read them from there. This is known
        only after a build without weights: if the library cannot, it is built a second time with
        the weights inside.
        """
        # Inductor folds constants only if gradients are disabled.
        with quiet_torch(), torch.no_grad():
            program = load_program(source.program)
            if target.device != "cpu":
                program = move_to_gpu(program, "cuda")
            settings = settings_for(target, {**self.preset, **self.rewrite(program), **options})
            if target.device != "cpu" or any(settings.get(name) for name in _PACKS):
                return _build(program, settings, out)
            files = _build(program, {**settings, _CONSTANTS_INSIDE: False}, out)
            library = out / files[0]
            weights = _separable_constants(program, library)
            if weights is not None and not needs_proxy_executor(library):
                # The native runner knows by this name that the library needs `weights.bin`.
                bare = library.rename(library.with_suffix(".bare.so"))
                return [bare.name, *files[1:], *write_weights(weights, out)]
            for file in files:
                (out / file).unlink()
            return _build(program, settings, out)


def settings_for(target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a target. `options` override them, and `threads` among these is the
    number of CPU threads (1 if not given)."""
    threads = {"cpp.threads": 1} if target.device == "cpu" else {}
    renamed = {"cpp.threads" if key == "threads" else key: value for key, value in options.items()}
    return {**cpu_code_settings(target), **threads, **renamed}


def _separable_constants(program: ExportedProgram, library: Path) -> dict[str, torch.Tensor] | None:
    """The tensors that a library without constants needs, by the names that it uses for them.

    Returns None if they cannot be stored in a separate file. Then Inductor made some of them itself
    (packed or folded weights), or the file format has no code for a dtype.
    """
    from torch._C import _aoti

    values = {**program.state_dict, **program.constants}
    runner = _aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    names = runner.get_constant_names_to_original_fqns()
    if not set(names.values()) <= values.keys():
        return None
    constants = {name: values[original] for name, original in names.items()}
    return constants if can_be_written(constants) else None


def can_be_written(tensors: Mapping[str, torch.Tensor]) -> bool:
    """True if the weight file can hold every tensor, that is, the format has its dtype, and its
    layout is strided."""
    return all(
        _dtype_name(tensor) in DTYPES and tensor.layout == torch.strided
        for tensor in tensors.values()
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write_weights(tensors: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Write CPU tensors, each with its strides, to two files in `folder`. Returns both names.

    Constants inside the library would take private memory in each process. All processes of a node
    can map `weights.bin` read-only and share it. It holds the memory of each tensor.
    `weights.txt` is an index with one line for each tensor (engines/native/common/aoti_code.h)::

        NAME DTYPE ITEMSIZE OFFSET NDIM SIZES... STRIDES...
    """
    lines = ["soa-weights 1"]
    offset = 0
    with (folder / WEIGHTS).open("wb") as weights:
        for name, tensor in tensors.items():
            padding = -offset % _ALIGNMENT  # to the next multiple of the alignment
            offset += weights.write(b"\0" * padding)
            numbers = [tensor.itemsize, offset, tensor.ndim, *tensor.shape, *tensor.stride()]
            lines.append(" ".join([name, _dtype_name(tensor), *map(str, numbers)]))
            offset += weights.write(_memory_bytes(tensor))
    (folder / WEIGHTS_INDEX).write_text("\n".join(lines) + "\n")
    return [WEIGHTS, WEIGHTS_INDEX]


def _memory_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes from a tensor's first element to its last one, including the gaps between elements
    that its strides leave."""
    if tensor.numel() == 0:
        return b""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)
    flat = tensor.detach().as_strided((last + 1,), (1,), tensor.storage_offset())
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def _products_that_take_no_rows() -> Iterator[None]:
    """Inside the block, code for matrix products is generated so that it can take 0 rows.

    torch 2.13 divides by the number of row blocks, and a call with 0 rows ends with SIGFPE. So the
    template of that code is replaced, in all threads. A template without that line stays as it is.
    """
    from torch._inductor import lowering  # noqa: F401  # first: the two import each other
    from torch._inductor.codegen import cpp_gemm_template as template

    original = template.GEMM_TEMPLATE_INIT_BLOCKING_BASIC_BLOCK
    template.GEMM_TEMPLATE_INIT_BLOCKING_BASIC_BLOCK = original.replace(
        "const int64_t Mr_blocks = (M + Mr - 1) / Mr;",
        "const int64_t Mr_blocks = std::max<int64_t>((M + Mr - 1) / Mr, 1);",
        1,
    )
    try:
        yield
    finally:
        template.GEMM_TEMPLATE_INIT_BLOCKING_BASIC_BLOCK = original


def _build(program: ExportedProgram, settings: dict[str, Any], out: Path) -> list[str]:
    """Compile the program with these settings of Inductor, and unpack the result into `out`.
    Returns the names of the files; the library is the first."""
    package = out / "package.pt2"
    with _products_that_take_no_rows(), inductor_settings(settings) as known:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(package), inductor_configs=known
        )
    files = unpack(package, out)
    package.unlink()
    return files


def unpack(package: Path, out: Path) -> list[str]:
    """Unpack a package's library, its metadata and GPU kernels, but not the generated sources.

    Returns the names of the files; the library is the first. Raises EngineError unless there is
    exactly one library.
    """
    files: list[str] = []
    with zipfile.ZipFile(package) as archive:
        for entry in archive.namelist():
            name = Path(entry).name
            if "/aotinductor/" not in entry or Path(name).suffix in _GENERATED_SOURCES:
                continue
            with archive.open(entry) as stored, (out / name).open("wb") as unpacked:
                shutil.copyfileobj(stored, unpacked)
            files.append(name)
    libraries = [name for name in files if name.endswith(".so")]
    if len(libraries) != 1:
        raise EngineError(f"expected one library in the package, found {sorted(libraries)}")
    (out / libraries[0]).chmod(0o755)
    return [*libraries, *sorted(name for name in files if not name.endswith(".so"))]
