"""Arriving: frames of our own node in which pages of other nodes arrive.

Whoever brings pages reserves frames under their keys, in one write group that all processes of the machine share for
that. So one at a time brings a page; the others see that it is coming, and find it stored a moment later. A page is
received where it stays, and sealed once it was verified.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import PAUSE_MAX_S, PAUSE_MIN_S, await_saved
from kvstore.client.local.proof import address_runs
from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, FrameState, Status
from kvstore.rpc.control import HINTS, NO_REPLY, WRITER, Op, batch_pages, pack_class, statuses_bytes
from kvstore.tier.index import IndexDamaged

BRINGERS: Final = int.from_bytes(b"bring it", "big")  # the write group
ARRIVAL_BYTES: Final = 32 << 20  # are reserved and brought at a time, where a page is not larger
TTL_S: Final = 30.0  # after which a page that has not arrived is nobody's; a get ends much earlier

_OURS = (int(Status.OK), int(Status.JOINED))


class Bringer(Enum):
    """Whose it is to bring a page."""

    OURS = "its frame is ours to fill"
    COMING = "somebody else of this machine brings it"
    AGAIN = "it has just come, or frames will be free in a moment"
    NONE = "there is no room for it"


class ArrivingPages:
    """Frames for the leading pages of ``keys``. Of one thread.

    Life: ``reserve`` -> pages are received in ``rows`` -> ``seal``, by which the leading ones that hold are stored, and
    the frames of the others are given back. By then nothing may write there any more: the connection that was to bring
    them has done so, or is closed. Where bytes may still land there (``leave``), the frames of pages that did not come
    are nobody's: reserved until the deadline, then QUARANTINED, until that is over or this process has ended. The death
    of this process, and the deadline, end it as those of a writer.

    Args:
        answer_s: how long the node may take for an answer.

    Attributes:
        rows: of each page the frame. To be written within ``mapped.channel.copies``.
    """

    def __init__(self, node: LocalNode, mapped: Mapped, keys: Keys, shape: FrameClass, answer_s: float) -> None:
        limit = min(batch_pages(shape.page_tokens, shape.layers), max(1, ARRIVAL_BYTES // shape.page_bytes))
        self.rows: list[Rows] = []
        self._node = node
        self._mapped = mapped
        self._keys = keys[:limit] if len(keys) > limit else keys
        self._shape = shape
        self._answer_s = answer_s
        self._addresses = np.zeros(0, ADDRESS_DTYPE)
        self._left = False

    def reserve(self) -> Bringer:
        """Reserve frames for as many leading pages as there are. ``seal`` has to follow where they are OURS.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node does not answer. What it reserved ends with its deadline.
        """
        mapped, keys = self._mapped, self._keys
        count, place = mapped.claims.claim(self, BRINGERS, 0, keys.hashes), Bringer.COMING
        self._keys = keys[:count]
        try:
            if count:
                place = self._ask(self._answer_s)
        except Unavailable:
            self._node.workers.submit(self._take_back, timeout_s=0.0)
            raise
        if place is not Bringer.OURS:
            mapped.claims.release(self)
        return place

    def _take_back(self) -> None:
        """The node may have heard what it did not answer in time. Until that is known nobody of ours asks again."""
        with contextlib.suppress(Unavailable, InvalidRequest):
            self._ask(self._node.timeout_s)
        self.seal(0)

    def _ask(self, timeout_s: float) -> Bringer:
        mapped, keys, count = self._mapped, self._keys, len(self._keys)
        body = (WRITER.pack(BRINGERS, 0, 1), keys.parent, keys.identity_bytes, keys.hints)
        flags, ttl_ms = HINTS if keys.hints else 0, int(TTL_S * 1000)
        number = pack_class(self._shape)
        ask = {"count": count, "a": number, "b": ttl_ms, "flags": flags}
        reply = mapped.exchange(Op.RESERVE, **ask, body=body, timeout_s=timeout_s)
        if reply.op == Status.BUSY:
            return Bringer.AGAIN
        statuses = np.frombuffer(reply.body, np.uint8, count).copy()  # the body is not ours for long
        addresses = np.frombuffer(reply.body, ADDRESS_DTYPE, count, statuses_bytes(count)).copy()
        ours = np.isin(statuses, _OURS)
        leading = count if ours.all() else int(ours.argmin())
        self._addresses = addresses[:leading]
        ours[:leading] = False
        self._give_back(addresses[ours].tobytes())  # behind a page that is stored already
        if leading:
            self._lay_out()
            return Bringer.OURS
        if statuses[0] == Status.NO_PARENT:
            return Bringer.COMING if is_coming(mapped, keys.hashes[0]) else Bringer.NONE
        return Bringer.AGAIN if statuses[0] in (Status.BUSY, Status.PRESENT) else Bringer.NONE

    def _lay_out(self) -> None:
        for number, frame, _, words in address_runs(self._addresses, int(FrameState.RESERVED)):
            extent = self._mapped.dram.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was made anew")
            frames = slice(frame, frame + len(words))
            extent.last_use[frames] = time.monotonic_ns()  # a frame keeps its last page's
            self.rows += list(extent.pages[frames])

    def seal(self, pages: int) -> None:
        """So many leading pages are in ``rows``, and hold; nothing is written there any more. Where the node does not
        hear of it, the frames end with their deadline."""
        mapped, self.rows = self._mapped, []
        raw, cut = self._addresses.tobytes(), pages * ADDRESS_BYTES
        self._addresses = self._addresses[pages:]
        try:
            if not self._left:
                self._give_back(raw[cut:])
            with contextlib.suppress(Unavailable, InvalidRequest):
                if pages:
                    reply = mapped.exchange(Op.SEAL, count=pages, body=(raw[:cut],), timeout_s=self._answer_s)
                    statuses = bytes(reply.body[:pages])
                    self._await_saved([page for page, status in enumerate(statuses) if status == Status.BUSY], raw)
        finally:
            if not self._left:
                mapped.claims.release(self)

    def leave(self) -> Callable[[], None]:
        """See ``transfer.transport.HeldPlaces``. ``seal`` gives no frame back then."""
        self._left = True
        return self._landed

    def _landed(self) -> None:
        """Nothing can land in these frames any more."""
        self._give_back(self._addresses.tobytes())
        self._mapped.claims.release(self)

    def _await_saved(self, pages: list[int], raw: bytes) -> None:
        if pages:
            hashes = [self._keys.hashes[page] for page in pages]
            addresses = np.frombuffer(raw, ADDRESS_DTYPE)[pages]
            await_saved(self._mapped, hashes, addresses, time.monotonic() + self._answer_s)

    def _give_back(self, raw: bytes) -> None:
        if raw:
            count = len(raw) // ADDRESS_BYTES
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
                ask = {"count": count, "a": 1, "flags": NO_REPLY}
                self._mapped.channel.request(Op.REVOKE, **ask, body=(raw,), timeout_s=self._answer_s)


def is_coming(mapped: Mapped, key: bytes) -> bool:
    """Whether somebody of this machine is about to store that page."""
    try:
        return mapped.index.find_pending(key) is not None
    except IndexDamaged:
        return False  # the daemon will rebuild it under a new epoch


def await_coming(mapped: Mapped, key: bytes, within_s: float) -> bool:
    """Wait while somebody is, a moment at least; False where they still are after ``within_s``."""
    deadline_s, pause_s = time.monotonic() + within_s, PAUSE_MIN_S
    while True:
        time.sleep(pause_s)
        if not is_coming(mapped, key):
            return True
        if time.monotonic() >= deadline_s:
            return False
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
