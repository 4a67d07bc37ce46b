"""Header of a page on NVMe. It precedes the frame, and proves which page is stored there.

All little-endian; the rest of the header's 4096-byte blocks is zero, and the payload follows::

      0  magic 8 | version u32 | used bytes u32, including the sum
     16  incarnation u64                    a random number of the device's format
     24  extent u32 | frame u32 | generation u64      the page's address; the generation also is the sequence
     40  page_tokens u32 | layers u32
     48  parent 16                          key of the page before, or the root
     64  info u64                           as in the page's record: payload bytes, position, flags, turns
     72  payload sum u64                    xxh3_64 of the page, checked by readers of entire pages
     80  key 16 | root 16 | extra 16 | token ids 4 * page_tokens      the identity, as in a DRAM record
         checksums u32 * layers             low 32 bits of xxh3_64 of each layer, as in a DRAM record
         sum u64                            xxh3_64 of everything before it

Worked example: 64 token ids and 32 layers use 136 + 256 + 128 = 520 bytes, in one block of 4096. (For a page of 64 KiB
one sum takes 4 us, and 32 sums of its layers 20 us.)

The header contains the address too. So a page of a former extent, or a page that was written to the wrong frame, is not
mistaken for a stored page. A wrong header is not an error but a reason, one of ``REASONS``.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.replica import IDENTITY_HEAD_BYTES, KEY_BYTES, PAYLOAD_MASK, Address, FrameClass
from kvstore.tier.nvme import geometry

VERSION: Final = 3
REASONS: Final = (
    "header",  # damaged, or not a header
    "version",  # another version of this format
    "foreign",  # written for another device, or before this one was reformatted
    "swapped",  # valid, but for another page or another frame
    "payload",  # the header is valid, but the page's checksums are wrong
)
_MAGIC: Final = b"KVFRAME1"
_FIXED = struct.Struct("<8sIIQIIQII16sQQ")  # up to the identity
_START: Final = struct.Struct("<8sII")
_SUM_BYTES: Final = 8
_IDENTITY: Final = _FIXED.size
assert _IDENTITY + IDENTITY_HEAD_BYTES + _SUM_BYTES == geometry.HEAD_BYTES
_PLACE: Final = struct.Struct("<8sIIQIIQII")  # the fields whose values a reader knows: up to the layers
assert _PLACE.size == _IDENTITY - KEY_BYTES - 16

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.uint32]

_digest = xxhash.xxh3_64_intdigest


class FrameHeader(NamedTuple):
    """The contents of a valid header. ``tokens`` and ``checksums`` are copies."""

    address: Address
    key: bytes
    root: bytes
    extra: bytes
    parent: bytes
    info: int
    payload_sum: int
    tokens: Sums
    checksums: Sums


def pack(
    out: Bytes,
    frame_class: FrameClass,
    incarnation: int,
    address: Address,
    identity: Bytes,
    parent: bytes,
    info: int,
    checksums: Sums,
    payload_sum: int,
) -> None:
    """Write a page's header into ``out`` ``[header_bytes]``, and fill all of it. See ``pack_bytes``."""
    place = frame_class, incarnation, address
    header = pack_bytes(*place, identity.tobytes(), parent, info, checksums, payload_sum)
    assert len(out) == len(header), (len(out), len(header))
    out[:] = np.frombuffer(header, np.uint8)


def pack_bytes(
    frame_class: FrameClass,
    incarnation: int,
    address: Address,
    identity: bytes,
    parent: bytes,
    info: int,
    checksums: Sums,
    payload_sum: int,
) -> bytes:
    """Return a page's header, ``header_bytes`` long.

    Args:
        incarnation: incarnation of the frame's device.
        identity: ``48 + 4 * page_tokens`` bytes: key, root, extra and token ids, as in a DRAM record.
        checksums: one checksum per layer.
        payload_sum: sum of the page. Compute it before the checksums are verified, so that both cover the same bytes.
    """
    used = _used_bytes(frame_class)
    tokens_end = used - _SUM_BYTES - 4 * frame_class.layers
    assert len(checksums) == frame_class.layers, "of another class"
    assert len(identity) == tokens_end - _IDENTITY and len(parent) == KEY_BYTES, (len(identity), len(parent))
    head = _FIXED.pack(
        *(_MAGIC, VERSION, used, incarnation, *address),
        *(frame_class.page_tokens, frame_class.layers, parent, info, payload_sum),
    )
    content = b"".join((head, identity, checksums.astype("<u4", copy=False).tobytes()))
    header = content + _digest(content).to_bytes(_SUM_BYTES, "little")
    return header.ljust(geometry.header_bytes(frame_class), b"\0")


def unpack(
    header: Bytes, frame_class: FrameClass, incarnation: int, extent: int, frame: int, generation: int | None = None
) -> FrameHeader | str:
    """Return the header of that frame, or one of ``REASONS`` if it is not valid there.

    If ``generation`` is None, any generation is valid (for scans of an extent). The payload is not checked, see
    ``is_payload_sound``.
    """
    raw = header.tobytes()
    reason = _fault(raw, frame_class, incarnation)
    if reason:
        return reason
    fixed = _FIXED.unpack_from(raw)
    address, (parent, info, total) = Address(*fixed[4:7]), fixed[9:]
    if address[:2] != (extent, frame) or generation not in (None, address.generation):
        return "swapped"
    if info & PAYLOAD_MASK > frame_class.page_bytes:
        return "header"
    key, root, extra = (raw[at : at + KEY_BYTES] for at in range(_IDENTITY, _IDENTITY + IDENTITY_HEAD_BYTES, KEY_BYTES))
    tokens = np.frombuffer(raw, "<u4", frame_class.page_tokens, _IDENTITY + IDENTITY_HEAD_BYTES)
    sums = np.frombuffer(raw, "<u4", frame_class.layers, _used_bytes(frame_class) - _SUM_BYTES - 4 * frame_class.layers)
    return FrameHeader(address, key, root, extra, parent, info, total, tokens, sums)


def faults(
    headers: Bytes,
    frame_class: FrameClass,
    incarnation: int,
    extent: int,
    first: int,
    generations: Words,
    identities: Bytes,
) -> list[str]:
    """Return, for each header of a run of consecutive frames, why it is not the header of the expected page, or "".

    Args:
        headers: ``[frames, header_bytes]``, may be strided along the first axis.
        first: number of the first frame.
        generations: ``[frames]``, the generations of the addresses.
        identities: ``[frames, 48 + 4 * page_tokens]``: key, root, extra and token ids of the expected pages.
    """
    count, used = len(headers), _used_bytes(frame_class)
    end = _IDENTITY + identities.shape[1]
    assert end == used - _SUM_BYTES - 4 * frame_class.layers and count == len(generations) == len(identities)
    head, tail = (_MAGIC, VERSION, used, incarnation, extent), (frame_class.page_tokens, frame_class.layers)
    actual, expected = headers[:, :used].tobytes(), identities.tobytes()
    reasons = []
    for row, generation in enumerate(generations.tolist()):  # as bytes: numpy costs more for a few headers
        raw = actual[row * used : (row + 1) * used]
        same = raw.startswith(_PLACE.pack(*head, first + row, generation, *tail))
        same = same and raw[_IDENTITY:end] == expected[row * identities.shape[1] : (row + 1) * identities.shape[1]]
        if same and _digest(raw[:-_SUM_BYTES]) == int.from_bytes(raw[-_SUM_BYTES:], "little"):
            reasons.append("")
        else:
            reasons.append(_fault(raw, frame_class, incarnation) or "swapped")
    return reasons


def payload_sums_in(headers: Bytes) -> list[int]:
    """Return the payload sums in headers ``[frames, header_bytes]``."""
    sums: list[int] = np.ascontiguousarray(headers[:, _IDENTITY - 8 : _IDENTITY]).view("<u8")[:, 0].tolist()
    return sums


def payload_sum(page: Bytes, frame_class: FrameClass) -> int:
    """xxh3_64 of a page ``[>= page_bytes]``."""
    return _digest(page[: frame_class.page_bytes].data)


def layer_sums(page: Bytes, layers: int) -> Sums:
    """Return the low 32 bits of xxh3_64 of each of the ``layers`` equal parts of ``page`` ``[page_bytes]``."""
    view, step = page.data, len(page) // layers
    assert step * layers == len(page), (len(page), layers)
    return np.array([_digest(view[at : at + step]) & 0xFFFFFFFF for at in range(0, len(view), step)], "<u4")


def is_payload_sound(page: Bytes, frame_class: FrameClass, total: int) -> bool:
    """Return whether ``page`` ``[>= page_bytes]`` has the payload sum ``total`` of its valid header; False is reason
    "payload".

    Readers of parts of a page use the layers' checksums instead.
    """
    return payload_sum(page, frame_class) == total


def _used_bytes(frame_class: FrameClass) -> int:
    return geometry.HEAD_BYTES + 4 * frame_class.page_tokens + 4 * frame_class.layers


def _fault(raw: bytes, frame_class: FrameClass, incarnation: int) -> str:
    """Why this is not a valid header of a page of that class on that device, or ""."""
    magic, version, used = _START.unpack_from(raw)
    if magic != _MAGIC:
        return "header"
    if version != VERSION:
        return "version"
    if used != _used_bytes(frame_class):
        return "header"
    if _digest(raw[: used - _SUM_BYTES]) != int.from_bytes(raw[used - _SUM_BYTES : used], "little"):
        return "header"
    fixed = _FIXED.unpack_from(raw)
    if fixed[3] != incarnation:
        return "foreign"
    return "" if fixed[7:9] == (frame_class.page_tokens, frame_class.layers) else "header"
