"""The proof that frames in DRAM hold the pages of given keys, and the copy of proven pages.

The index is a hint. A page counts only if two comparisons succeed. The word of its frame says SEALED under the
generation that the index names. The identity in its record (key, root, extra, token ids) equals the requested one byte
for byte. The words are read before the bytes are used, and compared again afterwards: a page that changed in between is
a miss. So stale index entries, forged hashes, reused frames and dropped extents are all misses.

Worked example: one writer put 32 pages into frames 40..71 of extent 3. The index names frame 71 for the last key. So
page i is probably in frame 40 + i. A few comparisons of bytes prove it, without looking up the other 31 keys. If the
guess is wrong, all keys are looked up and grouped into runs of consecutive frames.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.local.index_lookup import indexed_pages, stored_pages
from kvstore.client.local.node import MappedNode
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
    """Pages from ``page`` to ``page + length`` in consecutive frames starting at ``frame``, proven under ``words``."""

    extent: MappedExtent
    frame: int
    page: int
    length: int
    words: bytes  # the frames' words when the pages were proven, 8 bytes each

    def unchanged(self) -> int:
        """Return how many leading pages of the run have not changed since they were proven."""
        now = self.extent.words[self.frame : self.frame + self.length].tobytes()
        return self.length if now == self.words else equal_rows(now, self.words, 8)

    def addresses(self) -> bytes:
        """Return the pages' addresses, concatenated as in requests."""
        pack, number, words = ADDRESS.pack, self.extent.number, _WORD.iter_unpack(self.words)
        return b"".join([pack(number, frame, word >> 8) for frame, (word,) in enumerate(words, self.frame)])


def address_parts(runs: list[Run]) -> list[bytes]:
    """Return the addresses of all pages of ``runs``, split into parts of at most ``BATCH_MAX``, one for each
    request."""
    raw, step = b"".join([run.addresses() for run in runs]), BATCH_MAX * ADDRESS_BYTES
    return [raw[start : start + step] for start in range(0, len(raw), step)]


def prove(mapped: MappedNode, keys: Keys, page_bytes: int, closed: bool = True) -> tuple[list[Run], int, str]:
    """Prove the leading pages of ``keys``. Return their runs, their number, and why there are no more ("" if all are
    proven)."""
    requested = len(keys.hashes)
    stored, raw = indexed_pages(mapped, keys.hashes, closed)
    if raw is None:
        return [], 0, ABSENT if requested else ""
    number, frame, generation = _unpack_address(raw)
    extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
    first = frame + 1 - stored
    if extent is not None and first >= 0 and extent.page_bytes == page_bytes:
        words = extent.words[first : frame + 1].tobytes()
        if words[::8] == _SEALED_BYTE * stored and words[-8:] == _pack_word(generation << 8 | _SEALED):
            run = Run(extent, first, 0, stored, words)
            if _has_identity(run, keys):
                return [run], stored, "" if stored == requested else ABSENT
    runs, pages, reason = _prove_each(mapped, keys, stored_pages(mapped, keys, closed)[0], page_bytes)
    return runs, pages, reason or ("" if pages == requested else ABSENT)


def _has_identity(run: Run, keys: Keys) -> bool:
    """Return whether the identities in a run's records equal those of the keys. Columns are compared, because that
    needs no array of the keys' rows."""
    page, stop = run.page, run.page + run.length
    rows = run.extent.identity[run.frame : run.frame + run.length]
    hashes = keys.hashes if run.length == len(keys.hashes) else keys.hashes[page:stop]
    tokens = keys.tokens[page * keys.page_tokens : stop * keys.page_tokens]
    return (
        rows[:, :KEY_BYTES].tobytes() == b"".join(hashes)
        and rows[:, IDENTITY_HEAD_BYTES:].tobytes() == tokens.tobytes()
        and rows[:, KEY_BYTES:IDENTITY_HEAD_BYTES].tobytes() == keys.roots_and_extras(page, stop)
    )


def _prove_each(mapped: MappedNode, keys: Keys, stored: int, page_bytes: int) -> tuple[list[Run], int, str]:
    """Look up each of the ``stored`` leading pages, and prove them run by run.

    Plain loops are faster than numpy here: a batch has few runs, and each call of numpy takes time.
    """
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes[:stored])
    except IndexDamaged:
        return [], 0, ABSENT
    count = raws.index(None) if None in raws else stored
    addresses = b"".join([raw[:ADDRESS_BYTES] for raw in raws[:count] if raw is not None])
    fields = struct.unpack("<" + "IIQ" * count, addresses)
    numbers, frames, generations = fields[0::3], fields[1::3], fields[2::3]
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
        if extent.words[frame : frame + length].tobytes() != words or not _has_identity(run, keys):
            run, reason = prove_run(extent, frame, page, words, keys)
        if run.length:
            runs.append(run)
        if reason:
            return runs, page + run.length, reason
        page = stop
    return runs, count, "" if count == stored else ABSENT


def prove_run(extent: MappedExtent, frame: int, page: int, words: bytes, keys: Keys) -> tuple[Run, str]:
    """Prove that the frames starting at ``frame`` have these words and hold the pages starting at ``page``. Return the
    run of the leading proven pages, and why it lacks some pages ("" if it has all)."""
    count, reason = len(words) // 8, ""
    current_words = extent.words[frame : frame + count].tobytes()
    if current_words != words:
        count, reason = equal_rows(current_words, words, 8), GENERATION
    width = len(keys.identity_bytes) // len(keys)
    stored = extent.identity[frame : frame + count].tobytes()
    requested = keys.identity_bytes[page * width : (page + count) * width]
    if stored != requested:
        equal = equal_rows(stored, requested, width) if len(stored) == len(requested) else 0
        count, reason = equal, IDENTITY
    return Run(extent, frame, page, count, words[: 8 * count]), reason


def address_runs(
    addresses: npt.NDArray[np.void], state: int = _SEALED
) -> list[tuple[int, int, int, npt.NDArray[np.uint64]]]:
    """Group addresses into runs of consecutive frames. Return ``(extent, first frame, first page, words)`` for each
    run, with the words that the frames have if they are in ``state``."""
    if not len(addresses):
        return []
    extents, frames = addresses["extent"].astype(np.int64), addresses["frame"].astype(np.int64)
    words = addresses["generation"] << np.uint64(8) | np.uint64(state)
    breaks = (np.flatnonzero((np.diff(extents) != 0) | (np.diff(frames) != 1)) + 1).tolist()
    starts = [0, *breaks]
    stops = [*breaks, len(addresses)]
    return [(int(extents[i]), int(frames[i]), i, words[i:j]) for i, j in zip(starts, stops, strict=True)]


def count_reuse(counters: SessionCounters, runs: list[Run], pages: int, now_ns: int) -> None:
    """Count the time since the last use of the ``pages`` pages of ``runs``, which are about to be read. One sampled
    page stands for all."""
    if not runs:
        return
    random_number = now_ns // REUSE_SAMPLED
    run = runs[random_number % len(runs)]
    used_ns = int(run.extent.last_use[run.frame + random_number % run.length])
    if used_ns:
        counters.reused(now_ns - used_ns, pages)


def equal_rows(left: bytes, right: bytes, width: int) -> int:
    """Return how many leading rows of ``width`` bytes are equal."""
    rows = min(len(left), len(right)) // width
    left_rows = np.frombuffer(left, np.uint8, rows * width).reshape(rows, width)
    right_rows = np.frombuffer(right, np.uint8, rows * width).reshape(rows, width)
    differs = (left_rows != right_rows).any(axis=1)
    return int(differs.argmax()) if differs.any() else rows


def copy_runs(
    runs: list[Run], target: npt.NDArray[np.uint8], now_ns: int, shard: Shard | None = None
) -> tuple[int, bool]:
    """Copy proven runs into ``target``. Return how many leading pages did not change during the copy, and whether the
    next one did.

    Args:
        target: ``[pages, page_bytes]``; for a shard its part of each page, ``[pages, layers, width]``.
        now_ns: recorded as the pages' last use.
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
