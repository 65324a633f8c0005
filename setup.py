"""The native libraries, which pyproject.toml cannot describe yet. Everything else is there."""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = (
    "include/soa_runner",
    "artifact",
    "opening",
    "row_program",
    "kernel_program",
    "device_driver",
    "threads",
    "torch_code",
    "cpu_level",
)
SHIM = ("tensors", "operators", "convolution", "product", "vector_math")
FLAGS = ["-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra"]


class Build(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """The shim is no module of Python's: a library under the name that artifacts ask for."""
        if fullname.endswith("libsoa_shim"):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)


extensions = [
    Extension(
        "engines.native._native",
        sources=["engines/native/soa_runner.cpp", "engines/native/module.cpp"],
        depends=[f"engines/native/{name}.h" for name in HEADERS],
        extra_compile_args=[*FLAGS, "-O2"],
        libraries=["dl", "pthread"],
        language="c++",
    )
]
if platform.machine() == "x86_64":
    # What runs in place of torch. -ffp-contract: the compiler has no say in the last bits.
    shim = Extension(
        "engines.native.libsoa_shim",
        sources=[f"engines/native/shim/{name}.cpp" for name in SHIM],
        depends=[f"engines/native/shim/{n}" for n in ("tensors.h", "product.h", "product.inc")],
        extra_compile_args=[*FLAGS, "-O3", "-g0", "-mavx2", "-mfma", "-ffp-contract=off"],
        extra_link_args=["-Wl,-soname,libsoa_shim.so,-Bsymbolic"],
        language="c++",
    )
    extensions.append(shim)

if __name__ == "__main__":  # packages/soa-runtime builds the same
    setup(cmdclass={"build_ext": Build}, ext_modules=extensions)
