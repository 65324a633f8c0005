"""Calls in the code that Inductor generates: `python -m benchmarks.generated [CONFIG ...]`.

It counts the calls in the generated C++: library calls by their names, and Inductor's own kernels
by the operations in their names. It does so for three programs: the captured one in our calling
convention, the same one after the engine `aoti` has rewritten it, and the bare model on contiguous
rows. Nothing is compiled or run.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from benchmarks.row_major import exported_rows
from benchmarks.zoo import asked
from engines.aoti.build import AotiBuild, settings_for
from engines.exported import load_program, quiet_torch
from engines.target import host_targets
from pipeline.config import load_config
from pipeline.config.assemble import reference_inputs, source_of
from pipeline.report.tables import new_table, show
from stages.capture import capture
from stages.model.source import build_model

# An artifact should have no more copies, and no more products that repeat their weights, than the
# code on rows.
_KERNEL = re.compile(r"\b((?:cpp|triton)_\w*?fused_\w+?_\d+)\(")
_CALL = re.compile(r"\baoti_torch_(?:cpu|cuda)_(\w+)\(")
_MOVES = ("clone", "cat", "copy", "stack", "expand", "transpose", "permute")


def main(configs: list[Path]) -> None:
    for path in configs:
        config = load_config(path)
        signature = config.signature()
        inputs = reference_inputs(config, signature)
        with tempfile.TemporaryDirectory() as place:
            captured = capture(
                build_model(source_of(config)), signature, inputs, Path(place), "none",
                precision=config.precision, nonfinite=config.reference.nonfinite,
            )  # fmt: skip
            folded = load_program(captured.program)
            with quiet_torch(), torch.no_grad():
                AotiBuild().rewritten(folded)
            model = build_model(source_of(config)).eval()
            found = {
                "as captured": calls(load_program(captured.program), Path(place)),
                "as aoti compiles it": calls(folded, Path(place)),
            }
            try:
                rows = exported_rows(model, signature, inputs)
            except Exception as error:  # torch names no type for what it cannot export
                print(f"{config.name} on rows: {str(error).splitlines()[0]}")
            else:
                found["on rows"] = calls(rows, Path(place))
        show_calls(config.name, found)


def calls(program: ExportedProgram, folder: Path) -> Counter[str]:
    """The number of calls of each function in the C++ that Inductor generates."""
    package = folder / "generated.pt2"
    settings: dict[str, Any] = settings_for(host_targets("cpu")[0], {})
    with quiet_torch(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(package),
            inductor_configs={**settings, "aot_inductor.package_cpp_only": True},
        )
    with zipfile.ZipFile(package) as archive:
        names = [name for name in archive.namelist() if name.endswith("wrapper.cpp")]
        source = "".join(archive.read(name).decode() for name in names)
    found = Counter(_CALL.findall(source))
    body = source[source.index("run_impl") :]
    for kernel in set(_KERNEL.findall(body)):
        moves = [word for word in kernel.split("_") if word in _MOVES]
        found["kernel" + (f" with {', '.join(sorted(set(moves)))}" if moves else "")] += 1
    return found


def show_calls(name: str, found: dict[str, Counter[str]]) -> None:
    table = new_table(name, "called", *found)
    for call in sorted({call for each in found.values() for call in each}):
        table.add_row(call, *(str(each[call] or "") for each in found.values()))
    show([table])


if __name__ == "__main__":
    with asked() as given:
        main(given.configs)
