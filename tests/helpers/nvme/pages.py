"""NVMe pages for tests: what page belongs to which seed, how to write one, and what is found in a frame."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvstore.model.replica import IDENTITY_HEAD_BYTES, STAMPED, Address, FrameClass, FrameState, info_word, word_of
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.device import NvmeDevice
from kvstore.tier.nvme.disk import Bytes, aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader

EXTENT_BYTES = 256 << 10
CLASS = FrameClass(page_bytes=10_000, page_tokens=5, layers=4)  # frames of 12 KiB
WIDE = FrameClass(page_bytes=40_000, page_tokens=1200, layers=100)  # headers of 8 KiB
CLASSES = (CLASS, WIDE)


def device_bytes(positions: int) -> int:
    return 4 * 4096 + positions * EXTENT_BYTES


@lru_cache(4096)
def payload(frame_class: FrameClass, seed: int) -> Bytes:
    """The page of a seed, padded to a frame. Shared: not to be written into."""
    buffer = aligned_buffer(frame_class.frame_bytes)
    buffer[: frame_class.page_bytes] = np.random.default_rng(seed).integers(0, 256, frame_class.page_bytes, np.uint8)
    buffer.flags.writeable = False
    return buffer


@lru_cache(4096)
def identity(frame_class: FrameClass, seed: int) -> Bytes:
    """Key, root, extra and token ids of a seed's page."""
    width = IDENTITY_HEAD_BYTES + 4 * frame_class.page_tokens
    row = np.random.default_rng(seed + (1 << 32)).integers(0, 256, width, np.uint8)
    row.flags.writeable = False
    return row


def parent(seed: int) -> bytes:
    return identity(CLASS, seed + (1 << 33))[:16].tobytes()


def header(frame_class: FrameClass, incarnation: int, address: Address, seed: int) -> Bytes:
    """The header of a seed's page at that address."""
    out = aligned_buffer(geometry.header_bytes(frame_class))
    out[:] = 0xEE
    page = payload(frame_class, seed)[: frame_class.page_bytes]
    sums = frame_header.layer_sums(page, frame_class.layers)
    info = info_word(frame_class.page_bytes, flags=STAMPED, position=seed, turns=seed % 300)
    whole = frame_header.payload_sum(page, frame_class)
    what = identity(frame_class, seed), parent(seed), info, sums, whole
    frame_header.pack(out, frame_class, incarnation, address, *what)
    return out


def write(device: NvmeDevice, position: int, frame: int, generation: int, seed: int) -> None:
    """Write a seed's page; not synced."""
    extent = device.extents[position]
    address = Address(extent.number, frame, generation)
    head = header(extent.frame_class, device.incarnation, address, seed)
    device.write_page(position, frame, extent.frame_class, head, payload(extent.frame_class, seed))


def find(device: NvmeDevice, position: int, frame: int, generation: int | None = None) -> tuple[FrameHeader | str, Any]:
    """What header and payload say: ``(header, page)`` of a sound page, else a reason."""
    extent = device.extents[position]
    frame_class = extent.frame_class
    head, page = aligned_buffer(geometry.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
    device.read_page(position, frame, frame_class, head, page)
    found = frame_header.unpack(head, frame_class, device.incarnation, extent.number, frame, generation)
    if isinstance(found, str):
        return found, None
    if not frame_header.is_payload_sound(page, frame_class, found.payload_sum):
        return "payload", None
    return found, page


def is_page(found: FrameHeader | str, page: Any, frame_class: FrameClass, seed: int) -> bool:
    """Whether this is the seed's page, and everything said of it is right."""
    if isinstance(found, str):
        return False
    expected = identity(frame_class, seed)
    said = np.frombuffer(found.key + found.root + found.extra + found.tokens.tobytes(), np.uint8)
    return bool(
        (said == expected).all()
        and found.parent == parent(seed)
        and (page[: frame_class.page_bytes] == payload(frame_class, seed)[: frame_class.page_bytes]).all()
    )


def lean_rows(frame_class: FrameClass, frames: int, sealed: dict[int, tuple[int, int]]) -> Bytes:
    """Lean record rows: frame -> (generation, seed); the others FREE."""
    rows = np.zeros((frames, frame_class.lean.row_bytes), np.uint8)
    for frame, (generation, seed) in sealed.items():
        word = word_of(generation, FrameState.SEALED)
        rows[frame, :8] = np.frombuffer(word.to_bytes(8, "little"), np.uint8)
        rows[frame, 8:24] = identity(frame_class, seed)[:16]
    return rows


def claimed(rows: Bytes) -> dict[int, tuple[int, bytes]]:
    """frame -> (generation, key) of the rows that say SEALED."""
    words = np.ascontiguousarray(rows[:, :8]).view("<u8")[:, 0].tolist()
    return {
        frame: (word >> 8, rows[frame, 8:24].tobytes())
        for frame, word in enumerate(words)
        if word & 0xFF == FrameState.SEALED
    }
