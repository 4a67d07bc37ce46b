"""Scanner: after a reboot, finds the pages in extents that were written to after their last checkpoint.

The frames of these extents are QUARANTINED. The scanner reads every frame and verifies header and payload. After the
last frame it offers all valid pages to the node: parents before children, and the latest page first if several pages
have the same key. The node frees the frames of pages that it does not adopt. It serves requests during the scan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np

from kvstore import failpoint
from kvstore.model.replica import Address, FrameState, in_state, position_of, standing_of
from kvstore.node.node import Node
from kvstore.node.nvme_pages import READ_BYTES, NvmePages, lean_identities
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.frame_header import FrameHeader

log = logging.getLogger("kvstore.nvme")

ADOPT_PAGES = 256  # pages per event, so that other events are decided in between


class Scanner:
    """The scanner of one start, with a thread of its own. ``Node.scan`` has its progress."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def run(self, stopped: threading.Event) -> bool:
        """Scan all QUARANTINED frames and offer the pages; return False if ``stopped`` was set before the end.

        In that case the next start scans again. After an error, this can be called again: pages that were not adopted
        are still QUARANTINED.
        """
        nvme = self._node.nvme
        extents = [] if nvme is None else [(t, f) for t in self._node.nvme_tables() if len(f := _quarantined(t))]
        scan = self._node.scan
        scan.pages, scan.pages_done = sum(len(frames) for _, frames in extents), 0
        if nvme is not None and extents:
            log.warning("%d frames on NVMe are scanned: they were written to after the last checkpoint", scan.pages)
            pages: list[FrameHeader] = []
            for table, frames in extents:
                for page in self._scan(nvme, table, frames):
                    pages.append(page)
                    if stopped.is_set():
                        return False
            self._offer(pages, stopped)
            if stopped.is_set():
                return False
            for table, _ in extents:
                self._node.handle(ev.Adopted(time.monotonic_ns(), table.extent))
            log.warning("the scan is done: %d pages were sound", len(pages))
        scan.finished = True
        return True

    def _scan(self, nvme: NvmePages, table: ExtentTable, frames: list[int]) -> Iterator[FrameHeader]:
        """Read these frames of an extent, and yield the headers of valid pages."""
        step = max(1, READ_BYTES // geometry.stride_bytes(table.frame_class))
        for start in range(0, len(frames), step):
            part = frames[start : start + step]
            first, count = part[0], part[-1] - part[0] + 1
            is_run = count == len(part)  # consecutive frames
            for frame, length in [(first, count)] if is_run else [(frame, 1) for frame in part]:
                try:
                    pages = nvme.read(table, frame, length)
                except OSError as error:
                    log.error("frames could not be read: %s", error)
                    self._node.device_failed({table.position: error})  # nothing more is written, so that its pages stay
                    continue
                for page in pages:
                    if isinstance(page, FrameHeader):
                        yield page
                    else:
                        self._node.count(f"scan_{page}")
            self._node.scan.pages_done += len(part)
            if failpoint.ACTIVE:
                failpoint.hit("scanner.run")

    def _offer(self, pages: list[FrameHeader], stopped: threading.Event) -> None:
        pages.sort(key=lambda page: (position_of(page.info), -page.address.generation))
        for start in range(0, len(pages), ADOPT_PAGES):
            if stopped.is_set():
                return
            part = pages[start : start + ADOPT_PAGES]
            heads = lean_identities(part)
            addresses = [Address(*page.address) for page in part]
            parents, standings = [page.parent for page in part], [standing_of(page.info) for page in part]
            self._node.handle(ev.Adopt(time.monotonic_ns(), addresses, heads, parents, standings))
            if failpoint.ACTIVE:
                failpoint.hit("scanner.offered")


def _quarantined(table: ExtentTable) -> list[int]:
    frames: list[int] = np.flatnonzero(in_state(table.words, FrameState.QUARANTINED)).tolist()
    return frames
