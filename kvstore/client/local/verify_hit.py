"""Finds the frames that are proven to hold the pages of given keys.

The index is a hint. A page counts only when its frame's word says SEALED under the generation that the index named,
and the record's identity (key, root, extra, token ids) equals ours byte for byte. The words are captured first and
compared again after the bytes were used: a page that changed in between was not read. So a stale index entry, a forged
hash, a reused frame and a dropped extent are all treated in the same way: as a miss.

Worked example: 32 pages put by one writer are in frames 40..71 of extent 3. The index names frame 71 for the last key;
then the guess "page i is in frame 40 + i" is proven by three comparisons of bytes, without asking the index for the
other 31 keys. If the guess fails, all keys are looked up and grouped into runs of consecutive frames.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.local.index_lookup import named_pages, stored_pages
from kvstore.client.local.node import Mapped
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.match import ABSENT, EXTENT, GENERATION, IDENTITY
from kvstore.device.host_memory import copy
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, ADDRESS_BYTES, IDENTITY_HEAD_BYTES, KEY_BYTES, FrameState
from kvstore.model.shard import Shard
from kvstore.shm.counters import REUSE_SAMPLED, SessionCounters
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import BATCH_MAX

_SEALED = int(FrameState.SEALED)
_SEALED_BYTE = bytes([_SEALED])
_unpack_address = struct.Struct("<IIQ").unpack_from
_WORD = struct.Struct("<Q")
_pack_word = _WORD.pack


class Run(NamedTuple):
    """Pages ``page .. page + length`` in consecutive frames of one extent; ``words`` are those frames' words."""

    extent: MappedExtent
    frame: int
    page: int
    length: int
    words: bytes

    def unchanged(self) -> int:
        """Return how many leading pages of the run have not changed since they were proven."""
        now = self.extent.words[self.frame : self.frame + self.length].tobytes()
        return self.length if now == self.words else equal_rows(now, self.words, 8)

    def addresses(self) -> bytes:
        """Return the pages' addresses, concatenated as requests carry them."""
        pack, number, words = ADDRESS.pack, self.extent.number, _WORD.iter_unpack(self.words)
        return b"".join([pack(number, frame, word >> 8) for frame, (word,) in enumerate(words, self.frame)])


def address_parts(runs: list[Run]) -> list[bytes]:
    """Return the addresses of all pages of ``runs``, in parts of at most ``BATCH_MAX``, one per request."""
    raw, step = b"".join([run.addresses() for run in runs]), BATCH_MAX * ADDRESS_BYTES
    return [raw[start : start + step] for start in range(0, len(raw), step)]


def prove(mapped: Mapped, keys: Keys, page_bytes: int, closed: bool = True) -> tuple[list[Run], int, str]:
    """Return runs that hold the leading pages of ``keys``, how many pages these are, and why not more ("" for all)."""
    asked = len(keys.hashes)
    stored, raw = named_pages(mapped, keys.hashes, closed)
    if raw is None:
        return [], 0, ABSENT if asked else ""
    number, frame, generation = _unpack_address(raw)
    extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
    first = frame + 1 - stored
    if extent is not None and first >= 0 and extent.page_bytes == page_bytes:
        words = extent.words[first : frame + 1].tobytes()
        if words[::8] == _SEALED_BYTE * stored and words[-8:] == _pack_word(generation << 8 | _SEALED):
            run = Run(extent, first, 0, stored, words)
            if _holds(run, keys):
                return [run], stored, "" if stored == asked else ABSENT
    runs, pages, reason = _prove_each(mapped, keys, stored_pages(mapped, keys, closed)[0], page_bytes)
    return runs, pages, reason or ("" if pages == asked else ABSENT)


def _holds(run: Run, keys: Keys) -> bool:
    """Return whether the run's records equal the keys, compared column by column, so that no row has to be built."""
    page, stop = run.page, run.page + run.length
    rows = run.extent.identity[run.frame : run.frame + run.length]
    hashes = keys.hashes if run.length == len(keys.hashes) else keys.hashes[page:stop]
    tokens = keys.tokens[page * keys.page_tokens : stop * keys.page_tokens]
    return (
        rows[:, :KEY_BYTES].tobytes() == b"".join(hashes)
        and rows[:, IDENTITY_HEAD_BYTES:].tobytes() == tokens.tobytes()
        and rows[:, KEY_BYTES:IDENTITY_HEAD_BYTES].tobytes() == keys.roots_and_extras(page, stop)
    )


def _prove_each(mapped: Mapped, keys: Keys, stored: int, page_bytes: int) -> tuple[list[Run], int, str]:
    """Look up every page, and prove run after run. Plain loops are faster here: a batch has few runs, and numpy's calls
    add up."""
    try:
        found = mapped.index.find_many(mapped.dram.tier, keys.hashes[:stored])
    except IndexDamaged:
        return [], 0, ABSENT
    count = found.index(None) if None in found else stored
    raw = b"".join([value[:ADDRESS_BYTES] for value in found[:count] if value is not None])
    flat = struct.unpack("<" + "IIQ" * count, raw)
    numbers, frames, generations = flat[0::3], flat[1::3], flat[2::3]
    runs: list[Run] = []
    page = 0
    while page < count:
        number, offset, stop = numbers[page], frames[page] - page, page + 1
        while stop < count and frames[stop] - stop == offset and numbers[stop] == number:
            stop += 1
        extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
        if extent is None or extent.page_bytes != page_bytes:
            return runs, page, EXTENT
        frame, length = frames[page], stop - page
        words = struct.pack(f"<{length}Q", *[generation << 8 | _SEALED for generation in generations[page:stop]])
        run, reason = Run(extent, frame, page, length, words), ""
        if extent.words[frame : frame + length].tobytes() != words or not _holds(run, keys):
            run, reason = prove_run(extent, frame, page, words, keys)
        if run.length:
            runs.append(run)
        if reason:
            return runs, page + run.length, reason
        page = stop
    return runs, count, "" if count == stored else ABSENT


def prove_run(extent: MappedExtent, frame: int, page: int, words: bytes, keys: Keys) -> tuple[Run, str]:
    """Return the leading part of ``frame ..`` that is proven under ``words``, and why it is not all ("" if it is)."""
    count, reason = len(words) // 8, ""
    now = extent.words[frame : frame + count].tobytes()
    if now != words:
        count, reason = equal_rows(now, words, 8), GENERATION
    width = len(keys.identity_bytes) // len(keys)
    theirs = extent.identity[frame : frame + count].tobytes()
    ours = keys.identity_bytes[page * width : (page + count) * width]
    if theirs != ours:
        same = equal_rows(theirs, ours, width) if len(theirs) == len(ours) else 0
        count, reason = same, IDENTITY
    return Run(extent, frame, page, count, words[: 8 * count]), reason


def address_runs(
    addresses: npt.NDArray[np.void], state: int = _SEALED
) -> list[tuple[int, int, int, npt.NDArray[np.uint64]]]:
    """Return runs of consecutive frames: ``(extent, first frame, first page, words the frames should have)``."""
    if not len(addresses):
        return []
    extents, frames = addresses["extent"].astype(np.int64), addresses["frame"].astype(np.int64)
    words = addresses["generation"] << np.uint64(8) | np.uint64(state)
    breaks = (np.flatnonzero((np.diff(extents) != 0) | (np.diff(frames) != 1)) + 1).tolist()
    starts = [0, *breaks]
    stops = [*breaks, len(addresses)]
    return [(int(extents[i]), int(frames[i]), i, words[i:j]) for i, j in zip(starts, stops, strict=True)]


def tell_reuse(counters: SessionCounters, runs: list[Run], pages: int, now_ns: int) -> None:
    """Count the time since the last use of one of the ``pages`` that are about to be read, on behalf of all of them."""
    if not runs:
        return
    chance = now_ns // REUSE_SAMPLED
    run = runs[chance % len(runs)]
    used_ns = int(run.extent.last_use[run.frame + chance % run.length])
    if used_ns:
        counters.reused(now_ns - used_ns, pages)


def equal_rows(left: bytes, right: bytes, width: int) -> int:
    """Return how many leading rows of ``width`` bytes are equal."""
    rows = min(len(left), len(right)) // width
    a = np.frombuffer(left, np.uint8, rows * width).reshape(rows, width)
    b = np.frombuffer(right, np.uint8, rows * width).reshape(rows, width)
    differs = (a != b).any(axis=1)
    return int(differs.argmax()) if differs.any() else rows


def copy_runs(
    runs: list[Run], target: npt.NDArray[np.uint8], now_ns: int, shard: Shard | None = None
) -> tuple[int, bool]:
    """Copy proven runs; return how many pages did not change during the copy, and whether one did.

    Args:
        target: ``[pages, page_bytes]``; for a shard its part of each page, ``[pages, layers, width]``.
    """
    pages = 0
    for run in runs:
        extent, frame, page, count, words = run
        stop = frame + count
        source = extent.pages[frame:stop]
        copy(target[page : page + count], source if shard is None else shard.part(source))
        if extent.words[frame:stop].tobytes() != words:
            return page + run.unchanged(), True
        extent.last_use[frame:stop] = now_ns
        pages = page + count
    return pages, False
