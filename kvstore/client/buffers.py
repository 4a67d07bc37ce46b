"""Checks of callers' arguments, and their conversion into one form. Every check raises InvalidRequest, which names the
field.

Buffers (numpy, torch, bytearray, memoryview, ...) become rows of bytes without a copy. So does device memory (torch
CUDA, ``__cuda_array_interface__``, DLPack), as ``DeviceRows``. ``Scattered`` is one value in several buffers.
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


class Scattered:
    """One value in several flat buffers, in order."""

    def __init__(self, parts: list[Rows]) -> None:
        self.parts = parts
        self.nbytes: int = parts[0].size if len(parts) == 1 else sum([part.size for part in parts])

    @classmethod
    def of(cls, value: Any, field: str, writable: bool) -> Scattered:
        """Make a ``Scattered`` from a caller's buffer or list of buffers. Raises InvalidRequest (field ``field``)."""
        parts = [flat_bytes(part, field) for part in (value if isinstance(value, list | tuple) else [value])]
        if writable:
            for part in parts:
                if not part.flags.writeable:
                    raise InvalidRequest(field, "must be writable")
        return cls(parts)

    def write(self, start: int, data: Rows) -> None:
        """Copy ``data`` into the value at offset ``start``."""
        for part, low, high, at in self._cut(start, data.size):
            copy(part[low:high], data[at : at + high - low])

    def read(self, start: int, into: Rows) -> None:
        """Copy the value starting at offset ``start`` into ``into``, as much as fits."""
        if len(self.parts) == 1:
            part = self.parts[0][start : start + into.size]
            copy(into[: part.size], part)
            return
        for part, low, high, at in self._cut(start, min(into.size, self.nbytes - start)):
            copy(into[at : at + high - low], part[low:high])

    def views(self, start: int, count: int) -> list[Rows]:
        """Return views of ``count`` bytes of the value starting at offset ``start``, one for each buffer."""
        return [part[low:high] for part, low, high, _ in self._cut(start, count)]

    def rows(self, start: int, rows: int, row_bytes: int) -> Rows | None:
        """Return a view of the rows starting at ``start`` that are in one buffer, at most ``rows``; None if the first
        row is not in one buffer."""
        for part, low, _, _ in self._cut(start, 1):
            fit = min(rows, (part.size - low) // row_bytes)
            return part[low : low + fit * row_bytes].reshape(fit, row_bytes) if fit else None
        return None

    def _cut(self, start: int, count: int) -> list[tuple[Rows, int, int, int]]:
        """Return (buffer, low, high, offset in the range) for each buffer with a part of the range."""
        cut, base, stop = [], 0, start + count
        for part in self.parts:
            low, high = max(start - base, 0), min(stop - base, part.size)
            if low < high:
                cut.append((part, low, high, base + low - start))
            base += part.size
        return cut


_DLPACK_CPU: Final = 1
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
    read = device_rows_to_read if on_device(buffer) else rows_to_read
    return read(buffer, row_bytes, rows, field, apart=apart)
