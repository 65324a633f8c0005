"""The model.py of a Triton repository: passes Triton's requests to `serving.triton.backend`.

`pipeline deploy` copies this file. Triton's Python imports it, and must be able to import
soa-pipeline. All code that does not need Triton's interface is in serving/triton/backend.py.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # exists only inside Triton

# NVIDIA's wheel starts an isolated Python, which ignores PYTHONPATH and virtual environments.
folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]

import soa_pipeline  # noqa: E402

soa_pipeline.check_origins()

# Arrays are passed with DLPack. The stub was built for NumPy 1, and for it elements of NumPy 2 have
# 0 bytes, so its as_numpy() repeats the first element. Answers are passed as capsules of torch,
# because for capsules of NumPy the stub prints an error each time.
import numpy as np  # noqa: E402
from torch import Tensor, from_numpy  # noqa: E402
from torch.utils import dlpack  # noqa: E402

from runtime.loader import load  # noqa: E402
from runtime.process import keep_freed_memory  # noqa: E402
from serving.errors import RequestError, WrongVersionError  # noqa: E402
from serving.triton.backend import Core, Request, Values  # noqa: E402


class TritonPythonModel:
    """One instance of the model.

    Triton runs each instance in a separate process, and calls one method at a time.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside this file.

        `args`: Triton's configuration of the model, as JSON, and the device of this instance.
        Raises TritonModelException if the bundle is not the one in the configuration.
        """
        config = json.loads(args["model_config"])  # trusted
        folder = Path(__file__).resolve().parent / ".bundle"
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        facts = {key: value["string_value"] for key, value in config["parameters"].items()}
        keep_freed_memory()
        number = args["model_version"]  # other versions may be served beside it
        target = facts.get(f"target:{number}", facts["target"])
        digest = facts.get(f"digest:{number}", facts["digest"])
        self._session = load(folder, device=device, mode="production", target=target)
        loaded = self._session.origin.digest if self._session.origin else None
        if loaded != digest:
            raise pb_utils.TritonModelException(
                f"{folder} is bundle {str(loaded)[:12]}, config.pbtxt says {digest[:12]}"
            )
        self._core = Core(
            self._session,
            merge=config["max_batch_size"] > 0,
            digest=digest,
            requests=facts["requests"],
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests that Triton passes at once; returns the responses in their order."""
        answers = self._core.answer([_read_request(request) for request in requests])
        return [_make_response(answer) for answer in answers]

    def finalize(self) -> None:
        """Close the session; Triton calls this before it ends the process."""
        self._session.close()


def _read_request(request: Any) -> Request:
    """Read a request of Triton without copying its arrays.

    They become NumPy arrays, or torch tensors if any input is on a GPU.
    """
    tensors = request.inputs()
    if all(tensor.is_cpu() for tensor in tensors):
        inputs: dict[str, Values] = {
            tensor.name(): np.from_dlpack(_InputTensor(tensor)) for tensor in tensors
        }
    else:
        inputs = {tensor.name(): dlpack.from_dlpack(tensor.to_dlpack()) for tensor in tensors}
    digest, form = _parse_parameters(request.parameters())
    return Request(inputs, digest, form)


class _InputTensor:
    """A tensor of a request with the methods that NumPy calls.

    The stub's own method raises an error for NumPy's arguments, and NumPy then has to call it a
    second time, for every tensor.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: object) -> Any:
        """Return a capsule of the tensor. The options, such as a stream, mean nothing on a CPU."""
        return self._tensor.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._tensor.__dlpack_device__()
        return device


@functools.lru_cache(maxsize=64)
def _parse_parameters(parameters: str) -> tuple[str | None, str | None]:
    """Return the bundle's digest and the form that a request asks for; None if it asks for none.

    `parameters`: the request's parameters, as JSON. Cached, because most requests have the same.
    """
    named: dict[str, object] = json.loads(parameters or "{}")  # trusted
    digest, form = named.get("digest"), named.get("requests")
    return None if digest is None else str(digest), None if form is None else str(form)


def _make_response(answer: dict[str, Any] | RequestError) -> Any:
    """Convert an answer, or an error, to a response of Triton's Python backend."""
    if isinstance(answer, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
        if isinstance(answer, WrongVersionError):
            code = pb_utils.TritonError.NOT_FOUND
        return pb_utils.InferenceResponse([], pb_utils.TritonError(str(answer), code))
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor.from_dlpack(name, _to_dlpack(values)) for name, values in answer.items()]
    )


def _to_dlpack(values: Values) -> Any:
    """Return a DLPack capsule of an array, without copying it.

    An empty array gets the strides that Triton expects: those of a contiguous array of its shape.
    torch would count each extent as at least 1.
    """
    tensor = values if isinstance(values, Tensor) else from_numpy(values)
    if not tensor.numel():
        strides = [math.prod(values.shape[i + 1 :]) for i in range(values.ndim)]
        tensor = tensor.as_strided(tuple(values.shape), strides)
    return dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]
