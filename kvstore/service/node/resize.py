"""Resize: a node that is started with another ``dram`` size keeps its pages.

*Larger.* The segment's file is made longer. Clients have mapped the old length, and would be told of pages beyond
it; so all files get a new incarnation, by which clients of any version know that they have to map them again.
First the files are renamed one by one, then the header, which clients look at, so that they always find either all or
none. A kill between is noticed by the next start (``Header.growing_to``), which does the rest.

*Smaller.* The file keeps its length, since it is mapped. Positions beyond the new bound are carved no more; what lies
there moves or leaves, once no lease and no writer needs it to stay (``state.shrinking``). Then memory is given back.

Extents keep the size that they were made with.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from kvstore import failpoint
from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest
from kvstore.service.node.book import NAMES, PINS
from kvstore.tier.dram import SegmentFile, check_space
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.plain_files import open_plain
from kvstore.tier.quarantine import read_quarantine, write_quarantine
from kvstore.tier.records import ExtentTable
from kvstore.tier.secret_file import read_secret, write_secret

log = logging.getLogger("kvstore.node")

HEAD_BYTES = 256  # of a book: its incarnation stands in the first line


def open_segment(folder: NodeFolder, header: Header) -> SegmentFile | None:
    """The segment of this header, when what a kill left half renamed is, and as long as it was when its tail was cut
    off; None where there is none to be had."""
    if header.growing_to:
        _rename(folder, header)
    cut = SegmentFile.cut_to(folder, header.incarnation)
    if cut is not None:
        _give_up_beyond(folder, header.incarnation, *cut)
        SegmentFile.lengthen(folder)
    return SegmentFile.open(folder, header.incarnation)


def _give_up_beyond(folder: NodeFolder, incarnation: int, extent_bytes: int, left: int) -> None:
    """The segment's tail was cut off: nobody may believe in pages there, before there are zeros in their place."""
    given_up = 0
    for number in folder.extents():
        table = ExtentTable.open(folder, number, incarnation, writable=True)
        if table is None:
            continue
        end = table.position * extent_bytes + table.frames * table.frame_class.frame_bytes
        if end > left:
            table.disbelieve()
            given_up += 1
        table.close()
    log.warning("%s: its tail was cut off; %d extents are given up with their pages", folder.segment, given_up)


def fit(config: NodeConfig, folder: NodeFolder, header: Header, segment: SegmentFile) -> SegmentFile:
    """The node's segment with as many positions as ``config.dram`` has room for. ``header.positions`` tells how many.

    Raises:
        InvalidRequest: memory for more cannot be had; less than one extent is left; extents of another size are asked.
    """
    extent_bytes = header.extent_bytes
    has = f"{format_size(header.positions * extent_bytes)} in extents of {format_size(extent_bytes)}"
    remedy = f"or drop its pages with `kvstore purge {config.name}`"
    if config.extent and config.extent != extent_bytes:
        raise InvalidRequest("extent", f"node {config.name} has a segment of {has}; start it with that size, {remedy}")
    positions = config.dram // extent_bytes
    if not positions:
        raise InvalidRequest("dram", f"node {config.name} has a segment of {has}; start it with one at least, {remedy}")
    more = (positions - header.positions) * extent_bytes
    if more > 0:
        check_space(config.shm_dir, more + more // 64)
    if positions > segment.positions:
        segment.close()
        header.growing_to = secrets.randbits(63) | 1
        SegmentFile.lengthen(folder, positions)
        _rename(folder, header)
        grown = SegmentFile.open(folder, header.incarnation)
        assert grown is not None, "made just now"
        segment = grown
    if more:
        log.warning("dram: %s becomes %s", has, format_size(positions * extent_bytes))
    header.positions = positions
    return segment


def _rename(folder: NodeFolder, header: Header) -> None:
    """All files of this incarnation get the next one. Begun again where it was cut short."""
    old, new = header.incarnation, header.growing_to
    for book in (NAMES, PINS):
        _rename_book(folder.path / book, old, new)
    secret = read_secret(folder, old)
    if secret is not None:  # else it has the new incarnation already
        write_secret(folder, new, secret)
    held = read_quarantine(folder, old)
    if held:
        write_quarantine(folder, new, held)
    if failpoint.ACTIVE:
        failpoint.hit("node.resize")
    for number in folder.extents():
        ExtentTable.rename(folder, number, old, new)
        if failpoint.ACTIVE:
            failpoint.hit("node.resize")
    SegmentFile.rename(folder, old, new)
    if failpoint.ACTIVE:
        failpoint.hit("node.resize")
    header.incarnation = new
    header.growing_to = 0


def _rename_book(path: Path, old: int, new: int) -> None:
    try:
        fd = open_plain(path, os.O_RDWR)
    except OSError:
        return  # there is none
    try:
        place = os.pread(fd, HEAD_BYTES, 0).find(f"{old:016x}".encode())
        if place >= 0:
            os.pwrite(fd, f"{new:016x}".encode(), place)
    finally:
        os.close(fd)
