"""`python by_driver.py PACKAGE`: runs a version on a GPU for which torch is not built.

Each line of the input is [CASE, REF, environment] as JSON. For each line, a forked child prints its
result as JSON. PACKAGE is pipeline or soa_runtime.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

package = importlib.import_module(sys.argv[1])
ref = ""
FEATURES = np.random.default_rng(5).normal(size=(33, 6)).astype(np.float32)


class Exporter:
    """Exports GPU memory as CuPy does."""

    def __init__(self, address: int, nbytes: int) -> None:
        data = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = data


def opened(**options: Any) -> Any:
    """A session on the GPU."""
    return package.load(ref, device="cuda", **options)


def copied_to_gpu(collection: Any, stream: int) -> tuple[int, np.ndarray[Any, Any]]:
    """Copies a collection of the CPU to the device; returns the address there, and its bytes."""
    from tests.models import gpu

    values = collection.spans()[0].numpy()
    address = gpu.room(values)
    gpu.copy_in(address, values, stream)
    return address, values


def runs() -> dict[str, Any]:
    """Runs on memory of the GPU; also what is refused there."""
    from tests.models import gpu

    gpu.turn_to(0)
    session, stream = opened(), gpu.new_stream()
    jets, tags = session.layout("jets"), session.layout("tags")
    n, columns = len(FEATURES), dict(zip("abcdef", FEATURES.T, strict=True))
    x, values = copied_to_gpu(package.Collection.from_arrays(jets, columns), stream)
    y, answers = copied_to_gpu(package.Collection(tags, n), stream)
    inputs = package.Collection.wrap(jets, x, n, nbytes=values.nbytes, device="cuda:0")
    outputs = package.Collection.wrap(tags, Exporter(y, answers.nbytes), n)
    binding = session.bind(inputs, outputs)
    binding(stream=stream)
    gpu.copy_out(answers, y, stream)
    gpu.synchronise(stream)
    copy = package.Collection.wrap(tags, answers, n)
    # An address of the host, aligned as a collection must be, that claims to be on the GPU.
    of_host = package.Collection.wrap(
        jets, values.ctypes.data & ~127, n, nbytes=values.nbytes, device="cuda:0"
    )
    return {
        "target": session.origin.target,
        "engine": session.origin.engine,
        "given": FEATURES.tolist(),
        "answers": np.stack([copy[name] for name in "xyz"], 1).tolist(),
        "torch": "torch" in sys.modules,
        "refused": {
            "allocate": refusal(lambda: session.collection("jets", 3)),
            "no stream": refusal(binding),
            "graph": refusal(lambda: session.bind(inputs, outputs, graph=True)),
            "memory of the host": refusal(lambda: session.bind(of_host, outputs)),
            "test mode": refusal(lambda: opened(mode="test")),
            "another GPU": refusal(lambda: package.load(ref, device="cuda:1")),
        },
    }


def wherever() -> dict[str, Any]:
    """Runs on the CPU, in a session for all devices."""
    session = package.load(ref, device="auto")
    columns = dict(zip("abcdef", FEATURES.T, strict=True))
    jets = package.Collection.from_arrays(session.layout("jets"), columns)
    tags = package.Collection(session.layout("tags"), jets.n)
    session.run(jets, tags)
    answers = np.stack([tags[name] for name in "xyz"], 1).tolist()
    return {"given": FEATURES.tolist(), "answers": answers}


def loads() -> dict[str, Any]:
    return {"engine": opened().origin.engine}


def refusal(call: Callable[[], object]) -> list[str]:
    """The code and the message of the error; an empty list if there is none."""
    try:
        call()
    except package.SoaPipelineError as error:
        return [error.code, str(error)]
    return []


CASES: dict[str, Callable[[], Any]] = {"runs": runs, "loads": loads, "wherever": wherever}


def answer(case: str) -> Any:
    """The result of a case, or the code and the message of its error."""
    try:
        return CASES[case]()
    except package.SoaPipelineError as error:
        return {"code": error.code, "why": str(error)}


if sys.argv[1] == "pipeline":
    import pipeline.loading  # noqa: F401 -- and torch, once for all children
    import stages.judging.emulate  # noqa: F401
for line in sys.stdin:
    case, ref, environment = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        print(json.dumps(answer(case)), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        print(json.dumps(f"the child ended with {status}"), flush=True)
