"""Every kind of foreign memory: wrapped in place, kept alive, or refused."""

from __future__ import annotations

import ctypes
import mmap
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soa.errors import CollectionError
from soa.layout import Layout, column, scalar
from soa.memory import Collection, import_bytes, torch_drives_gpus
from tests.soa.exporters import (
    Array,
    OldDLPack,
    OnlyArrayInterface,
    OnlyCudaArrayInterface,
    OnlyDLPack,
    aligned,
)

# n = 33, alignment 128: x at 0 (132 -> 256 bytes), k at 256 (66 -> 128), s at 384; 512 in all.
LAYOUT = Layout([column("x", "float32"), column("k", "int16"), scalar("s", "float64")])
N = 33
NBYTES = 512
ADDRESS = aligned(64)  # any valid address


def views_of(memory: Array) -> dict[str, Any]:
    """The same bytes through every protocol for CPU memory."""
    tensor = torch.from_numpy(memory)
    return {
        "numpy": memory,
        "numpy void": memory.view("V1").reshape(2, -1),
        "torch": tensor,
        "memoryview": memory.data,
        "buffer protocol": (ctypes.c_char * memory.nbytes).from_buffer(memory.data),
        "array interface": OnlyArrayInterface(memory),
        "dlpack": OnlyDLPack(tensor),
        "dlpack 0.x": OldDLPack(tensor),
        "numpy's dlpack": OnlyDLPack(memory),
    }


@pytest.mark.parametrize("kind", list(views_of(aligned(64))))
def test_wrap_shares_memory(kind: str) -> None:
    memory = aligned(NBYTES)
    collection = Collection.wrap(LAYOUT, views_of(memory)[kind], N)
    assert collection.data_ptr == memory.ctypes.data
    assert not collection.readonly
    collection.tensor("x")[32] = 1.5  # byte 32 * 4 = 128
    collection.tensor("k")[1] = -2  # byte 256 + 2
    assert memory.view("f4")[32] == 1.5 and memory.view("i2")[129] == -2
    memory.view("f8")[48] = 7  # byte 384
    assert collection.tensor("s") == 7


def test_typed_memory_is_wrapped_where_every_column_is_of_its_dtype() -> None:
    layout = Layout([column("x", "float32"), column("y", "float32"), scalar("s", "float32")])
    memory = aligned(640)
    for typed in (memory.view("f4"), torch.from_numpy(memory).view(torch.float32).requires_grad_()):
        collection = Collection.wrap(layout, typed, N)
        assert collection.data_ptr == memory.ctypes.data


@pytest.mark.parametrize(
    "dtype",
    [">f4", "f2", "i4", "i1", "c8", "M8[ns]", "V4", "S4", [("a", "f4")]],
)
def test_values_of_another_dtype_are_not_raw_bytes(dtype: Any) -> None:
    floats = Layout([column("x", "float32")])
    memory = aligned(256).view(dtype)
    name = "opaque4" if memory.dtype.kind == "V" else re.escape(str(memory.dtype))
    says = f"the memory holds {name}, the layout's columns are float32"
    for given in (memory, OnlyArrayInterface(memory)):
        with pytest.raises(CollectionError, match=says):
            Collection.wrap(floats, given, N)
    with pytest.raises(CollectionError, match="column 'x' is "):
        Collection.from_columns(Layout([column("x", "float32")], 1, "columns"), {"x": memory})
    with pytest.raises(CollectionError, match="column 'x'"):
        Collection.from_arrays(floats, {"x": memory})
    mixed = "the memory holds float32, the layout's columns are float32, int16 and float64"
    with pytest.raises(CollectionError, match=mixed):
        Collection.wrap(LAYOUT, aligned(NBYTES).view("f4"), N)


@pytest.mark.parametrize("number", [int, np.int64, np.uint64, ctypes.c_void_p])
def test_wrap_an_address(number: Callable[[int], Any]) -> None:
    memory = aligned(NBYTES)
    collection = Collection.wrap(LAYOUT, number(memory.ctypes.data), N, nbytes=NBYTES)
    assert collection.data_ptr == memory.ctypes.data
    collection.tensor("x")[0] = 2.0
    assert memory.view("f4")[0] == 2.0


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
def test_wrap_a_mapped_file(tmp_path: Path, access: int) -> None:
    path = tmp_path / "event"
    path.write_bytes(b"\3\0" * (mmap.PAGESIZE // 2))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=access) as mapped:
        collection = Collection.wrap(LAYOUT, mapped, N)
        assert collection.readonly == (access == mmap.ACCESS_READ)
        assert collection["k"][0] == 3
        if not collection.readonly:
            collection["x"][1] = 3.0
        with pytest.raises(BufferError):
            mapped.close()  # the collection still uses it
        del collection
    if access == mmap.ACCESS_WRITE:
        assert np.frombuffer(path.read_bytes(), "f4")[1] == 3.0


def readonly_numpy() -> Array:
    memory = aligned(NBYTES)
    memory.flags.writeable = False
    return memory


@pytest.mark.parametrize(
    "memory",
    [
        readonly_numpy(),
        readonly_numpy().data,
        OnlyArrayInterface(readonly_numpy()),
        OnlyDLPack(readonly_numpy()),
    ],
    ids=["numpy", "memoryview", "array interface", "dlpack"],
)
def test_read_only_memory_stays_so(memory: Any) -> None:
    collection = Collection.wrap(LAYOUT, memory, N)
    assert collection.readonly
    assert collection.rows(3).readonly
    with pytest.raises(ValueError, match="read-only"):
        collection["x"][0] = 1
    assert not collection.to("cpu").readonly
    assert not Collection.wrap(LAYOUT, memory, N, readonly=False).readonly


def test_bytes_are_read_only() -> None:
    loose = Layout([column("k", "int16")], 2)  # `bytes` objects are not aligned
    collection = Collection.wrap(loose, b"\1\0\2\0", 2)
    assert collection.readonly and collection["k"].tolist() == [1, 2]


def test_empty_memory() -> None:
    layout = Layout([column("x", "float32")])
    for nothing in (np.zeros(0, "f4"), b"", torch.empty(0), OnlyDLPack(torch.empty(0)), 0):
        collection = Collection.wrap(layout, nothing, 0, nbytes=0)
        assert collection.tensor("x").shape == (0,)
        assert collection.run("x", 0, 1).shape == (1, 0)


# -- refused ---------------------------------------------------------------------------------


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch is about to remove them
        return torch.quantize_per_tensor(torch.zeros(NBYTES), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (aligned(NBYTES, shift=4), r"misaligned: 128-byte alignment needed, found 4 bytes past"),
        (aligned(NBYTES - 1), "memory of 511 bytes is too small: 33 elements .* take 512 bytes"),
        (aligned(2 * NBYTES)[::2], r"strides \(2,\) bytes for shape \(512,\) is not contiguous"),
        (torch.zeros(NBYTES, 2)[:, 0], r"strides \(2,\) for shape \(512,\) is not contiguous"),
        (OnlyDLPack(torch.zeros(NBYTES, 2)[:, 0]), "not contiguous"),
        (memoryview(bytearray(NBYTES))[::2], "not contiguous"),
        (torch.zeros(NBYTES).to_sparse(), "sparse"),
        (torch.zeros(NBYTES, dtype=torch.complex64).conj(), "conjugated"),
        (quantized(), "quantized"),
        (np.array([object()] * NBYTES), "Python objects"),
        (np.ma.masked_array(np.zeros(NBYTES), np.arange(NBYTES) == 3), "masked values"),
        pytest.param(ADDRESS.ctypes.data, "without a size: give nbytes=", id="address"),
        (ctypes.pointer(ctypes.c_float(0)), "a LP_c_float is a value, not memory"),
        (np.float32(0), "a float32 is a value"),
        ([1, 2, 3], "cannot view a list as memory"),
    ],
)
def test_what_cannot_be_wrapped(memory: Any, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        Collection.wrap(LAYOUT, memory, N)


@pytest.mark.parametrize(
    ("address", "nbytes", "says"),
    [
        (0, NBYTES, "null address for 512 bytes"),
        (-128, NBYTES, "no memory"),
        pytest.param(ADDRESS.ctypes.data, -1, "-1 bytes at address 0x", id="negative"),
    ],
)
def test_addresses_that_cannot_be_wrapped(address: Any, nbytes: int, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        Collection.wrap(LAYOUT, address, N, nbytes=nbytes)


def test_an_exporter_that_fails() -> None:
    class Broken(OnlyDLPack):
        def __dlpack__(self, **how: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(CollectionError, match=r"Broken does not export its memory.*not today"):
        import_bytes(Broken(torch.zeros(4)))


def test_an_exporter_of_a_copy() -> None:
    class Copying(OnlyDLPack):
        """Asks NumPy for a copy, which sets DLPack's IS_COPIED flag."""

        def __dlpack__(self, **how: Any) -> Any:
            return self._array.__dlpack__(**{**how, "copy": True})

    with pytest.raises(CollectionError, match="Copying exports a copy of its memory"):
        import_bytes(Copying(np.zeros(4)))


class OnGpu:
    """An exporter of GPU memory, which the tests never read."""

    def __init__(self, **changes: Any) -> None:
        said = {"shape": (4, 3), "typestr": "<f4", "data": (4096, True), "version": 3}
        self.__cuda_array_interface__ = said | changes


@pytest.mark.skipif(torch_drives_gpus(), reason="says what comes where no torch is built for GPUs")
def test_gpu_memory_without_torch() -> None:
    memory = OnGpu(strides=(12, 4))
    span, dtype, shape = import_bytes(memory)
    assert (span.address, span.nbytes, span.device) == (4096, 48, "cuda:0")
    assert span.readonly and span.owner is memory and (dtype, shape) == ("float32", (4, 3))
    assert import_bytes(8192, 16, "cuda:1").bytes.device == "cuda:1"
    for made in (OnGpu(strides=(4, 16)), OnGpu(mask=memory), OnGpu(shape=None)):
        with pytest.raises(CollectionError):
            import_bytes(made)


@pytest.mark.skipif(torch_drives_gpus(), reason="says what comes where no torch is built for GPUs")
def test_gpu_memory_is_neither_made_nor_read_without_torch() -> None:
    there = Collection.wrap(LAYOUT, 4096, N, nbytes=NBYTES, device="cuda:0")
    for call in (
        lambda: Collection(LAYOUT, N, "cuda"),
        lambda: there.to("cpu"),
        lambda: there.tensor("x"),
        lambda: there.rows(1).fill("x", np.zeros(1)),
    ):
        with pytest.raises(CollectionError, match="no torch that is built for GPUs"):
            call()
    assert "cuda:0" in repr(there)


# -- lifetime --------------------------------------------------------------------------------


# No test here collects garbage: memory must be freed without the collector, which would keep large
# events for long.


class Owned(np.ndarray[Any, Any]):
    """An array with weak references, which show when it is freed."""


@pytest.mark.parametrize("protocol", [lambda a: a, OnlyArrayInterface, memoryview, OnlyDLPack])
@pytest.mark.parametrize("held", ["collection", "rows", "view", "component"])
def test_memory_lives_as_long_as_what_sees_it(protocol: Callable[[Any], Any], held: str) -> None:
    array = aligned(NBYTES).view(Owned)
    watch = weakref.ref(array)
    collection = Collection.wrap(LAYOUT, protocol(array), N)
    seen: Any = {
        "collection": collection,
        "rows": collection.rows(2),
        "view": collection.tensor("x"),
        "component": collection.span("k").tensor(),
    }[held]
    del array, collection
    assert watch() is not None
    del seen
    assert watch() is None


# -- GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_wrap_cuda_memory() -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    sources: list[Any] = [memory, OnlyCudaArrayInterface(memory), OnlyDLPack(memory)]
    for source in sources:
        collection = Collection.wrap(LAYOUT, source, N)
        assert collection.data_ptr == memory.data_ptr()
        assert collection.device == memory.device
        collection.tensor("x")[0] += 1
    by_address = Collection.wrap(LAYOUT, memory.data_ptr(), N, nbytes=NBYTES, device="cuda")
    by_address.tensor("x")[0] += 1
    assert memory.view(torch.float32)[0].item() == 4
    assert Collection.wrap(LAYOUT, OnlyCudaArrayInterface(memory, True), N).readonly
    with pytest.raises(CollectionError, match="NumPy reads CPU memory"):
        by_address["x"]
    assert by_address.to("cpu").tensor("x")[0] == 4
    with pytest.raises(CollectionError, match="lies on cuda:0, not on cpu"):
        import_bytes(memory, device="cpu")


@pytest.mark.cuda
def test_own_cuda_memory() -> None:
    collection = Collection(LAYOUT, N, "cuda")
    assert collection.data_ptr % 128 == 0
    assert collection.device.type == "cuda"
    values = {"x": np.arange(N, dtype="f4"), "k": np.arange(N, dtype="i2"), "s": np.float64(2)}
    filled = Collection.from_arrays(LAYOUT, values, device="cuda").to("cpu")
    assert filled.tensor("x").tolist() == list(range(N))
