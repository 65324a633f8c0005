"""How `aoti-standalone` compiles: AOTInductor's native code for a process without torch.

The code calls `libsoa_shim.so` (engines/native/shim), which has the necessary part of torch's C
interface and Sleef's functions. Inductor generates the code of matrix products if it can. No choice
depends on a time measurement or on the processor: v3 and v4 give the same bits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch.export import ExportedProgram

from engines.aoti.build import TARGET, AotiBuild
from engines.aoti.hoisting import hoist_linear, replace_pointwise_convolutions
from engines.base import Portable
from engines.errors import EngineError, NotApplicableError
from engines.exported import load_program, with_model_lines
from engines.native import SHIM
from engines.target import Target

VERSION = 1
"""The least shim version that an artifact needs; see `soa_shim_version` in shim/tensors.cpp."""

_LEVELS = ("x86-64-v3", "x86-64-v4")
# Functions of the C library whose last bits depend on the processor. The shim replaces them; a
# function that the shim does not have is an error of the linker.
_FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf",
    "erfc", "exp", "exp10", "exp2", "expm1", "hypot", "j0", "j1", "lgamma", "log", "log10",
    "log1p", "log2", "pow", "sin", "sincos", "sinh", "tan", "tanh", "tgamma", "y0", "y1",
)  # fmt: skip
_MISSING_FUNCTION = re.compile(r"undefined (?:reference to [`']|symbol: )(?:__wrap_)?(\w+)")
# Functions by which torch calls an operator that has no C function.
_DISPATCHER = ("aoti_torch_proxy_executor_call_function", "aoti_torch_new_uninitialized_tensor")


class StandaloneBuild(AotiBuild):
    """Compiles for `aoti-standalone`: the library is linked with the shim instead of torch."""

    preset: ClassVar[Mapping[str, Any]] = {
        "aot_inductor.link_libtorch": False,
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,CPP",
        "cpp.simdlen": 256,
    }

    def rewrite(self, program: ExportedProgram) -> Mapping[str, Any]:
        hoist_linear(program)
        replace_pointwise_convolutions(program)
        return super().rewrite(program)

    def compile(
        self, source: Portable, target: Target, options: Mapping[str, Any], out: Path
    ) -> list[str]:
        """Compile as `aoti` does, with the shim's version in the target file.

        Raises NotApplicableError if the code needs torch, or for a target that is not supported.
        The message names the operators that need torch and their lines in the model.
        """
        if target.device != "cpu" or target.arch not in _LEVELS:
            allowed = " and ".join(f"cpu/{level}" for level in _LEVELS)
            raise NotApplicableError(f"aoti-standalone builds for {allowed}; found {target}")
        if not SHIM.is_file():
            raise EngineError(f"{SHIM} is missing: install soa-pipeline on an x86-64 host")
        dispatched: list[str] = []
        try:
            with TemporaryDirectory() as scratch, _generated_products(), _recording(dispatched):
                settings = {"aot_inductor.custom_op_libs": [_write_linker_words(Path(scratch))]}
                files = super().compile(source, target, {**settings, **options}, out)
        except Exception as error:  # torch has no exception type for errors of the linker
            missing = list(dict.fromkeys(_MISSING_FUNCTION.findall(str(error))))
            if not missing:
                raise
            needed = _describe_need_of_torch(dispatched, missing, source.program)
            raise NotApplicableError(f"it cannot run without torch: {needed}") from error
        with (out / TARGET).open("a") as target_file:
            target_file.write(f"soa-shim {VERSION}\n")
        return files


def _describe_need_of_torch(dispatched: Sequence[str], missing: Sequence[str], file: Path) -> str:
    """The part of an error message that names what the code needs of torch: the operators without a
    C function (`dispatched`, which have their lines already), and the functions that the linker did
    not find, each with its line in the model."""
    program = load_program(file)
    functions = [_with_line(name, program) for name in missing if name not in _DISPATCHER]
    return ", ".join(dict.fromkeys([*dispatched, *functions]))


def _write_linker_words(scratch: Path) -> str:
    """Make the text that follows the linker's `-l`. It links the shim, which also replaces
    `_FUNCTIONS` and OpenMP.

    Writes a `libgomp.so` into `scratch`, so that the system's OpenMP is not linked: the code uses
    one thread. The folder must exist until the linker has run. A function that neither the shim nor
    the system has becomes an error of the linker.
    """
    (scratch / "libgomp.so").write_text("INPUT(-lsoa_shim)\n")
    folders = [f"-L{shlex.quote(str(folder))}" for folder in (scratch, SHIM.parent)]
    wrapped = [f"--wrap={name}{suffix}" for name in _FUNCTIONS for suffix in ("", "f")]
    return " ".join(["soa_shim", *folders, ",".join(["-Wl,-z,defs,-z,noexecstack", *wrapped])])


@contextmanager
def _generated_products() -> Iterator[None]:
    """Inside the block, Inductor generates the code of a matrix product wherever it can, and does
    not compare its speed with that of a library."""
    from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache

    def without_libraries(choices: list[Any]) -> list[Any]:
        generated = [choice for choice in choices if not isinstance(choice, ExternKernelCaller)]
        return generated or choices

    cache = get_algorithm_selector_cache()
    cache.add_preprocessing_fn(without_libraries)
    try:
        yield
    finally:
        cache.preprocessing_fns.remove(without_libraries)


@contextmanager
def _recording(dispatched: list[str]) -> Iterator[None]:
    """Inside the block, each operator without a C function that Inductor compiles is added to
    `dispatched`, with its line in the model."""
    from torch._inductor.ir import FallbackKernel

    original: Any = FallbackKernel.export_extern_kernel_node

    def record_and_export(kernel: Any) -> Any:
        dispatched.append(with_model_lines(str(kernel.op_overload), kernel.get_stack_traces()))
        return original(kernel)

    FallbackKernel.export_extern_kernel_node = record_and_export  # type: ignore[method-assign]
    try:
        yield
    finally:
        FallbackKernel.export_extern_kernel_node = original  # type: ignore[method-assign]


def _with_line(name: str, program: ExportedProgram) -> str:
    """The name of a C function with the line of the model that needs it, if that line can be found.

    It is the line of the first operator whose name is a part of the function's name: `addmm` for
    `aoti_torch_cpu_addmm_out`, `exp` for `expf` and `Sleef_expf8_u10`.
    """
    for node in program.graph.nodes:
        operator = re.match(r"\w+\.(\w+)", str(node.target))
        if node.op != "call_function" or operator is None:
            continue
        if re.search(rf"(^|_){operator[1].strip('_')}(_|[fd]\d|f?$)", name):
            return with_model_lines(name, [node.meta.get("stack_trace") or ""])
    return name
