"""Many objects found at once: their heads named by one look at the index, and proven an extent at a time.

A head is proven as any page is (see ``proof``): its frame's word says SEALED under the generation that the index named,
and its record says the whole key. What ``object_parts.find_head`` tells of one key, ``find_heads`` tells of each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.local.mapped_extent import MappedExtent
from kvstore.client.local.node import Mapped
from kvstore.model.objects import HeadRows, is_object_class, key_hash, read_row
from kvstore.model.replica import ADDRESS_BYTES, KEY, FrameState
from kvstore.tier.index import IndexDamaged

_SEALED = int(FrameState.SEALED)


class GatheredFrames(NamedTuple):
    """Frames of one extent as they were at one moment.

    Attributes:
        places: of each, among what was asked for.
        gathered: the same as ``frames``.
        words: what each frame's word was. ``rows``: the identity rows that were there then ``[frames, width]``.
    """

    extent: MappedExtent
    places: Sequence[int]
    frames: Sequence[int]
    gathered: npt.NDArray[np.intp]
    words: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint8]

    def changed(self) -> list[int]:
        """The places of those that are not any more what they were."""
        now = self.extent.words[self.gathered]
        if now.tobytes() == self.words.tobytes():
            return []
        same = (now == self.words).tolist()
        return [place for place, held in zip(self.places, same, strict=True) if not held]


def gather(mapped: Mapped, raws: Sequence[bytes | None]) -> list[GatheredFrames]:
    """Of the frames at these raw addresses in DRAM those that are sealed under the generations named, by extent."""
    places: Sequence[int] = range(len(raws))
    if None in raws:
        places = [place for place, raw in enumerate(raws) if raw is not None]
    packed = b"".join([raw[:ADDRESS_BYTES] for raw in raws if raw is not None])
    flat = struct.unpack("<" + "IIQ" * len(places), packed)
    numbers, frames, generations = flat[0::3], flat[1::3], flat[2::3]
    words = [generation << 8 | _SEALED for generation in generations]
    several = dict.fromkeys(numbers)
    if len(several) == 1:
        return _sealed(mapped, numbers[0], places, frames, words)
    found = []
    for number in several:
        mine = [i for i, other in enumerate(numbers) if other == number]
        parts = ([of[i] for i in mine] for of in (places, frames, words))
        found += _sealed(mapped, number, *parts)
    return found


def _sealed(
    mapped: Mapped, number: int, places: Sequence[int], frames: Sequence[int], words: Sequence[int]
) -> list[GatheredFrames]:
    """Of these frames of an extent those whose words say so; nothing where there are none."""
    extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
    if extent is None or max(frames) >= len(extent.words):
        return []
    index = np.array(frames, np.intp)
    now = extent.words[index]
    if now.tolist() != words:
        kept = [i for i, (mine, named) in enumerate(zip(now.tolist(), words, strict=True)) if mine == named]
        if not kept:
            return []
        places, frames = [places[i] for i in kept], [frames[i] for i in kept]
        index, now = index[kept], now[kept]
    return [GatheredFrames(extent, places, frames, index, now, extent.identity[index])]


class DramHeads:
    """The heads of objects, as far as they are in DRAM.

    Attributes:
        keys: of all names, wherever they are. ``raws``: where the index names them in DRAM.
        frames: what they were proven under.
        heads: by place among the names: extent, frame and bytes of the value; None where it is not proven.
        large: by place, which of those have pieces: how many, and their nonce.
        other: places of names that the index gives to a page that is not theirs.
    """

    __slots__ = ("keys", "raws", "frames", "heads", "large", "other")

    def __init__(self, mapped: Mapped, root: bytes, names: Sequence[bytes]) -> None:
        self.keys = [key_hash(root, name) for name in names]
        self.raws: list[bytes | None] = []
        self.frames: list[GatheredFrames] = []
        self.heads: list[tuple[MappedExtent, int, int] | None] = [None] * len(names)
        self.large: dict[int, tuple[int, bytes]] = {}
        self.other: set[int] = set()
        try:
            self.raws = mapped.index.find_many(mapped.dram.tier, self.keys)
        except IndexDamaged:
            return  # the daemon will rebuild it under a new epoch
        for frames in gather(mapped, self.raws) if any(self.raws) else ():
            if is_object_class(frames.extent.frame_class):
                self.frames.append(frames)
                self._prove(frames, root, names)

    def _prove(self, frames: GatheredFrames, root: bytes, names: Sequence[bytes]) -> None:
        told, heads, keys, extent = HeadRows(frames.rows, root), self.heads, self.keys, frames.extent
        sizes, pieces = told.value_bytes, told.pieces
        for i, (place, frame) in enumerate(zip(frames.places, frames.frames, strict=True)):
            if told.key(i) == keys[place] and told.name(i) == names[place]:
                heads[place] = extent, frame, sizes[i]
                if pieces[i]:
                    self.large[place] = pieces[i], told.nonce(i)
            elif int(extent.words[frame]) == int(frames.words[i]):  # else it left meanwhile, and may be in a lower tier
                self.other.add(place)


def find_heads(mapped: Mapped, root: bytes, names: Sequence[bytes]) -> list[bytes | None]:
    """Where the head of each of these objects is, in which tier ever; None: there is none, or another string's."""
    proven = DramHeads(mapped, root, names)
    found = [raw if head is not None else None for raw, head in zip(proven.raws, proven.heads, strict=False)]
    found += [None] * (len(names) - len(found))
    left = [place for place, raw in enumerate(found) if raw is None and place not in proven.other]
    for reader in mapped.lower.values() if left else ():
        try:
            raws = mapped.index.find_many(reader.tier, [proven.keys[place] for place in left])
        except IndexDamaged:
            break
        unseen = []
        for place, raw in zip(left, raws, strict=True):
            head = reader.object_head(raw) if raw is not None else None
            about = read_row(head.row) if head is not None else None
            if head is None:
                unseen.append(place)
            elif about is not None and about[0] == root and about[1].name == names[place]:
                found[place] = raw if head.row[KEY] == proven.keys[place] else None
        left = unseen
    return found
