"""The native code under sanitizers: `python -m tests.engines.native.sanitize`.

Under AddressSanitizer with UndefinedBehaviorSanitizer and LeakSanitizer, and then under
ThreadSanitizer, it runs: the runner (stress.cpp), on a small artifact with torch and on two without
torch, which are compiled first; and the shim that replaces torch, its operators (operators.cpp) and
functions (functions.cpp). libtorch is not instrumented: errors inside it are not seen, but its
calls (malloc, mutexes) and the code of this repository are checked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "engines" / "native"
SHIM = NATIVE / "shim"
SHIM_FLAGS = ("-mavx2", "-mfma", "-ffp-contract=off", "-fwrapv", "-Wno-psabi", f"-I{SHIM}")
SANITIZERS = {"address": ("address", "undefined"), "thread": ("thread",)}
# Used in the tests: this compiles three times as fast, and the sanitizers see the same memory.
QUICK = ("-O0", "-g1")
_REPORT = 66

Done = subprocess.CompletedProcess[str]


def compiler() -> str | None:
    """The path of CXX, or of g++; None if it is not installed."""
    return shutil.which(os.environ.get("CXX", "g++"))


def has_sanitizer(name: str, scratch: Path) -> bool:
    """Whether this machine compiles and starts programs with this sanitizer."""
    command = compiler()
    if command is None:
        return False
    source = scratch / "empty.cpp"
    source.write_text("int main() {}\n")
    program = scratch / f"empty-{name}"
    flags = [f"-fsanitize={part}" for part in SANITIZERS[name]]
    built = subprocess.run(
        [command, *flags, source, "-o", program], capture_output=True, check=False
    )
    return built.returncode == 0 and subprocess.run([program], check=False).returncode == 0


def compiled(sanitizer: str | None, *words: str | Path) -> None:
    """Runs the compiler; raises CalledProcessError."""
    flags = ["-std=c++17", "-Wall", "-Wextra", "-O1", "-g", "-fno-omit-frame-pointer"]
    flags += ["-fno-sanitize-recover=all"]
    flags += [f"-fsanitize={part}" for part in SANITIZERS[sanitizer]] if sanitizer else []
    subprocess.run([compiler() or "g++", *flags, *words, "-pthread"], check=True)


def build(
    out: Path,
    sanitizer: str | None = None,
    torch_free: bool = False,
    name: str = "stress",
    flags: tuple[str, ...] = (),
) -> Path:
    """Compiles the stress program, or another one of this folder, together with the runner.

    With `torch_free` it is linked with the shim, compiled with the same sanitizer, and not with
    libtorch. `flags` come after the usual ones.
    """
    program = out / f"{name}-{sanitizer or 'plain'}"
    links: tuple[str, ...] = ()
    if torch_free:
        library = ("-fPIC", "-shared", "-Wl,-soname,libsoa_shim.so", "-o", out / "libsoa_shim.so")
        small = "-DSOA_SHIM_CACHED_BYTES=4096"  # larger blocks are freed at once
        compiled(sanitizer, *SHIM_FLAGS, small, *library, *SHIM.glob("*.cpp"))
    else:
        import torch

        folder = Path(torch.__file__).parent / "lib"
        links = ("-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-lc10")
        links += (f"-Wl,-rpath,{folder}",)
    include, runner = f"-I{NATIVE / 'include'}", NATIVE / "soa_runner.cpp"
    sources = (HERE / f"{name}.cpp", runner)
    compiled(sanitizer, *flags, include, *sources, "-o", program, *links, "-ldl")
    return program


def build_operators(out: Path, sanitizer: str | None = None) -> Path:
    """Compiles the test of the shim's operators; without a cache, each block is freed at once."""
    program = out / f"operators-{sanitizer or 'plain'}"
    sources = (HERE / "operators.cpp", *SHIM.glob("*.cpp"))
    compiled(sanitizer, *SHIM_FLAGS, "-DSOA_SHIM_CACHED_BYTES=0", *sources, "-o", program)
    return program


def build_functions(out: Path, sanitizer: str | None = None, flags: tuple[str, ...] = ()) -> Path:
    """Compiles the program that measures the shim's functions; `flags` as in `build`."""
    program = out / f"functions-{sanitizer or 'plain'}"
    fast = ("-O2", "-fno-builtin")
    compiled(sanitizer, *SHIM_FLAGS, *fast, *flags, HERE / "functions.cpp", "-o", program)
    return program


def run(program: Path, *words: object) -> Done:
    """Runs a program. Exit code 0: no check failed, and no sanitizer reported anything."""
    # Without intercept_tls_get_addr=0, LeakSanitizer of gcc 12 itself sometimes crashes when it
    # reads the thread-local memory of libraries that were loaded by dlopen.
    options = {
        "ASAN_OPTIONS": f"exitcode={_REPORT}:detect_leaks=1:fast_unwind_on_malloc=0"
        ":intercept_tls_get_addr=0",
        "LSAN_OPTIONS": f"suppressions={HERE / 'leaks.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"exitcode={_REPORT}:second_deadlock_stack=1",
    }
    return subprocess.run(
        [program, *map(str, words)],
        env={**os.environ, **options, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def runs(folder: Path, sanitizer: str, files: Mapping[str, Path]) -> Iterator[tuple[str, Done]]:
    """Runs all programs; yields the name of the tested part, and the finished process."""
    yield "operators", run(build_operators(folder, sanitizer), 300, 4)
    yield "functions", run(build_functions(folder, sanitizer), "ulps", 100003)
    for engine, file in files.items():
        program = build(folder, sanitizer, torch_free=engine == "aoti-standalone")
        yield engine, run(program, file, 400)


def main() -> int:
    """Prints a line for each part under each sanitizer; 1 if one fails or cannot be built."""
    from tests.models import building, mlps

    failed = False
    with tempfile.TemporaryDirectory(prefix="soa-sanitize-") as scratch:
        folder = Path(scratch)
        print("compiling a small model ...", flush=True)
        signature = building.mlp_signature(5000)
        engines = ("aoti", "aoti-standalone", "lanes")
        built = building.build(mlps.PointwiseFirst(), signature, folder, engines)
        for name, parts in SANITIZERS.items():
            title = " and ".join(parts)
            if not has_sanitizer(name, folder):
                print(
                    f"{title}: {compiler() or 'no compiler'} cannot build and start such programs"
                )
                failed = True
                continue
            for part, done in runs(folder, name, built.files):
                last = (done.stdout.splitlines() or [""])[-1]
                print(f"{title}, {part}: exit {done.returncode}; {last}", flush=True)
                if done.returncode != 0:
                    print(done.stdout, done.stderr, sep="\n")
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
