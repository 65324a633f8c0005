"""Build stress.cpp with the runner and run it: `python -m tests.engines.native.sanitize`.

Under AddressSanitizer with UndefinedBehaviorSanitizer and LeakSanitizer, then under
ThreadSanitizer, on a small artifact that is compiled first. libtorch is not instrumented: what
happens inside it is not seen, what it calls (malloc, mutexes) and the runner's own code are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "engines" / "native"
SANITIZERS = {"address": ("address", "undefined"), "thread": ("thread",)}
_REPORT = 66


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def has_sanitizer(name: str, scratch: Path) -> bool:
    """Whether this machine's compiler links programs with it, and the kernel lets them start."""
    found = compiler()
    if found is None:
        return False
    source = scratch / "empty.cpp"
    source.write_text("int main() {}\n")
    program = scratch / f"empty-{name}"
    flags = [f"-fsanitize={part}" for part in SANITIZERS[name]]
    built = subprocess.run([found, *flags, source, "-o", program], capture_output=True, check=False)
    return built.returncode == 0 and subprocess.run([program], check=False).returncode == 0


def build(out: Path, sanitizer: str | None = None, torch_free: bool = False) -> Path:
    """The stress program and the runner, compiled as one; raises CalledProcessError.

    With `torch_free`, beside the shim, which is compiled alike, and without libtorch.
    """
    program = out / f"stress-{sanitizer or 'plain'}"
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    flags += [f"-fsanitize={part}" for part in SANITIZERS[sanitizer]] if sanitizer else []
    common: list[str | Path] = [compiler() or "g++", "-std=c++17", "-Wall", "-Wextra", *flags]
    if torch_free:
        made = out / "libsoa_shim.so"
        arithmetic = ("-mavx2", "-mfma", "-ffp-contract=off", "-DSOA_SHIM_CACHED_BYTES=4096")
        library = ("-fPIC", "-shared", "-Wl,-soname,libsoa_shim.so", "-o", made)
        sources = NATIVE.joinpath("shim").glob("*.cpp")
        subprocess.run([*common, *arithmetic, *library, *sources], check=True)
        links: tuple[str, ...] = ()
    else:
        import torch

        folder = Path(torch.__file__).parent / "lib"
        links = ("-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-lc10")
        links += (f"-Wl,-rpath,{folder}",)
    runner = (f"-I{NATIVE}", HERE / "stress.cpp", NATIVE / "soa_runner.cpp", "-o", program)
    subprocess.run([*common, *runner, *links, "-ldl", "-pthread"], check=True)
    return program


def run(program: Path, library: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    """Exit code 0 only if every promise was kept and no sanitizer has reported anything."""
    # Without intercept_tls_get_addr=0, gcc 12's LeakSanitizer itself crashes now and then, while
    # it walks the thread-local memory of libraries that were loaded by dlopen.
    options = {
        "ASAN_OPTIONS": f"exitcode={_REPORT}:detect_leaks=1:fast_unwind_on_malloc=0"
        ":intercept_tls_get_addr=0",
        "LSAN_OPTIONS": f"suppressions={HERE / 'leaks.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"exitcode={_REPORT}:second_deadlock_stack=1",
    }
    return subprocess.run(
        [program, library, str(rounds)],
        env={**os.environ, **options, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def main() -> int:
    from tests.models import building, mlps

    failed = False
    with tempfile.TemporaryDirectory(prefix="soa-sanitize-") as scratch:
        folder = Path(scratch)
        print("compiling a small model ...", flush=True)
        signature = building.mlp_signature(5000)
        engines = ("aoti", "aoti-standalone")
        made = building.build(mlps.PointwiseFirst(), signature, folder, engines)
        for name, parts in SANITIZERS.items():
            title = " and ".join(parts)
            if not has_sanitizer(name, folder):
                print(
                    f"{title}: {compiler() or 'no compiler'} cannot build and start such programs"
                )
                failed = True
                continue
            for engine in engines:
                program = build(folder, name, torch_free=engine == "aoti-standalone")
                done = run(program, made.files[engine], rounds=400)
                last = (done.stdout.splitlines() or [""])[-1]
                print(f"{title}, {engine}: exit {done.returncode}; {last}")
                if done.returncode != 0:
                    print(done.stdout, done.stderr, sep="\n")
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
