"""Keeping: which pages of other nodes get a place in this one, and how they come there.

A page that this machine reads from another node for the second time is worth a place here. So is what has to be in
this machine's memory: for a lease, a reader, a shard, a prefetch. It is received in the frame in which it stays, sealed
when it was verified, and read from there by all programs of the machine. One of them brings it; the others wait for
that. Copies are worth less than pages that nobody else has: they leave first.

So are pages that only engines of this machine have, in memory that they mounted, where they have to stay for longer
than an engine waits for readers: for a lease, or because others are brought that hang on them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from kvstore.client.buffers import Rows
from kvstore.client.local.arriving import ArrivingPages, Bringer, await_coming
from kvstore.client.local.elsewhere import Brought, Elsewhere, Patience
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import heard_from
from kvstore.client.local.stored import first_unstored, locate, stored_beyond, stored_pages
from kvstore.errors import Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.retention import Retention, hints_of
from kvstore.transfer.reading import WantedChain

COPIES: Final = Retention(-1)

Name = Callable[[Mapped, float], None]
"""Tells the node whose pages these are, within so many seconds."""


class Keeping:
    """For one cache."""

    def __init__(self, node: LocalNode, chain: WantedChain) -> None:
        self._node = node
        self._chain = chain

    def worth(self, elsewhere: Elsewhere, keys: Keys) -> int:
        """How many of these pages, which other nodes may have, are to be kept: leading ones brought before."""
        mapped = self._node.last
        return elsewhere.brought.leading(keys.links) if mapped is not None and heard_from(mapped) else 0

    def gather(self, keys: Keys, patience: Patience, name: Name) -> Brought:
        """Bring what other nodes have of these pages here, as far as there is room. Returns what this call brought, and
        no other program of this machine."""
        brought, elsewhere = Brought(), self._node.elsewhere
        if elsewhere is None or elsewhere.alone:
            return brought
        with contextlib.suppress(Unavailable):  # our own node does not answer: what is elsewhere stays there
            while not patience.over and self._go_on(elsewhere, keys, patience, brought, name):
                pass
        return brought

    def lift(self, keys: Keys, patience: Patience, name: Name) -> None:
        """Copy what only engines of this machine have of these pages to frames of the node, as far as there is room."""
        with contextlib.suppress(Unavailable):
            while not patience.over and self._lift_some(keys, patience, name):
                pass

    def _lift_some(self, keys: Keys, patience: Patience, name: Name) -> bool:
        """Some more of them; False where there are no more, or none can come."""
        mapped = self._node.mapped()
        if mapped is None or not mapped.hbm.readable() or not heard_from(mapped):
            return False
        ours = mapped.in_pool(keys)
        ours = ours[first_unstored(mapped, ours, self._chain.closed) :]
        located = locate(mapped, mapped.hbm, ours, self._chain.closed)
        if not located:
            return False
        arrival = ArrivingPages(self._node, mapped, ours[: len(located)], self._chain.frame_class, patience.here_s)
        with patience.asking():
            name(mapped, patience.here_s)
            place = arrival.reserve()
        if place is not Bringer.OURS:
            return place is not Bringer.NONE and self._await(mapped, ours.hashes[0], patience)
        pages = 0
        try:
            with mapped.channel.copies:
                pages = self._read(mapped, located, ours, arrival.rows)
        finally:
            arrival.seal(pages)
        return pages > 0

    def _read(self, mapped: Mapped, located: list[bytes], keys: Keys, rows: list[Rows]) -> int:
        """Fill these frames with the leading pages that are still there; how many."""
        for page, row in enumerate(rows):
            one = slice(page, page + 1)
            read = mapped.hbm.start(located[one], keys[one], self._chain.frame_class, row[None])
            if not read.result(mapped.timeout_s)[0]:
                return page
        return len(rows)

    def _go_on(self, elsewhere: Elsewhere, keys: Keys, patience: Patience, brought: Brought, name: Name) -> bool:
        """Bring some more pages, or wait for somebody else who does; False where nothing more comes."""
        mapped = self._node.mapped()
        if mapped is None or not heard_from(mapped):  # nothing could be stored, and nobody may wait for that
            return False
        pages = self._stored(mapped, keys)
        found = elsewhere.seek(self._chain, keys, pages, (), patience) if pages < len(keys) else []
        if not found:
            return False
        self.lift(keys[:pages], patience, name)  # what is brought may hang on them
        wanted = mapped.in_pool(keys[pages : pages + found[-1].stop])
        wanted = wanted.hinted(hints_of(COPIES, len(wanted), wanted.page_tokens))
        arrival = ArrivingPages(self._node, mapped, wanted, self._chain.frame_class, patience.here_s)
        with patience.asking():
            name(mapped, patience.here_s)
            place = arrival.reserve()
        if place is Bringer.OURS:
            return self._bring(elsewhere, mapped, arrival, keys, pages, patience, brought)
        if place is Bringer.NONE:
            return False
        began_s = time.monotonic()
        joined = self._await(mapped, wanted.hashes[0], patience)
        if joined and self._stored(mapped, keys) > pages:
            patience.extend(time.monotonic() - began_s)
        return joined

    def _await(self, mapped: Mapped, key: bytes, patience: Patience) -> bool:
        """Wait for somebody else of this machine who brings that page; whether they have ended."""
        joined = await_coming(mapped, key, patience.here_s)
        patience.waited(0.0 if joined else patience.here_s)
        return joined

    def _bring(
        self,
        elsewhere: Elsewhere,
        mapped: Mapped,
        arrival: ArrivingPages,
        keys: Keys,
        pages: int,
        patience: Patience,
        brought: Brought,
    ) -> bool:
        """Fill those frames; whether any page came."""
        came = Brought()
        try:
            with mapped.channel.copies:
                came = elsewhere.read(self._chain, keys, arrival.rows, pages, patience, arrival)
        finally:
            arrival.seal(came.pages)
        brought.add(came)
        return bool(came.pages)

    def _stored(self, mapped: Mapped, keys: Keys) -> int:
        """How many leading pages are in any tier here."""
        ours = mapped.in_pool(keys)
        pages, _ = stored_pages(mapped, ours, self._chain.closed)
        return stored_beyond(mapped, ours, pages, self._chain.closed)[0] if pages < len(keys) else pages
