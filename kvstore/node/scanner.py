"""Scanner: after a reboot, finds the pages in extents that were being written to when their last checkpoint was made.

Their frames wait QUARANTINED. Every one is read, header and payload, and proven; what holds is offered to the node
when all has been seen, parents before children, and of two pages of one key the one written last. The node serves all
the while, and forgets pages that were not adopted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np

from kvstore import failpoint
from kvstore.model.replica import IDENTITY_HEAD_BYTES, Address, FrameState, position_of, standing_of
from kvstore.node.node import Node
from kvstore.node.nvme_pages import READ_BYTES, NvmePages, identity_row
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.frame_header import FrameHeader

log = logging.getLogger("kvstore.nvme")

ADOPT_PAGES = 256  # offered in one event, so that others get a turn


class Scanner:
    """One scan per start, in a thread of its own. How far it is stands in ``Node.scan``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def run(self, stopped: threading.Event) -> bool:
        """Scan, offer, end; or end where ``stopped``: the next start scans again. True once all is scanned.

        Where it fails it may be called again: pages that were not adopted wait as before."""
        nvme = self._node.nvme
        extents = [] if nvme is None else [(t, f) for t in self._node.nvme_tables() if len(f := _waiting(t))]
        scan = self._node.scan
        scan.pages, scan.pages_done = sum(len(frames) for _, frames in extents), 0
        if nvme is not None and extents:
            log.warning("%d frames on NVMe are scanned: they were written to after the last checkpoint", scan.pages)
            found: list[FrameHeader] = []
            for table, frames in extents:
                for page in self._scan(nvme, table, frames):
                    found.append(page)
                    if stopped.is_set():
                        return False
            self._offer(found, stopped)
            if stopped.is_set():
                return False
            for table, _ in extents:
                self._node.handle(ev.Adopted(time.monotonic_ns(), table.extent))
            log.warning("the scan is done: %d pages were sound", len(found))
        scan.finished = True
        return True

    def _scan(self, nvme: NvmePages, table: ExtentTable, frames: list[int]) -> Iterator[FrameHeader]:
        step = max(1, READ_BYTES // geometry.stride_bytes(table.frame_class))
        for start in range(0, len(frames), step):
            part = frames[start : start + step]
            first, count = part[0], part[-1] - part[0] + 1
            whole = count == len(part)
            for frame, length in [(first, count)] if whole else [(frame, 1) for frame in part]:
                try:
                    pages = nvme.read(table, frame, length)
                except OSError as error:
                    log.error("frames could not be read: %s", error)
                    self._node.device_failed({table.position: error})  # it takes no writes: what it holds stays
                    continue
                for page in pages:
                    if isinstance(page, FrameHeader):
                        yield page
                    else:
                        self._node.count(f"scan_{page}")
            self._node.scan.pages_done += len(part)
            if failpoint.ACTIVE:
                failpoint.hit("scanner.run")

    def _offer(self, found: list[FrameHeader], stopped: threading.Event) -> None:
        found.sort(key=lambda page: (position_of(page.info), -page.address.generation))
        for start in range(0, len(found), ADOPT_PAGES):
            if stopped.is_set():
                return
            part = found[start : start + ADOPT_PAGES]
            heads = np.stack([identity_row(page)[:IDENTITY_HEAD_BYTES] for page in part])
            addresses = [Address(*page.address) for page in part]
            parents, standings = [page.parent for page in part], [standing_of(page.info) for page in part]
            self._node.handle(ev.Adopt(time.monotonic_ns(), addresses, heads, parents, standings))
            if failpoint.ACTIVE:
                failpoint.hit("scanner.offered")


def _waiting(table: ExtentTable) -> list[int]:
    frames: list[int] = np.flatnonzero((table.words & np.uint64(0xFF)) == FrameState.QUARANTINED).tolist()
    return frames
