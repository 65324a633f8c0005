"""View memory of other libraries as bytes, without a copy.

Accepted: an address with a size, anything with the buffer protocol (bytes, mmap, memoryview),
NumPy, torch, and any exporter of `__cuda_array_interface__`, `__array_interface__` or DLPack. The
returned span keeps the exporter alive; the caller keeps memory alive that is given by its address.
torch checks GPU memory. Without a torch that is built for GPUs, GPU memory is accepted only by its
address or `__cuda_array_interface__`, and the runner asks the driver about it when it is bound.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from soa.dtypes import DTYPES, dtype_name, is_float, is_opaque, itemsize, numpy_dtype
from soa.errors import CollectionError
from soa.layout import Column, Layout
from soa.memory.span import CPU, Array, Device, Export, Span, is_tensor, span_of, torch_drives_gpus
from soa.options import nearest_hint

if TYPE_CHECKING:
    import torch


class Foreign(NamedTuple):
    """Memory as bytes, with the dtype and shape that its exporter gave.

    A dtype that no column can have keeps the exporter's own name, such as `>f4` for big-endian
    numbers. So it never equals the dtype of a column.
    """

    bytes: Span
    dtype: str
    shape: tuple[int, ...]


def import_bytes(memory: Any, nbytes: int | None = None, device: str | None = None) -> Foreign:
    """View `memory` as bytes where it lies, without a copy.

    An address needs `nbytes`. Raises CollectionError if a copy is needed, or if the memory does not
    lie on a `device` of this kind.
    """
    foreign = _import_by_protocol(memory, nbytes, device)
    actual = foreign.bytes.device
    if device is not None and actual.type != Device(device).type:
        raise CollectionError(
            f"this {type(memory).__name__} lies on {actual}, not on {device}: "
            "wrap it where it lies, then copy it with Collection.to"
        )
    return foreign


def _import_by_protocol(memory: Any, nbytes: int | None, device: str | None) -> Foreign:
    """View memory by the first protocol that it offers; raise CollectionError if it has none."""
    if isinstance(memory, ctypes.c_void_p):
        memory = memory.value or 0
    if isinstance(memory, Span):
        return Foreign(memory.raw(), memory.dtype, memory.shape)
    if isinstance(memory, int | np.integer) and not isinstance(memory, bool):
        return _import_address(int(memory), nbytes, device or CPU)
    # NumPy would take the few bytes of the scalar, or of the pointer itself, as the memory.
    if isinstance(memory, bool | np.generic | ctypes._SimpleCData | ctypes._Pointer):
        raise CollectionError(
            f"a {type(memory).__name__} is a value, not memory: give an array, or an address as "
            "an int with nbytes="
        )
    if is_tensor(memory):
        return _import_tensor(memory.detach())
    if hasattr(memory, "__cuda_array_interface__"):
        return _import_cuda_interface(memory, device)
    if hasattr(memory, "__array_interface__"):
        return _import_array(np.asarray(memory), memory)
    if hasattr(memory, "__dlpack__"):
        return _import_dlpack(memory)
    try:
        return _import_array(np.asarray(memoryview(memory)), memory)
    except (TypeError, ValueError, BufferError):
        raise CollectionError(
            f"cannot view a {type(memory).__name__} as memory: give an address, or an object with "
            "the buffer protocol, __array_interface__, __cuda_array_interface__ or DLPack"
        ) from None


def _import_address(address: int, nbytes: int | None, device: str) -> Foreign:
    """View `nbytes` bytes at an address. The caller of this package keeps them alive."""
    if nbytes is None:
        raise CollectionError(f"address {address:#x} comes without a size: give nbytes=")
    if address < 0 or nbytes < 0:
        raise CollectionError(f"{nbytes} bytes at address {address:#x} are no memory")
    raw = _span_at(address, nbytes, device, readonly=False, owner=None)
    return Foreign(raw, "uint8", (nbytes,))


def _span_at(address: int, nbytes: int, device: str, readonly: bool, owner: object) -> Span:
    """Return the span of the bytes at an address.

    On a GPU torch checks them, if it is built for GPUs. Raises CollectionError for a null address,
    and if the check fails.
    """
    if nbytes and not address:
        raise CollectionError(f"null address for {nbytes} bytes")
    raw = Span(address, "uint8", (nbytes,), Device(device), readonly, owner)
    if device == CPU or not nbytes or not torch_drives_gpus():
        return raw
    return _import_cuda_interface(Export(raw, "|u1", "__cuda_array_interface__"), device).bytes


def _require_contiguous(contiguous: bool, strides: object, shape: object, what: str) -> None:
    """Raise CollectionError, with strides and shape, unless memory (`what`) is contiguous."""
    if not contiguous:
        raise CollectionError(
            f"{what} with strides {strides} for shape {shape} is not contiguous: a collection "
            "wraps memory as it lies, it does not copy"
        )


def _import_tensor(tensor: torch.Tensor, readonly: bool = False) -> Foreign:
    """View the memory of a tensor; raise CollectionError unless it is dense and contiguous."""
    import torch

    strided = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if not strided or tensor.is_conj() or tensor.is_neg():
        raise CollectionError(
            "a sparse, quantized, nested, conjugated or negated tensor does not hold its values as "
            "they are: give a plain one"
        )
    shape = tuple(tensor.shape)
    _require_contiguous(tensor.is_contiguous(), tuple(tensor.stride()), shape, "memory")
    dense = tensor.as_strided((tensor.numel(),), (1,))  # one element may have any stride
    flat = dense.view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    span = span_of(flat)._replace(readonly=readonly)
    return Foreign(span, dtype_name(tensor.dtype), shape)


def _import_array(array: Array, owner: object) -> Foreign:
    """View the memory of a NumPy array, which `owner` keeps alive.

    Raises CollectionError for masked values, Python objects, and gaps between elements.
    """
    refuse_mask(owner)
    if array.dtype.hasobject:
        raise CollectionError("an array of Python objects holds references, not values")
    shape = array.shape
    _require_contiguous(array.flags.c_contiguous, f"{array.strides} bytes", shape, "array")
    address = array.__array_interface__["data"][0]
    span = _span_at(address, array.nbytes, CPU, not array.flags.writeable, (owner, array))
    return Foreign(span, dtype_name(array.dtype), shape)


def refuse_mask(array: object) -> None:
    """Raise CollectionError for a NumPy array with masked values, which would become numbers."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise CollectionError("the array has masked values: fill them first (array.filled(value))")


def _import_cuda_interface(memory: Any, device: str | None) -> Foreign:
    """View GPU memory by `__cuda_array_interface__`. torch checks it, if it is built for GPUs."""
    if device is None:
        # Without an index torch uses the current GPU, and would copy memory of another GPU there.
        device = "cuda"
        if hasattr(memory, "__dlpack_device__"):
            device = f"cuda:{memory.__dlpack_device__()[1]}"
    if not torch_drives_gpus():
        return _import_unchecked(memory, Device(device))
    import torch

    address, readonly = memory.__cuda_array_interface__["data"]
    try:
        tensor = torch.as_tensor(_WritableForTorch(memory) if readonly else memory, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CollectionError(f"torch cannot import this GPU memory: {error}") from None
    if tensor.numel() and tensor.data_ptr() != address:
        raise CollectionError(f"this memory does not lie on {device}: say which GPU (device=)")
    return _import_tensor(tensor, bool(readonly))


class _WritableForTorch:
    """Shows read-only GPU memory to torch as writable, since torch refuses it otherwise.

    The span of the memory is read-only all the same.
    """

    def __init__(self, memory: Any) -> None:
        interface = memory.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._owner = memory  # torch keeps this object alive


def _import_unchecked(memory: Any, device: Device) -> Foreign:
    """View GPU memory by `__cuda_array_interface__` without torch, which could check it."""
    interface = memory.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise CollectionError("this GPU memory has a mask of valid values: fill it first")
    try:
        address, readonly = interface["data"]
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        dtype = np.dtype(interface["typestr"])
    except (KeyError, TypeError, ValueError) as error:
        raise CollectionError(f"__cuda_array_interface__ is incomplete: {error}") from None
    dense_strides = [math.prod(shape[k:]) * dtype.itemsize for k in range(1, len(shape) + 1)]
    contiguous = strides is None or 0 in shape or list(strides) == dense_strides
    _require_contiguous(contiguous, strides, shape, "memory")
    nbytes = math.prod(shape) * dtype.itemsize
    span = _span_at(address or 0, nbytes, device, bool(readonly), memory)
    return Foreign(span, dtype_name(dtype), shape)


class _FlagReader:
    """Passes an exporter of DLPack to NumPy or torch, and reads the flags, which both ignore."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        # JAX may use one buffer for several arrays, but does not mark it as read-only.
        self.readonly = type(memory).__module__.startswith("jax")

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.memory.__dlpack_device__()
        return kind, index

    def __dlpack__(self, **options: Any) -> Any:
        """Return the exporter's capsule, and note whether its memory is read-only.

        Raises CollectionError if the flags say that this is a copy. The importer's object keeps the
        memory alive.
        """
        capsule = self.memory.__dlpack__(**options)
        if _is_valid(capsule, b"dltensor_versioned"):
            managed = _pointer(capsule, b"dltensor_versioned")
            flags = ctypes.c_uint64.from_address(managed + _FLAGS_AT).value
            if flags & _IS_COPIED:
                raise CollectionError(
                    f"this {type(self.memory).__name__} exports a copy of its memory"
                )
            self.readonly |= bool(flags & _READ_ONLY)
        return capsule


# dlpack.h: the flags of a DLManagedTensorVersioned come after its version and two pointers.
_FLAGS_AT = 24
_READ_ONLY, _IS_COPIED = 1, 2
_GPUS = (2, 10)  # kDLCUDA, kDLROCM
_CAPSULE = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *_CAPSULE)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_CAPSULE)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _import_dlpack(memory: Any) -> Foreign:
    """View memory by DLPack. NumPy imports CPU memory; torch GPU memory, and bfloat16."""
    exporter = _FlagReader(memory)
    try:
        on_gpu = exporter.__dlpack_device__()[0] in _GPUS
        if on_gpu and not torch_drives_gpus():
            raise CollectionError(
                "DLPack memory of a GPU is imported by torch, and no torch that is built for GPUs "
                "is here: give its address, or __cuda_array_interface__"
            )
        array = None if on_gpu else _import_by_numpy(exporter)
        if array is not None:
            foreign = _import_array(array, memory)
            # NumPy itself marks all memory from exporters older than DLPack 1.0 as read-only.
            return foreign._replace(bytes=foreign.bytes._replace(readonly=exporter.readonly))
        import torch

        return _import_tensor(torch.utils.dlpack.from_dlpack(exporter), exporter.readonly)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise CollectionError(
            f"this {type(memory).__name__} does not export its memory by DLPack: {error}"
        ) from None


def _import_by_numpy(exporter: _FlagReader) -> Array | None:
    """Return a NumPy array over exported CPU memory; None if NumPy does not have its dtype."""
    try:
        return np.from_dlpack(exporter)
    except RuntimeError:
        return None


def check_dtype(member: Column, dtype: str, label: str) -> None:
    """Raise CollectionError if `dtype`, of a column's values, is not the layout's.

    `label` names the column in the message.
    """
    if dtype != member.dtype:
        advice = f", or write dtype: {dtype} in the model's config" if dtype in DTYPES else ""
        raise CollectionError(
            f"column {label} is {dtype}, the layout says {member.dtype}: convert it first{advice}"
        )


def shape_error(member: Column, values: Any, needed: tuple[int, ...]) -> CollectionError:
    """Return the error about values of a column whose shape is not `needed`."""
    shape = tuple(values.shape)
    return CollectionError(f"column {member.name!r} has shape {shape}, needed {needed}")


def as_opaque(member: Column, values: Any) -> Array:
    """Return an array with one opaque element for each row, which holds the bytes of the row.

    This is a view, or a copy if the array has gaps. Raises CollectionError if a row does not have
    as many bytes as an element of the column.
    """
    rows, size = np.ascontiguousarray(values), itemsize(member.dtype)
    if rows.nbytes != len(rows) * size or rows.dtype.hasobject:
        raise CollectionError(
            f"column {member.name!r} is {rows.dtype} of shape {rows.shape}: the layout says "
            f"{member.dtype}, {size} bytes a row"
        )
    return rows.reshape(-1).view(f"V{size}")


def check_alignment(span: Span, alignment: int, what: str) -> None:
    """Raise CollectionError unless the span's address is a multiple of `alignment` bytes."""
    past = span.address % alignment  # bytes
    if span.nbytes and past:
        raise CollectionError(
            f"{what} at address {span.address:#x} is misaligned: {alignment}-byte alignment "
            f"needed, found {past} bytes past it; use session.collection(…), or copy "
            "with as_collection; or write in the model's config a smaller `alignment`, or "
            "`storage: columns`, which needs only an element's own alignment"
        )


def import_columns(layout: Layout, columns: Mapping[str, Any]) -> dict[str, list[Span]]:
    """View the memory of each column of a layout, and return the spans of its components by name.

    Raises CollectionError if a column is missing, unknown, or does not fit the layout.
    """
    _check_names(layout, columns)
    spans_of: dict[str, list[Span]] = {}
    for member in layout.columns:
        column = columns[member.name]
        components = list(column) if member.kind == "eigen" else [column]
        if len(components) != member.components:
            raise CollectionError(
                f"column {member.name!r} needs {member.components} component arrays, "
                f"found {len(components)}"
            )
        spans_of[member.name] = [
            _import_component(layout, member, k, memory) for k, memory in enumerate(components)
        ]
    return spans_of


def values_of(layout: Layout, arrays: Mapping[str, Any]) -> dict[str, Array | torch.Tensor]:
    """Return the values to copy into each column; lists and other sequences become arrays."""
    _check_names(layout, arrays)
    return {name: _as_values(layout[name], value) for name, value in arrays.items()}


def numbers_of(member: Column, value: Any) -> Array | torch.Tensor:
    """Return the values to copy into one column, as an array or a tensor.

    A tensor on the CPU that has the column's dtype becomes an array. Raises CollectionError if the
    values are no numbers, except for an opaque column.
    """
    values = _as_values(member, value)
    if is_tensor(values):
        same_dtype = dtype_name(values.dtype) == member.dtype
        if same_dtype and values.device.type == "cpu" and member.dtype != "bfloat16":
            return values.numpy(force=True)
        return values
    if is_opaque(member.dtype):
        return values
    if np.asarray(values).dtype.kind not in "biuf" and dtype_name(values.dtype) != "bfloat16":
        raise CollectionError(f"column {member.name!r}: {values.dtype} values are no numbers")
    return values


def broadcast_values(member: Column, value: Any, shape: tuple[int, ...]) -> Array | torch.Tensor:
    """Return the values to copy into a column, broadcast to `shape` by NumPy's rules.

    Raises CollectionError if they cannot be broadcast, or if an integer or bool column cannot hold
    them: it refuses 1.5.
    """
    values: Any = numbers_of(member, value)
    if member.dtype in DTYPES and not is_float(member.dtype):
        numbers = values.cpu().numpy() if is_tensor(values) else values
        with np.errstate(invalid="ignore"):  # NaN becomes some integer, which differs from it
            converted = numbers.astype(numpy_dtype(member.dtype))
        if not np.array_equal(converted, numbers):
            raise CollectionError(
                f"column {member.name!r} is {member.dtype}, which cannot hold these values"
            )
    try:
        return values.expand(shape) if is_tensor(values) else np.broadcast_to(values, shape)
    except (RuntimeError, ValueError):
        raise shape_error(member, values, shape) from None


def _check_names(layout: Layout, columns: Mapping[str, Any]) -> None:
    """Raise CollectionError unless the columns have exactly the names of the layout's columns."""
    missing = [member.name for member in layout.columns if member.name not in columns]
    unknown = [name for name in columns if name not in layout.by_name]
    if missing or unknown:
        faults = [f"missing {missing}"] if missing else []
        faults += [f"unknown {unknown}"] if unknown else []
        hint = nearest_hint(missing[0], unknown) if missing and unknown else ""
        raise CollectionError(f"columns do not match the layout: {', '.join(faults)}{hint}")


def _import_component(layout: Layout, member: Column, k: int, memory: Any) -> Span:
    """View the memory of component k of a column; check its dtype, shape and alignment."""
    label = member.name if member.kind != "eigen" else f"{member.name}[{k}]"
    try:
        foreign = import_bytes(memory)
    except CollectionError as error:
        raise CollectionError(f"column {label!r}: {error}") from None
    check_dtype(member, foreign.dtype, repr(label))
    count = foreign.bytes.nbytes // itemsize(member.dtype)
    if member.kind == "scalar":
        if count != 1:
            raise CollectionError(f"scalar {label!r} has {count} values, needed 1")
    elif len(foreign.shape) != 1:
        raise CollectionError(f"column {label!r} has shape {foreign.shape}, needed one dimension")
    check_alignment(foreign.bytes, layout.alignment_of(member.name), f"column {label!r}")
    return foreign.bytes.at(0, member.dtype, count)


def _as_values(member: Column, value: Any) -> Array | torch.Tensor:
    """Return the values of a column as an array or a tensor.

    Raises CollectionError for a sparse or meta tensor, and for what NumPy cannot make an array of.
    """
    name = member.name
    if is_tensor(value):
        if str(value.layout) != "torch.strided" or value.is_meta:
            raise CollectionError(
                f"column {name!r} is a sparse or a meta tensor: give one with plain memory"
            )
        return value.detach()
    try:
        refuse_mask(value)
        if is_opaque(member.dtype):
            return as_opaque(member, value).reshape(() if member.kind == "scalar" else -1)
        return np.asarray(value)
    except (CollectionError, TypeError, ValueError) as error:
        raise CollectionError(f"column {name!r}: {error}") from None
