"""Reads ONNX files, and puts numbers in place of text and maps, which cannot be columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import first_line
from soa.errors import needs_extra
from stages.errors import SourceError

# The attributes with text, and those that have numbers instead.
_NUMBERED = {
    "classlabels_strings": "classlabels_int64s",
    "keys_strings": "keys_int64s",
    "values_strings": "values_int64s",
    "default_string": "default_int64",
}
_SHOWN = 10  # classes in a sentence


def onnx_files(path: Path) -> list[Path]:
    """The paths of an ONNX file and of the files beside it that hold its weights. Raises
    SourceError if it cannot be read."""
    tensors = read_onnx(path, weights=False).graph.initializer
    entries = [entry for tensor in tensors for entry in tensor.external_data]
    names = {entry.value for entry in entries if entry.key == "location"}
    return [path, *(path.parent / name for name in sorted(names))]


def read_onnx(path: Path, weights: bool = True) -> Any:
    """Read an ONNX file as ONNX's protobuf object. If `weights` is false, weights in files beside
    it are not read. Raises SourceError."""
    with needs_extra("onnx", SourceError):
        import onnx
    try:
        return onnx.load(path, load_external_data=weights)
    except Exception as error:  # the errors of protobuf and onnx have no common base
        raise SourceError(f"{path} cannot be read as ONNX: {first_line(error)}") from error


def replace_text_and_maps(model: Any, path: Path) -> list[str]:
    """Change a model in place, so that its outputs can be columns.

    A map of classes to scores becomes the tensor of the scores. The name of a class becomes a
    number. An encoder that fails at an unknown category gives zeros for it. Returns a sentence for
    each change. Raises SourceError if an input is text.
    """
    import onnx

    text = onnx.TensorProto.STRING
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == text:
            raise SourceError(
                f"{path}: the input {value.name!r} is text, and a column has numbers: train and "
                "export with numbers for its categories"
            )
    notes = _remove_maps(model.graph)
    numbers: dict[str, int] = {}  # by class name, in the order in which the names appear
    for node in model.graph.node:
        _number_attributes(node, numbers)
        notes += _allow_unknown(node)
    for tensor in model.graph.initializer:
        if tensor.data_type == text:
            codes = [numbers.setdefault(name.decode(), len(numbers)) for name in tensor.string_data]
            array = np.array(codes, np.int64).reshape(tuple(tensor.dims))
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    numbered = []
    for value in (*model.graph.value_info, *model.graph.output):
        if value.type.tensor_type.elem_type == text:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT64
            numbered.append(value.name)
    if numbers:
        meanings = [f"{number} is {name}" for name, number in [*numbers.items()][:_SHOWN]]
        if len(numbers) > _SHOWN:
            meanings.append(f"and {len(numbers) - _SHOWN} more")
        notes.append(f"{', '.join(numbered)} has numbers for names: {', '.join(meanings)}")
    return notes


def _remove_maps(graph: Any) -> list[str]:
    """Remove each node that makes a map of classes to scores from a tensor; the tensor gets the
    name of the map. Returns a note for each."""
    import onnx

    notes = []
    for node in [node for node in graph.node if node.op_type == "ZipMap"]:
        (tensor,), (map_name,) = node.input, node.output
        graph.node.remove(node)
        for other_node in graph.node:
            for names in (other_node.input, other_node.output):
                names[:] = [map_name if name == tensor else name for name in names]
        for output in graph.output:
            if output.name == map_name:
                output.CopyFrom(
                    onnx.helper.make_tensor_value_info(map_name, onnx.TensorProto.FLOAT, None)
                )
        (attribute,) = node.attribute
        classes = onnx.helper.get_attribute_value(attribute)
        labels = [label.decode() if isinstance(label, bytes) else str(label) for label in classes]
        notes.append(f"{map_name} has a column for each class, in the order {', '.join(labels)}")
    return notes


def _number_attributes(node: Any, numbers: dict[str, int]) -> None:
    """Replace class names in the attributes of a node by their numbers, in place. Names that are
    not in `numbers` yet are added, with the next number."""
    import onnx

    for attribute in node.attribute:
        if attribute.name not in _NUMBERED or not (attribute.strings or attribute.s):
            continue
        name = _NUMBERED[attribute.name]
        name = "classlabels_ints" if node.op_type == "LinearClassifier" else name
        codes = [
            numbers.setdefault(text.decode(), len(numbers))
            for text in attribute.strings or [attribute.s]
        ]
        value = codes if attribute.strings else codes[0]
        attribute.CopyFrom(onnx.helper.make_attribute(name, value))


def _allow_unknown(node: Any) -> list[str]:
    """Let a node that encodes categories give zeros for an unknown one, instead of an error.

    The node is changed in place. Returns a note if it changes, else an empty list.
    """
    notes = []
    for attribute in node.attribute:
        if node.op_type == "OneHotEncoder" and attribute.name == "zeros" and not attribute.i:
            attribute.i = 1
            notes.append(
                f"{node.name or node.output[0]} gives zeros for a category that it does not know; "
                "in the file it is an error"
            )
    return notes
