"""An ONNX file of the onnxruntime engine, with a shell: what a request carries in and out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.errors import EngineError, first_line
from engines.onnx import OUTPUTS, input_name, read_outputs
from serving.wire import Array, Program, Wire, WireTensor
from soa.signature import Argument, Signature

_INNER = "artifact/"  # of the names in the artifact: a block may have one of them
_LARGEST = 2**31 - 1
"""Bytes of a protobuf message, and so of an ONNX file that carries its weights itself."""


def write_onnx(artifact: Path, signature: Signature, wire: Wire, file: Path) -> None:
    """Write `file`, weights inside. Raises EngineError."""
    try:
        import onnx
        import onnx.compose
    except ImportError as error:
        raise EngineError(f"{error.name} is not installed: pip install 'soa-pipeline[onnx]'") from (
            error
        )
    model = onnx.compose.add_prefix(onnx.load(artifact), _INNER)
    _Shell(model, signature, wire).put_on()
    if model.ByteSize() > _LARGEST:
        raise EngineError(f"{artifact.name} with its weights is larger than 2 GB")
    onnx.save(model, file)
    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineError(f"onnx.checker: {first_line(error)}") from error


def open_onnx(file: Path, wire: Wire) -> Program:
    """The file in an ONNX Runtime of this process."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no public common base
        raise EngineError(f"ONNX Runtime: {first_line(error)}") from error
    names = [t.name for t in wire.inputs]

    def run(given: Sequence[Array]) -> Sequence[Array]:
        found: Sequence[Array] = session.run(
            [t.name for t in wire.outputs], dict(zip(names, given, strict=True))
        )
        return found

    return run


class _Shell:
    """Adds steps before and after a graph, in place."""

    def __init__(self, model: Any, signature: Signature, wire: Wire) -> None:
        self._graph = model.graph
        self._signature, self._wire = signature, wire
        described = {entry.key: entry.value for entry in model.metadata_props}
        self._outputs = read_outputs(described.get(OUTPUTS, ""))
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._given = {given.name for given in self._graph.input}
        self._steps = 0

    def put_on(self) -> None:
        from onnx import helper

        graph = self._graph
        flat = {t.name: self._flat(t) for t in self._wire.inputs}
        for i, argument in enumerate(self._signature.arguments):
            if (name := _INNER + input_name(i)) in self._given:
                self._argument(name, argument, flat)
        for t in self._wire.outputs:
            self._answer(t)
        steps = [*self._before, *graph.node, *self._after]
        del graph.node[:], graph.input[:], graph.output[:]
        graph.node.extend(steps)
        for tensors, entries in (
            (self._wire.inputs, graph.input),
            (self._wire.outputs, graph.output),
        ):
            for t in tensors:
                shape = [t.rows if extent < 0 else extent for extent in t.shape(-1)]
                kind = helper.np_dtype_to_tensor_dtype(t.dtype)
                entries.append(helper.make_tensor_value_info(t.name, kind, shape))

    def _flat(self, t: WireTensor) -> str:
        """An input as rows of entries, (n, F)."""
        if t.scalar:
            return self._step(self._before, "Reshape", [t.name, self._ints([1, -1])])
        if t.rows_last:
            return self._step(self._before, "Transpose", [t.name], perm=[1, 0])
        return self._step(self._before, "Flatten", [t.name], axis=1)

    def _argument(self, name: str, argument: Argument, flat: dict[str, str]) -> None:
        """What the artifact calls `name`, made of the inputs."""
        if argument.kind == "carrier":
            t = next(
                (t for t in self._wire.inputs if t.rows == argument.rows and not t.scalar), None
            )
            if t is None:
                raise EngineError(f"no input has rows of {argument.rows!r}")
            none = self._step(
                self._before, "Slice", [flat[t.name], *map(self._ints, ([0], [0], [1]))]
            )
            self._step(self._before, "Cast", [none], into=name, to=1)  # float32
            return
        bound = next(b for b in self._signature.inputs if b.name == argument.block)
        if argument.kind != "matrix":
            column = self._entry(argument.collection, (argument.column, argument.component), flat)
            self._step(self._before, "Reshape", [column, self._ints([-1])], into=name)
            return
        entries = [self._entry(argument.collection, c, flat) for c in bound.plan.components]
        joined = self._step(self._before, "Concat", entries, axis=1)
        self._step(self._before, "Transpose", [joined], into=name, perm=[1, 0])

    def _entry(self, collection: str, component: tuple[str, int], flat: dict[str, str]) -> str:
        """One physical column of the inputs, (n, 1)."""
        for t in self._wire.inputs:
            if t.collection == collection and component in t.components:
                place = t.order.index(t.components.index(component))
                return self._step(
                    self._before, "Gather", [flat[t.name], self._ints([place])], axis=1
                )
        raise EngineError(f"{collection}.{component[0]} is in no input")

    def _answer(self, t: WireTensor) -> None:
        places: dict[tuple[str, str, int], str] = {}
        for output in self._outputs:
            argument = self._signature.arguments[output.argument]
            bound = next(b for b in self._signature.outputs if b.name == argument.block)
            name, k = (argument.column, argument.component)
            if argument.kind == "matrix":
                name, k = bound.plan.components[output.component]
            places[argument.collection, name, k] = _INNER + output.name
        columns = [
            self._step(
                self._after,
                "Reshape",
                [places[(t.collection, *t.components[k])], self._ints([-1, 1])],
            )
            for k in t.order
        ]
        joined = self._step(self._after, "Concat", columns, axis=1)
        if t.rows_last:
            self._step(self._after, "Transpose", [joined], into=t.name, perm=[1, 0])
            return
        shape = list(t.dims) if t.scalar else [-1, *t.dims]
        self._step(self._after, "Reshape", [joined, self._ints(shape)], into=t.name)

    def _step(
        self, where: list[Any], op: str, inputs: list[str], into: str = "", **attributes: Any
    ) -> str:
        from onnx import helper

        self._steps += 1
        result = into or f"shell_{self._steps}"
        where.append(
            helper.make_node(op, inputs, [result], f"shell_{op}_{self._steps}", **attributes)
        )
        return result

    def _ints(self, values: list[int]) -> str:
        from onnx import TensorProto, helper

        self._steps += 1
        name = f"shell_{self._steps}"
        self._graph.initializer.append(
            helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        )
        return name
