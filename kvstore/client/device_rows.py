"""DeviceRows: callers' device memory (torch CUDA, ``__cuda_array_interface__``, DLPack) as rows of bytes."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.client.buffers import Rows, rows_to_read
from kvstore.device.base import Addresses, Device, DeviceEvent
from kvstore.device.cuda import device_of, missing
from kvstore.errors import InvalidRequest

_DLPACK_CPU: Final = 1
_DLPACK_CUDA: Final = (2, 13)  # device and managed memory
_LEGACY_STREAM: Final = 1


@dataclass(frozen=True)
class DeviceRows:
    """Rows of bytes in a device's memory, each contiguous.

    Attributes:
        stream: the handle of the stream that may still be writing or reading them; None if there is none.
        owner: the object that keeps the memory alive.
    """

    device: Device
    address: int
    rows: int
    row_bytes: int
    stride: int  # bytes from row to row
    stream: int | None
    owner: Any

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, part: slice) -> DeviceRows:
        start, stop, step = part.indices(self.rows)
        assert step == 1
        return replace(self, address=self.address + start * self.stride, rows=max(0, stop - start))

    def columns(self, start: int, stop: int) -> DeviceRows:
        """Return these bytes of each row."""
        return replace(self, address=self.address + start, row_bytes=stop - start)

    @property
    def addresses(self) -> Addresses:
        """Return the address of each row."""
        return (self.address + np.arange(self.rows, dtype=np.int64) * self.stride).astype(np.uint64)

    def ready(self) -> DeviceEvent | None:
        """Record an event after all work queued in the caller's stream so far; None if there is nothing to wait for."""
        return None if self.stream is None else self.device.stream_of(self.stream).record()


class _Array(NamedTuple):
    """A strided array in memory of a device, strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    read_only: bool
    stream: int | None


def on_device(buffer: Any) -> bool:
    """Return whether a buffer says that it is device memory."""
    kind = type(buffer)
    if kind is DeviceRows:
        return True
    if kind is np.ndarray or kind in (bytes, bytearray, memoryview, list):
        return False
    if hasattr(kind, "untyped_storage"):
        return bool(buffer.device.type == "cuda")
    if hasattr(kind, "__cuda_array_interface__"):
        return True
    return hasattr(kind, "__dlpack_device__") and buffer.__dlpack_device__()[0] in _DLPACK_CUDA


def device_rows_to_fill(
    buffer: Any, row_bytes: int, rows: int, field: str = "out", *, apart: bool = False
) -> DeviceRows:
    """As ``buffers.rows_to_fill``, for device memory."""
    found = _rows(buffer, row_bytes, field, apart=apart, writable=True)
    if len(found) < rows:
        raise InvalidRequest(field, f"must have at least {rows} rows of {row_bytes} bytes (got {len(found)})")
    return found


def device_rows_to_read(
    buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False
) -> DeviceRows:
    """As ``buffers.rows_to_read``, for device memory."""
    found = _rows(buffer, row_bytes, field, apart=apart, writable=False)
    if len(found) != rows:
        raise InvalidRequest(field, f"must have {rows} rows of {row_bytes} bytes (got {len(found)})")
    return found


def _rows(buffer: Any, row_bytes: int, field: str, *, apart: bool, writable: bool) -> DeviceRows:
    if isinstance(buffer, DeviceRows):
        assert buffer.row_bytes == row_bytes
        return buffer
    owner, array = _array_of(buffer, field)
    if writable and array.read_only:
        raise InvalidRequest(field, "must be writable")
    nbytes = math.prod(array.shape) * array.itemsize
    if _contiguous(array.shape, array.strides, array.itemsize):
        if not writable and nbytes % max(1, row_bytes):
            raise InvalidRequest(field, f"must consist of rows of {row_bytes} bytes (got {nbytes} bytes)")
        rows, stride = nbytes // max(1, row_bytes), row_bytes
    else:
        inner = len(array.shape) > 1 and _contiguous(array.shape[1:], array.strides[1:], array.itemsize)
        if not apart or not inner:
            raise InvalidRequest(field, "must be C-contiguous" + (", or have contiguous rows" if apart else ""))
        rows, stride = array.shape[0], array.strides[0]
        if nbytes != rows * row_bytes:
            raise InvalidRequest(field, f"must have rows of {row_bytes} bytes (got {nbytes // rows})")
        if writable and rows > 1 and abs(stride) < row_bytes:
            raise InvalidRequest(field, "must not have overlapping rows")
    device = device_of(array.address)
    if device is None and nbytes:
        why = missing()
        raise InvalidRequest(field, "must be memory of a device of this process" + (f": {why}" if why else ""))
    if device is None:
        raise InvalidRequest(field, "must not be empty")
    return DeviceRows(device, array.address, rows, row_bytes, stride, array.stream, owner)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _array_of(buffer: Any, field: str) -> tuple[Any, _Array]:
    """Return the object that keeps the memory alive, and the array's place."""
    if hasattr(type(buffer), "untyped_storage"):
        return buffer, _of_torch(buffer, field)
    if hasattr(type(buffer), "__cuda_array_interface__"):
        return buffer, _of_interface(buffer.__cuda_array_interface__, field)
    return _of_dlpack(buffer, field)


def _of_torch(tensor: Any, field: str) -> _Array:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided:
        raise InvalidRequest(field, "must be a strided tensor")
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return _Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, False, stream)


def _of_interface(told: dict[str, Any], field: str) -> _Array:
    """See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
    if told.get("mask") is not None:
        raise InvalidRequest(field, "must have no mask")
    kind, shape = np.dtype(told["typestr"]), tuple(int(length) for length in told["shape"])
    strides = told.get("strides")
    if strides is None:
        strides = tuple(kind.itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape)))
    address, read_only = told["data"]
    return _Array(int(address), shape, tuple(strides), kind.itemsize, bool(read_only), told.get("stream"))


class _Tensor(ctypes.Structure):
    """DLTensor, the first member of a DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _of_dlpack(buffer: Any, field: str) -> tuple[Any, _Array]:
    """Return the capsule, which keeps the memory alive, and the array. A capsule that was not renamed frees the memory
    when it is dropped."""
    capsule = buffer.__dlpack__(stream=_LEGACY_STREAM)  # its work is ordered before anything queued from now on
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    itemsize, odd = divmod(tensor.bits * tensor.lanes, 8)
    if odd:
        raise InvalidRequest(field, "must have elements of whole bytes")
    shape = tuple(tensor.shape[at] for at in range(tensor.ndim))
    strides = tuple(itemsize * math.prod(shape[at + 1 :]) for at in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[at] * itemsize for at in range(tensor.ndim))
    array = _Array((tensor.data or 0) + tensor.byte_offset, shape, strides, itemsize, False, _LEGACY_STREAM)
    return (buffer, capsule), array


def any_rows(buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False) -> Rows | DeviceRows:
    """Call ``rows_to_read`` for host memory, and ``device_rows_to_read`` for device memory."""
    read = device_rows_to_read if on_device(buffer) else rows_to_read
    return read(buffer, row_bytes, rows, field, apart=apart)
