"""The native runner, which pyproject.toml cannot describe yet. Everything else is there."""

from setuptools import Extension, setup

HEADERS = ("soa_runner", "artifact", "worker_pool", "cpu_level")

setup(
    ext_modules=[
        Extension(
            "engines.native._native",
            sources=["engines/native/soa_runner.cpp", "engines/native/module.cpp"],
            depends=[f"engines/native/{name}.h" for name in HEADERS],
            extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
            libraries=["dl", "pthread"],
            language="c++",
        )
    ]
)
