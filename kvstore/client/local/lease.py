"""LocalLease: read-only views of pages where they lie in this machine's memory, kept there until a deadline.

RunLease: a lease of proven frames, as their node knows it; taken, renewed and given back.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from kvstore import failpoint
from kvstore.client.local.hints import bring
from kvstore.client.local.index_lookup import known_below
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.verify_hit import Run, address_parts, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Lease, Match
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.shm.header import DaemonState
from kvstore.wire.control import NO_REPLY, Op, encode

RELEASE_S: Final = 0.2  # a release that cannot be sent is no loss: the deadline passes by itself
_OK = int(Status.OK)


class RunLease:
    """Keeps the frames of some runs from being granted to others. Of one thread at a time.

    Life: made -> ``take`` -> ``renew``, any number of times -> ``release``, or its deadline, or this process's end.

    Args:
        number: of a lease that was taken before; 0: a new one.
    """

    def __init__(self, mapped: Mapped, ttl_ms: int, number: int = 0) -> None:
        self.number = number or secrets.randbits(63) | 1
        self._mapped = mapped
        self._ttl_ms = ttl_ms
        self._answered = bool(number)  # no request for it is on its way: what is published would overtake that

    def take(self, runs: list[Run]) -> int:
        """Returns for how many leading pages it was given: those of them that are unchanged now are leased. Raises as
        ``Mapped.exchange``."""
        return self._publish(runs) or self._ask(runs)

    def renew(self, runs: list[Run]) -> bool:
        """Move its deadline. False: the node did not know it any more (a restarted one does not), and it was taken
        anew: runs may have changed. Raises as ``Mapped.exchange``."""
        if self._mapped.exchange(Op.RENEW, a=self.number, b=self._ttl_ms).op == Status.OK:
            return True
        self._ask(runs)
        return False

    def release(self) -> None:
        """End it."""
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
            self._release()

    def _release(self) -> None:
        """Published where that can be: the node hears of it before it decides anything, and nobody has to wake it."""
        mapped, publisher = self._mapped, self._mapped.channel.publisher
        if self._answered and publisher is not None:
            request = encode(Op.RELEASE, 0, a=self.number, flags=NO_REPLY)
            if publisher.publish(request, [], mapped.header):
                return
        mapped.channel.request(Op.RELEASE, a=self.number, flags=NO_REPLY, timeout_s=RELEASE_S)

    def _publish(self, runs: list[Run]) -> int:
        """Take the lease without a message; for how many pages it is, if they are unchanged now. 0: ask. See
        ``service.node.deciding``."""
        mapped, publisher, parts = self._mapped, self._mapped.channel.publisher, address_parts(runs)
        if publisher is None or len(parts) > 1:
            return 0
        if mapped.header.state != DaemonState.READY:
            return 0
        count = len(parts[0]) // ADDRESS_BYTES
        request = encode(Op.LEASE, 0, count=count, a=self.number, b=self._ttl_ms, flags=NO_REPLY, body=parts)
        if not publisher.publish(request, [], mapped.header) or publisher.deciding:
            return 0  # a lease that is published and asked for as well is one lease
        self._answered = True
        return count

    def _ask(self, runs: list[Run]) -> int:
        held, self._answered = 0, False
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = self._mapped.exchange(Op.LEASE, count=count, a=self.number, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                held += next(i for i, status in enumerate(statuses) if status != _OK)
                break
            held += count
        self._answered = True
        return held


class LocalLease(Lease):
    """A lease whose views are of DRAM: what only a lower tier has is brought there when it is taken, as
    far as there is room, and so is what only an engine's own memory has: an engine waits for its readers, but not as
    long as a lease may last, and memory of a device has no views.

    It ends with the death of this process too. After its end the views show whatever is there, and leaving raises
    ``LeaseBroken`` where a page changed. Views live no longer than the lease; they are memory all the same, so using
    one later is wrong but no crash. A restart of the daemon keeps the lease. Where nothing is found no request is made.
    """

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, ttl_s: float, name: Callable[[Mapped], None]
    ) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._name = name  # tells the node whose pages these are
        self._kept: RunLease | None = None
        self._runs: list[Run] = []

    def _take(self) -> None:
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        runs: list[Run] = []
        reason = ABSENT
        if mapped is not None:
            self._keys = mapped.in_pool(self._keys)
            runs, reason = self._proven(mapped)
        if mapped is not None and runs:
            self._kept = RunLease(mapped, self._ttl_ms)
            held = self._kept.take(runs)
            if failpoint.ACTIVE:
                failpoint.hit("client.leased")
            try:
                runs, reason = still(runs, held, reason)
            except BaseException:
                self.release()
                raise
        now_ns = time.monotonic_ns()
        for extent, frame, _, count, _ in runs:
            self.pages += list(extent.views[frame : frame + count])
            extent.last_use[frame : frame + count] = now_ns
        self._runs = runs
        if reason:
            self._node.missed(reason)
        if mapped is not None:
            row = mapped.counters.row(self._layout.page_bytes, self._layout.page_tokens)
            mapped.counters.leased(row, len(self._keys), len(self.pages), reason, start_ns)
        self.match = Match(len(self.pages) * self._layout.page_tokens, len(self.pages), reason)

    def check(self) -> None:
        """See ``Lease.check``."""
        for run in self._runs:
            same = run.unchanged()
            if same < run.length:
                raise LeaseBroken(f"page {run.page + same} changed under a lease that was overstayed; discard the read")

    def _renew(self) -> None:
        """Also after a restart of the daemon, whose leases have no names."""
        if self._kept is not None and self._runs and not self._kept.renew(self._runs):
            self.check()

    def release(self) -> None:
        """See ``Lease.release``."""
        kept, self._kept = self._kept, None
        self._runs, self.pages = [], []
        if kept is not None:
            kept.release()

    def _proven(self, mapped: Mapped) -> tuple[list[Run], str]:
        """Runs in DRAM, and why not more; what more is in lower tiers is brought to DRAM first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and known_below(mapped, keys, pages, closed):
            self._name(mapped)
            bring(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason


def still(runs: list[Run], held: int, reason: str) -> tuple[list[Run], str]:
    """The leading part of ``runs`` that is leased (``held`` pages) and has not changed until it was."""
    kept: list[Run] = []
    for run in runs:
        count = min(run.unchanged(), held - run.page)
        if count > 0:
            kept.append(run._replace(length=count, words=run.words[: 8 * count]))
        if count < run.length:
            return kept, GENERATION
    return kept, reason
