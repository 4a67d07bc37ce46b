"""Checks of callers' arguments, and their conversion into one form. Every check raises InvalidRequest, which names the
field.

Buffers (numpy, torch, bytearray, memoryview, ...) become rows of bytes without a copy. So does device memory (torch
CUDA, ``__cuda_array_interface__``, DLPack, ``DevicePointer``), as ``DeviceRows``. A part of an opaque object has no
rows: it is a flat array, or ``DevicePart``.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.device.base import Addresses, Device, DeviceEvent
from kvstore.device.cuda import device_of, missing
from kvstore.device.host_memory import copy
from kvstore.errors import InvalidRequest

Rows = npt.NDArray[np.uint8]


class PageRows(list[Rows]):
    """Pages that are not adjacent, each a uint8 array ``[page_bytes]``. A put accepts them like one array."""


_U8 = np.dtype(np.uint8)


def rows_to_fill(buffer: Any, row_bytes: int, rows: int, field: str = "out", *, apart: bool = False) -> Rows:
    """Return ``buffer`` as writable uint8 ``[>= rows, row_bytes]``, sharing the caller's memory.

    Any C-contiguous writable buffer of at least ``rows * row_bytes`` bytes is accepted, of any dtype and shape.

    Args:
        apart: also accept arrays and tensors ``[>= rows, ...]`` in which each row of ``row_bytes`` is contiguous.

    Raises:
        InvalidRequest: too small, read-only, not contiguous, not host memory, or not a buffer.
    """
    if (
        type(buffer) is np.ndarray
        and buffer.dtype is _U8
        and buffer.ndim == 2
        and buffer.shape[1] == row_bytes
        and buffer.shape[0] >= rows
        and buffer.flags.carray
    ):
        return buffer
    apart_rows = _rows_apart(buffer, row_bytes, field) if apart else None
    if apart_rows is not None:
        if not apart_rows.flags.writeable:
            raise InvalidRequest(field, "must be writable")
        if len(apart_rows) < rows:
            raise InvalidRequest(field, f"must have at least {rows} rows (got {len(apart_rows)})")
        if len(apart_rows) > 1 and abs(apart_rows.strides[0]) < row_bytes:
            raise InvalidRequest(field, "must not have overlapping rows")
        return apart_rows
    flat = flat_bytes(buffer, field)
    if not flat.flags.writeable:
        raise InvalidRequest(field, "must be writable")
    size = rows * row_bytes
    if flat.size < size:
        raise InvalidRequest(field, f"must have at least {size} bytes for {rows} rows of {row_bytes} (got {flat.size})")
    usable = flat.size // row_bytes * row_bytes
    return flat[:usable].reshape(-1, row_bytes)


def rows_to_read(buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False) -> Rows:
    """Return ``buffer`` as uint8 ``[rows, row_bytes]`` for reading, sharing the caller's memory.

    Args:
        apart: also accept arrays and tensors ``[rows, ...]`` in which each row of ``row_bytes`` is contiguous.

    Raises:
        InvalidRequest: not exactly ``rows * row_bytes`` bytes, not contiguous, not host memory, or not a buffer.
    """
    if type(buffer) is PageRows:
        return buffer  # type: ignore[return-value]  # only the node's own server passes them, in the right size
    if type(buffer) is np.ndarray and buffer.dtype is _U8 and buffer.shape == (rows, row_bytes):
        if buffer.flags.c_contiguous or (apart and buffer.strides[1] == 1):
            return buffer
        raise InvalidRequest(field, "must be C-contiguous")
    apart_rows = _rows_apart(buffer, row_bytes, field) if apart else None
    if apart_rows is not None:
        if len(apart_rows) != rows:
            raise InvalidRequest(field, f"must have {rows} rows (got {len(apart_rows)})")
        return apart_rows
    flat = flat_bytes(buffer, field)
    size = rows * row_bytes
    if flat.size != size:
        raise InvalidRequest(field, f"must have {size} bytes, {rows} rows of {row_bytes} (got {flat.size})")
    return flat.reshape(rows, row_bytes)


def fill(target: Rows, source: Any) -> None:
    """Copy rows into the same number of rows. ``source`` is one array, or a slice of ``PageRows``."""
    if isinstance(source, list):
        for row, bytes_of_page in zip(target, source, strict=True):
            copy(row, bytes_of_page)
    else:
        copy(target, source)


def flat_bytes(buffer: Any, field: str) -> Rows:
    """Return all bytes of a C-contiguous buffer as uint8 ``[bytes]``."""
    if type(buffer) is np.ndarray and buffer.dtype is _U8 and buffer.ndim == 1 and buffer.flags.c_contiguous:
        return buffer
    if hasattr(buffer, "detach") and hasattr(buffer, "untyped_storage"):
        return _flat_tensor(buffer, field)
    if not isinstance(buffer, np.ndarray):
        return _flat_memory(buffer, field)
    if buffer.dtype.hasobject:
        raise InvalidRequest(field, f"must hold plain numbers (got {buffer.dtype})")
    if not buffer.flags.c_contiguous:
        raise InvalidRequest(field, "must be C-contiguous")
    return buffer.reshape(-1).view(np.uint8)


def _rows_apart(buffer: Any, row_bytes: int, field: str) -> Rows | None:
    """Return an array or tensor ``[n, ...]`` that has gaps between its rows as uint8 ``[n, row_bytes]``. Return None if
    it is contiguous, or not an array.

    Raises:
        InvalidRequest: a row is not contiguous or not ``row_bytes`` long, or the memory is not the host's.
    """
    if hasattr(buffer, "detach") and hasattr(buffer, "untyped_storage"):
        torch = sys.modules["torch"]
        _check_host(buffer, field)
        if buffer.layout is not torch.strided or buffer.is_contiguous():
            return None
        if buffer.dim() < 2 or not buffer[0].is_contiguous():
            raise InvalidRequest(field, "must be C-contiguous, or have contiguous rows")
        rows: Rows = buffer.detach().view(len(buffer), -1).view(torch.uint8).numpy()
    elif isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous:
        if buffer.dtype.hasobject or buffer.ndim < 2 or not buffer[0].flags.c_contiguous:
            raise InvalidRequest(field, "must be plain numbers, C-contiguous or with contiguous rows")
        rows = buffer.reshape(len(buffer), -1).view(np.uint8)
    else:
        return None
    if rows.shape[1] != row_bytes:
        raise InvalidRequest(field, f"must have rows of {row_bytes} bytes (got {rows.shape[1]})")
    return rows


def _check_host(tensor: Any, field: str) -> None:
    if tensor.device.type != "cpu":
        raise InvalidRequest(field, f"must be host memory (got a tensor on {tensor.device})")


def _flat_tensor(tensor: Any, field: str) -> Rows:
    """Return a torch tensor's bytes. Torch reinterprets them, because numpy has no bfloat16."""
    _check_host(tensor, field)
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_contiguous():
        raise InvalidRequest(field, "must be C-contiguous")
    flat: Rows = tensor.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return flat


def _flat_memory(buffer: Any, field: str) -> Rows:
    try:
        view = memoryview(buffer)
    except TypeError:
        kind = type(buffer).__name__
        raise InvalidRequest(field, f"must be an array, a tensor or a buffer (got {kind})") from None
    if not view.c_contiguous:
        raise InvalidRequest(field, "must be C-contiguous")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


SECONDS_MAX = 1e6


def check_seconds(value: Any, field: str) -> float:
    """Return a positive number of seconds. Raises InvalidRequest for anything else."""
    if not isinstance(value, int | float) or not 0 < value < SECONDS_MAX:
        raise InvalidRequest(field, f"must be positive seconds (got {value!r})")
    return value


def check_text(value: Any, field: str) -> str:
    """Return text that UTF-8 can encode. Raises InvalidRequest for anything else."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be text (got {type(value).__name__})")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid text ({error.reason})") from None
    return value


_DLPACK_CUDA: Final = (2, 13)  # device and managed memory
_LEGACY_STREAM: Final = 1


@dataclass(frozen=True)
class DeviceRows:
    """Contiguous rows of bytes in device memory.

    Attributes:
        stream: the handle of the stream that may still write or read the rows; None if there is none.
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
        """Return the rows with only these bytes of each row."""
        return replace(self, address=self.address + start, row_bytes=stop - start)

    @property
    def addresses(self) -> Addresses:
        """The address of each row."""
        return (self.address + np.arange(self.rows, dtype=np.int64) * self.stride).astype(np.uint64)

    def ready(self) -> DeviceEvent | None:
        """Record an event after all work queued in the caller's stream; return None if the rows have no stream."""
        return None if self.stream is None else self.device.stream_of(self.stream).record()


@dataclass(slots=True, eq=False)
class DevicePart:
    """Contiguous bytes in device memory, as one part of a value. The counterpart of a flat array.

    Attributes:
        size: the number of bytes.
        stream, owner: as in ``DeviceRows``.
    """

    device: Device
    address: int
    size: int
    stream: int | None
    owner: Any

    def row(self, start: int, stop: int) -> DeviceRows:
        """Return bytes ``start`` to ``stop`` as one row."""
        size = stop - start
        return DeviceRows(self.device, self.address + start, 1, size, size, self.stream, self.owner)


@dataclass(frozen=True, slots=True)
class DevicePointer:
    """A range of device memory by its address, for programs that have no tensor. Every verb that accepts device memory
    accepts a pointer too. The program keeps the memory allocated.

    Attributes:
        stream: the handle of a stream (``cudaStream_t``) whose queued work comes before the copy. None: the program has
            already waited for all work on the memory.

    Raises:
        InvalidRequest: ``address`` or ``nbytes`` is not a positive integer.
    """

    address: int
    nbytes: int
    stream: int | None = None

    def __post_init__(self) -> None:
        for field in ("address", "nbytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or not 0 < value < 1 << 64:
                raise InvalidRequest(field, f"must be a positive integer of 64 bits (got {value!r})")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self.address, False
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3, "stream": self.stream}


class _Array(NamedTuple):
    """A strided array in device memory, with strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    read_only: bool
    stream: int | None


def on_device(buffer: Any) -> bool:
    """Return whether a buffer is device memory, according to its type."""
    kind = type(buffer)
    if kind is np.ndarray or kind in (bytes, bytearray, memoryview, list):
        return False
    if kind in (DeviceRows, DevicePart):
        return True
    if hasattr(kind, "untyped_storage"):
        return bool(buffer.device.type == "cuda")
    if hasattr(kind, "__cuda_array_interface__"):
        return True
    return hasattr(kind, "__dlpack_device__") and buffer.__dlpack_device__()[0] in _DLPACK_CUDA


def device_rows_to_fill(
    buffer: Any, row_bytes: int, rows: int, field: str = "out", *, apart: bool = False
) -> DeviceRows:
    """Return device memory as writable rows, with the checks of ``rows_to_fill``."""
    device_rows = _rows(buffer, row_bytes, field, apart=apart, writable=True)
    if len(device_rows) < rows:
        raise InvalidRequest(field, f"must have at least {rows} rows of {row_bytes} bytes (got {len(device_rows)})")
    return device_rows


def device_rows_to_read(
    buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False
) -> DeviceRows:
    """Return device memory as rows, with the checks of ``rows_to_read``."""
    device_rows = _rows(buffer, row_bytes, field, apart=apart, writable=False)
    if len(device_rows) != rows:
        raise InvalidRequest(field, f"must have {rows} rows of {row_bytes} bytes (got {len(device_rows)})")
    return device_rows


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
        has_rows = len(array.shape) > 1 and _contiguous(array.shape[1:], array.strides[1:], array.itemsize)
        if not apart or not has_rows:
            raise InvalidRequest(field, "must be C-contiguous" + (", or have contiguous rows" if apart else ""))
        rows, stride = array.shape[0], array.strides[0]
        if nbytes != rows * row_bytes:
            raise InvalidRequest(field, f"must have rows of {row_bytes} bytes (got {nbytes // rows})")
        if writable and rows > 1 and abs(stride) < row_bytes:
            raise InvalidRequest(field, "must not have overlapping rows")
    if not nbytes:
        raise InvalidRequest(field, "must not be empty")
    device = _device_of(buffer, array.address, nbytes, field)
    return DeviceRows(device, array.address, rows, row_bytes, stride, array.stream, owner)


def part_of(buffer: Any, field: str, *, writable: bool) -> Rows | DevicePart:
    """Return all bytes of a C-contiguous buffer in host or device memory, sharing the caller's memory.

    Raises:
        InvalidRequest: read-only although ``writable``, not contiguous, or not a buffer.
    """
    if on_device(buffer):
        return _device_bytes(buffer, field, writable=writable)
    flat = flat_bytes(buffer, field)
    if writable and not flat.flags.writeable:
        raise InvalidRequest(field, "must be writable")
    return flat


def _device_bytes(buffer: Any, field: str, *, writable: bool) -> Rows | DevicePart:
    """Return the bytes of device memory; an empty array if there are none."""
    if type(buffer) is DevicePart:
        return buffer
    owner, array = _array_of(buffer, field)
    if writable and array.read_only:
        raise InvalidRequest(field, "must be writable")
    if not _contiguous(array.shape, array.strides, array.itemsize):
        raise InvalidRequest(field, "must be C-contiguous")
    nbytes = math.prod(array.shape) * array.itemsize
    if not nbytes:
        return np.empty(0, np.uint8)
    device = _device_of(buffer, array.address, nbytes, field)
    return DevicePart(device, array.address, nbytes, array.stream, owner)


def _device_of(buffer: Any, address: int, nbytes: int, field: str) -> Device:
    """Return the device that has a buffer. A pointer's range may end elsewhere than its memory, so its last byte is
    checked too."""
    device = device_of(address)
    if device is None:
        why = missing()
        raise InvalidRequest(field, "must be memory of a device of this process" + (f": {why}" if why else ""))
    if type(buffer) is DevicePointer and not device.owns(address + nbytes - 1):
        raise InvalidRequest(field, f"must be memory of {device.name} up to its last byte (got {nbytes} bytes)")
    return device


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _array_of(buffer: Any, field: str) -> tuple[Any, _Array]:
    """Return the object that keeps the memory alive, and the array."""
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


def _of_interface(interface: dict[str, Any], field: str) -> _Array:
    """Return the array of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
    if interface.get("mask") is not None:
        raise InvalidRequest(field, "must have no mask")
    kind, shape = np.dtype(interface["typestr"]), tuple(int(length) for length in interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(kind.itemsize * math.prod(shape[at + 1 :]) for at in range(len(shape)))
    address, read_only = interface["data"]
    return _Array(int(address), shape, tuple(strides), kind.itemsize, bool(read_only), interface.get("stream"))


class _Tensor(ctypes.Structure):
    """DLTensor, which is the first member of a DLManagedTensor."""

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
    """Return the buffer and its capsule, which keep the memory alive, and the array. A capsule that was not renamed
    frees the memory when it is dropped."""
    capsule = buffer.__dlpack__(stream=_LEGACY_STREAM)  # work queued so far comes before work queued later
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
    if (
        type(buffer) is np.ndarray
        and buffer.dtype is _U8
        and buffer.shape == (rows, row_bytes)
        and buffer.flags.c_contiguous
    ):
        return buffer
    read = device_rows_to_read if on_device(buffer) else rows_to_read
    return read(buffer, row_bytes, rows, field, apart=apart)
