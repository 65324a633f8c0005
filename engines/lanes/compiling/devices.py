"""Builds a GPU kernel from a captured program, without a device or a toolkit.

One thread computes one row if a compiler can keep its intermediate values in registers. Otherwise a
block of threads computes some rows together, in its shared memory.

NVRTC, which is a Python wheel, compiles for NVIDIA's GPUs, and Debian's clang for AMD's. The text
file `network.kernel` has the facts that the runner needs (engines/native/common/kernel_program.h).
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.base import FACTS
from engines.errors import EngineError, NotApplicableError
from engines.lanes.compiling.compilers import run_compiler
from engines.lanes.index import Variable
from engines.lanes.planning import (
    HEADERS,
    Kernel,
    Plan,
    Step,
    Store,
    columns_of,
    dtype_letters,
    make_plan,
    make_row_program,
    rows_together,
    write_kernel,
)
from engines.lanes.tensors import Leaves, Product, Program, Reduction
from engines.target import Target

THREADS = 128  # of a block
_UNROLLED = 6000  # the most steps of a row's program for which all loops are unrolled
_A_NODE = 10  # steps that take a compiler as long as a node of a tree: 2,480 nodes took 30 s
_MOST_STORED = 400  # the most intermediate values to try in registers; not all exist at once
_MOST_SPILLED = 512  # bytes a thread may spill if the intermediate values are in registers
_MOST_SHARED = 48 << 10  # bytes of shared memory for a block, which every GPU has
_MOST_LOCAL = 64 << 10  # bytes for a thread: 2,048 threads of 132 processors then take 17 GB
_MOST_BYTES = 4000  # of a kernel's arguments
_OLDEST_CLANG = 18  # older versions round square roots differently
_WARP, _REGISTERS, _UNIT = 32, 16384, 256
"""NVIDIA: threads of a warp; registers of a quarter of a multiprocessor; their allocation unit."""
_THREADS_AT_ONCE = {75: 1024, 86: 1536, 87: 1536, 89: 1536, 120: 1536, 121: 1536}
"""The most threads of an NVIDIA multiprocessor, by architecture; 2,048 for all others."""
_SHARED_AT_ONCE = {75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 120: 100, 121: 100}
"""The shared memory of an NVIDIA multiprocessor in kB, by architecture; 228 for all others. Each
block takes 1 kB more than it asks for."""
_WAVES_AT_ONCE = {"gfx9": 8, "gfx900": 10, "gfx906": 10, "gfx908": 10, "gfx101": 20}
"""The most waves of an AMD SIMD, by the longest prefix of the architecture; 16 for all others."""


@dataclass(frozen=True)
class Report:
    """What the compiler reports of a kernel, for each thread.

    `spilled_bytes` are a part of `local_bytes`; `shared_bytes` are for a block of threads. `store`:
    where a row's intermediate values lie. `occupancy`: the number of threads for which a processor
    has registers and shared memory, divided by the most threads that it can hold.
    """

    registers: int
    spilled_bytes: int
    local_bytes: int
    shared_bytes: int
    store: Store
    occupancy: float


def build_kernel(program: Path, target: Target, out: Path) -> list[str]:
    """See `Engine.compile`. Writes network.kernel, the code, network.cu, target.txt, facts.json."""
    return build_row_kernel(make_row_program(program), target, out)


def build_row_kernel(program: Program, target: Target, out: Path) -> list[str]:
    """As `build_kernel`, from the program for one row."""
    plan = make_plan(program)
    columns = columns_of(plan.program)
    # A pointer to each column, and the numbers of items and of rows: 8 bytes each.
    if 8 * (len(columns) + plan.program.kinds.count("i") + 1) > _MOST_BYTES:
        raise NotApplicableError(
            f"a kernel takes {_MOST_BYTES // 8} columns at most; this network has {len(columns)}"
        )
    report = _compiled(plan, target, out)
    _require_room(report.local_bytes)
    rows = _rows(plan) if report.store == "shared" else THREADS
    images = [name for name in ("network.image", "network.ptx") if (out / name).is_file()]
    lines = [
        "soa-kernel 1", f"target {target}", f"threads {THREADS}", f"rows {rows}",
        f"columns {len(columns)}", f"items {plan.program.kinds.count('i')}",
        f"kinds {plan.program.kinds}", f"dtypes {dtype_letters(plan.program)}",
        *(f"image {name}" for name in images),
    ]  # fmt: skip
    (out / "network.kernel").write_text("\n".join(lines) + "\n")
    (out / "target.txt").write_text(f"soa-target 1\n{target}\n")
    (out / FACTS).write_text(json.dumps({**asdict(report), "threads": THREADS}))
    return ["network.kernel", *images, "network.cu", "target.txt", FACTS]


def _compiled(plan: Plan, target: Target, out: Path) -> Report:
    """Write network.cu, and compile it with the first of `stores` that has enough room for a row's
    intermediate values: registers have not if many values spill."""
    compile_for = {"cuda": _nvidia, "rocm": _amd}[target.device]
    for store in stores(plan):
        rows = _rows(plan) if store == "shared" else 1
        (out / "network.cu").write_text(write_kernel(plan, THREADS, store, rows).text)
        report = compile_for(out, target, store)
        if store != "registers" or report.spilled_bytes <= _MOST_SPILLED:
            break
    return report


def stores(plan: Plan) -> list[Store]:
    """The places for intermediate values to try, in order. NotApplicableError if they are too many
    for any place."""
    _require_room(4 * plan.size)
    roomiest: Store = "shared" if _rows(plan) else "local"
    if sum(map(_steps, plan.steps)) <= _UNROLLED and plan.size <= _MOST_STORED:
        return ["registers", roomiest]
    return [roomiest]


def _rows(plan: Plan) -> int:
    """How many rows a block of threads computes together; 0 if not one fits in shared memory."""
    return rows_together(plan, THREADS, _MOST_SHARED)


def _require_room(size: int) -> None:
    """NotApplicableError if a thread needs more than _MOST_LOCAL bytes."""
    if size > _MOST_LOCAL:
        raise NotApplicableError(
            f"a thread would need {size:,} bytes of local memory for its intermediate values, "
            f"more than {_MOST_LOCAL:,}: a network with fewer such values would fit"
        )


def _steps(step: Step) -> int:
    """About how many steps of a row's program a step of the plan is, if all loops are unrolled. A
    sort compares about all pairs."""
    if isinstance(step, Leaves):
        return _A_NODE * step.source.shape[0] * len(step.forest.thresholds)
    if not isinstance(step, Kernel):
        return math.prod(step.source.shape) ** 2
    inner = step.inner.steps() if isinstance(step.inner, Product | Reduction) else ()
    atoms = {atom for index in (*step.index, *inner) for atom in index.atoms()}
    return math.prod(atom.extent for atom in atoms if isinstance(atom, Variable))


# --- NVIDIA ---


def nvrtc() -> ctypes.CDLL:
    """NVRTC from the wheel or from the toolkit; EngineError says how to install it."""
    of_wheels: list[Path] = []
    for packages in sys.path:
        of_wheels += sorted(Path(packages).glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True)
    for name in (*map(str, of_wheels), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EngineError("NVRTC, which compiles for CUDA, is not here: pip install nvidia-cuda-nvrtc")


def _nvidia(out: Path, target: Target, store: Store) -> Report:
    """Compile network.cu to network.image and network.ptx."""
    text = (out / "network.cu").read_bytes()  # ours
    image = nvrtc_image(text, target.arch, HEADERS)
    (out / "network.image").write_bytes(image.cubin)
    (out / "network.ptx").write_bytes(image.ptx)
    registers = number_in(image.log, r"Used (\d+) registers")
    shared = number_in(image.log, r"(\d+) bytes smem")
    return Report(
        registers=registers,
        spilled_bytes=number_in(image.log, r"(\d+) bytes spill stores"),
        local_bytes=number_in(image.log, r"(\d+) bytes stack frame"),
        shared_bytes=shared,
        store=store,
        occupancy=_occupancy(_number_of(target.arch), registers, shared),
    )


def _number_of(arch: str) -> int:
    """90 of sm_90 or sm_90a."""
    return int(re.sub("[^0-9]", "", arch))


@dataclass(frozen=True)
class Image:
    """What NVRTC made of a text: code for one architecture, and its log."""

    cubin: bytes
    ptx: bytes
    log: str


def number_in(log: str, pattern: str) -> int:
    """The number that a regular expression finds in a compiler's log; 0 if there is none."""
    match = re.search(pattern, log)
    return int(match[1]) if match else 0


def nvrtc_image(text: bytes, arch: str, include: Path, fmad: bool = False) -> Image:
    """Compile a text with NVRTC. EngineError has its first error. `fmad`: as nvcc does by default,
    the compiler makes an fma of a product and a sum."""
    library = nvrtc()
    known = _known_archs(library)
    if _number_of(arch) not in known:
        listed = ", ".join(f"sm_{number}" for number in known)
        raise EngineError(f"this NVRTC does not know {arch}; it knows {listed}")
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), text, b"network.cu", 0, None, None)
    options = (
        f"--gpu-architecture={arch}", f"--fmad={str(fmad).lower()}", "--std=c++20",
        "--device-int128", "--ptxas-options=-v", "--disable-warnings", f"--include-path={include}",
    )  # fmt: skip
    pointers = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        status = library.nvrtcCompileProgram(program, len(options), pointers)
        log = _result(library, program, "ProgramLog").decode(errors="replace")
        if status:
            errors = [line for line in log.splitlines() if "error" in line]
            first = errors[0].strip() if errors else f"code {status}"
            raise EngineError(f"NVRTC failed: {first}")
        return Image(_result(library, program, "CUBIN"), _result(library, program, "PTX"), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _occupancy(arch: int, registers: int, shared: int) -> float:
    """The occupancy of a multiprocessor by NVIDIA's rules: registers are given to whole warps, in
    four partitions, and shared memory to whole blocks. `registers`: of a thread; `shared`: bytes of
    a block."""
    of_a_warp = max(-(-registers * _WARP // _UNIT) * _UNIT, 1)
    by_registers = 4 * _WARP * (_REGISTERS // of_a_warp)
    by_memory = THREADS * ((_SHARED_AT_ONCE.get(arch, 228) << 10) // (shared + 1024))
    most = _THREADS_AT_ONCE.get(arch, 2048)
    return min(by_registers, by_memory if shared else most, most) / most


def _known_archs(library: ctypes.CDLL) -> list[int]:
    """The numbers of the architectures for which NVRTC compiles."""
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return list(archs)


def _result(library: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> bytes:
    """What `nvrtcGet{name}` gives of a program that was compiled."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{name}")(program, content)
    return content.raw


# --- AMD ---


def clang() -> str:
    """A clang++ that is new enough and has lld; EngineError says how to install it."""
    versions = range(25, _OLDEST_CLANG - 1, -1)
    for name in (*(f"clang++-{version}" for version in versions), "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        output = subprocess.run(
            [path, "-dumpversion"], capture_output=True, text=True, errors="replace"
        ).stdout
        version = number_in(output, r"^(\d+)")
        has_linker = shutil.which(f"ld.lld-{version}") or shutil.which("ld.lld")
        if version >= _OLDEST_CLANG and has_linker:
            return path
    raise EngineError(
        f"no clang {_OLDEST_CLANG} or later with lld, which compile for ROCm, is here: apt-get "
        "install clang-19 lld-19"
    )


def amd_image(file: str, arch: str, folder: Path, include: Path, flags: Sequence[str] = ()) -> str:
    """Compile a file of a folder to its `network.image`. Returns what clang says of resources."""
    command = [
        clang(), "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc",
        "-nogpulib", f"--offload-arch={arch}", "-std=c++20", "-O3", *flags,
        "-fno-strict-aliasing", "-Rpass-analysis=kernel-resource-usage", "-w", "-I", str(include),
        "-o", "network.image", file,
    ]  # fmt: skip
    return run_compiler(command, folder, folder / "network.image")


def _amd(out: Path, target: Target, store: Store) -> Report:
    """Compile network.cu to network.image."""
    remarks = amd_image("network.cu", target.arch, out, HEADERS, ["-ffp-contract=off"])

    def remark(name: str) -> int:
        return number_in(remarks, rf"{name}: (\d+)")

    return Report(
        registers=remark("VGPRs") + remark("AGPRs"),
        spilled_bytes=4 * remark("VGPRs Spill"),
        local_bytes=remark(r"ScratchSize \[bytes/lane\]"),
        shared_bytes=remark(r"LDS Size \[bytes/block\]"),
        store=store,
        occupancy=remark(r"Occupancy \[waves/SIMD\]") / _waves_at_once(target.arch),
    )


def _waves_at_once(arch: str) -> int:
    """The most waves of a SIMD, by the longest prefix of the architecture that is known."""
    prefixes = [prefix for prefix in _WAVES_AT_ONCE if arch.startswith(prefix)]
    return _WAVES_AT_ONCE[max(prefixes, key=len)] if prefixes else 16
