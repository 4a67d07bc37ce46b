"""Buffers: what callers hand in (numpy, torch, bytearray, memoryview, ...) as plain rows of bytes, without a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

Rows = npt.NDArray[np.uint8]


class PageRows(list[Rows]):
    """Pages that do not lie together, each a uint8 array ``[page_bytes]``: a put takes them like one array."""


_U8 = np.dtype(np.uint8)


def rows_to_fill(buffer: Any, row_bytes: int, rows: int, field: str = "out") -> Rows:
    """``buffer`` as uint8 ``[>= rows, row_bytes]`` to be written into; shares the caller's memory.

    Any dtype and shape of at least ``rows * row_bytes`` bytes will do, where it is C-contiguous and writable.

    Raises:
        InvalidRequest: too small, read-only, not contiguous, not host memory, or no buffer at all; names ``field``.
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
    flat = flat_bytes(buffer, field)
    if not flat.flags.writeable:
        raise InvalidRequest(field, "must be writable")
    need = rows * row_bytes
    if flat.size < need:
        raise InvalidRequest(field, f"has {flat.size} bytes, {rows} rows of {row_bytes} need {need}")
    usable = flat.size // row_bytes * row_bytes
    return flat[:usable].reshape(-1, row_bytes)


def rows_to_read(buffer: Any, row_bytes: int, rows: int, field: str = "pages") -> Rows:
    """``buffer`` as uint8 ``[rows, row_bytes]`` to be read from; shares the caller's memory.

    Raises:
        InvalidRequest: not exactly ``rows * row_bytes`` bytes, not contiguous, not host memory, or no buffer at all.
    """
    if type(buffer) is PageRows:
        return buffer  # type: ignore[return-value]  # by our own server, which has made them so
    if type(buffer) is np.ndarray and buffer.dtype is _U8 and buffer.shape == (rows, row_bytes):
        if buffer.flags.c_contiguous:
            return buffer
        raise InvalidRequest(field, "must be C-contiguous")
    flat = flat_bytes(buffer, field)
    need = rows * row_bytes
    if flat.size != need:
        raise InvalidRequest(field, f"has {flat.size} bytes, {rows} of {row_bytes} bytes each are expected: {need}")
    return flat.reshape(rows, row_bytes)


def fill(target: Rows, source: Any) -> None:
    """Copy rows into as many rows; ``source`` is one array, or a slice of ``PageRows``."""
    if isinstance(source, list):
        for row, bytes_of_page in zip(target, source, strict=True):
            row[:] = bytes_of_page
    else:
        target[:] = source


def flat_bytes(buffer: Any, field: str) -> Rows:
    """All bytes of a C-contiguous buffer as uint8 ``[bytes]``."""
    if hasattr(buffer, "detach") and hasattr(buffer, "untyped_storage"):
        return _flat_tensor(buffer, field)
    if not isinstance(buffer, np.ndarray):
        return _flat_memory(buffer, field)
    if buffer.dtype.hasobject:
        raise InvalidRequest(field, f"must hold plain numbers, not {buffer.dtype}")
    if not buffer.flags.c_contiguous:
        raise InvalidRequest(field, "must be C-contiguous")
    return buffer.reshape(-1).view(np.uint8)


def _flat_tensor(tensor: Any, field: str) -> Rows:
    """A torch tensor's bytes. numpy knows no bfloat16, so the tensor is seen as bytes on torch's side first."""
    if tensor.device.type != "cpu":
        raise InvalidRequest(field, f"is on {tensor.device}; device memory comes with the HBM tier, pass host memory")
    if tensor.layout is not sys.modules["torch"].strided or not tensor.is_contiguous():
        raise InvalidRequest(field, "must be C-contiguous")
    flat: Rows = tensor.detach().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return flat


def _flat_memory(buffer: Any, field: str) -> Rows:
    try:
        view = memoryview(buffer)
    except TypeError:
        kind = type(buffer).__name__
        raise InvalidRequest(field, f"must be an array, a tensor or a buffer, not {kind}") from None
    if not view.c_contiguous:
        raise InvalidRequest(field, "must be C-contiguous")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)
