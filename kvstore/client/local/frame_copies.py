"""Copies between a device and frames of a node's memory."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import DeviceRows
from kvstore.client.device_link import COPY_DEADLINE_S, link_of
from kvstore.client.local.copying import checksums_of, count_in_place
from kvstore.client.local.grants import GrantPool
from kvstore.client.local.index_lookup import locate
from kvstore.client.local.lease import RunLease
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import Run, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, NodeUnavailable, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import Address
from kvstore.shm.header import DaemonState
from kvstore.wire.data import ChainQuery

LEASE_MS: Final = int(2000 * COPY_DEADLINE_S)


def proven_to_device(node: LocalNode, keys: Keys, rows: DeviceRows, chain: ChainQuery) -> tuple[int, str]:
    """Copy the leading pages that are in memory now; return how many, and why not more.

    Raises:
        DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
    """
    now_ns = time.monotonic_ns()
    if now_ns > node.check_ns:
        node.recheck(now_ns)
    mapped = node.mapped()
    if mapped is None:
        return 0, ABSENT
    keys = mapped.in_pool(keys)
    runs, _, reason = prove(mapped, keys, chain.frame_class.page_bytes, chain.closed)
    pages, changed = to_device(mapped, runs, rows, now_ns)
    reason = GENERATION if changed else reason
    count_in_place(mapped, chain, len(keys), pages, reason)
    if reason and reason not in ELSEWHERE:
        node.missed(reason)
    return pages, reason


def near_to_device(node: LocalNode, keys: Keys, rows: DeviceRows, chain: ChainQuery) -> tuple[int, int, str]:
    """As ``proven_to_device``, then continue with pages in memory of local engines that the device can access. Returns
    how many pages, how many of them from engines' memory, and why not more."""
    pages, reason = proven_to_device(node, keys, rows, chain)
    mapped = node.mapped()
    if reason not in ELSEWHERE or pages == len(keys) or mapped is None or not mapped.hbm.readable():
        return pages, 0, reason
    keys, rows = mapped.in_pool(keys)[pages:], rows[pages:]
    located, hbm = locate(mapped, mapped.hbm, keys, chain.closed), 0
    if located:
        hbm, reason = mapped.hbm.start_direct(located, keys, chain.frame_class, rows).result()
    asked = hbm if reason in ELSEWHERE else len(keys)  # the others are counted where they are looked for
    if asked:
        mapped.counters.got(mapped.row(chain.frame_class), asked, 0, 0, reason, hbm)
    return pages + hbm, hbm, reason


def to_device(
    mapped: Mapped,
    runs: list[Run],
    target: DeviceRows,
    now_ns: int,
    part: slice = slice(None),
    *,
    leased: bool = True,
) -> tuple[int, bool]:
    """As ``proof.copy_runs``, into device memory. If the node can be asked, the pages are leased until the copy's event
    is over; they are compared again then.

    Args:
        part: the bytes of each page to copy.
        leased: False for frames that cannot be leased yet.

    Raises:
        DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
    """
    if not runs:
        return 0, False
    link, lease = link_of(target.device), RunLease(mapped, LEASE_MS)
    if leased and mapped.header.state == DaemonState.READY:
        with contextlib.suppress(Unavailable):
            lease.take(runs)  # pages without a lease may have changed, which the check below finds
    try:
        pairs = []
        for extent, frame, page, count, _ in runs:
            pairs.append((extent.pages[frame : frame + count, part], target[page : page + count]))
        event = link.copy(pairs, [run.extent for run in runs], to_device=True)
        link.wait(event, pairs)
        pages = 0
        for run in runs:
            same = run.unchanged()
            run.extent.last_use[run.frame : run.frame + same] = now_ns
            pages += same
            if same < run.length:
                return pages, True
        return pages, False
    finally:
        if leased:
            lease.release()


def from_device(mapped: Mapped, rows: DeviceRows, addresses: list[Address], pool: GrantPool) -> None:
    """Fill granted frames with the rows. Called within ``mapped.channel.copies``; returns when the copy's event is
    over.

    Raises:
        DeviceLost: the frames are given up.
        DeadlineExceeded: the device may still write into the frames, so they stay unused until this process has ended.
    """
    link, pairs, frames = link_of(rows.device), [], frames_of(mapped, addresses)
    for extent, frame, i, j in frames:
        pairs.append((extent.pages[frame : frame + j - i], rows[i:j]))
        extent.last_use[frame : frame + j - i] = time.monotonic_ns()  # not its last page's
    try:
        event = link.copy(pairs, [extent for extent, *_ in frames], to_device=False)
        link.wait(event, pairs)
    except DeviceLost:
        pool.forfeit(addresses)
        raise
    except DeadlineExceeded:
        mapped.channel.copies.__enter__()  # never left: the session stays open, and keeps its frames
        raise


def frame_checksums(mapped: Mapped, addresses: list[Address], layers: int) -> npt.NDArray[np.uint32]:
    """Compute the checksums of the pages in these frames."""
    found = frames_of(mapped, addresses)
    return np.concatenate([checksums_of(extent.pages[frame : frame + j - i], layers) for extent, frame, i, j in found])


def frames_of(mapped: Mapped, addresses: list[Address]) -> list[tuple[MappedExtent, int, int, int]]:
    """As ``frame_runs``, with the mapped extents. Raises NodeUnavailable if one is gone."""
    found = []
    for number, frame, i, j in frame_runs(addresses):
        extent = mapped.dram.extent(number)
        if extent is None:
            raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
        found.append((extent, frame, i, j))
    return found


def frame_runs(addresses: list[Address]) -> list[tuple[int, int, int, int]]:
    """Return ``(extent, first frame, i, j)`` for each run ``addresses[i:j]`` of ascending, consecutive frames of one
    extent."""
    count = len(addresses)
    first, last = addresses[0], addresses[-1]
    if first.extent == last.extent and last.frame - first.frame == count - 1:
        return [(first.extent, first.frame, 0, count)]
    runs, start = [], 0
    for i in range(1, count + 1):
        before = addresses[i - 1]
        if i == count or addresses[i].extent != before.extent or addresses[i].frame != before.frame + 1:
            runs.append((before.extent, addresses[start].frame, start, i))
            start = i
    return runs
