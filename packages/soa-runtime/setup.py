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
    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp += "/of/sources"  # object files of ../../engines then stay in this folder


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        own = [file for file in files if not file.startswith((f"{ROOT}/", ".."))]
        super().make_release_tree(base_dir, own)
        made = shutil.ignore_patterns("__pycache__", "*.so")
        for name in FLOORS:
            shutil.copytree(Path(ROOT, name), Path(base_dir, COPY, name), ignore=made)
        for name in ("setup.py", "soa_pipeline.py"):
            shutil.copyfile(Path(ROOT, name), Path(base_dir, COPY, name))


for extension in native["extensions"]:
    extension.name = f"{LIB}.{extension.name}"
    extension.sources = [f"{ROOT}/{source}" for source in extension.sources]
    extension.depends = [f"{ROOT}/{header}" for header in extension.depends]

found = find_packages(ROOT, include=[f"{floor}{below}" for floor in FLOORS for below in ("", ".*")])
setup(
    version=version,
    packages=["soa_runtime", *(f"{LIB}.{package}" for package in found)],
    package_dir={f"{LIB}.{floor}": f"{ROOT}/{floor}" for floor in FLOORS},
    package_data={"": ["*.pyi", "py.typed"]},
    cmdclass={"build_ext": Build, "sdist": Sdist},
    ext_modules=native["extensions"],
    options=native["options"],
)
