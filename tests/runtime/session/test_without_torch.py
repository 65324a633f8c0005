"""Memory, signatures and native calls need no torch, unless callers pass objects of torch."""

from __future__ import annotations

import subprocess
import sys

COLUMNS = """
import sys
import numpy as np
import soa, runtime.session, engines.native, soa.memory.from_libraries, soa.signature_lines
import runtime.loader, runtime.opening.lookup, runtime.opening.target_choice
import runtime.opening.artifact, runtime.devices.scheduler, runtime.versions.live
from engines.native import NativeExecutable, PreparedCall, run_many
from engines.base import Executable, Prepared
from runtime.session import Binding, Session
from soa import Block, Collection, Layout, RowRange, Signature, column, eigen, scalar

layout = Layout([column("p", "float32"), eigen("m", "float32", 2, 3), scalar("run", "uint32")])
tags = Layout([column("t", "float32")], 8, "columns")
signature = Signature.build(
    {"jets": layout, "tags": tags},
    [Block("x", "jets", ("p",))],
    [Block("y", "tags", ("t",))],
    {"n": RowRange(0, 64)},
)
jets, out = Collection(layout, 5, capacity=40), Collection(tags, 5)
jets["p"][:] = np.arange(5)
jets["m"] = 1.5
assert jets.component("m", 1).tolist()[:5] == [1.5] * 5
assert jets["p"].sum() == 10 and jets["m"][4].sum() == 9 and jets.to("cpu")["p"][4] == 4
wrapped = Collection.wrap(Layout([column("p", "float32")]), jets.span("p").raw().numpy(), 5)
assert Collection.from_arrays(layout, {n: jets[n] for n in ("p", "m", "run")})["p"][3] == 3

class Doubling(Executable):  # what a native executable is to a binding
    def __call__(self, arguments):
        raise AssertionError
    def prepare(self, spans):
        class Call(Prepared):
            def run(self, stream=0):
                spans[2].numpy()[:] = 2 * spans[1].numpy()[0, : spans[2].shape[0]]
            def replace(self, changes):
                for i, span in changes.items():
                    spans[i] = span
        return Call()

session = Session(signature, Doubling())
binding = session.bind(jets, out)
binding()
assert out["t"].tolist() == [0, 2, 4, 6, 8]
out["t"][:] = -1
binding(2)
assert out["t"].tolist() == [0, 2, -1, -1, -1]
assert session.collection("jets", 3).device == "cpu"
assert "torch" not in sys.modules, "torch was imported"
"""


def test_columns_and_bound_calls_import_no_torch() -> None:
    process = subprocess.run([sys.executable, "-c", COLUMNS], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
