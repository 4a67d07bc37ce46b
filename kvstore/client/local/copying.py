"""Copies of proven pages out of a node's memory, with a comparison of their checksums on request."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import request_checksums
from kvstore.client.local.node import MappedNode
from kvstore.client.local.verify_hit import Run, copy_runs, prove
from kvstore.client.match import CHECKSUM, ELSEWHERE, GENERATION
from kvstore.model.prefix import Keys
from kvstore.model.replica import STAMPED
from kvstore.model.shard import Shard
from kvstore.wire.data import ChainQuery


def checksums_of(rows: npt.NDArray[np.uint8], layers: int) -> npt.NDArray[np.uint32]:
    """Return the checksums of pages ``[pages, page_bytes]``, in the form in which records store them: the low 32 bits
    of the xxh3_64 of each layer, uint32 ``[pages, layers]``."""
    digest = xxhash.xxh3_64_intdigest
    parts = rows.reshape(rows.shape[0] * layers, -1)
    sums = [digest(part.data) & 0xFFFFFFFF for part in parts]
    return np.array(sums, "<u4").reshape(rows.shape[0], layers)


_STAMPED_BIT = np.uint64(STAMPED << 48)


def copy_proven(mapped: MappedNode, keys: Keys, rows: Rows, chain: ChainQuery, verify: bool) -> tuple[int, str]:
    """Copy the leading pages that are in DRAM now into ``rows``. Return how many, and why no more."""
    runs, _, reason = prove(mapped, keys, chain.frame_class.page_bytes, chain.closed)
    copied, changed = copy_runs(runs, rows, time.monotonic_ns())
    if verify:
        copied, reason = verify_copies(mapped, runs, rows, copied, reason, chain.frame_class.layers)
    return copied, GENERATION if changed else reason


def copy_shard(
    mapped: MappedNode, keys: Keys, shard: Shard, target: Rows, chain: ChainQuery, now_ns: int
) -> tuple[int, str]:
    """Copy a shard's part of the leading pages that are in DRAM now. Return how many pages, and why no more.

    Counts the copied pages. The caller reads the others as whole pages, which counts them.
    """
    runs, _, reason = prove(mapped, keys, chain.frame_class.page_bytes, chain.closed)
    pages, changed = copy_runs(runs, shard.unpacked(target), now_ns, shard)
    reason = GENERATION if changed else reason
    count_in_place(mapped, chain, len(keys), pages, reason)
    return pages, reason


def count_in_place(mapped: MappedNode, chain: ChainQuery, requested: int, pages: int, reason: str) -> None:
    """Count a get of ``requested`` pages that copied ``pages`` of them from DRAM. If the caller continues elsewhere,
    the other pages are counted there."""
    continues = reason in ELSEWHERE and pages < requested
    if pages or not continues:
        mapped.counters.got(mapped.row(chain.frame_class), pages if continues else requested, pages, 0, reason)


def verify_copies(
    mapped: MappedNode, runs: list[Run], target: Rows, pages: int, reason: str, layers: int
) -> tuple[int, str]:
    """Compare the first ``pages`` copied pages in ``target`` with the checksums in their records. Return how many
    leading pages are valid, and ``reason`` or CHECKSUM. The node first computes the checksums that are missing."""
    for extent, frame, page, count, _ in runs:
        count = min(count, pages - page)
        if count <= 0:
            break
        stop = frame + count
        if not (extent.info[frame:stop] & _STAMPED_BIT).all() and not request_checksums(mapped, runs):
            return page, CHECKSUM
        checksums = checksums_of(target[page : page + count], layers)
        is_valid = (checksums == extent.checksums[frame:stop]).all(axis=1)
        if not is_valid.all():
            request_checksums(mapped, runs)  # the node then finds and drops the damaged page
            return page + int(is_valid.argmin()), CHECKSUM
    return pages, reason
