"""SessionCounters: what one client did, counted in a page of words that its node reads. No message is sent for it.

A client's session file (``sessions/<id>``, see ``tier.sessions``) is one page of 8-byte words: a magic number, then one
word per name of ``NAMES``. Each word has one writing party, the client; the node reads them whenever it likes. Threads
of one client share its words without a lock, so two that add in the same moment may lose one of the two; no word is
ever torn or goes back.

Worked example: a get asks for 32 pages of 64 KiB, finds 20 in DRAM and 8 more in NVMe, and the next one fails its
checksum: ``gets`` +1, ``pages_asked`` +32, ``hit_dram`` +20, ``hit_nvme`` +8, ``missed_checksum`` +4,
``read_dram_bytes`` +20 * 65536, ``read_nvme_bytes`` +8 * 65536. So pages asked are always those hit plus those missed.
A lookup reads no page: it counts as a lookup and as nothing else, or the get that follows it would count twice.
Layer-wise readers wait for their pages, and are not counted.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final

from kvstore.tier.folder import allocate

COUNTERS_BYTES: Final = 4096
MISS_REASONS: Final = ("absent", "generation", "identity", "checksum", "extent", "io")
NAMES: Final = (
    "lookups",
    "gets",
    "leases",
    "pages_asked",  # by gets and leases
    "hit_dram",
    "hit_nvme",
    *(f"missed_{reason}" for reason in MISS_REASONS),  # pages after the match, by why it ended
    "read_dram_bytes",  # copied or lent
    "read_nvme_bytes",
    "pages_put",  # new ones, acknowledged
    "put_bytes",
)
_MAGIC: Final = int.from_bytes(b"KVCOUNT1", "little")
_WORDS: Final = 1 + len(NAMES)
_unpack = struct.Struct(f"<{_WORDS}Q").unpack_from
assert 8 * _WORDS <= COUNTERS_BYTES

_PLACES = {name: 1 + i for i, name in enumerate(NAMES)}
_LOOKUPS, _GETS, _LEASES, _ASKED = (_PLACES[name] for name in ("lookups", "gets", "leases", "pages_asked"))
_HIT_DRAM, _HIT_NVME = _PLACES["hit_dram"], _PLACES["hit_nvme"]
_READ_DRAM, _READ_NVME = _PLACES["read_dram_bytes"], _PLACES["read_nvme_bytes"]
_PAGES_PUT, _PUT_BYTES = _PLACES["pages_put"], _PLACES["put_bytes"]
_MISSED = {reason: _PLACES[f"missed_{reason}"] for reason in MISS_REASONS}
_ABSENT = _MISSED["absent"]


class SessionCounters:
    """One session's words. Made in plain memory; ``attach`` moves them into the session's file.

    Ends with whoever holds it: the words of the file stay for the node, which adds them up when the session is over.

    Attributes:
        words: the page, word 0 the magic number.
    """

    __slots__ = ("words", "_attached")

    def __init__(self) -> None:
        self.words: memoryview[int] = memoryview(bytearray(8 * _WORDS)).cast("Q")
        self._attached = False

    def attach(self, path: Path) -> None:
        """Count in this file from now on. What was counted in memory so far goes with it; what an earlier file holds
        stays there, for the node has it.

        Raises:
            OutOfSpace, OSError: no memory for the page, or no file; counting goes on where it was.
        """
        # Opened for this alone: a map keeps a copy of its descriptor, which would keep a lock taken through it.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            allocate(fd, 0, COUNTERS_BYTES, str(path))  # a store into a hole of a full tmpfs would kill us
            words: memoryview[int] = memoryview(mmap.mmap(fd, COUNTERS_BYTES)).cast("Q")
        finally:
            os.close(fd)
        counted = self.words
        if words[0] != _MAGIC:
            for place in range(1, _WORDS):
                words[place] = 0
            words[0] = _MAGIC
        self.words = words
        if not self._attached:
            self._attached = True
            for place in range(1, _WORDS):
                words[place] += counted[place]

    def looked_up(self) -> None:
        """A lookup was answered."""
        self.words[_LOOKUPS] += 1

    def got(self, asked: int, dram: int, nvme: int, page_bytes: int, reason: str, verb: int = _GETS) -> None:
        """A get of ``asked`` pages found ``dram + nvme`` of them, and no more for ``reason``."""
        words = self.words
        words[verb] += 1
        words[_ASKED] += asked
        if dram:
            words[_HIT_DRAM] += dram
            words[_READ_DRAM] += dram * page_bytes
        if nvme:
            words[_HIT_NVME] += nvme
            words[_READ_NVME] += nvme * page_bytes
        if dram + nvme < asked:
            words[_MISSED.get(reason, _ABSENT)] += asked - dram - nvme

    def leased(self, asked: int, pages: int, page_bytes: int, reason: str) -> None:
        """A lease of ``asked`` pages lends ``pages`` of them, and no more for ``reason``."""
        self.got(asked, pages, 0, page_bytes, reason, _LEASES)

    def put(self, pages: int, page_bytes: int) -> None:
        """So many new pages were acknowledged as sealed."""
        self.words[_PAGES_PUT] += pages
        self.words[_PUT_BYTES] += pages * page_bytes

    def values(self) -> dict[str, int]:
        """All counts by name."""
        return dict(zip(NAMES, self.words[1:_WORDS].tolist(), strict=True))


def read_counters(fd: int) -> dict[str, int] | None:
    """The counts in a session's file; None where there are none (yet), or those of another version."""
    page = os.pread(fd, 8 * _WORDS, 0)
    if len(page) < 8 * _WORDS:
        return None
    magic, *counts = _unpack(page)
    return dict(zip(NAMES, counts, strict=True)) if magic == _MAGIC else None
