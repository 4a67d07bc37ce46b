"""Buffers: everything with bytes in it is taken as it is, everything else is refused by name."""

from __future__ import annotations

import array

import numpy as np
import pytest

from kvstore.client.buffers import rows_to_fill, rows_to_read
from kvstore.errors import InvalidRequest

torch = pytest.importorskip("torch")

FILLABLE = {
    "uint8 rows": lambda: np.zeros((3, 16), np.uint8),
    "more rows than needed": lambda: np.zeros((7, 16), np.uint8),
    "float32 of another shape": lambda: np.zeros((2, 3, 2, 1), np.float32),
    "bytearray": lambda: bytearray(48),
    "memoryview": lambda: memoryview(bytearray(50)),
    "array.array": lambda: array.array("d", [0.0] * 6),
    "torch uint8": lambda: torch.zeros(3, 16, dtype=torch.uint8),
    "torch bfloat16": lambda: torch.zeros(3, 8, dtype=torch.bfloat16),
    "torch with gradient": lambda: torch.zeros(3, 4, requires_grad=True),
}


@pytest.mark.parametrize("kind", FILLABLE)
def test_fill_shares_the_callers_memory(kind: str) -> None:
    buffer = FILLABLE[kind]()
    rows = rows_to_fill(buffer, 16, 3)
    rows[2] = 0x3F
    if hasattr(buffer, "detach"):
        seen = bytes(buffer.detach().view(torch.uint8).numpy().reshape(-1))
    else:
        seen = bytes(memoryview(buffer).cast("B"))
    assert seen[32:48] == b"\x3f" * 16 and seen[:32] == b"\0" * 32


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (np.zeros((2, 16), np.uint8), "need 48"),
        (np.zeros((3, 32), np.uint8)[:, ::2], "contiguous"),
        (np.asfortranarray(np.zeros((3, 16), np.uint8)), "contiguous"),
        (np.frombuffer(bytes(48), np.uint8), "writable"),
        (bytes(48), "writable"),
        (memoryview(bytearray(96))[::2], "contiguous"),
        (torch.zeros(16, 3, dtype=torch.uint8).t(), "contiguous"),
        (torch.zeros(3, 16, dtype=torch.uint8, device="meta"), "device memory"),
        (np.array([None] * 48), "plain numbers"),
        ([0] * 48, "must be an array"),
        ("x" * 48, "must be an array"),
        (None, "must be an array"),
        (np.zeros(0, np.uint8), "need 48"),
        (b"", "need 48"),
    ],
)
def test_fill_refuses_by_name(buffer: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^out: .*{word}"):
        rows_to_fill(buffer, 16, 3)


def arena() -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """Page-major: ``[frames, layers, 8 elements]``."""
    return np.zeros((5, 3, 8), np.float16)


ROWS_APART = {
    "a layer": lambda: arena()[1:4, 1],
    "half of it": lambda: arena()[1:4, 2, 4:],
    "of more dimensions": lambda: arena().reshape(5, 3, 2, 2, 2)[1:4, 0],
    "last frame first": lambda: arena()[3:0:-1, 1],
    "bytes": lambda: np.zeros((3, 32), np.uint8)[:, :16],
    "one element": lambda: np.zeros((3, 2), np.complex128)[:, 1:],
    "torch": lambda: torch.zeros(5, 3, 8, dtype=torch.bfloat16)[1:4, 1],
    "torch of more dimensions": lambda: torch.zeros(5, 3, 2, 2, 2, requires_grad=True)[:3, 1],
    "torch, one element": lambda: torch.zeros(3, 2, dtype=torch.complex128)[:, :1],
}


@pytest.mark.parametrize("kind", ROWS_APART)
def test_rows_apart_share_the_callers_memory(kind: str) -> None:
    buffer = ROWS_APART[kind]()
    size = buffer[0].nbytes
    for rows in (rows_to_fill(buffer, size, 3, apart=True), rows_to_read(buffer, size, 3, apart=True)):
        assert rows.shape == (3, size) and rows.dtype == np.uint8
        array = buffer.detach().view(torch.uint8).numpy() if hasattr(buffer, "detach") else buffer
        assert np.shares_memory(rows, array)
    assert len(rows_to_fill(buffer, size, 2, apart=True)) == 3
    for call in (rows_to_fill, rows_to_read):
        with pytest.raises(InvalidRequest, match="^out: .*contiguous"):
            call(buffer, size, 3, "out")
        with pytest.raises(InvalidRequest, match=f"^out: has rows of {size} bytes"):
            call(buffer, size // 2, 3, "out", apart=True)
        with pytest.raises(InvalidRequest, match="^out: has 3 rows"):
            call(buffer, size, 4, "out", apart=True)
    with pytest.raises(InvalidRequest, match="^data: has 3 rows, 2 are"):
        rows_to_read(buffer, size, 2, "data", apart=True)


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (np.zeros((3, 32), np.uint8)[:, ::2], "rows that each are"),
        (np.asfortranarray(np.zeros((3, 16), np.uint8)), "rows that each are"),
        (np.zeros(96, np.uint8)[::2], "rows that each are"),
        (np.zeros((3, 2), object)[:, :1], "plain numbers"),
        (np.broadcast_to(np.zeros(16, np.uint8), (3, 16)), "writable"),
        (np.lib.stride_tricks.as_strided(np.zeros(32, np.uint8), (3, 16), (8, 1)), "over each other"),
        (torch.zeros(1, 16, dtype=torch.uint8).expand(3, 16), "over each other"),
        (torch.zeros(16, 3, dtype=torch.uint8).t(), "rows that each are"),
        (torch.zeros(3, 2, 16, dtype=torch.uint8, device="meta")[:, 1], "device memory"),
        (np.zeros((2, 16), np.uint8), "need 48"),
        (memoryview(bytearray(96))[::2], "contiguous"),
        (bytes(48), "writable"),
    ],
)
def test_rows_apart_are_refused_by_name(buffer: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^out: .*{word}"):
        rows_to_fill(buffer, 16, 3, apart=True)
