"""Builds a network's C++ header and a library that includes it, which the pipeline validates.

The library is compiled as a user's code may be: C++17, for this host's level, without flags for
arithmetic. A header for GPUs is compiled for several of them, too; no GPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from engines.base import FACTS, Portable
from engines.errors import EngineError
from engines.lanes.compiling.compilers import compiler, family, machine_flags, run_compiler
from engines.lanes.compiling.devices import compile_cuda, compile_hip, number_in, stores_to_try
from engines.lanes.planning import Language, make_plan, make_row_program, members_of, write_header
from engines.target import Target

HEADER = "network.h"
_NVIDIA = ("sm_75", "sm_80", "sm_90", "sm_100")
_AMD = ("gfx90a", "gfx942", "gfx1100")
_KERNEL = f"""\
#include "{HEADER}"
extern "C" __attribute__((global)) void soa_rows(soa_network::Columns of, long n) {{
  soa_network::thread_rows(of, n);
}}
"""


def build_header(source: Portable, target: Target, out: Path) -> list[str]:
    """Build for `Engine.compile`. Writes network.so, network.h, network.cpp, target.txt and
    facts.json. Raises EngineError if `source` has no signature."""
    if source.signature is None:
        raise EngineError("a header needs the signature of its columns")
    plan = make_plan(make_row_program(source.program))
    store = stores_to_try(plan)[0]
    if store == "shared":  # the user's code computes a row in one thread
        store = "local"
    language: Language = target.arch  # type: ignore[assignment]
    header = write_header(plan, members_of(source.signature), language, store)
    (out / HEADER).write_text(header.text)
    (out / "network.cpp").write_text(header.library)
    facts = {} if language == "cpp" else {"registers": _registers_by_arch(out, language)}
    host = Target.parse("cpu")
    command = [
        *compiler(family(host)), "-O2", "-std=c++17", "-fPIC", *machine_flags(host), "-shared",
        "-o", "network.so", "network.cpp",
    ]  # fmt: skip
    run_compiler(command, out, out / "network.so")
    (out / "target.txt").write_text(f"soa-target 1\n{host}\n")
    (out / FACTS).write_text(json.dumps(facts))
    return ["network.so", HEADER, "network.cpp", "target.txt", FACTS]


def passes_self_test(text: str, name: str) -> bool:
    """Compile a header's text with this host's compiler, and run the self-test in its namespace
    `name`. True if no value had other bits. Raises EngineError if it does not compile."""
    host = Target.parse("cpu")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / HEADER).write_text(text)
        program = f'#include "{HEADER}"\nint main() {{ return {name}::self_test() != 0; }}\n'
        (folder / "main.cpp").write_text(program)
        command = [*compiler(family(host)), "-O2", "-std=c++17", *machine_flags(host)]
        run_compiler([*command, "-o", "main", "main.cpp"], folder, folder / "main")
        return subprocess.run([str(folder / "main")], check=False).returncode == 0


def _registers_by_arch(folder: Path, language: Language) -> dict[str, int]:
    """Compile a kernel that includes the header in `folder`, for several GPUs. Returns the number
    of registers of a thread for each architecture."""
    registers: dict[str, int] = {}
    if language == "cuda":
        for arch in _NVIDIA:
            # `fmad` as nvcc sets it by default: the header must give the same bits.
            compiled = compile_cuda(_KERNEL.encode(), arch, folder, fmad=True)
            registers[arch] = number_in(compiled.log, r"Used (\d+) registers")
        return registers
    with tempfile.TemporaryDirectory() as scratch:
        scratch_folder = Path(scratch)
        (scratch_folder / "kernel.hip").write_text(_KERNEL)
        for arch in _AMD:
            log = compile_hip("kernel.hip", arch, scratch_folder, folder)
            registers[arch] = number_in(log, r"VGPRs: (\d+)")
    return registers
