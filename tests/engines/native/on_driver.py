"""`python on_driver.py KERNEL CASE`: runs a kernel on the CUDA driver that is emulated on the CPU.

Prints the result of a case as JSON. SOA_EMULATED and LD_LIBRARY_PATH lead to the driver.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import RunError
from engines.native import NativeExecutable
from tests.models.gpu import copy_in, copy_out, new_stream, room, synchronise, turn_to

ROWS, PITCH, FEATURES, ANSWERS = 131, 160, 6, 3
kernel = Path(sys.argv[1])


def inputs() -> np.ndarray[Any, Any]:
    """Normal numbers in the rows, NaN behind them."""
    features = np.full((FEATURES, PITCH), np.nan, np.float32)
    features[:, :ROWS] = np.random.default_rng(3).normal(size=(FEATURES, ROWS))
    return features


def outputs() -> np.ndarray[Any, Any]:
    """Answers that nothing has written yet: -7."""
    return np.full((ANSWERS, PITCH), -7.0, np.float32)


def spans(x: int, y: int, n: int = ROWS, pitch: int = PITCH) -> list[Any]:
    """The arguments in the order of the signature: rows, inputs, outputs."""
    return [
        (0, "float32", (n, 0)),
        (x, "float32", (FEATURES, pitch)),
        (y, "float32", (ANSWERS, pitch)),
    ]


def opened(device: int = 0) -> NativeExecutable:
    """The kernel, opened on a device."""
    return NativeExecutable(kernel, f"cuda:{device}")


def answers(n: int = ROWS, pitch: int = PITCH, stream_of_copy: str = "same") -> list[list[float]]:
    """The answers to n rows; with another stream, the inputs may come too late."""
    turn_to(0)
    model, x, y = opened(), room(inputs()), room(outputs())
    stream, copied = new_stream(), outputs()
    copy_in(x, inputs(), stream if stream_of_copy == "same" else new_stream())
    copy_in(y, outputs(), stream)
    model.prepare(spans(x, y, n, pitch)).run(stream)
    copy_out(copied, y, stream)
    assert (copied == -7.0).all()  # nothing runs before `synchronise`
    synchronise(stream)
    rows: list[list[float]] = copied.tolist()
    return rows


def several_streams() -> list[bool]:
    """Four streams, synchronised in another order, give the answers of one stream."""
    turn_to(0)
    model, x = opened(), room(inputs())
    first = new_stream()
    copy_in(x, inputs(), first)
    synchronise(first)
    places = [(new_stream(), room(outputs()), outputs()) for _ in range(4)]
    for k, (stream, y, copied) in enumerate(places):
        copy_in(y, outputs(), stream)
        model.prepare(spans(x, y, ROWS - k)).run(stream)
        copy_out(copied, y, stream)
    for stream, _, _ in reversed(places):
        synchronise(stream)
    results = [copied for _, _, copied in places]
    whole = results[0]
    right: list[bool] = []
    for k, copied in enumerate(results):
        n = ROWS - k
        right.append(bool((copied[:, :n] == whole[:, :n]).all() and (copied[:, n:] == -7).all()))
    return right


def on_the_other_device() -> bool:
    """Whether device 1 writes all rows and nothing behind them."""
    turn_to(1)
    x, y, stream, copied = room(inputs()), room(outputs()), new_stream(), outputs()
    copy_in(x, inputs(), stream)
    copy_in(y, outputs(), stream)
    opened(1).prepare(spans(x, y)).run(stream)
    copy_out(copied, y, stream)
    synchronise(stream)
    return bool(np.isfinite(copied).all() and (copied[:, ROWS:] == -7).all())


def memory_of_another_device() -> None:
    """Memory of device 1 for the kernel on device 0, which must be refused."""
    turn_to(1)
    x, y = room(inputs()), room(outputs())
    opened(0).prepare(spans(x, y))


def memory_of_the_host() -> None:
    """An aligned address of the host, which must be refused."""
    turn_to(0)
    opened().prepare(spans(inputs().ctypes.data & ~127, room(outputs())))


def stream_of_another_context() -> None:
    """A stream of device 1 for a call on device 0, which must be refused."""
    turn_to(1)
    alien = new_stream()
    turn_to(0)
    opened().prepare(spans(room(inputs()), room(outputs()))).run(alien)


def opens() -> None:
    """It must not raise."""
    opened()


def runs() -> None:
    """Three runs of one call on one stream."""
    turn_to(0)
    stream, call = new_stream(), opened().prepare(spans(room(inputs()), room(outputs())))
    for _ in range(3):
        call.run(stream)
    synchronise(stream)


CASES: dict[str, Callable[[], Any]] = {
    "answers": answers,
    "no rows": lambda: answers(0),
    "another pitch": lambda: answers(pitch=PITCH - 8),
    "beyond the end": lambda: answers(pitch=PITCH + 4096),
    "no order": lambda: answers(stream_of_copy="another"),
    "several streams": several_streams,
    "on the other device": on_the_other_device,
    "no such device": lambda: opened(7),
    "memory of another device": memory_of_another_device,
    "memory of the host": memory_of_the_host,
    "stream of another context": stream_of_another_context,
    "opens": opens,
    "runs": runs,
}
try:
    print(json.dumps({"found": CASES[sys.argv[2]]()}))
except RunError as error:
    print(json.dumps({"refused": str(error)}))
