"""Many objects read at once, out of DRAM: heads and pieces found by two looks at the index, proven, copied, and their
generations compared again once all are copied.

What cannot be read so is left to who reads one object after another: what is not in DRAM, what changed meanwhile, and
all of it where checksums are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore import failpoint
from kvstore.client.buffers import Rows
from kvstore.client.local.mapped_extent import MappedExtent
from kvstore.client.local.node import Mapped
from kvstore.client.local.object_finding import DramHeads, GatheredFrames, gather
from kvstore.client.scattered import Scattered
from kvstore.errors import InvalidRequest
from kvstore.model.objects import About, pieces_of
from kvstore.tier.host_memory import copy
from kvstore.tier.index import IndexDamaged

Place = tuple[MappedExtent, int]
"""A page's frame."""


def read_objects(
    mapped: Mapped, root: bytes, names: Sequence[bytes], targets: Sequence[Rows | Scattered]
) -> list[int | None]:
    """Copy each of these objects into its target; how many bytes that were, None: it was not to be read so.

    Raises:
        InvalidRequest: a target is too small; nothing was copied.
    """
    found = DramHeads(mapped, root, names)
    heads, large, lengths = found.heads, found.large, list[int | None]()
    for place, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None:
            continue
        extent, _, size = head
        count = large[place][0] if place in large else 0
        if (count or size > extent.page_bytes) and count != pieces_of(size, extent.page_bytes):
            heads[place] = None  # its record is damaged
            large.pop(place, None)
        elif target.nbytes < size:
            raise InvalidRequest("out", f"has {target.nbytes} bytes, the value has {size}")
    pieces, before = _pieces(mapped, root, names, found) if large else ([], {})
    if failpoint.ACTIVE:
        failpoint.hit("client.reading")
    for place, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None or (place in large and place not in before):
            lengths.append(None)
            continue
        extent, frame, size = head
        if type(target) is Scattered or place in before:
            _copy([*before.get(place, ()), (extent, frame)], size, target)
        else:
            assert not isinstance(target, Scattered)
            row = extent.pages[frame]
            copy(target if target.size == size else target[:size], row if row.size == size else row[:size])
        lengths.append(size)
    now_ns = time.monotonic_ns()
    for frames in (*found.frames, *pieces):
        for place in frames.changed():
            lengths[place] = None
        frames.extent.last_use[frames.gathered] = now_ns
    for place, chain in before.items():  # they count as pages that were got, as where one object is read
        if lengths[place] is not None:
            mapped.counters.got(mapped.row(chain[0][0].frame_class), len(chain), len(chain), 0, "")
    return lengths


def _pieces(
    mapped: Mapped, root: bytes, names: Sequence[bytes], heads: DramHeads
) -> tuple[list[GatheredFrames], dict[int, list[Place]]]:
    """The frames of these objects' pieces, and by place in ``names`` where they are, of those that are there with all
    of them."""
    keys: list[bytes] = []
    rows: list[bytes] = []
    owners: list[int] = []
    for owner, (count, nonce) in heads.large.items():
        head = heads.heads[owner]
        assert head is not None, "proven"
        about = About(names[owner], head[2], count, nonce)
        chain = about.piece_keys(root, head[0].frame_class.page_tokens)
        width = len(chain.identity_bytes) // count
        keys += chain.hashes
        rows += [chain.identity_bytes[at : at + width] for at in range(0, count * width, width)]
        owners += [owner] * count
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys)
    except IndexDamaged:
        return [], {}
    proven: list[Place | None] = [None] * len(keys)
    found = gather(mapped, raws) if any(raws) else []
    for frames in found:
        data, width = frames.rows.tobytes(), frames.rows.shape[1]
        for i, (place, frame) in enumerate(zip(frames.places, frames.frames, strict=True)):
            head = heads.heads[owners[place]]
            of_class = head is not None and frames.extent.frame_class == head[0].frame_class
            if of_class and data[i * width : (i + 1) * width] == rows[place]:
                proven[place] = frames.extent, frame
    places: dict[int, list[Place]] = {}
    lost = {owner for owner, piece in zip(owners, proven, strict=True) if piece is None}
    for owner, piece in zip(owners, proven, strict=True):
        if piece is not None and owner not in lost:
            places.setdefault(owner, []).append(piece)
    return [frames._replace(places=[owners[place] for place in frames.places]) for frames in found], places


def _copy(pages: list[Place], value_bytes: int, target: Rows | Scattered) -> None:
    """Lay a value's pages end to end into its target."""
    if not value_bytes:
        return  # into a target that may have no parts
    page_bytes, at = pages[0][0].page_bytes, 0
    parts = iter(target.parts if isinstance(target, Scattered) else [target])
    part, start = next(parts), 0  # that has the byte ``at`` of the value, and where it begins there
    while at < value_bytes:
        while at == start + part.size:
            start, part = start + part.size, next(parts)
        extent, frame = pages[at // page_bytes]
        low = at % page_bytes
        size = min(page_bytes - low, start + part.size - at, value_bytes - at)
        copy(part[at - start : at - start + size], extent.pages[frame, low : low + size])
        at += size
