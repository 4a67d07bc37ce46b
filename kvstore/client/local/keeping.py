"""Keeping: which pages of other nodes get a place in this one, and how they come there.

What a get brought from another node is in the caller's buffer. It is stored here as well, in the background, when it is
brought for the second time: one that many need is then read from here by all programs of this machine. What needs pages
in this machine's memory (a lease, a reader, a shard, a prefetch) has them brought and stored first. Copies are
worth less than pages that nobody else has: they leave first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from kvstore.client.buffers import Rows
from kvstore.client.local.elsewhere import Elsewhere
from kvstore.client.local.node import LocalNode
from kvstore.client.local.prefetch import heard_from
from kvstore.client.local.stored import stored_beyond, stored_pages
from kvstore.errors import KVStoreError
from kvstore.model.prefix import Keys
from kvstore.model.retention import Retention
from kvstore.tier.host_memory import empty
from kvstore.transfer.reading import WantedChain

COPIES: Final = Retention(-1)
GATHER_BYTES: Final = 16 << 20  # are brought, then stored, where a page is not larger
BEHIND_BYTES_MAX: Final = 64 << 20  # of what one get brought are stored behind it; one get at a time

PutHere = Callable[[Keys, Rows, bool], int]
"""Stores these pages here, and waits until that is done where it is told to."""


class Keeping:
    """For one cache, which lends its ``put``: it would not end if it were held here."""

    def __init__(self, node: LocalNode, chain: WantedChain) -> None:
        self._node = node
        self._chain = chain

    def offer(self, keys: Keys, rows: Rows, put: PutHere) -> None:
        """These pages were brought from elsewhere, and all before them are here. Does not wait; copies what is kept."""
        elsewhere, mapped = self._node.elsewhere, self._node.last
        if elsewhere is None or mapped is None:
            return
        count = elsewhere.brought.leading(keys.links)
        count = min(count, BEHIND_BYTES_MAX // self._chain.frame_class.page_bytes)
        if not count or not heard_from(mapped) or not elsewhere.behind.acquire(blocking=False):
            return
        try:
            self._node.workers.submit(self._store, elsewhere, keys[:count], rows[:count].copy(), put, timeout_s=0.0)
        except KVStoreError:
            elsewhere.behind.release()

    def _store(self, elsewhere: Elsewhere, keys: Keys, rows: Rows, put: PutHere) -> None:
        try:
            with contextlib.suppress(KVStoreError):  # full, or its daemon is down: they are elsewhere
                put(keys, rows, False)
        finally:
            elsewhere.behind.release()

    def gather(self, keys: Keys, timeout_s: float, put: PutHere) -> None:
        """Bring what other nodes have of these pages, and store it here, as far as there is room."""
        elsewhere, deadline_s = self._node.elsewhere, time.monotonic() + timeout_s
        if elsewhere is None or elsewhere.alone or self._stored(keys) == len(keys):
            return
        mapped = self._node.last
        if mapped is None or not heard_from(mapped):  # nothing could be stored, and nobody may wait for that
            return
        if not elsewhere.gathering.acquire(timeout=timeout_s):
            return
        try:
            pages, step = self._stored(keys), max(1, GATHER_BYTES // self._chain.frame_class.page_bytes)
            while pages < len(keys) and time.monotonic() < deadline_s:
                found = elsewhere.seek(keys, pages, self._chain.closed)
                if not found:
                    return
                rows = empty((min(step, found[-1].stop), self._chain.frame_class.page_bytes))
                brought = elsewhere.read(self._chain, keys, rows, pages).pages
                with contextlib.suppress(KVStoreError):
                    put(keys[pages : pages + brought], rows[:brought], True)
                before, pages = pages, self._stored(keys)
                if pages == before:
                    return
        finally:
            elsewhere.gathering.release()

    def _stored(self, keys: Keys) -> int:
        """How many leading pages are in any tier here."""
        mapped = self._node.mapped()
        if mapped is None:
            return len(keys)  # nothing can be stored
        ours = mapped.in_pool(keys)
        pages, _ = stored_pages(mapped, ours, self._chain.closed)
        return stored_beyond(mapped, ours, pages, self._chain.closed)[0] if pages < len(keys) else pages
