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
def test_wrap_shares_the_memory_of_every_protocol(kind: str) -> None:
    memory = aligned(NBYTES)
    collection = Collection.wrap(LAYOUT, views_of(memory)[kind], N)
    assert collection.data_ptr == memory.ctypes.data
    assert not collection.readonly
    collection.tensor("x")[32] = 1.5  # byte 32 * 4 = 128
    collection.tensor("k")[1] = -2  # byte 256 + 2
    assert memory.view("f4")[32] == 1.5 and memory.view("i2")[129] == -2
    memory.view("f8")[48] = 7  # byte 384
    assert collection.tensor("s") == 7


@pytest.mark.parametrize(
    "typed",
    [
        lambda memory: memory.view("f4"),
        lambda memory: torch.from_numpy(memory).view(torch.float32).requires_grad_(),
    ],
    ids=["numpy", "torch"],
)
def test_typed_memory_is_wrapped_where_every_column_is_of_its_dtype(
    typed: Callable[[Array], Any],
) -> None:
    layout = Layout([column("x", "float32"), column("y", "float32"), scalar("s", "float32")])
    memory = aligned(640)
    assert Collection.wrap(layout, typed(memory), N).data_ptr == memory.ctypes.data


@pytest.mark.parametrize(
    "dtype",
    [">f4", "f2", "i4", "i1", "c8", "M8[ns]", "V4", "S4", [("a", "f4")]],
)
def test_values_of_another_dtype_are_not_raw_bytes(dtype: Any) -> None:
    floats = Layout([column("x", "float32")])
    memory = aligned(256).view(dtype)
    name = "opaque4" if memory.dtype.kind == "V" else re.escape(str(memory.dtype))
    says = f"the memory holds {name}, the layout's columns are float32"
    for exporter in (memory, OnlyArrayInterface(memory)):
        with pytest.raises(CollectionError, match=says):
            Collection.wrap(floats, exporter, N)
    with pytest.raises(CollectionError, match="column 'x' is "):
        Collection.from_columns(Layout([column("x", "float32")], 1, "columns"), {"x": memory})
    with pytest.raises(CollectionError, match="column 'x'"):
        Collection.from_arrays(floats, {"x": memory})


def test_typed_memory_is_refused_where_columns_have_several_dtypes() -> None:
    says = "the memory holds float32, the layout's columns are float32, int16 and float64"
    with pytest.raises(CollectionError, match=says):
        Collection.wrap(LAYOUT, aligned(NBYTES).view("f4"), N)


@pytest.mark.parametrize("number", [int, np.int64, np.uint64, ctypes.c_void_p])
def test_an_address_is_wrapped_in_place(number: Callable[[int], Any]) -> None:
    memory = aligned(NBYTES)
    collection = Collection.wrap(LAYOUT, number(memory.ctypes.data), N, nbytes=NBYTES)
    assert collection.data_ptr == memory.ctypes.data
    collection.tensor("x")[0] = 2.0
    assert memory.view("f4")[0] == 2.0


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
def test_a_mapped_file_is_wrapped_in_place(tmp_path: Path, access: int) -> None:
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
    """Memory for LAYOUT that NumPy does not write."""
    memory = aligned(NBYTES)
    memory.flags.writeable = False
    return memory


of_any_protocol = pytest.mark.parametrize(
    "memory",
    [
        readonly_numpy(),
        readonly_numpy().data,
        OnlyArrayInterface(readonly_numpy()),
        OnlyDLPack(readonly_numpy()),
    ],
    ids=["numpy", "memoryview", "array interface", "dlpack"],
)


@of_any_protocol
def test_read_only_memory_stays_so(memory: Any) -> None:
    collection = Collection.wrap(LAYOUT, memory, N)
    assert collection.readonly
    assert collection.rows(3).readonly
    with pytest.raises(ValueError, match="read-only"):
        collection["x"][0] = 1
    assert not collection.to("cpu").readonly  # a copy


@of_any_protocol
def test_read_only_memory_is_writable_if_the_caller_says_so(memory: Any) -> None:
    assert not Collection.wrap(LAYOUT, memory, N, readonly=False).readonly


def test_bytes_are_read_only() -> None:
    loose = Layout([column("k", "int16")], 2)  # `bytes` objects are not aligned
    collection = Collection.wrap(loose, b"\1\0\2\0", 2)
    assert collection.readonly and collection["k"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "nothing",
    [np.zeros(0, "f4"), b"", torch.empty(0), OnlyDLPack(torch.empty(0)), 0],
    ids=["numpy", "bytes", "torch", "dlpack", "address"],
)
def test_memory_of_no_bytes_is_wrapped(nothing: Any) -> None:
    collection = Collection.wrap(Layout([column("x", "float32")]), nothing, 0, nbytes=0)
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
def test_addresses_that_cannot_be_wrapped_are_refused(address: Any, nbytes: int, says: str) -> None:
    with pytest.raises(CollectionError, match=says):
        Collection.wrap(LAYOUT, address, N, nbytes=nbytes)


def test_an_exporter_that_fails_is_refused_with_its_reason() -> None:
    class Broken(OnlyDLPack):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("not today")

    with pytest.raises(CollectionError, match=r"Broken does not export its memory.*not today"):
        import_bytes(Broken(torch.zeros(4)))


def test_an_exporter_of_a_copy() -> None:
    class Copying(OnlyDLPack):
        """Asks NumPy for a copy, which sets DLPack's IS_COPIED flag."""

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options | {"copy": True})

    with pytest.raises(CollectionError, match="Copying exports a copy of its memory"):
        import_bytes(Copying(np.zeros(4)))


class OnGpu:
    """An exporter of GPU memory, which the tests never read."""

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": (4, 3), "typestr": "<f4", "data": (4096, True), "version": 3}
        self.__cuda_array_interface__ = interface | changes


without_gpu_torch = pytest.mark.skipif(
    torch_drives_gpus(), reason="says what comes where no torch is built for GPUs"
)


@without_gpu_torch
def test_gpu_memory_is_described_without_torch() -> None:
    memory = OnGpu(strides=(12, 4))
    span, dtype, shape = import_bytes(memory)
    assert (span.address, span.nbytes, span.device) == (4096, 4 * 3 * 4, "cuda:0")
    assert span.readonly and span.owner is memory and (dtype, shape) == ("float32", (4, 3))


@without_gpu_torch
def test_an_address_may_be_of_any_gpu_without_torch() -> None:
    assert import_bytes(8192, 16, "cuda:1").bytes.device == "cuda:1"


@without_gpu_torch
@pytest.mark.parametrize(
    "changes",
    [{"strides": (4, 16)}, {"mask": OnGpu()}, {"shape": None}],
    ids=["strides", "mask", "shape"],
)
def test_gpu_memory_in_another_form_is_refused_without_torch(changes: dict[str, Any]) -> None:
    with pytest.raises(CollectionError):
        import_bytes(OnGpu(**changes))


@without_gpu_torch
@pytest.mark.parametrize(
    "call",
    [
        lambda on_gpu: Collection(LAYOUT, N, "cuda"),
        lambda on_gpu: on_gpu.to("cpu"),
        lambda on_gpu: on_gpu.tensor("x"),
        lambda on_gpu: on_gpu.rows(1).fill("x", np.zeros(1)),
    ],
    ids=["made", "copied", "seen", "filled"],
)
def test_gpu_memory_is_neither_made_nor_read_without_torch(
    call: Callable[[Collection], Any],
) -> None:
    on_gpu = Collection.wrap(LAYOUT, 4096, N, nbytes=NBYTES, device="cuda:0")
    with pytest.raises(CollectionError, match="no torch that is built for GPUs"):
        call(on_gpu)


@without_gpu_torch
def test_the_text_of_a_collection_names_its_gpu_without_torch() -> None:
    on_gpu = Collection.wrap(LAYOUT, 4096, N, nbytes=NBYTES, device="cuda:0")
    assert "cuda:0" in repr(on_gpu)


# -- lifetime --------------------------------------------------------------------------------


# No test here collects garbage: memory must be freed without the collector, which would keep large
# events for long.


class Owned(np.ndarray[Any, Any]):
    """An array with weak references, which show when it is freed."""


@pytest.mark.parametrize("protocol", [lambda a: a, OnlyArrayInterface, memoryview, OnlyDLPack])
@pytest.mark.parametrize(
    "view_of",
    [
        lambda collection: collection,
        lambda collection: collection.rows(2),
        lambda collection: collection.tensor("x"),
        lambda collection: collection.span("k").tensor(),
    ],
    ids=["collection", "rows", "view", "component"],
)
def test_memory_lives_as_long_as_what_sees_it(
    protocol: Callable[[Any], Any], view_of: Callable[[Collection], Any]
) -> None:
    array = aligned(NBYTES).view(Owned)
    watch = weakref.ref(array)
    view = view_of(Collection.wrap(LAYOUT, protocol(array), N))
    del array
    assert watch() is not None
    del view
    assert watch() is None


# -- GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize(
    "protocol", [lambda tensor: tensor, OnlyCudaArrayInterface, OnlyDLPack, torch.Tensor.data_ptr]
)
def test_cuda_memory_of_every_protocol_is_wrapped_in_place(
    protocol: Callable[[torch.Tensor], Any],
) -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    source = protocol(memory)
    size: dict[str, Any] = {"nbytes": NBYTES, "device": "cuda"} if isinstance(source, int) else {}
    collection = Collection.wrap(LAYOUT, source, N, **size)
    assert collection.data_ptr == memory.data_ptr()
    assert collection.device == memory.device
    collection.tensor("x")[0] = 1
    assert memory.view(torch.float32)[0].item() == 1
    assert collection.to("cpu").tensor("x")[0] == 1


@pytest.mark.cuda
def test_cuda_memory_may_be_read_only() -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    assert Collection.wrap(LAYOUT, OnlyCudaArrayInterface(memory, readonly=True), N).readonly


@pytest.mark.cuda
def test_cuda_memory_is_not_read_as_cpu_memory() -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    with pytest.raises(CollectionError, match="NumPy reads CPU memory"):
        Collection.wrap(LAYOUT, memory, N)["x"]
    with pytest.raises(CollectionError, match="lies on cuda:0, not on cpu"):
        import_bytes(memory, device="cpu")


@pytest.mark.cuda
def test_own_cuda_memory_is_aligned_and_filled_from_numpy() -> None:
    collection = Collection(LAYOUT, N, "cuda")
    assert collection.data_ptr % 128 == 0
    assert collection.device.type == "cuda"
    values = {"x": np.arange(N, dtype="f4"), "k": np.arange(N, dtype="i2"), "s": np.float64(2)}
    filled = Collection.from_arrays(LAYOUT, values, device="cuda").to("cpu")
    assert filled.tensor("x").tolist() == list(range(N))
