"""Buffers: everything with bytes in it is taken as it is, everything else is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.client.buffers import rows_to_fill
from kvstore.errors import InvalidRequest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (np.zeros((2, 16), np.uint8), "48 bytes"),
        (np.zeros((3, 32), np.uint8)[:, ::2], "contiguous"),
        (np.asfortranarray(np.zeros((3, 16), np.uint8)), "contiguous"),
        (np.frombuffer(bytes(48), np.uint8), "writable"),
        (bytes(48), "writable"),
        (memoryview(bytearray(96))[::2], "contiguous"),
        (torch.zeros(16, 3, dtype=torch.uint8).t(), "contiguous"),
        (torch.zeros(3, 16, dtype=torch.uint8, device="meta"), "must be host memory"),
        (np.array([None] * 48), "plain numbers"),
        ([0] * 48, "must be an array"),
        ("x" * 48, "must be an array"),
        (None, "must be an array"),
        (np.zeros(0, np.uint8), "48 bytes"),
        (b"", "48 bytes"),
    ],
)
def test_fill_refuses_by_name(buffer: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^out: .*{word}"):
        rows_to_fill(buffer, 16, 3)


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (np.zeros((3, 32), np.uint8)[:, ::2], "contiguous rows"),
        (np.asfortranarray(np.zeros((3, 16), np.uint8)), "contiguous rows"),
        (np.zeros(96, np.uint8)[::2], "contiguous rows"),
        (np.zeros((3, 2), object)[:, :1], "plain numbers"),
        (np.broadcast_to(np.zeros(16, np.uint8), (3, 16)), "writable"),
        (np.lib.stride_tricks.as_strided(np.zeros(32, np.uint8), (3, 16), (8, 1)), "overlapping"),
        (torch.zeros(1, 16, dtype=torch.uint8).expand(3, 16), "overlapping"),
        (torch.zeros(16, 3, dtype=torch.uint8).t(), "contiguous rows"),
        (torch.zeros(3, 2, 16, dtype=torch.uint8, device="meta")[:, 1], "must be host memory"),
        (np.zeros((2, 16), np.uint8), "48 bytes"),
        (memoryview(bytearray(96))[::2], "contiguous"),
        (bytes(48), "writable"),
    ],
)
def test_rows_apart_are_refused_by_name(buffer: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^out: .*{word}"):
        rows_to_fill(buffer, 16, 3, apart=True)
