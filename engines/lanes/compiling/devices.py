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

THREADS = 128  # the number of threads of a block
_UNROLLED = 6000  # the most steps of a row's program for which all loops are unrolled
# So many steps take a compiler as long as a node of a tree: 2,480 nodes took 30 s.
_STEPS_OF_A_NODE = 10
_MOST_STORED = 400  # the most intermediate values to try in registers; not all exist at once
_MOST_SPILLED = 512  # bytes a thread may spill if the intermediate values are in registers
_MOST_SHARED = 48 << 10  # bytes of shared memory for a block, which every GPU has
_MOST_LOCAL = 64 << 10  # bytes for a thread: 2,048 threads of 132 processors then take 17 GB
_MOST_ARGUMENTS = 500  # pointers and numbers that a kernel takes, of 8 bytes each
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
    """What the compiler reports of a kernel.

    The numbers are for each thread, except that `shared_bytes` are for a block of threads.
    `spilled_bytes` are a part of `local_bytes`. `store` says where a row's intermediate values lie.
    `occupancy` is the number of threads for which a processor has registers and shared memory,
    divided by the most threads that it can hold.
    """

    registers: int
    spilled_bytes: int
    local_bytes: int
    shared_bytes: int
    store: Store
    occupancy: float


def build_kernel(program: Path, target: Target, out: Path) -> list[str]:
    """Build for `Engine.compile`. Writes network.kernel, the compiled code, network.cu, target.txt
    and facts.json."""
    return build_row_kernel(make_row_program(program), target, out)


def build_row_kernel(program: Program, target: Target, out: Path) -> list[str]:
    """As `build_kernel`, but takes the program for one row instead of a file."""
    plan = make_plan(program)
    columns = columns_of(plan.program)
    # A pointer to each column, each number of items, and the number of rows.
    if len(columns) + plan.program.kinds.count("i") + 1 > _MOST_ARGUMENTS:
        raise NotApplicableError(
            f"a kernel takes {_MOST_ARGUMENTS} columns at most; this network has {len(columns)}"
        )
    report = _compile_in_best_store(plan, target, out)
    _require_room(report.local_bytes)
    rows = _rows_of_block(plan) if report.store == "shared" else THREADS
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


def _compile_in_best_store(plan: Plan, target: Target, out: Path) -> Report:
    """Write and compile network.cu, with a row's intermediate values in the first of
    `stores_to_try` that has enough room. Registers have too little if more than _MOST_SPILLED bytes
    spill. Returns the compiler's report."""
    compile_for = {"cuda": _compile_for_nvidia, "rocm": _compile_for_amd}[target.device]
    for store in stores_to_try(plan):
        rows = _rows_of_block(plan) if store == "shared" else 1
        (out / "network.cu").write_text(write_kernel(plan, THREADS, store, rows).text)
        report = compile_for(out, target, store)
        if store != "registers" or report.spilled_bytes <= _MOST_SPILLED:
            break
    return report


def stores_to_try(plan: Plan) -> list[Store]:
    """Where a row's intermediate values may lie, in the order in which a build tries the places.
    Raises NotApplicableError if no place has room for all values."""
    _require_room(plan.row_bytes)
    roomiest: Store = "shared" if _rows_of_block(plan) else "local"
    if sum(map(_unrolled_steps, plan.steps)) <= _UNROLLED and plan.size <= _MOST_STORED:
        return ["registers", roomiest]
    return [roomiest]


def _rows_of_block(plan: Plan) -> int:
    """The number of rows that a block of threads computes together. 0 if the intermediate values of
    one row do not fit into shared memory."""
    return rows_together(plan, THREADS, _MOST_SHARED)


def _require_room(size: int) -> None:
    """Raise NotApplicableError if a thread would need more than _MOST_LOCAL bytes."""
    if size > _MOST_LOCAL:
        raise NotApplicableError(
            f"a thread would need {size:,} bytes of local memory for its intermediate values, "
            f"more than {_MOST_LOCAL:,}: a network with fewer such values would fit"
        )


def _unrolled_steps(step: Step) -> int:
    """Estimate how many steps of a row's program a step of the plan becomes if all loops are
    unrolled. A sort counts as a comparison of all pairs."""
    if isinstance(step, Leaves):
        return _STEPS_OF_A_NODE * step.source.shape[0] * len(step.forest.thresholds)
    if not isinstance(step, Kernel):
        return math.prod(step.source.shape) ** 2
    inner = step.inner.steps() if isinstance(step.inner, Product | Reduction) else ()
    atoms = {atom for index in (*step.index, *inner) for atom in index.atoms()}
    return math.prod(atom.extent for atom in atoms if isinstance(atom, Variable))


# --- NVIDIA ---


def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's wheel, or else from the CUDA toolkit. Raises EngineError if there is
    neither; the message says how to install it."""
    in_wheels: list[Path] = []
    for packages in sys.path:
        in_wheels += sorted(Path(packages).glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True)
    for name in (*map(str, in_wheels), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EngineError("NVRTC, which compiles for CUDA, is not here: pip install nvidia-cuda-nvrtc")


def _compile_for_nvidia(out: Path, target: Target, store: Store) -> Report:
    """Compile network.cu to network.image and network.ptx with NVRTC. Returns its report."""
    text = (out / "network.cu").read_bytes()  # trusted
    image = compile_cuda(text, target.arch, HEADERS)
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
        occupancy=_occupancy(_arch_number(target.arch), registers, shared),
    )


def _arch_number(arch: str) -> int:
    """The number of an NVIDIA architecture: 90 for `sm_90` and for `sm_90a`."""
    return int(re.sub("[^0-9]", "", arch))


@dataclass(frozen=True)
class Image:
    """What NVRTC made of a text: code for one architecture, PTX code, and its log."""

    cubin: bytes
    ptx: bytes
    log: str


def number_in(log: str, pattern: str) -> int:
    """The number that the first group of a regular expression matches in a compiler's log. 0 if the
    log has no match."""
    match = re.search(pattern, log)
    return int(match[1]) if match else 0


def compile_cuda(text: bytes, arch: str, include: Path, fmad: bool = False) -> Image:
    """Compile a text with NVRTC for one architecture, such as `sm_90`. `include` is the folder of
    header files. With `fmad` the compiler may fuse a product and a sum to an fma, as nvcc does by
    default. Raises EngineError with the compiler's first error."""
    library = load_nvrtc()
    known = _known_archs(library)
    if _arch_number(arch) not in known:
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
        log = _fetch(library, program, "ProgramLog").decode(errors="replace")
        if status:
            errors = [line for line in log.splitlines() if "error" in line]
            message = errors[0].strip() if errors else f"code {status}"
            raise EngineError(f"NVRTC failed: {message}")
        return Image(_fetch(library, program, "CUBIN"), _fetch(library, program, "PTX"), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _occupancy(arch: int, registers: int, shared: int) -> float:
    """The occupancy of a multiprocessor (see `Report`) by NVIDIA's rules.

    Each quarter of a multiprocessor gives its registers to whole warps, in units of _UNIT, and
    shared memory is given to whole blocks. `registers` are those of a thread, and `shared` the
    bytes of a block.
    """
    registers_of_warp = max(-(-registers * _WARP // _UNIT) * _UNIT, 1)  # rounded up to units
    by_registers = 4 * _WARP * (_REGISTERS // registers_of_warp)
    by_memory = THREADS * ((_SHARED_AT_ONCE.get(arch, 228) << 10) // (shared + 1024))
    most_threads = _THREADS_AT_ONCE.get(arch, 2048)
    limits = [by_registers, by_memory, most_threads] if shared else [by_registers, most_threads]
    return min(limits) / most_threads


def _known_archs(library: ctypes.CDLL) -> list[int]:
    """The numbers of the architectures that this NVRTC knows, such as 90 for sm_90."""
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return list(archs)


def _fetch(library: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> bytes:
    """Read a result of a compiled program by the function `nvrtcGet{name}`."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{name}")(program, content)
    return content.raw


# --- AMD ---


def find_clang() -> str:
    """The path of a clang++ that is new enough and has the linker lld. Raises EngineError if there
    is none; the message says how to install it."""
    versions = range(25, _OLDEST_CLANG - 1, -1)
    for name in (*(f"clang++-{version}" for version in versions), "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "-dumpversion"], capture_output=True, errors="replace")
        version = number_in(done.stdout, r"^(\d+)")
        has_linker = shutil.which(f"ld.lld-{version}") or shutil.which("ld.lld")
        if version >= _OLDEST_CLANG and has_linker:
            return path
    raise EngineError(
        f"no clang {_OLDEST_CLANG} or later with lld, which compile for ROCm, is here: apt-get "
        "install clang-19 lld-19"
    )


def compile_hip(
    file: str, arch: str, folder: Path, include: Path, flags: Sequence[str] = ()
) -> str:
    """Compile a HIP file of a folder to network.image in that folder. Returns clang's remarks,
    which tell the registers and the memory that the kernel uses."""
    command = [
        find_clang(), "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc",
        "-nogpulib", f"--offload-arch={arch}", "-std=c++20", "-O3", *flags,
        "-fno-strict-aliasing", "-Rpass-analysis=kernel-resource-usage", "-w", "-I", str(include),
        "-o", "network.image", file,
    ]  # fmt: skip
    return run_compiler(command, folder, folder / "network.image")


def _compile_for_amd(out: Path, target: Target, store: Store) -> Report:
    """Compile network.cu to network.image with clang. Returns its report."""
    remarks = compile_hip("network.cu", target.arch, out, HEADERS, ["-ffp-contract=off"])

    def number_of(name: str) -> int:
        return number_in(remarks, rf"{name}: (\d+)")

    return Report(
        registers=number_of("VGPRs") + number_of("AGPRs"),
        spilled_bytes=4 * number_of("VGPRs Spill"),  # a register has 4 bytes
        local_bytes=number_of(r"ScratchSize \[bytes/lane\]"),
        shared_bytes=number_of(r"LDS Size \[bytes/block\]"),
        store=store,
        occupancy=number_of(r"Occupancy \[waves/SIMD\]") / _waves_at_once(target.arch),
    )


def _waves_at_once(arch: str) -> int:
    """The most waves that an AMD SIMD can hold, from the longest entry of _WAVES_AT_ONCE with which
    the architecture's name begins."""
    prefixes = [prefix for prefix in _WAVES_AT_ONCE if arch.startswith(prefix)]
    return _WAVES_AT_ONCE[max(prefixes, key=len)] if prefixes else 16
