"""Copies proven pages out of a node's memory, and compares their checksums on request.

Checksums of pages, as stored in records.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import have_verified
from kvstore.client.local.node import Mapped
from kvstore.client.local.verify_hit import Run, copy_runs, prove
from kvstore.client.match import CHECKSUM, ELSEWHERE, GENERATION
from kvstore.model.prefix import Keys
from kvstore.model.replica import STAMPED
from kvstore.model.shard import Shard
from kvstore.wire.data import ChainQuery


def checksums_of(rows: npt.NDArray[np.uint8], layers: int) -> npt.NDArray[np.uint32]:
    """Low 32 bits of xxh3_64 of each layer of each page ``[pages, page_bytes]``, as uint32 ``[pages, layers]``."""
    digest = xxhash.xxh3_64_intdigest
    parts = rows.reshape(rows.shape[0] * layers, -1)
    sums = [digest(part.data) & 0xFFFFFFFF for part in parts]
    return np.array(sums, "<u4").reshape(rows.shape[0], layers)


_STAMPED_BIT = np.uint64(STAMPED << 48)


def copy_proven(mapped: Mapped, keys: Keys, rows: Rows, chain: ChainQuery, verify: bool) -> tuple[int, str]:
    """Copy the leading pages that are in memory now into ``rows``; return how many, and why not more."""
    runs, _, reason = prove(mapped, keys, chain.frame_class.page_bytes, chain.closed)
    copied, changed = copy_runs(runs, rows, time.monotonic_ns())
    if verify:
        copied, reason = verified(mapped, runs, rows, copied, reason, chain.frame_class.layers)
    return copied, GENERATION if changed else reason


def copy_shard(
    mapped: Mapped, keys: Keys, shard: Shard, target: Rows, chain: ChainQuery, now_ns: int
) -> tuple[int, str]:
    """As ``copy_proven``, for a shard's part of the pages. Other pages are later read whole, and counted then."""
    runs, _, reason = prove(mapped, keys, chain.frame_class.page_bytes, chain.closed)
    pages, changed = copy_runs(runs, shard.unpacked(target), now_ns, shard)
    reason = GENERATION if changed else reason
    count_in_place(mapped, chain, len(keys), pages, reason)
    return pages, reason


def count_in_place(mapped: Mapped, chain: ChainQuery, asked: int, pages: int, reason: str) -> None:
    """Count a get from memory, except for pages that are then looked for elsewhere: those are counted there."""
    goes_on = reason in ELSEWHERE and pages < asked
    if pages or not goes_on:
        mapped.counters.got(mapped.row(chain.frame_class), pages if goes_on else asked, pages, 0, reason)


def verified(mapped: Mapped, runs: list[Run], target: Rows, pages: int, reason: str, layers: int) -> tuple[int, str]:
    """Compare the copied pages with the records' checksums. The node first computes those that are missing."""
    for extent, frame, page, count, _ in runs:
        count = min(count, pages - page)
        if count <= 0:
            break
        stop = frame + count
        if not (extent.info[frame:stop] & _STAMPED_BIT).all() and not have_verified(mapped, runs):
            return page, CHECKSUM
        ours = checksums_of(target[page : page + count], layers)
        equal = (ours == extent.checksums[frame:stop]).all(axis=1)
        if not equal.all():
            have_verified(mapped, runs)  # so that the node finds and drops the page
            return page + int(equal.argmin()), CHECKSUM
    return pages, reason
