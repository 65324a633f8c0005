"""The repository's own modules as `soa_runtime/lib`: no copy of them is kept, and none of their
names is taken in site-packages, so that soa-pipeline may be installed beside it."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

LIB = "soa_runtime.lib"
FLOORS = ("soa", "engines", "registry", "runtime")
ROOT = "../.."

native = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))


class Build(native["Build"]):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp += "/of/sources"  # objects of ../../engines then stay inside it


for extension in native["extensions"]:
    extension.name = f"{LIB}.{extension.name}"
    extension.sources = [f"{ROOT}/{source}" for source in extension.sources]
    extension.depends = [f"{ROOT}/{header}" for header in extension.depends]

found = find_packages(ROOT, include=[f"{floor}{below}" for floor in FLOORS for below in ("", ".*")])
setup(
    packages=["soa_runtime", *(f"{LIB}.{package}" for package in found)],
    package_dir={f"{LIB}.{floor}": f"{ROOT}/{floor}" for floor in FLOORS},
    package_data={"": ["*.pyi", "py.typed"]},
    cmdclass={"build_ext": Build},
    ext_modules=native["extensions"],
)
