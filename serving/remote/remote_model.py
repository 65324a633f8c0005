"""The executable of a remote session: it knows one server, and the form of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engines.base import Executable
from engines.processes import OwnProcess
from runtime.opening import Opened
from serving.client import HEADERS, RemoteOptions
from serving.errors import AnswerError, RefusedError, ServingError, VersionMismatchError
from serving.remote.request_codec import Codec, Progress
from serving.triton import DIGEST, REQUESTS, TARGET, read_fact
from serving.wire import FORMS, Form
from soa.dtypes import is_float
from soa.errors import needs_extra

if TYPE_CHECKING:
    from serving.client import Client, Regions


class RemoteModel(Executable):
    """Sends argument tensors to a server, and writes its answers into the output arguments.

    Nothing is written unless the whole answer has the right names, shapes and dtypes. Call
    `update_form` first: it finds the form of the server's requests. `close` also closes `regions`,
    the shared memory, and `client`.
    """

    def __init__(self, opened: Opened, client: Client, regions: Regions | None = None) -> None:
        self.opened, self.client = opened, client
        self.target = ""
        """The target that the server runs, from its configuration."""
        self._signature = opened.signature
        self._regions = regions
        self._codec: Codec | None = None
        self._process = OwnProcess()

    @property
    def _version(self) -> str:
        """The number of the version in requests; "" for any version."""
        return "" if self.opened.number is None else str(self.opened.number)

    def is_ready(self, within_s: float) -> bool:
        """Ask the server whether the model is ready. Raises RemoteError.

        `within_s`: the time limit in seconds.
        """
        return self.client.ask_ready(self.opened.name, self._version, within_s)

    def update_form(self, within_s: float | None = None) -> None:
        """Ask the server for the form of its requests, and use this form from now on.

        `within_s` replaces the options' time limit. Raises VersionMismatchError if the server's
        model has another bundle, or was not deployed by `pipeline deploy`.
        """
        name, label = self.opened.name, self.opened.label
        try:
            config = self.client.ask_config(name, self._version, within_s)
        except RefusedError as error:
            raise VersionMismatchError(f"{label} is not served there: {error}") from None
        form, merge = self._find_form(config), config.max_batch_size > 0
        codec = self._codec
        self.target = read_fact(config, TARGET, self._version)
        if codec is None or (codec.form, codec.merge) != (form, merge):
            self._codec = Codec(self._signature, form, merge)

    def _find_form(self, config: Any) -> Form:
        """Read the form of requests from the server's ModelConfig.

        Raises VersionMismatchError if the server has another bundle than ours, or takes requests
        that we cannot send.
        """
        digest = self.opened.bundle.digest
        its_model = f"server {self.client.address}: its {self.opened.label}"
        served = read_fact(config, DIGEST, self._version)
        if not served:
            raise VersionMismatchError(f"{its_model} was not made by `pipeline deploy`")
        if served != digest:
            raise VersionMismatchError(
                f"{its_model} is bundle {served[:12]}, the registry's is {digest[:12]}: "
                "deploy that version there"
            )
        if config.backend != "python":
            raise VersionMismatchError(
                f"server {self.client.address}: Triton's {config.backend} backend runs its "
                f"{self.opened.label}, and it cannot check a request's bundle: use tritonclient, "
                "or deploy it with --backend python"
            )
        named = read_fact(config, REQUESTS) or "columns"  # early deployments name none
        for form in FORMS:
            if form == named:
                return form
        raise VersionMismatchError(
            f"{its_model} takes requests of the form {named!r}, which is none of {', '.join(FORMS)}"
        )

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run the model on `arguments`, CPU tensors. Raises RemoteError; then no output has
        changed."""
        self._process.require()
        with self.client.one_deadline():
            progress = Progress(arguments)
            while not progress.done:
                self.ask(progress)
            progress.write()

    def ask(self, progress: Progress) -> None:
        """Send one message with the rows that have no answer yet, or as many of them as fit.

        The answer is added to `progress`. Raises RemoteError; earlier answers of the request are
        kept.
        """
        codec = self._codec  # kept for the message: `update_form` of another thread may replace it
        if codec is None:
            raise VersionMismatchError(f"{self}: not yet asked in which form it takes requests")
        with self.client.one_deadline():
            left = progress.rows_left(self._signature.dims)
            shareable = all(tensor.nbytes(left[tensor.rows]) for tensor in codec.tensors)
            regions = self._regions if shareable else None  # Triton shares no empty arrays
            rows = self._rows_that_fit(codec, left) if regions is None else left
            inputs = codec.encode(progress.arguments, progress.at, rows)
            if regions is None:
                answers = self._ask_inline(codec, inputs, rows)
            else:
                answers = self._ask_shared(codec, inputs, rows, regions)
            self._check_values(codec, answers, inputs, progress.at)
            progress.add(codec, None if rows == left else sum(rows.values()), answers)

    def close(self) -> None:
        """Close the shared memory, then the connection. Calls in progress fail."""
        if not self._process.here():
            return  # in the child of a fork everything belongs to the parent
        if self._regions is not None:
            self._regions.close()
        self.client.close()

    def _rows_that_fit(self, codec: Codec, left: Mapping[str, int]) -> Mapping[str, int]:
        """Return the row counts of the next message. `left`: the rows without an answer.

        Raises TooLargeError if the rows do not fit and must not be split, or if the parts would
        have too few rows for the model.
        """
        rows = codec.rows_that_fit(left, self.client.options.message_bytes - HEADERS)
        if rows is None:
            size = codec.nbytes(left) + HEADERS
            raise self.client.too_large_error(size, "a message, whose rows cannot be split,")
        return rows

    def _request(self, codec: Codec, rows: Mapping[str, int]) -> Any:
        """Make a ModelInferRequest for these row counts, without the arrays."""
        from tritonclient.grpc import service_pb2

        name = self.opened.name
        request = service_pb2.ModelInferRequest(model_name=name, model_version=self._version)
        request.parameters[DIGEST].string_param = self.opened.bundle.digest
        request.parameters[REQUESTS].string_param = codec.form
        for tensor in codec.wire.inputs:
            request.inputs.add(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape(rows[tensor.rows])
            )
        for tensor in codec.wire.outputs:
            request.outputs.add(name=tensor.name)
        return request

    def _ask_inline(
        self, codec: Codec, inputs: Mapping[str, Any], rows: Mapping[str, int]
    ) -> dict[str, Any]:
        """Send the inputs in the request itself.

        Returns the outputs by name, as read-only views of the answer. Raises RemoteError.
        """
        request = self._request(codec, rows)
        for tensor in codec.wire.inputs:
            request.raw_input_contents.append(inputs[tensor.name].tobytes())
        answer = self.client.infer(request)
        self._check_shapes(codec, answer, rows)
        if len(answer.raw_output_contents) != len(answer.outputs):
            raise AnswerError(f"{self}: {len(answer.raw_output_contents)} arrays in the answer")
        answers = {}
        for described, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            tensor = codec.outputs[described.name]
            n = rows[tensor.rows]
            if len(raw) != tensor.nbytes(n):
                raise AnswerError(
                    f"{self}: output {tensor.name} has {len(raw)} bytes, needed are "
                    f"{tensor.nbytes(n)}"
                )
            answers[tensor.name] = np.frombuffer(raw, tensor.dtype).reshape(tensor.shape(n))
        return answers

    def _ask_shared(
        self, codec: Codec, inputs: Mapping[str, Any], rows: Mapping[str, int], regions: Regions
    ) -> dict[str, Any]:
        """Send the inputs through shared memory, and return copies of the outputs by name.

        If the server does not know the region, it is asked again with a new one.
        """
        try:
            return self._ask_in_region(codec, inputs, rows, regions)
        except (RefusedError, VersionMismatchError) as error:
            if "shared memory region" not in str(error):  # only the text tells it from others
                raise
            regions.give_up_unused()
            return self._ask_in_region(codec, inputs, rows, regions)

    def _ask_in_region(
        self, codec: Codec, inputs: Mapping[str, Any], rows: Mapping[str, int], regions: Regions
    ) -> dict[str, Any]:
        """Send the inputs through one region, and return copies of the outputs by name."""
        request = self._request(codec, rows)
        slices, size = codec.lay_out_region(rows)
        with regions.take(size) as region:
            for described in (*request.inputs, *request.outputs):
                place = slices[described.name]
                parameters = described.parameters
                parameters["shared_memory_region"].string_param = region.name
                parameters["shared_memory_offset"].int64_param = place.start
                parameters["shared_memory_byte_size"].int64_param = place.stop - place.start
            arrays = {}
            for tensor in codec.tensors:
                values = region.memory[slices[tensor.name]].view(tensor.dtype)
                arrays[tensor.name] = values.reshape(tensor.shape(rows[tensor.rows]))
            for tensor in codec.wire.inputs:
                arrays[tensor.name][...] = inputs[tensor.name]
            answer = self.client.infer(request, region.doubt)
            self._check_shapes(codec, answer, rows)
            if any(answer.raw_output_contents):  # the region holds old data
                raise AnswerError(f"{self}: its answer is not in the memory that it shares with us")
            return {name: np.array(arrays[name], order="C") for name in codec.outputs}

    def _check_shapes(self, codec: Codec, answer: Any, rows: Mapping[str, int]) -> None:
        """Raise AnswerError if the answer has other outputs than the model, or of other shapes.

        `rows`: the row counts of the request.
        """
        names = [described.name for described in answer.outputs]
        if sorted(names) != sorted(codec.outputs):
            raise AnswerError(
                f"{self}: the answer has outputs {', '.join(names) or 'none'}, the model has "
                f"{', '.join(codec.outputs)}"
            )
        for described in answer.outputs:
            tensor = codec.outputs[described.name]
            datatype, shape = described.datatype, tuple(described.shape)
            needed_shape = tensor.shape(rows[tensor.rows])
            if (datatype, shape) != (tensor.datatype, needed_shape):
                raise AnswerError(
                    f"{self}: output {tensor.name} is {datatype} {shape}, needed is "
                    f"{tensor.datatype} {needed_shape}"
                )

    def _check_values(
        self, codec: Codec, answers: Mapping[str, Any], inputs: Mapping[str, Any], at: int
    ) -> None:
        """Raise AnswerError if an output has a NaN, and all inputs are finite.

        `at`: the row of the request where `inputs` and `answers` begin.
        """
        if self.client.options.allow_nan:
            return
        for tensor in codec.wire.outputs:
            if not is_float(tensor.column_dtype) or not np.isnan(answers[tensor.name]).any():
                continue
            floats = (sent for sent in codec.wire.inputs if is_float(sent.column_dtype))
            if all(np.isfinite(inputs[sent.name]).all() for sent in floats):
                nan = np.isnan(answers[tensor.name].T if tensor.rows_last else answers[tensor.name])
                rows_with_nan = nan.reshape(1 if tensor.scalar else len(nan), -1).any(1)
                raise AnswerError(
                    f"{self}: output {tensor.name} is NaN at row {at + rows_with_nan.argmax()}, "
                    "and no input is NaN or Inf"
                )

    def __str__(self) -> str:
        version = self._version or "any"
        return f"server {self.client.address}, {self.opened.name}/{version}"


def open_model(opened: Opened, address: str, options: RemoteOptions) -> RemoteModel:
    """Make the executable that runs a version in the server at `address`, a `host:port`.

    No request is sent yet. Raises ServingError if tritonclient or a certificate is missing.
    """
    with needs_extra("serve", ServingError):
        from serving.client import Client, Regions
    client = Client(address, options)
    return RemoteModel(opened, client, Regions(client) if options.shared_memory else None)
