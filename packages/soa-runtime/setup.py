"""Packs the repository's own modules as `soa_runtime/lib`.

The repository holds no copy of them, and their names are not used in site-packages, so soa-pipeline
may be installed beside it.
"""

import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

LIB = "soa_runtime.lib"
FLOORS = ("soa", "engines", "registry", "runtime")
HERE = Path(__file__).parent
COPY = "repository"  # in an sdist, the folder with the modules
ROOT = COPY if (HERE / COPY).is_dir() else "../.."

native = runpy.run_path(str(HERE / ROOT / "setup.py"))
version = runpy.run_path(str(HERE / ROOT / "soa_pipeline.py"))["__version__"]


class Build(native["Build"]):
    """Builds the native module in a folder of its own."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp += "/of/sources"  # object files of ../../engines then stay in this folder


class Sdist(sdist):
    """An sdist with a copy of the repository's modules in the folder `COPY`."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        own = [file for file in files if not file.startswith((f"{ROOT}/", ".."))]
        super().make_release_tree(base_dir, own)
        build_products = shutil.ignore_patterns("__pycache__", "*.so")
        for name in FLOORS:
            shutil.copytree(Path(ROOT, name), Path(base_dir, COPY, name), ignore=build_products)
        for name in ("setup.py", "soa_pipeline.py"):
            shutil.copyfile(Path(ROOT, name), Path(base_dir, COPY, name))


for extension in native["extensions"]:
    extension.name = f"{LIB}.{extension.name}"
    extension.sources = [f"{ROOT}/{source}" for source in extension.sources]
    extension.depends = [f"{ROOT}/{header}" for header in extension.depends]

packages = find_packages(
    ROOT, include=[f"{floor}{below}" for floor in FLOORS for below in ("", ".*")]
)
setup(
    version=version,
    packages=["soa_runtime", *(f"{LIB}.{package}" for package in packages)],
    package_dir={f"{LIB}.{floor}": f"{ROOT}/{floor}" for floor in FLOORS},
    package_data={"": ["*.pyi", "py.typed"]},
    cmdclass={"build_ext": Build, "sdist": Sdist},
    ext_modules=native["extensions"],
    options=native["options"],
)
