"""The native libraries, which pyproject.toml cannot describe yet. Everything else is there."""

from pathlib import Path
from sysconfig import get_platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = (
    "include/soa_runner",
    "common/artifact",
    "common/opening",
    "common/row_program",
    "common/kernel_program",
    "common/device_driver",
    "common/threads",
    "common/aoti_code",
    "common/counting",
    "common/cpu_level",
    "common/float_mode",
)
SHIM = ("tensors", "operators", "convolution", "product", "vector_math")
SHIM_HEADERS = ("order.h", "tensors.h", "product.h", "product.inc")
FLAGS = ["-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]


class Build(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        """The shim is no module of Python's: a library under the name that artifacts ask for."""
        if fullname.endswith("libsoa_shim"):
            return f"{fullname.replace('.', '/')}.so"
        return super().get_ext_filename(fullname)

    def run(self) -> None:
        super().run()
        if self.inplace:  # Python would take one that an older setup.py made, by its suffix
            for old in Path("engines/native").glob("_native.cpython-*.so"):
                old.unlink()


extensions = [
    Extension(
        "engines.native._native",
        sources=["engines/native/soa_runner.cpp", "engines/native/module.cpp"],
        depends=[f"engines/native/{name}.h" for name in HEADERS],
        extra_compile_args=[*FLAGS, "-O3"],
        libraries=["dl", "pthread"],
        py_limited_api=True,  # as module.cpp says
        language="c++",
    )
]
if get_platform().endswith("x86_64"):  # what is built for: not always this host
    # What runs in place of torch. -ffp-contract: the compiler has no say in the last bits. -fwrapv:
    # the integers of vectors wrap around.
    shim = Extension(
        "engines.native.libsoa_shim",
        sources=[f"engines/native/shim/{name}.cpp" for name in SHIM],
        depends=[
            *(f"engines/native/shim/{n}" for n in SHIM_HEADERS),
            *(f"engines/lanes/headers/{n}.h" for n in ("prelude", "lanes", "functions")),
        ],
        extra_compile_args=[
            *FLAGS,
            "-O3",
            "-g0",
            "-mavx2",
            "-mfma",
            "-ffp-contract=off",
            "-fwrapv",
        ],
        extra_link_args=["-Wl,-soname,libsoa_shim.so,-Bsymbolic"],
        language="c++",
    )
    extensions.append(shim)

options = {"bdist_wheel": {"py_limited_api": "cp311"}}  # one wheel for 3.11 and all that come after

if __name__ == "__main__":  # packages/soa-runtime builds the same
    setup(cmdclass={"build_ext": Build}, ext_modules=extensions, options=options)
