"""Keeping: which pages of other nodes get a place in this one, and how they come there.

A page that this machine reads from another node for the second time is worth a place here. So is what has to be in
this machine's memory: for a lease, a reader, a shard, a prefetch. It is received in the frame in which it stays, sealed
when it was verified, and read from there by all programs of the machine. One of them brings it; the others wait for
that. Copies are worth less than pages that nobody else has: they leave first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from kvstore.client.local.arriving import ArrivingPages, Bringer, await_coming
from kvstore.client.local.elsewhere import Brought, Elsewhere, Patience
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import heard_from
from kvstore.client.local.stored import stored_beyond, stored_pages
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

    def _go_on(self, elsewhere: Elsewhere, keys: Keys, patience: Patience, brought: Brought, name: Name) -> bool:
        """Bring some more pages, or wait for somebody else who does; False where nothing more comes."""
        mapped = self._node.mapped()
        if mapped is None or not heard_from(mapped):  # nothing could be stored, and nobody may wait for that
            return False
        pages = self._stored(mapped, keys)
        found = elsewhere.seek(self._chain, keys, pages, (), patience) if pages < len(keys) else []
        if not found:
            return False
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
        joined = await_coming(mapped, wanted.hashes[0], patience.here_s)
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
