"""Copies between device memory and frames of a node's memory, and between the parts of a value and frames."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import DevicePart, DeviceRows
from kvstore.client.device_link import COPY_DEADLINE_S, DeviceCopies, link_of
from kvstore.client.local.copying import checksums_of, count_in_place
from kvstore.client.local.grants import GrantedFrames, GrantPool
from kvstore.client.local.index_lookup import locate
from kvstore.client.local.lease import RunLease
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import Run, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION
from kvstore.client.value_buffers import Part
from kvstore.device.host_memory import copy
from kvstore.errors import DeadlineExceeded, NodeUnavailable, Unavailable
from kvstore.model.prefix import Keys
from kvstore.shm.header import DaemonState
from kvstore.wire.data import ChainQuery

LEASE_MS: Final = int(2000 * COPY_DEADLINE_S)


def proven_to_device(node: LocalNode, keys: Keys, rows: DeviceRows, chain: ChainQuery) -> tuple[int, str]:
    """Copy the leading pages that are in DRAM now into device memory. Return how many, and why no more.

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
    """Copy the leading pages that are in DRAM, or after these in engines' memory that the device can access. Return how
    many pages, how many of them from engines' memory, and why no more. Raises as ``proven_to_device``."""
    pages, reason = proven_to_device(node, keys, rows, chain)
    mapped = node.mapped()
    if reason not in ELSEWHERE or pages == len(keys) or mapped is None or not mapped.hbm.readable():
        return pages, 0, reason
    keys, rows = mapped.in_pool(keys)[pages:], rows[pages:]
    located, hbm = locate(mapped, mapped.hbm, keys, chain.closed), 0
    if located:
        hbm, reason = mapped.hbm.start_direct(located, keys, chain.frame_class, rows).result()
    counted = hbm if reason in ELSEWHERE else len(keys)  # pages that the caller reads elsewhere are counted there
    if counted:
        mapped.counters.got(mapped.row(chain.frame_class), counted, 0, 0, reason, hbm)
    return pages + hbm, hbm, reason


def to_device(
    mapped: MappedNode,
    runs: list[Run],
    target: DeviceRows,
    now_ns: int,
    part: slice = slice(None),
    *,
    leased: bool = True,
) -> tuple[int, bool]:
    """Copy proven runs into device memory. Return how many leading pages did not change during the copy, and whether
    the next one did.

    If the node answers, the pages are leased until the device has copied them.

    Args:
        part: the bytes of each page to copy.
        leased: False for frames that are still being written, which cannot be leased.

    Raises:
        DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
    """
    if not runs:
        return 0, False
    link = link_of(target.device)
    with leased_for_copy(mapped, runs) if leased else contextlib.nullcontext():
        pairs = []
        for extent, frame, page, count, _ in runs:
            pairs.append((extent.pages[frame : frame + count, part], target[page : page + count]))
        event = link.copy(pairs, [run.extent for run in runs], to_device=True)
        link.wait(event, pairs)
        pages = 0
        for run in runs:
            unchanged = run.unchanged()
            run.extent.last_use[run.frame : run.frame + unchanged] = now_ns
            pages += unchanged
            if unchanged < run.length:
                return pages, True
        return pages, False


@contextlib.contextmanager
def leased_for_copy(mapped: MappedNode, runs: list[Run]) -> Iterator[None]:
    """Keep proven runs in their frames while a device copies them, if the node answers. Pages that get no lease may
    change, which the caller detects afterwards by their words."""
    lease = RunLease(mapped, LEASE_MS)
    if mapped.header.state == DaemonState.READY:
        with contextlib.suppress(Unavailable):
            lease.take(runs)
    try:
        yield
    finally:
        lease.release()


def from_device(mapped: MappedNode, rows: DeviceRows, frames: GrantedFrames, pool: GrantPool) -> None:
    """Copy rows in device memory into granted frames, and wait for the copy. Call it within ``mapped.channel.copies``.

    Raises:
        DeviceLost: the copy failed.
        DeadlineExceeded: the device may still write into the frames; see ``device_writes``.
    """
    link, pairs, runs = link_of(rows.device), [], mapped_runs(mapped, frames)
    for extent, frame, i, j in runs:
        pairs.append((extent.pages[frame : frame + j - i], rows[i:j]))
        extent.last_use[frame : frame + j - i] = time.monotonic_ns()  # replaces the last use of the frame's old page
    with device_writes(mapped, frames, pool):
        event = link.copy(pairs, [extent for extent, *_ in runs], to_device=False)
        link.wait(event, pairs)


@contextlib.contextmanager
def device_writes(mapped: MappedNode, frames: GrantedFrames, pool: GrantPool) -> Iterator[None]:
    """Copy from a device into these granted frames within this context, and within ``mapped.channel.copies``.

    If the copy fails, the frames are forfeit. If it does not end in time, the device may still write into the frames:
    then they stay unused until this process has ended, because its session stays open.
    """
    try:
        yield
    except DeadlineExceeded:
        mapped.channel.copies.keep_open()
        raise
    except BaseException:
        pool.forfeit(frames)
        raise


def frame_checksums(mapped: MappedNode, frames: GrantedFrames, layers: int) -> npt.NDArray[np.uint32]:
    """Return the checksums of the pages in these frames, uint32 ``[pages, layers]``. Raises as ``mapped_runs``."""
    runs = mapped_runs(mapped, frames)
    return np.concatenate([checksums_of(extent.pages[frame : frame + j - i], layers) for extent, frame, i, j in runs])


def mapped_runs(mapped: MappedNode, frames: GrantedFrames) -> list[tuple[MappedExtent, int, int, int]]:
    """Return ``(mapped extent, first frame, i, j)`` for each run ``frames[i:j]`` of consecutive frames.

    Raises:
        NodeUnavailable: an extent no longer exists, because the node was recreated.
    """
    runs = []
    for number, frame, i, j in frames.runs:
        extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
        if extent is None:
            raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
        runs.append((extent, frame, i, j))
    return runs


PageFrame = tuple[MappedExtent, int]
"""The extent and the frame of a page."""


def copy_value(
    pages: Sequence[PageFrame],
    parts: Sequence[Part],
    value_bytes: int,
    copies: DeviceCopies,
    *,
    to_pages: bool,
    start: int = 0,
) -> None:
    """Copy a value of ``value_bytes`` from its parts into its pages, or back. Copies of device memory are only added to
    ``copies``. The pages have the value from byte ``start`` on; the parts have all of it."""
    page_bytes = pages[0][0].page_bytes
    offset, stop = start, min(value_bytes, start + len(pages) * page_bytes)
    rest, part_start, part_stop = iter(parts), 0, 0
    part: Part | None = None
    while offset < stop:
        while offset >= part_stop:
            part = next(rest)
            part_start, part_stop = part_stop, part_stop + part.size
        assert part is not None, "the parts have all of the value"
        extent, frame = pages[(offset - start) // page_bytes]
        in_page, in_part = (offset - start) % page_bytes, offset - part_start
        size = min(page_bytes - in_page, part_stop - offset, stop - offset)  # as far as both a page and a part go on
        if isinstance(part, DevicePart):
            copies.add(part, in_part, extent.address(frame, in_page), size)
        elif to_pages:
            copy(extent.pages[frame, in_page : in_page + size], part[in_part : in_part + size])
        else:
            copy(part[in_part : in_part + size], extent.pages[frame, in_page : in_page + size])
        offset += size
