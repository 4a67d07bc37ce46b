"""Brought: which pages of other nodes this machine has read of late. What it reads twice is worth a place in it."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final

import numpy as np

from kvstore.errors import OutOfSpace
from kvstore.model.span import Fingerprints, fingerprints
from kvstore.tier.folder import NodeFolder, allocate
from kvstore.tier.plain_files import open_plain

NAME: Final = "brought"
PLACES: Final = 1 << 16
BYTES: Final = 8 * PLACES


class BroughtBefore:
    """A table that all processes of a node share, in a file of its folder: of each page the fingerprint, where its last
    bits say. A later page of the same place takes it, and two processes may write at a time: a page is then kept too
    late, or too early. Without the file (there is no memory for it) every process has a table of its own.
    """

    def __init__(self, folder: NodeFolder | None) -> None:
        self._table: Fingerprints = np.zeros(PLACES, np.uint64)
        if folder is not None:
            with contextlib.suppress(OSError, OutOfSpace):  # the folder is just being purged, or full
                self._table = _mapped(folder)

    def leading(self, links: list[bytes]) -> int:
        """How many leading ones of these pages were brought before."""
        if not links:
            return 0
        named = fingerprints(b"".join(links))
        seen = self._table[_places(named)] == named
        return len(seen) if seen.all() else int(seen.argmin())

    def add(self, links: list[bytes]) -> None:
        """These are being brought."""
        if links:
            named = fingerprints(b"".join(links))
            self._table[_places(named)] = named


def _places(named: Fingerprints) -> Fingerprints:
    return named % np.uint64(PLACES)


def _mapped(folder: NodeFolder) -> Fingerprints:
    path = folder.path / NAME
    fd = open_plain(path, os.O_RDWR | os.O_CREAT, folder.file_mode)
    try:
        if os.fstat(fd).st_size < BYTES:
            allocate(fd, 0, BYTES, str(path))
            os.fchmod(fd, folder.file_mode)  # whatever the umask
        return np.frombuffer(mmap.mmap(fd, BYTES), np.uint64)
    finally:
        os.close(fd)
