"""The native libraries, which pyproject.toml cannot describe yet. Everything else is there."""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = ("soa_runner", "artifact", "worker_pool", "cpu_level")
SHIM = "engines.native.libsoa_shim"


class Build(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """The shim is no module of Python's: a library under the name that artifacts ask for."""
        if fullname.endswith("libsoa_shim"):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)


runner = Extension(
    "engines.native._native",
    sources=["engines/native/soa_runner.cpp", "engines/native/module.cpp"],
    depends=[f"engines/native/{name}.h" for name in HEADERS],
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
    libraries=["dl", "pthread"],
    language="c++",
)
# What artifacts of `aoti-standalone` run on in place of torch; -ffp-contract: no bit is the compiler's choice.
shim = Extension(
    SHIM,
    sources=[f"engines/native/shim/{n}.cpp" for n in ("tensors", "operators", "convolution", "product", "vector_math")],
    depends=[f"engines/native/shim/{n}" for n in ("tensors.h", "product.h", "product.inc")],
    extra_compile_args=[
        "-std=c++17", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra",
    ],
    extra_link_args=["-Wl,-soname,libsoa_shim.so,-Bsymbolic"],
    language="c++",
)

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[runner, *([shim] if platform.machine() == "x86_64" else [])],
)
