"""The `aoti-standalone` engine: AOTInductor's native code for a process without torch.

It runs on `libsoa_shim.so` (engines/native/shim), which has the part of torch's C interface that
such code calls, and Sleef's functions. Matrix products are written out where Inductor can. Nothing
is chosen by time, and nothing depends on the processor: v3 and v4 give the same bits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch.export import ExportedProgram

from engines.aoti.engine import TARGET, AotiEngine
from engines.aoti.hoisting import hoist_linear
from engines.aoti.symbols import Symbols
from engines.base import Portable
from engines.errors import EngineError
from engines.exported import load_program
from engines.native import SHIM
from engines.target import Target

VERSION = 1
"""Of the shim that an artifact needs at least: `soa_shim_version` in shim/tensors.cpp."""

_LEVELS = ("x86-64-v3", "x86-64-v4")
_SYSTEM = ("libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")
# Of the C library's mathematics, what is exact, and so the same on every processor.
_EXACT = frozenset(
    name + suffix
    for name in (
        "sqrt", "fma", "fmod", "remainder", "floor", "ceil", "trunc", "round", "rint", "nearbyint",
        "lround", "lrint", "frexp", "ldexp", "scalbn", "modf", "fmin", "fmax", "nextafter",
    )
    for suffix in ("", "f")
)  # fmt: skip
_PROXY = "aoti_torch_proxy_executor_call_function"
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class StandaloneEngine(AotiEngine, engine="aoti-standalone", order=13, default=False):
    preset: ClassVar[Mapping[str, Any]] = {
        "aot_inductor.link_libtorch": False,
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,CPP",
        "conv_1x1_as_mm": True,
        "cpp.simdlen": 256,
    }

    def rewritten(self, program: ExportedProgram) -> Mapping[str, Any]:
        hoist_linear(program)
        return super().rewritten(program)

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """As for `aoti`; EngineError names each operator that needs torch."""
        if target.device != "cpu" or target.arch not in _LEVELS:
            allowed = " and ".join(f"cpu/{level}" for level in _LEVELS)
            raise EngineError(f"aoti-standalone builds for {allowed}; found {target}")
        if not SHIM.is_file():
            raise EngineError(f"{SHIM} is missing: install soa-pipeline on an x86-64 host")
        shim = Symbols(SHIM)
        with TemporaryDirectory() as scratch, _written_out():
            settings = {"aot_inductor.custom_op_libs": [_libraries(shim, Path(scratch))]}
            files = super().compile(source, target, {**settings, **options}, out)
        needs = _needs_torch(out, files, shim, source)
        if needs:
            for file in files:
                (out / file).unlink()
            raise EngineError(f"it cannot run without torch: {', '.join(needs)}")
        with (out / TARGET).open("a") as note:
            note.write(f"soa-shim {VERSION}\n")
        return files


def _libraries(shim: Symbols, scratch: Path) -> str:
    """What the linker gets after `-l`: the shim, for the C library's functions too.

    One thread calls nothing of OpenMP's, so `libgomp` is asked for only where something does.
    """
    (scratch / "libgomp.so").write_text("INPUT(AS_NEEDED(libgomp.so.1))\n")
    wrapped = [f"--wrap={name[7:]}" for name in sorted(shim.defined) if name.startswith("__wrap_")]
    folders = [f"-L{shlex.quote(str(folder))}" for folder in (scratch, SHIM.parent)]
    return " ".join(["soa_shim", *folders, ",".join(["-Wl", *wrapped])])


@contextmanager
def _written_out() -> Iterator[None]:
    """Products are Inductor's own where it has any, without a race against a library's."""
    from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache

    def own(choices: list[Any]) -> list[Any]:
        return [each for each in choices if not isinstance(each, ExternKernelCaller)] or choices

    cache = get_algorithm_selector_cache()
    cache.add_preprocessing_fn(own)
    try:
        yield
    finally:
        cache.preprocessing_fns.remove(own)


def _needs_torch(out: Path, files: list[str], shim: Symbols, source: Portable) -> list[str]:
    """What the library calls that neither the shim nor the system has in one form for all."""
    missing = [
        name
        for name, library in Symbols(out / files[0]).taken.items()
        if name not in shim.defined
        and library not in _SYSTEM
        and not (library == "libm.so.6" and name in _EXACT)
    ]
    if not missing:
        return []
    if _PROXY in missing:  # operators without a C function of their own
        missing.remove(_PROXY)
        text = "".join((out / file).read_text() for file in files if file.endswith(".json"))
        missing += sorted(set(re.findall(r"torch\.ops\.\w+\.(\w+)", text))) or [_PROXY]
    program = load_program(source.program)
    return [_said(name, program) for name in missing]


def _said(name: str, program: ExportedProgram) -> str:
    """A function, and the line of the model that asks for it where the program tells."""
    for node in program.graph.nodes:
        operator = re.match(r"\w+\.(\w+)", str(node.target))
        if node.op != "call_function" or operator is None:
            continue
        if re.search(rf"(^|_){operator[1].strip('_')}(_|f\d|f?$)", name):
            places = _PLACE.findall(node.meta.get("stack_trace") or "")
            return f"{name} ({':'.join(places[-1])})" if places else f"{name} ({node.target})"
    return name
